"""Inputs and outcomes of steps: chunks, carried tokens, ends inside a block, counters."""

import pytest

from app.core.reason import DRAFTER_READS, Reason
from app.core.request import Request
from app.core.statistics import PhaseSeconds
from app.core.step import DecodeStep, EngineLimits, FinishReason, PrefillStep, RowOutcome, StepResult, TokenLogprobs
from app.scheduler.governor import StepObservation
from app.scheduler.scheduler import Scheduler
from app.scheduler.sequence import LiveSequence
from tests.scheduler.scripted import (
    Loop,
    ManualClock,
    ScriptedEngine,
    build,
    check_against_naive,
    some_request,
    speculative_limits,
)


def running(*, prompt: int = 3, cached: int = 2, **wishes: object) -> Scheduler:
    """Return a scheduler with one admitted request `a`, which asks for four drafts per step."""
    scheduler = Scheduler(speculative_limits(), clock=ManualClock())
    scheduler.submit(some_request("a", prompt=prompt, method="draft_model", num_draft_tokens=4, **wishes))  # type: ignore[arg-type]
    scheduler.admitted("a", cached)
    return scheduler


def test_a_prompt_is_cached_in_chunks_except_its_last_token() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=16)))
    loop.run(some_request("a", prompt=40, max_tokens=1))
    chunks = [(row.start, row.end) for plan in loop.plans if isinstance(plan, PrefillStep) for row in plan.rows]
    assert chunks == [(0, 16), (16, 32), (32, 39)]
    assert [row.computed for row in loop.decode_rows("a")] == [39]


def test_a_cached_prefix_is_not_fed_again() -> None:
    scheduler = running(prompt=60, cached=20)
    plan = scheduler.plan()
    assert isinstance(plan, PrefillStep)
    assert plan.rows[0].start == 20


def test_short_prompts_are_read_by_the_first_decode_step() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=16)))
    loop.run(*(some_request(name, prompt=9, max_tokens=3) for name in ("a", "bb", "ccc")))
    assert isinstance(loop.plans[0], DecodeStep)
    assert [row.computed for row in loop.plans[0].rows] == [0, 0, 0]
    assert not any(isinstance(plan, PrefillStep) for plan in loop.plans)


def test_the_step_that_reads_a_short_prompt_teaches_nothing_about_drafts() -> None:
    scheduler = running(prompt=16, cached=0)
    assert isinstance(scheduler.plan(), DecodeStep)
    unread = RowOutcome("a", (3,), 16, why_not_drafted=Reason("drafter_unread"))
    scheduler.commit(StepResult((unread,), seconds=0.5, width=16))
    assert scheduler.costs.export() == (), "neither a forward of sixteen nor a drafting that took no time"


def test_the_steps_in_which_a_drafter_reads_the_prompt_teach_nothing_about_its_drafts() -> None:
    scheduler = running()
    seen = list[StepObservation]()
    scheduler._speculation._governor.observe = seen.append  # type: ignore[method-assign]
    assert isinstance(scheduler.plan(), DecodeStep)
    scheduler.commit(StepResult((RowOutcome("a", (3,), 3, why_not_drafted=DRAFTER_READS),), seconds=0.5))
    (step,) = seen
    assert not step.typical
    assert [(draft.method, draft.requested) for draft in step.drafts] == [("draft_model", 0)]


def test_a_short_prompt_does_not_widen_the_step_of_a_running_stream() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=16)), policy="off")
    loop.scheduler.submit(some_request("stream", prompt=2, max_tokens=20))
    loop.turn()
    loop.scheduler.submit(some_request("short", prompt=9, max_tokens=2))
    loop.finish()
    assert any(isinstance(plan, PrefillStep) and plan.rows[0].sequence_id == "short" for plan in loop.plans)


def test_chunks_and_decode_steps_alternate_while_both_are_wanted() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=8)), policy="off")
    loop.scheduler.submit(some_request("stream", prompt=2, max_tokens=40))
    for _ in range(3):
        loop.turn()
    loop.scheduler.submit(some_request("long", prompt=60, max_tokens=2))
    begun = len(loop.plans)
    loop.finish()
    kinds = [isinstance(plan, PrefillStep) for plan in loop.plans[begun:]]
    assert kinds[:16] == [True, False] * 8


