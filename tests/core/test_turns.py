"""Owners take turns, and what is cancelled leaves the queue."""

import threading

import pytest

from app.core.errors import QueueFull
from app.core.turns import Backlog, SharedThread


def hold(thread: SharedThread) -> threading.Event:
    """Have the thread wait for the event that is returned."""
    started, gate = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        gate.wait(10)

    thread.submit("a", wait)
    assert started.wait(10)
    return gate


def test_owners_take_turns_and_each_keeps_its_order() -> None:
    thread, done = SharedThread("test"), list[str]()
    gate = hold(thread)
    futures = [thread.submit(name[0], done.append, name) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]
    gate.set()
    for future in futures:
        future.result(10)
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_what_is_cancelled_or_closed_is_not_run_and_an_error_is_its_callers() -> None:
    thread, done = SharedThread("test"), list[str]()
    gate = hold(thread)
    left, broken, last = (
        thread.submit(*work) for work in (("a", done.append, "left"), ("a", int, "x"), ("b", done.append, "last"))
    )
    assert left.cancel()
    gate.set()
    with pytest.raises(ValueError, match="'x'"):
        broken.result(10)
    last.result(10)
    gate = hold(thread)
    late = thread.submit("a", done.append, "late")
    thread.close()
    gate.set()
    assert late.cancelled()
    assert done == ["last"]


def test_a_backlog_counts_each_owner_alone_and_lets_one_piece_of_any_size_in() -> None:
    backlog = Backlog(2, 100)
    backlog.enter("a", 500)
    with pytest.raises(QueueFull):
        backlog.enter("a", 1)
    backlog.leave("a", 500)
    for _ in range(2):
        backlog.enter("a", 1)
    with pytest.raises(QueueFull):
        backlog.enter("a", 1)
    backlog.enter("b", 1)
