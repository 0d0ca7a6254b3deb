"""Each coding agent corrects one word of a file through `paceline launch`: `make agents` installs and runs them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from app.api.message_blocks import BILLING_HEADER
from app.coding_agents import AGENTS, NO_KEY, ModelEndpoint
from tests.agents.installed import FOLDERS
from tests.agents.task import RIGHT, TASK, TEMPLATES, WRONG
from tests.scripted.folders import CONTEXT_TOKENS
from tests.scripted.server import ScriptedServer, scripted_server

pytestmark = pytest.mark.agents
SHARE_FOUND = 0.9
"""Share of its system part's tokens that a second session must find in the prefix cache, at least."""
USER = {"role": "user", "content": ""}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("agents") / "home", worker="tests.agents.scripted_worker") as running:
        yield running


def words_of(agent: str, task: str, file: str) -> Sequence[str]:
    """Return the arguments with which an agent does one task without asking the user."""
    return {
        "claude": ("--print", task, "--permission-mode", "acceptEdits"),
        "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task),
        "opencode": ("run", task),
        "aider": ("--message", task, "--yes-always", "--no-git", "--no-check-update", "--no-analytics", file),
    }[agent]


def mend(
    server: ScriptedServer, agent: str, template: str, home: Path, *, begin: str = "", by_hand: bool = False
) -> None:
    """Let an agent correct the word in a project of its own; its task's text begins with `begin`. `by_hand` starts it
    without `launch`, with the same settings except for the one that suppresses the attribution header."""
    project = home / "project"
    project.mkdir(exist_ok=True)
    file = project / "greeting.txt"
    file.write_text(f"Hello, {WRONG}\n")
    environment = {
        "HOME": str(home),
        "PACELINE_HOME": str(server.home),
        "PATH": os.pathsep.join([str(FOLDERS[agent]), os.environ["PATH"]]),
    }
    command = [sys.executable, "-m", "app.cli", "launch", agent, "--model", server.model(template), "--"]
    if by_hand:
        place = ModelEndpoint(str(server.client.base_url).rstrip("/"), server.model(template), CONTEXT_TOKENS, NO_KEY)
        environment |= AGENTS[agent].environment(place)
        del environment["CLAUDE_CODE_ATTRIBUTION_HEADER"]
        command = [AGENTS[agent].program, *AGENTS[agent].flags(place)]
    said = subprocess.run(
        [*command, *words_of(agent, f"{begin}{TASK} {file}", str(file))],
        check=False,
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert file.read_text() == f"Hello, {RIGHT}\n", said.stdout
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", FOLDERS)
def test_an_agent_mends_a_word(server: ScriptedServer, agent: str, template: str, tmp_path: Path) -> None:
    mend(server, agent, template, tmp_path)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_second_session_of_claude_code_finds_the_system_part_of_the_first(
    server: ScriptedServer, template: str, by_hand: bool, tmp_path: Path
) -> None:
    """Run another task in the same project. `launch` suppresses the header that differs; else the server drops it."""
    firsts = []
    for begin in ("", "Now, please: "):
        before = len(server.heard)
        mend(server, "claude", template, tmp_path, begin=begin, by_hand=by_hand)
        firsts.append(next(exchange for exchange in server.heard[before:] if b'"tools"' in exchange.sent))
    before, body = (json.loads(exchange.sent) for exchange in firsts)
    header, other = (request["system"][0]["text"] for request in (before, body))
    assert header.startswith(BILLING_HEADER) == (header != other) == by_hand
    system = {name: body[name] for name in ("model", "system", "tools")}
    counted = server.client.post("/v1/messages/count_tokens", json=system | {"messages": [USER]}).json()
    lines = firsts[1].answered.decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    [cached_tokens] = [
        event["usage"]["cache_read_input_tokens"] for event in events if event["type"] == "message_delta"
    ]
    assert cached_tokens >= SHARE_FOUND * counted["input_tokens"]
