"""Preemption for lack of memory: the newest request loses its row, waits first in the queue, and resumes its answer."""

import random

import pytest

from app.core.request import Request
from app.core.step import EngineLimits
from app.scheduler.scheduler import Scheduler
from tests.scheduler.scripted import Loop, ScriptedEngine, build, check_against_naive, some_request


def begun(*names: str) -> Scheduler:
    scheduler = Scheduler(EngineLimits(4_096, 4))
    for name in names:
        scheduler.submit(some_request(name, owner=name[0]))
        scheduler.admitted(name, 0)
    return scheduler


def test_the_newest_row_is_taken_and_is_the_next_to_be_given_one() -> None:
    scheduler = begun("a1", "b1", "c1")
    scheduler.submit(some_request("a2", owner="a"))
    assert scheduler.preempt() == "c1"
    assert scheduler.drain_released() == [("c1", ())]
    assert (scheduler.running, scheduler.waiting) == (2, 2)
    head = scheduler.next_admission()
    assert head is not None
    assert head.id == "c1"


def test_somebody_goes_on_whatever_memory_there_is() -> None:
    scheduler = begun("a", "b")
    assert scheduler.preempt() == "b"
    assert scheduler.preempt() == ""
    assert scheduler.running == 1
    assert Scheduler(EngineLimits(4_096, 4)).preempt() == ""


@pytest.mark.parametrize("what", ["scores_prompt", "embeds"])
def test_what_is_told_of_a_prompt_is_not_told_twice(what: str) -> None:
    scheduler = begun("a", "b")
    scheduler.submit(Request(id="c", prompt_tokens=(1, 2, 3), max_tokens=1, **{what: True}))
    scheduler.admitted("c", 0)
    assert scheduler.preempt() == "b"


def test_a_preempted_request_can_be_cancelled_while_it_waits() -> None:
    scheduler = begun("a", "b")
    scheduler.preempt()
    scheduler.drain_released()
    (event,) = scheduler.cancel("b")
    assert event.finish_reason == "cancelled"
    assert scheduler.waiting == 0
    assert scheduler.drain_released() == []


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_the_same_however_often_rows_are_taken(seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        some_request(f"r{number}", prompt=chance.randint(1, 40), max_tokens=chance.randint(1, 60))
        for number in range(6)
    ]
    loop: Loop = build(engine=ScriptedEngine(EngineLimits(4_096, 3, prefill_chunk_tokens=16)))
    taken = 0
    for request in requests:
        loop.scheduler.submit(request)
    while loop.scheduler.has_work:
        if chance.random() < 0.2:
            taken += bool(loop.scheduler.preempt())
        loop.turn()
    assert taken > 3
    for request in requests:
        check_against_naive(loop, request)
    assert not loop.engine.rows
