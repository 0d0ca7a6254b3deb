"""Each coding agent mends one word of a file through `paceline launch`: `make agents` installs and runs them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.agents.installed import FOLDERS
from tests.agents.task import RIGHT, TASK, WRONG
from tests.scripted.server import scripted_server

pytestmark = pytest.mark.agents


def words_of(agent: str, task: str, file: str) -> Sequence[str]:
    """How each is told to do one task by itself, without asking."""
    return {
        "claude": ("--print", task, "--permission-mode", "acceptEdits"),
        "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task),
        "opencode": ("run", task),
        "aider": ("--message", task, "--yes-always", "--no-git", "--no-check-update", "--no-analytics", file),
    }[agent]


@pytest.mark.parametrize("agent", FOLDERS)
def test_an_agent_mends_a_word(agent: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    file = project / "greeting.txt"
    file.write_text(f"Hello, {WRONG}\n")
    environment = {
        "HOME": str(tmp_path),
        "PACELINE_HOME": str(tmp_path / "home"),
        "PATH": os.pathsep.join([str(FOLDERS[agent]), os.environ["PATH"]]),
    }
    with scripted_server(tmp_path / "home", worker="tests.agents.scripted_worker") as server:
        launch = [sys.executable, "-m", "app.cli", "launch", agent, "--model", server.model(), "--"]
        words = words_of(agent, f"{TASK} {file}", str(file))
        said = subprocess.run(
            [*launch, *words],
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
