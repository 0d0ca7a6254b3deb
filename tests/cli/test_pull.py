"""`paceline pull`: in the server's queue, or in the command's own process if no server lets it in."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from app.cli import application
from app.hub.partial_folder import PARTIAL
from app.models.catalog import FolderCatalog
from tests.cli.fake_server import FakeServer
from tests.hub.queue import model_files
from tests.hub.stand_in import StandInHub, stand_in_hub

ID = "paceline-test/tiny-4bit"
WAIT_SECONDS = 60.0


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        hub.add(ID, model_files())
        yield hub


@pytest.fixture
def alone(environment: Mapping[str, str], hub: StandInHub) -> Mapping[str, str]:
    """Environment without a server, with the stand-in hub."""
    return {**environment, "PACELINE_PORT": "1", "HF_ENDPOINT": hub.address}


def pull(environment: Mapping[str, str], *arguments: str) -> Result:
    return CliRunner().invoke(application, ["pull", *arguments], env=dict(environment))


def folder_of(environment: Mapping[str, str]) -> Path:
    return Path(environment["PACELINE_HOME"]) / "models"


def view(state: str, **more: Any) -> dict[str, Any]:
    row = {"id": 3, "repository": ID, "state": state, "phase": "", "done_bytes": 5, "total_bytes": 10}
    return {**row, "problem_text": "", **more}


def test_without_a_server_it_downloads_itself(alone: Mapping[str, str]) -> None:
    result = pull(alone, ID)
    assert result.exit_code == 0, result.output
    assert f"{ID} is in " in result.stdout
    model = FolderCatalog([folder_of(alone)]).find(ID)
    assert model.problem == ""
    again = pull(alone, f"https://hub.example/{ID}")
    assert again.exit_code == 0, "what is here already is no error"


def test_offline_it_says_at_once_which_host_does_not_answer_and_why(environment: Mapping[str, str]) -> None:
    offline = {**environment, "PACELINE_PORT": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    began = time.monotonic()
    result = pull(offline, ID)
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    assert "127.0.0.1" in result.stderr
    assert "refused" in result.stderr
    assert time.monotonic() - began < WAIT_SECONDS, "it does not try again and again"


def test_a_folder_on_a_drive_that_is_away_is_named_and_not_made_on_another(
    alone: Mapping[str, str], tmp_path: Path
) -> None:
    result = pull({**alone, "PACELINE_DOWNLOADS_FOLDER": str(tmp_path / "drive" / "models")}, ID)
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert "connect its drive" in result.stderr
    assert not (tmp_path / "drive").exists()


def test_a_server_that_does_not_let_it_in_is_no_obstacle(alone: Mapping[str, str], fake: FakeServer) -> None:
    there = {**alone, "PACELINE_PORT": str(fake.port)}
    fake.answers["/admin/api/downloads"] = (401, {"error": {"message": "sign in"}})
    assert pull(there, ID).exit_code == 0
    fake.answers["/admin/api/downloads"] = (403, {"error": {"message": "only", "code": "insufficient_scope"}})
    assert pull(there, ID).exit_code == 0
    fake.answers["/admin/api/downloads"] = (403, {"error": {"message": "the hub refused", "code": "hub_refused"}})
    assert "the hub refused" in pull(there, ID).stderr


def test_a_server_gets_it_into_its_queue(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/admin/api/downloads"] = (
        200,
        view("running") | {"downloads": [view("done")], "folder": "/its/folder"},
    )
    result = pull(environment, ID, "--revision", "v1")
    assert result.exit_code == 0, result.output
    assert f"{ID} is in /its/folder." in result.stdout, "the server's folder, not the command's"
    assert fake.requests[0][:3] == ("POST", "/admin/api/downloads", {"repository": ID, "revision": "v1"})


@pytest.mark.parametrize(
    ("row", "words"),
    [(view("failed", problem_text="the disk is full"), "The disk is full"), (view("cancelled"), "is cancelled")],
)
def test_what_becomes_of_it_in_the_queue_is_told(
    environment: Mapping[str, str], fake: FakeServer, row: dict[str, Any], words: str
) -> None:
    fake.answers["/admin/api/downloads"] = (200, view("running") | {"downloads": [row]})
    result = pull(environment, ID)
    assert result.exit_code == 1
    assert words in result.stderr


def test_refusals_are_one_line(alone: Mapping[str, str], hub: StandInHub) -> None:
    hub.add("a/gated", model_files(), gated="manual")
    for name, words in (("no/such", "the name"), ("a/gated", "license"), ("../../etc/x", "organisation/name")):
        result = pull(alone, name)
        assert (result.exit_code, words in result.stderr) == (1, True), result.output
        assert len(result.stderr.strip().splitlines()) == 1
        assert name in result.stderr, "as it is written"


def test_ctrl_c_pauses_and_the_same_command_goes_on(alone: Mapping[str, str], hub: StandInHub) -> None:
    hub.faults.stalls.extend([65_536] * 3)  # only one of the three files is longer, whichever comes first
    command = [sys.executable, "-m", "app.cli", "pull", ID]
    with subprocess.Popen(command, env={**os.environ, **alone}, stdout=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + WAIT_SECONDS
        while sum(path.stat().st_size for path in folder_of(alone).glob(f"{PARTIAL}/*@*/*")) < 65_536:
            assert time.monotonic() < until
            assert process.poll() is None
            select.select([], [], [], 0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130
    assert "Paused. Run the command again to resume." in output
    hub.faults.stalls.clear()  # later requests do not stall
    assert FolderCatalog([folder_of(alone)]).models() == ()
    assert pull(alone, ID).exit_code == 0
    assert hub.gets("model.safetensors")[-1].range.startswith("bytes=")
    assert [model.id for model in FolderCatalog([folder_of(alone)]).models()] == [ID]
