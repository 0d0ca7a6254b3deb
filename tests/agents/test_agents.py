"""Each coding agent mends one word of a file through `paceline launch`: `make agents` installs and runs them."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.agents.installed import FOLDERS
from tests.agents.scripted_server import MODEL, scripted_server
from tests.agents.scripted_worker import RIGHT, TASK, WRONG

pytestmark = [pytest.mark.agents, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def words_of(agent: str, task: str, file: str) -> Sequence[str]:
    """How each is told to do one task by itself, without asking."""
    return {
        "claude": ("--print", task, "--permission-mode", "acceptEdits"),
        "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task),
        "opencode": ("run", task),
        "aider": ("--message", task, "--yes-always", "--no-git", "--no-check-update", "--no-analytics", file),
    }[agent]


@pytest.mark.parametrize("agent", FOLDERS)
async def test_an_agent_mends_a_word(agent: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    file = project / "greeting.txt"
    file.write_text(f"Hello, {WRONG}\n")
    environment = {
        "HOME": str(tmp_path),
        "PACELINE_HOME": str(tmp_path / "home"),
        "PATH": os.pathsep.join([str(FOLDERS[agent]), os.environ["PATH"]]),
    }
    async with scripted_server(tmp_path / "home"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app.cli", "launch", agent, "--model", MODEL, "--"),
            *words_of(agent, f"{TASK} {file}", str(file)),
            cwd=project,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
    assert file.read_text() == f"Hello, {RIGHT}\n", said.decode()
    assert process.returncode == 0, said.decode()