def test_the_oldest_prompt_is_finished_first() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=8)))
    loop.run(*(some_request(name, prompt=30, max_tokens=20) for name in ("a", "bb")))
    order = [plan.rows[0].sequence_id for plan in loop.plans if isinstance(plan, PrefillStep)]
    assert order == ["a"] * 4 + ["bb"] * 4


def test_prompts_of_about_one_length_are_read_together_when_a_chunk_holds_them() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=96)))
    prompts = {"a": 30, "bb": 24, "ccc": 60, "dddd": 28}
    loop.run(*(some_request(name, prompt=length, max_tokens=2) for name, length in prompts.items()))
    together = [[row.sequence_id for row in plan.rows] for plan in loop.plans if isinstance(plan, PrefillStep)]
    assert together == [["a", "dddd", "bb"], ["ccc"]]


def test_prompts_that_came_together_start_together_where_one_more_chunk_ends_them_all() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=64)), policy="off")
    loop.run(*(some_request(name, prompt=60, max_tokens=3) for name in ("a", "bb")))
    kinds = [tuple(row.sequence_id for row in plan.rows) for plan in loop.plans]
    assert kinds[:3] == [("a",), ("bb",), ("a", "bb")]


def test_who_was_read_waits_for_one_more_chunk_at_most() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=64)), policy="off")
    loop.run(*(some_request(name, prompt=60, max_tokens=9) for name in ("a", "bb", "ccc", "dddd")))
    kinds = ["".join(row.sequence_id[0] for row in plan.rows) for plan in loop.plans]
    prefills = [isinstance(plan, PrefillStep) for plan in loop.plans]
    assert list(zip(kinds, prefills, strict=True))[:7] == [
        ("a", True),
        ("a", False),
        ("b", True),
        ("ab", False),
        ("c", True),
        ("abc", False),
        ("d", True),
    ]


def test_carried_tokens_are_fed_with_the_next_decode_step() -> None:
    scheduler = running()
    scheduler.plan()
    scheduler.commit(StepResult((RowOutcome("a", (1, 2, 3), computed=2, drafted=4, accepted=2),)))
    plan = scheduler.plan()
    assert isinstance(plan, DecodeStep)
    assert plan.rows[0].computed == 2
    assert list(plan.rows[0].tokens[2:])[1:] == [1, 2, 3]


def test_a_deep_rewind_is_caught_up_by_prefill_steps() -> None:
    scheduler = running(prompt=40, cached=39)
    scheduler.plan()
    scheduler.commit(StepResult((RowOutcome("a", (1,), computed=10),)))
    plan = scheduler.plan()
    assert isinstance(plan, PrefillStep)
    assert [(row.start, row.end) for row in plan.rows] == [(10, 26)]


def test_drafts_never_reach_beyond_what_remains() -> None:
    scheduler = running(max_tokens=3)
    plan = scheduler.plan()
    assert isinstance(plan, DecodeStep)
    assert (plan.rows[0].remaining, plan.rows[0].num_draft_tokens) == (3, 2)


def test_a_stop_token_inside_a_block_ends_it_untold_and_everything_behind_it_never_was() -> None:
    scheduler = running(stops=frozenset({22}))
    scheduler.plan()
    logprobs = tuple(TokenLogprobs(-float(place)) for place in range(5))
    outcome = RowOutcome("a", (1, 2, 22, 4, 5), 7, drafted=4, accepted=4, logprobs=logprobs, method="ngram")
    [event] = scheduler.commit(StepResult((outcome,)))
    assert event.tokens == (1, 2)
    assert event.logprobs == logprobs[:2]
    assert event.finish_reason is FinishReason.STOP
    assert (event.drafted, event.accepted) == (3, 2)
    statistics = event.statistics
    assert (statistics.completion_tokens, statistics.drafted, statistics.accepted) == (3, 3, 3)
    assert statistics.accepted_per_position == (1, 1, 1)
    [(_, released)] = scheduler.drain_released()
    assert released[-3:] == (1, 2, 22), "keys and values of the stop token are valid, those behind it are not"


