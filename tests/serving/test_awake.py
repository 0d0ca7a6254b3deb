"""A computer stays awake while requests run: when the lock is held, and the child process, with a stand-in program."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from app.core.messages import Heartbeat
from app.serving.awake import LINGER_SECONDS, Awake, Caffeinate

STAND_IN = '#!/bin/sh\necho $$ "$@" >"$(dirname "$0")/called"\nexec sleep 600\n'


class Lock:
    """A wake lock that records whether it is held, and how often that changed."""

    def __init__(self) -> None:
        self.held = False
        self.changes = 0

    def hold(self) -> None:
        self.changes += not self.held
        self.held = True

    def release(self) -> None:
        self.changes += self.held
        self.held = False


def test_it_is_held_from_the_first_request_on_until_some_seconds_behind_the_last() -> None:
    now, busy, lock = [0.0], [False], Lock()
    awake = Awake(lock, is_busy=lambda: busy[0], clock=lambda: now[0])
    held = []
    for second in range(60):
        now[0], busy[0] = float(second), 10 <= second < 20 or second == 25
        awake.on_event(Heartbeat(pending=busy[0]))
        held.append(lock.held)
    assert held == [10 <= second < 25 + LINGER_SECONDS for second in range(60)]
    assert lock.changes == 2
    busy[0] = True
    awake.on_event(Heartbeat(pending=True))
    awake.close()
    assert not lock.held


@pytest.fixture(name="called")
def a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a pipe; a reader waits until the stand-in writes its process id and its arguments."""
    program, called = tmp_path / "caffeinate", tmp_path / "called"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    os.mkfifo(called)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return called


Children = Callable[[], list[psutil.Process]]


@pytest.fixture(name="children")
def the_new_children() -> Children:
    """Function that lists this test's children: all new ones, because their command is unknown before their exec."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


def test_one_child_watches_this_process_until_it_is_let_go(called: Path, children: Children) -> None:
    lock = Caffeinate()
    lock.release()
    lock.hold()
    lock.hold()
    (child,) = children()
    assert called.read_text() == f"{child.pid} -i -w {os.getpid()}\n"
    lock.release()
    lock.release()
    assert children() == []


def test_a_child_that_somebody_ended_is_started_again(called: Path, children: Children) -> None:
    lock = Caffeinate()
    lock.hold()
    (first,) = children()
    first.send_signal(signal.SIGKILL)
    psutil.wait_procs([first], timeout=60)
    lock.hold()
    (second,) = children()
    assert second.pid != first.pid
    lock.release()


def test_without_the_program_nothing_is_started_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lock = Caffeinate()
    lock.hold()
    lock.release()
    assert children() == []


def test_a_program_that_does_not_start_is_told(called: Path, caplog: pytest.LogCaptureFixture) -> None:
    (called.parent / "caffeinate").write_bytes(b"\x7fELF")
    Caffeinate().hold()
    assert "the computer may go to sleep" in caplog.text
