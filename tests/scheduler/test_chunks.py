"""Prefill chunk sizes: about a second and a half of work alone, less beside streams and in long contexts."""

import pytest

from app.core.step import EngineLimits, PrefillStep, StepResult
from app.scheduler.prefill import ChunkSizes
from app.scheduler.scheduler import Scheduler
from tests.scheduler.scripted import some_request

LIMITS = EngineLimits(262_144, 8, prefill_chunk_tokens=2048)


def of_speed(tokens_per_second: float, limits: EngineLimits = LIMITS) -> ChunkSizes:
    sizes = ChunkSizes(limits)
    sizes.learn(512, 0, 512 / tokens_per_second)
    return sizes


@pytest.mark.parametrize(
    ("speed", "alone", "beside"), [(5_000, 2048, 512), (800, 1024, 128), (300, 256, 64), (50, 64, 32), (2, 32, 32)]
)
def test_a_chunk_takes_a_second_or_two_alone_and_a_quarter_of_one_beside_streams(
    speed: float, alone: int, beside: int
) -> None:
    sizes = of_speed(speed)
    assert sizes.size(0, alone=True, streams=False) == alone
    assert sizes.size(0, alone=False, streams=True) == beside
    assert sizes.size(0, alone=False, streams=False) == min(alone, 512)


def test_what_is_slower_in_a_long_context_is_read_in_smaller_pieces_there() -> None:
    sizes = of_speed(5_000)
    for _ in range(8):
        sizes.learn(2048, 70_000, 4.0)
    assert sizes.size(0, alone=True, streams=False) == 2048
    assert sizes.size(70_000, alone=True, streams=False) == 512
    assert sizes.size(50_000, alone=True, streams=False) == 512


def test_however_fast_a_machine_is_its_command_buffers_and_scores_stay_bounded() -> None:
    assert of_speed(1e9).size(70_000, alone=True, streams=False) == 1024
    unfused = of_speed(1e9, EngineLimits(262_144, 8, prefill_chunk_tokens=2048, prefill_pairs=1 << 23))
    assert unfused.size(0, alone=True, streams=False) == 2048
    assert unfused.size(15_000, alone=True, streams=False) == 512


def test_a_machine_that_is_not_known_begins_with_a_usual_chunk_and_a_short_one_teaches_nothing() -> None:
    sizes = ChunkSizes(LIMITS)
    assert sizes.size(0, alone=True, streams=False) == 512
    sizes.learn(5, 0, 10.0)
    assert sizes.size(0, alone=True, streams=False) == 512


def test_the_scheduler_learns_from_its_steps_and_follows() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(some_request("a", prompt=9_000))
    scheduler.admitted("a", 0)
    sizes = []
    for _ in range(4):
        plan = scheduler.plan()
        assert isinstance(plan, PrefillStep)
        (row,) = plan.rows
        sizes.append(row.end - row.start)
        scheduler.commit(StepResult(prefilled=(("a", row.end),), seconds=sizes[-1] / 4_000, width=sizes[-1]))
    assert sizes == [512, 2048, 2048, 2048]


def test_streams_of_another_model_wait_no_longer_than_those_of_the_same_one() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(some_request("a", prompt=9_000))
    scheduler.admitted("a", 0)
    sizes = []
    for beside_others in (False, True, False):
        plan = scheduler.plan(beside_others=beside_others)
        assert isinstance(plan, PrefillStep)
        (row,) = plan.rows
        sizes.append(row.end - row.start)
        scheduler.commit(StepResult(prefilled=(("a", row.end),), seconds=sizes[-1] / 1_000, width=sizes[-1]))
    assert sizes == [512, 128, 1024]