def test_how_sure_the_target_is_of_a_text_follows_its_last_tokens_and_nothing_behind_the_end() -> None:
    sequence = LiveSequence(some_request("a", prompt=3, max_tokens=4), 0.0)
    assert not sequence.confidence.weight
    sequence.append(RowOutcome("a", (1,), 3, confidences=(0.5,)), 100, PhaseSeconds())
    assert sequence.confidence.value == 0.5
    sequence.append(RowOutcome("a", (2, 3), 5, drafted=1, accepted=1, confidences=(1.0, 0.0)), 100, PhaseSeconds())
    assert sequence.confidence.value == pytest.approx(0.5), "the first ones count alike"
    sequence.append(RowOutcome("a", (4, 5), 7, drafted=1, accepted=1, confidences=(0.9, 1.0)), 100, PhaseSeconds())
    assert sequence.confidence.value == pytest.approx(0.6), "the fourth token was the last one"


def test_how_sure_the_target_was_long_ago_fades() -> None:
    sequence = LiveSequence(some_request("a", prompt=3, max_tokens=100), 0.0)
    for place, confidence in enumerate([1.0] * 50 + [0.0] * 10):
        sequence.append(RowOutcome("a", (1,), 3 + place, confidences=(confidence,)), 100, PhaseSeconds())
    assert sequence.confidence.value == pytest.approx(0.8**10)


def test_the_last_token_is_released_only_when_it_was_fed() -> None:
    scheduler = running(stops=frozenset({22}))
    scheduler.plan()
    scheduler.commit(StepResult((RowOutcome("a", (1, 22), 4, drafted=4, accepted=1),)))
    [(_, released)] = scheduler.drain_released()
    assert len(released) == 4
    assert released[-1] == 1


def test_what_was_read_again_for_close_calls_is_counted() -> None:
    scheduler = running(stops=frozenset({22}))
    for tokens, computed, replayed in (((1,), 3, 4), ((2,), 4, 0), ((22,), 5, 2)):
        scheduler.plan()
        [event] = scheduler.commit(StepResult((RowOutcome("a", tokens, computed, replayed=replayed),)))
    assert (event.statistics.close_calls, event.statistics.replayed_tokens) == (2, 6)


def test_an_answer_that_is_only_a_stop_token_tells_nothing_but_its_end() -> None:
    scheduler = running(stops=frozenset({22}))
    scheduler.plan()
    [event] = scheduler.commit(StepResult((RowOutcome("a", (22,), 3, drafted=4),)))
    assert (event.tokens, event.finish_reason) == ((), FinishReason.STOP)
    assert (event.statistics.completion_tokens, event.statistics.first_token_seconds) == (1, 0.0)


def test_a_block_longer_than_what_remains_is_cut() -> None:
    scheduler = running(max_tokens=2)
    scheduler.plan()
    [event] = scheduler.commit(StepResult((RowOutcome("a", (1, 2, 3, 4), 6, drafted=3, accepted=3),)))
    assert event.tokens == (1, 2)
    assert (event.drafted, event.accepted, event.finish_reason) == (2, 2, FinishReason.LENGTH)


def test_a_row_missing_in_the_result_is_planned_again() -> None:
    scheduler = running()
    first = scheduler.plan()
    assert scheduler.commit(StepResult()) == []
    assert scheduler.plan() == first


def test_outcomes_of_requests_that_left_are_ignored() -> None:
    scheduler = running()
    scheduler.plan()
    scheduler.cancel("a")
    assert scheduler.commit(StepResult((RowOutcome("a", (1,), 3),), prefilled=(("a", 2),))) == []
    assert scheduler.plan() is None


@pytest.mark.parametrize("computed", [-1, 4])
def test_an_impossible_cache_length_fails_the_request_instead_of_corrupting_it(computed: int) -> None:
    scheduler = running()
    scheduler.plan()
    [event] = scheduler.commit(StepResult((RowOutcome("a", (1,), computed=computed),)))
    assert event.finish_reason is FinishReason.FAILED
    assert "cached" in event.error
    assert scheduler.drain_released() == [("a", ())]


def test_an_impossible_prefill_fails_the_request() -> None:
    scheduler = running(prompt=9, cached=0)
    scheduler.plan()
    [event] = scheduler.commit(StepResult(prefilled=(("a", 9),)))
    assert event.finish_reason is FinishReason.FAILED


