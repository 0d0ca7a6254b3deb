"""The device ran out of memory: fewer rows, smaller chunks, the same texts, and at most one request that fails."""

import random

import pytest

from app.core.request import Request
from app.core.step import DecodeStep, EngineLimits, FinishReason, PrefillStep, StepResult, TokenLogprobs
from app.models.footprint import SMALLEST_CHUNK_TOKENS
from app.scheduler.scheduler import RECOVERY_ANSWERS, Scheduler
from tests.scheduler.scripted import Loop, ScriptedEngine, build, check_against_naive, some_request


def begun(rows: int, prompt: int = 2_000) -> Scheduler:
    scheduler = Scheduler(EngineLimits(4_096, 8, prefill_chunk_tokens=512))
    for number in range(rows):
        scheduler.submit(some_request(f"r{number}", prompt=prompt))
    admit_all(scheduler)
    return scheduler


def admit_all(scheduler: Scheduler) -> list[str]:
    scheduler.drain_released()
    admitted = []
    while (request := scheduler.next_admission()) is not None:
        scheduler.admitted(request.id, 0)
        admitted.append(request.id)
    return admitted


def read(scheduler: Scheduler) -> int:
    """Run one prefill step; return how many tokens of the first prompt it read."""
    plan = scheduler.plan()
    assert isinstance(plan, PrefillStep)
    scheduler.commit(StepResult(prefilled=tuple((row.sequence_id, row.end) for row in plan.rows)))
    return plan.rows[0].end - plan.rows[0].start


def test_rows_and_chunks_are_halved_and_all_go_on_in_their_order() -> None:
    scheduler = begun(5)
    assert read(scheduler) == 512
    assert scheduler.shrink("full") == []
    assert admit_all(scheduler) == ["r0", "r1"]
    assert read(scheduler) == 256
    assert scheduler.shrink("full") == []
    assert admit_all(scheduler) == ["r0"]
    assert read(scheduler) == 128
    assert scheduler.waiting == 4


def test_alone_it_is_tried_once_more_and_again_only_while_that_gets_further() -> None:
    scheduler = begun(1)
    for tries, reached in enumerate((512, 1024, 1280)):
        while scheduler.prefill_progress["r0"] < reached:
            read(scheduler)
        assert scheduler.shrink("full") == [], tries
        assert admit_all(scheduler) == ["r0"]
    while scheduler.prefill_progress["r0"] < 1280:
        read(scheduler)
    (event,) = scheduler.shrink("full")
    assert (event.request_id, event.finish_reason, event.error) == ("r0", FinishReason.FAILED, "full")
    assert not scheduler.running


def test_at_the_smallest_chunk_it_is_not_tried_for_ever() -> None:
    scheduler = begun(1)
    events = []
    for tries in range(1, 20):
        while scheduler.prefill_progress["r0"] < 300 * tries:
            read(scheduler)
        events = scheduler.shrink("full")
        if events:
            break
        admit_all(scheduler)
    assert tries == 5  # at chunks of 512, 256, 128, 64, 32
    assert SMALLEST_CHUNK_TOKENS == 32


def test_once_nothing_is_left_to_do_everything_is_as_before() -> None:
    scheduler = begun(4)
    scheduler.shrink("full")
    for number in range(4):
        scheduler.cancel(f"r{number}")
    for number in range(4):
        scheduler.submit(some_request(f"s{number}", prompt=2_000))
    assert len(admit_all(scheduler)) == 4
    assert read(scheduler) == 512


def test_under_steady_load_rows_come_back_one_by_one() -> None:
    loop = build(engine=ScriptedEngine(EngineLimits(4_096, 4, prefill_chunk_tokens=16)))
    scheduler, names, running = loop.scheduler, [f"r{number}" for number in range(4 * RECOVERY_ANSWERS)], []
    for number in range(RECOVERY_ANSWERS - 1):  # they end before the shortage, and do not count
        scheduler.submit(some_request(f"early{number}", max_tokens=4))
    while scheduler.has_work:
        loop.turn()
    for name in names:
        scheduler.submit(some_request(name, max_tokens=4))
    while scheduler.running < 4:
        loop.turn()
    scheduler.shrink("full")
    while scheduler.waiting:
        loop.turn()
        running.append((len(names) - scheduler.waiting - scheduler.running, scheduler.running))
    assert max(rows for answers, rows in running if answers < RECOVERY_ANSWERS) == 2
    assert max(rows for answers, rows in running if answers < 2 * RECOVERY_ANSWERS) == 3
    assert max(rows for answers, rows in running) == 4


def test_scores_of_a_prompt_that_is_read_again_are_told_once() -> None:
    scheduler = Scheduler(EngineLimits(4_096, 4, prefill_chunk_tokens=512))
    prompt = tuple(range(1, 601))
    scheduler.submit(Request(id="r", prompt_tokens=prompt, max_tokens=1, scores_prompt=True))
    logprobs: list[TokenLogprobs] = []
    for shortage in (1, 2, 3, 0):
        admit_all(scheduler)
        for _ in range(shortage or 99):
            plan = scheduler.plan()
            if isinstance(plan, DecodeStep):
                break
            assert plan is not None
            (row,) = plan.rows
            assert isinstance(plan, PrefillStep)
            scores = tuple(TokenLogprobs(-float(token)) for token in row.tokens[row.start + 1 : row.end + 1])
            for event in scheduler.commit(StepResult(prefilled=(("r", row.end),), prompt_logprobs={"r": scores})):
                logprobs += event.prompt_logprobs
        if shortage:
            assert scheduler.shrink("full") == []
    assert logprobs == [TokenLogprobs(-float(token)) for token in prompt[1:]]


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_the_same_however_often_memory_runs_out(seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        some_request(f"r{number}", prompt=chance.randint(1, 40), max_tokens=chance.randint(1, 60))
        for number in range(6)
    ]
    loop: Loop = build(engine=ScriptedEngine(EngineLimits(4_096, 4, prefill_chunk_tokens=16)))
    for request in requests:
        loop.scheduler.submit(request)
    shortages = 0
    while loop.scheduler.has_work:
        if loop.scheduler.running > 1 and chance.random() < 0.3:
            assert loop.scheduler.shrink("full") == []
            shortages += 1
        loop.turn()
    assert shortages
    for request in requests:
        check_against_naive(loop, request)
    assert not loop.engine.rows
