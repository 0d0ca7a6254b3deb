"""`kill -9` at random moments: the file opens afterwards, and every value in it was written once, whole."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from app.model_settings import ModelSettings
from app.store.accounts import Accounts
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store

LONGEST_SECONDS = 0.012
"""Longest delay of a kill, in seconds: about the time of the changes between two numbers."""
EARLY = 5
"""Interval, in kills, of early ones: they do not wait for the child's first number and may hit it opening the file."""
WRITER = """
import os, sys
from pathlib import Path
from app.model_settings import ModelSettings
from app.store.accounts import Accounts
from app.store.rows import StoredSettings
from app.store.store import Store

def write(store, number, end=sys.maxsize):
    kept, keys = StoredSettings(store), Accounts(store).keys
    while number < end:
        kept.change_settings({"port": number, "max_rows": number}, source=str(number))
        os.write(1, b"%d\\n" % number)
        kept.save_model("big", ModelSettings(top_k=number, alias=f"a{number}"), source=str(number))
        keys.revoke(keys.create(f"k{number}", "inference")[0].id)
        number += 1

warm = Store(Path(sys.argv[1] + "-warm"))
write(warm, 0, 1)
warm.close()
for line in sys.stdin:  # each line begins another child, which has every module already
    child = os.fork()
    if child == 0:
        os.write(1, b"child %d\\n" % os.getpid())
        write(Store(Path(sys.argv[1])), int(line))
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.soak)])
def test_kills_lose_nothing_that_was_said_to_be_kept(tmp_path: Path, kills: int) -> None:
    path = tmp_path / FILE_NAME
    chance = random.Random(9)
    reported = 0
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        assert forks.stdout.readline() == b"0\n", "every module is warm"
        for kill in range(kills):
            forks.stdin.write(f"{reported + 1}\n".encode())
            seconds = chance.uniform(0, LONGEST_SECONDS)
            said = read_until_killed(forks.stdout, seconds, wait_for_number=kill % EARLY > 0)
            reported = max([reported, *said])
            reported = check(path, reported, most_keys=kill + 1)
        forks.stdin.close()
    assert reported >= kills - kills // EARLY


def read_until_killed(lines: IO[bytes], seconds: float, *, wait_for_number: bool) -> list[int]:
    """Kill a child `seconds` after it began or printed its first number; return the numbers that it printed."""
    child = int(lines.readline().split()[1])
    text = lines.readline() if wait_for_number else b""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and select.select([lines], [], [], left)[0]:
        text += os.read(lines.fileno(), 4096)
    os.kill(child, signal.SIGKILL)
    while not text.endswith(b"gone\n"):
        text += os.read(lines.fileno(), 4096)
    return [int(line) for line in text.split() if line != b"gone"]


def check(path: Path, reported: int, *, most_keys: int) -> int:
    """Check that a new store finds whole values, none older than reported; return the newest number."""
    store = Store(path)
    assert store.start() == "", "never damaged"
    kept = StoredSettings(store)
    settings, model = kept.settings(), kept.models().get("big", ModelSettings())
    number = int(settings.get("port", 0))
    assert settings == ({"port": number, "max_rows": number} if number else {}), "one change, all or nothing"
    assert number >= reported
    assert (model.top_k or 0) <= number
    assert model.alias == (f"a{model.top_k}" if model.top_k is not None else None)
    assert len(Accounts(store).keys.list()) <= most_keys
    store.close()
    return number
