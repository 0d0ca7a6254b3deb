"""`paceline launch`: an agent gets address, model and key through its environment, its flags and files of ours."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from app.coding_agents import AGENTS, ModelEndpoint

STAND_IN = """#!/bin/sh
printf '%s\\n' "$0 $*"
env
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A separate home, stand-ins for all agents first on the PATH, and the server that the first launch starts."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "bin").mkdir()
    for name in AGENTS:
        program = folder / "bin" / name
        program.write_text(STAND_IN)
        program.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    own |= {"PACELINE_HOME": str(folder / "home"), "HF_HOME": str(folder / "hub"), "HOME": str(folder)}
    own |= {"PATH": f"{folder / 'bin'}:{own['PATH']}", "PACELINE_PORT": "0", "COLUMNS": "200"}
    yield own
    run(own, "stop")


def run(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", *words]
    return subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=60, check=False)


def launched(environment: Mapping[str, str], agent: str, *words: str) -> tuple[list[str], dict[str, str]]:
    """Launch an agent; return the arguments that its program got, and the environment that it saw."""
    done = run(environment, "launch", agent, "--model", "demo-assistant", "--force", *words)
    assert done.returncode == 0, done.stderr
    command, *lines = done.stdout.splitlines()
    return command.split()[1:], dict(line.split("=", 1) for line in lines if "=" in line)


def test_each_agent_gets_what_it_needs(environment: Mapping[str, str]) -> None:
    words, seen = launched(environment, "claude", "--", "--continue")
    address = seen["ANTHROPIC_BASE_URL"]
    assert address.startswith("http://127.0.0.1:")
    assert (seen["ANTHROPIC_MODEL"], words) == ("demo-assistant", ["--model", "demo-assistant", "--continue"])
    words, seen = launched(environment, "codex")
    assert f'model_providers.paceline.base_url="{address}/v1"' in words
    assert seen[json.loads(words[words.index("-c") + 9].partition("=")[2])]  # the key, in the variable of `env_key`
    _, seen = launched(environment, "opencode")
    assert json.loads(seen["OPENCODE_CONFIG_CONTENT"])["model"] == "paceline/demo-assistant"
    words, seen = launched(environment, "aider")
    assert (seen["OPENAI_API_BASE"], words[:2]) == (f"{address}/v1", ["--model", "openai/demo-assistant"])
    metadata = json.loads(Path(seen["AIDER_MODEL_METADATA_FILE"]).read_text())
    assert metadata["openai/demo-assistant"]["max_input_tokens"] == 4096
    _, seen = launched(environment, "crush")
    config = json.loads((Path(seen["CRUSH_GLOBAL_CONFIG"]) / "crush.json").read_text())
    assert config["providers"]["paceline"]["base_url"] == f"{address}/v1"
    assert Path(environment["PACELINE_HOME"]) in Path(seen["CRUSH_GLOBAL_CONFIG"]).parents


@pytest.mark.parametrize(("context", "output"), [(4096, 512), (65_536, 8192), (131_072, 16_384), (1 << 20, 32_000)])
def test_each_agent_knows_what_the_model_holds(context: int, output: int) -> None:
    place = ModelEndpoint("http://127.0.0.1:1", "m", context, "key")
    claude = AGENTS["claude"].environment(place)
    assert claude["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(context)
    assert claude["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(output)
    assert claude["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    codex = AGENTS["codex"].flags(place)
    assert f"model_context_window={context}" in codex
    assert f"model_auto_compact_token_limit={context - 2 * output}" in codex
    config = json.loads(AGENTS["opencode"].environment(place)["OPENCODE_CONFIG_CONTENT"])
    assert config["provider"]["paceline"]["models"]["m"]["limit"] == {"context": context, "output": output}
    [metadata] = AGENTS["aider"].files(place).values()
    assert (metadata["openai/m"]["max_input_tokens"], metadata["openai/m"]["max_output_tokens"]) == (context, output)
    [crush] = AGENTS["crush"].files(place).values()
    [model] = crush["providers"]["paceline"]["models"]
    assert (model["context_window"], model["default_max_tokens"]) == (context, output)


@pytest.mark.parametrize("agent", AGENTS)
def test_an_answer_and_a_compaction_fit_behind_the_shortest_context_that_is_taken(agent: str) -> None:
    """First requests are measured in tokens, the maximum over qwen3, llama 3.1 and gemma 3; Crush's is assumed."""
    first_request = {"claude": 13_706, "codex": 9_000, "opencode": 8_000, "aider": 763, "crush": 8_000}[agent]
    kept_free = 13_000 if agent == "claude" else 0
    shortest = AGENTS[agent].context_tokens
    output = ModelEndpoint("", "m", shortest, "").output_tokens
    assert first_request * 1.5 <= shortest - output - kept_free


def test_a_model_that_does_not_tell_its_context_sets_no_limits() -> None:
    unknown = ModelEndpoint("http://127.0.0.1:1", "m", 0, "key")
    assert not [name for name in AGENTS["claude"].environment(unknown) if name.endswith("TOKENS")]
    assert not [word for word in AGENTS["codex"].flags(unknown) if "token" in word or "window" in word]


def test_what_would_be_run_is_printed_and_what_cannot_work_is_said(environment: Mapping[str, str]) -> None:
    shown = run(environment, "launch", "aider", "--model", "demo-assistant", "--force", "--print").stdout
    assert "export OPENAI_API_KEY=paceline" in shown
    short = run(environment, "launch", "claude", "--model", "demo-assistant")
    assert (short.returncode, "needs 49152" in short.stderr) == (1, True)
    unknown = run(environment, "launch", "emacs")
    assert "claude, codex, opencode, aider, crush" in unknown.stderr
    missing = {**environment, "PATH": "/usr/bin:/bin"}
    absent = run(missing, "launch", "crush", "--model", "demo-assistant", "--force")
    assert "npm install -g @charmland/crush" in absent.stderr
    nothing = run(environment, "launch", "claude", "--model", "nothing", "--force")
    assert nothing.returncode == 1
