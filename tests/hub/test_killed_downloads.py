"""`kill -9` at a random moment, again and again: listed models are whole, and all other downloads can be resumed."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.hub.partial_folder import PARTIAL
from app.models.catalog import FolderCatalog
from tests.hub.queue import model_files
from tests.hub.stand_in import StandInHub, stand_in_hub

LONGEST_SECONDS, LOOK_SECONDS = 0.03, 0.002
PATIENCE_SECONDS = 60.0
LET_LIVE = 25
MODEL_BYTES = sum(map(len, model_files(30_000).values()))


class Forge:
    """The warm process of `tests.hub.forge`, and the life that it forked last."""

    def __init__(self, process: "subprocess.Popen[bytes]", environment: Path, hub: StandInHub) -> None:
        self.process = process
        self.hub = hub
        self.folder = environment / "models"
        self.order = {
            "store": str(environment / "home" / "p.sqlite3"),
            "folder": str(self.folder),
            "endpoint": hub.address,
        }
        self.pid = self.child = 0

    def begin(self, repository: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**self.order, "repository": repository}).encode() + b"\n")
        self.process.stdin.flush()
        self.pid = self.receive(PATIENCE_SECONDS, "pid")["pid"]

    def receive(self, seconds: float, wanted: str = "end") -> dict[str, Any]:
        """Return the next line with the key `wanted`, or for "child" the end of the life; {} if none comes in time."""
        assert self.process.stdout is not None
        until = time.monotonic() + seconds
        while select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            line: dict[str, Any] = json.loads(self.process.stdout.readline())
            if "child" in line:
                self.child = line["child"]
            if wanted in line or (wanted == "child" and "end" in line):
                return line
        return {}

    def told_before(self, sent_bytes: int) -> dict[str, Any]:
        """Return the life's end if it comes before the hub has sent `sent_bytes` bytes, or {}."""
        while self.hub.sent_bytes < sent_bytes:
            if end := self.receive(LOOK_SECONDS):
                return end
        return {}

    def kill(self, whom: str) -> bool:
        """Kill the server, its download process, or both; return False if the process had already ended."""
        try:
            if whom == "both":
                os.killpg(self.pid, signal.SIGKILL)
            else:
                os.kill(self.pid if whom == "server" else self.child, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def let_live(self, repository: str) -> None:
        """Run a life to its end, and expect a complete download."""
        self.begin(repository)
        assert self.receive(PATIENCE_SECONDS) == {"end": "done", "problem": ""}


@contextmanager
def forge_at(environment: Path, hub: StandInHub) -> Iterator[Forge]:
    command = [sys.executable, "-m", "tests.hub.forge"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        yield Forge(process, environment, hub)
        process.kill()


def check_visible(forge: Forge, hub: StandInHub) -> int:
    """Check that every model in the catalog has all its bytes; return the number of models."""
    seen = 0
    for model in FolderCatalog([forge.folder]).models():
        assert model.problem == ""
        files = hub.repositories[model.id].files
        assert {path.name: path.read_bytes() for path in model.path.iterdir() if path.name[0] != "."} == files
        seen += 1
    return seen


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_a_killed_download_can_always_be_gone_on_with(tmp_path: Path, kills: int) -> None:
    chance = random.Random(20261121)
    killed = dict.fromkeys(("both", "server", "child"), 0)
    with stand_in_hub() as hub, forge_at(tmp_path, hub) as forge:
        hub.faults.slices, hub.faults.pause_seconds = 1 << 14, 0.002
        seen = 0
        while sum(killed.values()) < kills:
            name = f"paceline-test/model-{seen}"
            hub.add(name, model_files(30_000 + seen))
            forge.begin(name)
            for whom in chance.choice((("both",), ("server",), ("child", "both"))):
                end = forge.receive(PATIENCE_SECONDS, "child") if whom == "child" else {}
                wanted = hub.sent_bytes + chance.choice((0, chance.randrange(MODEL_BYTES)))
                end = forge.told_before(wanted) if "end" not in end else end
                end = end or forge.receive(chance.uniform(0, LONGEST_SECONDS))
                assert end in ({}, {"end": "done", "problem": ""})
                if end:
                    break
                killed[whom] += forge.kill(whom)
            if sum(killed.values()) % LET_LIVE == 0:
                forge.let_live(name)
            seen = check_visible(forge, hub)
        for number in range(seen + 1):
            hub.add(f"paceline-test/model-{number}", model_files(30_000 + number))
            forge.let_live(f"paceline-test/model-{number}")
        assert check_visible(forge, hub) == seen + 1
        assert [path for path in (forge.folder / PARTIAL).iterdir() if path.suffix != ".lock"] == []
        assert any(request.range for request in hub.requests), "some were gone on with in the middle of a file"
        assert min(killed.values()) >= kills // 10, killed