def test_statistics_say_where_the_time_went() -> None:
    clock = ManualClock()
    scheduler = Scheduler(EngineLimits(4_096, 1, prefill_chunk_tokens=64), clock=clock)
    loop = Loop(scheduler, ScriptedEngine(EngineLimits(4_096, 1, prefill_chunk_tokens=64)))
    scheduler.submit(some_request("a", prompt=30, max_tokens=3))
    clock.now += 1
    loop.turn()
    clock.now += 2
    for _ in range(3):
        loop.turn()
        clock.now += 4
    statistics = loop.end("a").statistics
    assert (statistics.queue_seconds, statistics.prefill_seconds, statistics.decode_seconds) == (1, 2, 8)
    assert statistics.first_token_seconds == 3
    assert (statistics.prompt_tokens, statistics.steps, statistics.methods) == (30, 3, ("off",))


def test_seconds_of_timed_steps_are_told_and_stand_for_the_others() -> None:
    scheduler = running(max_tokens=40)
    timed = []
    for _ in range(8):
        plan = scheduler.plan()
        assert isinstance(plan, DecodeStep)
        timed.append(plan.timed)
        (row,) = plan.rows
        end = len(row.tokens) + 2
        outcome = RowOutcome("a", (1, 2, 3), end, row.num_draft_tokens, 2, method="draft_model")
        phase_seconds = PhaseSeconds(0.25, 0.5, 0.125) if plan.timed else None
        scheduler.commit(StepResult((outcome,), seconds=1.0, width=5, phase_seconds=phase_seconds))
    (end_event,) = scheduler.cancel("a")
    (drafts,) = end_event.statistics.by_method
    assert (drafts.method, drafts.steps, drafts.drafted, drafts.accepted) == ("draft_model", 8, 32, 16)
    assert timed == [True, False, False, False, False, False, False, False]
    assert drafts.draft_seconds == pytest.approx(8 * 0.25)
    assert drafts.verify_seconds == pytest.approx(8 * 0.5)
    assert drafts.rewind_seconds == pytest.approx(8 * 0.125)


def test_a_plain_step_is_a_forward_and_nothing_else() -> None:
    loop = build(policy="off")
    loop.run(some_request("a", max_tokens=5))
    (plain,) = loop.end("a").statistics.by_method
    assert (plain.method, plain.steps, plain.drafted, plain.draft_seconds) == ("off", 5, 0, 0.0)
    assert plain.verify_seconds > 0


def test_statistics_count_every_position_of_a_proposal() -> None:
    loop = build(engine=ScriptedEngine(accepts=lambda drafts: drafts // 2))
    for request in (some_request(name, max_tokens=9, num_draft_tokens=4, method="ngram") for name in ("a", "bb")):
        loop.run(request)
        check_against_naive(loop, request)
        statistics = loop.end(request.id).statistics
        assert statistics.completion_tokens == 9
        assert statistics.drafted > statistics.accepted == sum(statistics.accepted_per_position) > 0
        assert statistics.accepted_per_position[:2] == (statistics.cycles, statistics.cycles - 1)


@pytest.mark.parametrize(("stops", "ends"), [(True, [40, 90, 100, 129]), (False, [64, 128, 129])])
def test_pieces_of_a_prompt_end_at_its_checkpoints_where_caches_cannot_be_cut(stops: bool, ends: list[int]) -> None:
    limits = EngineLimits(4_096, 2, prefill_chunk_tokens=64, stops_at_checkpoints=stops)
    scheduler = Scheduler(limits, policy="off")
    request = Request(id="a", prompt_tokens=(1,) * 130, max_tokens=4, checkpoints=(40, 90, 100))
    scheduler.submit(request)
    scheduler.next_admission()
    scheduler.admitted("a", 0)
    seen = []
    while isinstance(plan := scheduler.plan(), PrefillStep):
        seen.append(plan.rows[0].end)
        scheduler.commit(StepResult(prefilled=(("a", plan.rows[0].end),)))
    assert seen == ends


def test_the_end_of_a_prompt_rides_along_with_the_first_step_behind_its_last_checkpoint() -> None:
    scheduler = Scheduler(EngineLimits(4_096, 2, stops_at_checkpoints=True), policy="off")
    scheduler.submit(Request(id="a", prompt_tokens=(1,) * 50, max_tokens=4, checkpoints=(45,)))
    scheduler.next_admission()
    scheduler.admitted("a", 0)
    assert isinstance(scheduler.plan(), PrefillStep)
    scheduler.commit(StepResult(prefilled=(("a", 45),)))
    plan = scheduler.plan()
    assert isinstance(plan, DecodeStep)
    assert plan.rows[0].computed == 45
