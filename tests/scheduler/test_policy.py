"""Requests that may draft, and the reason reported for each that may not."""

import msgspec
import pytest

from app.core.errors import SpeculationUnavailable
from app.core.reason import NO_REASON, Reason
from app.core.request import SpeculationRequest
from app.core.step import DecodeStep, EngineLimits, StepCost
from app.scheduler.scheduler import Scheduler
from tests.scheduler.scripted import Loop, ScriptedEngine, build, some_request, speculative_limits

BATCHED = Reason("batched")


def drafts_planned(loop: Loop, name: str) -> list[int]:
    return [row.num_draft_tokens for row in loop.decode_rows(name)]


def test_a_lone_request_drafts_and_has_nothing_to_explain() -> None:
    loop = build()
    loop.run(some_request("a", max_tokens=20, method="draft_model", num_draft_tokens=4))
    assert drafts_planned(loop, "a") == [4, 4, 4, 4]
    statistics = loop.end("a").statistics
    assert (statistics.methods, statistics.reason) == (("draft_model",), NO_REASON)
    assert (statistics.cycles, statistics.steps, statistics.accepted) == (4, 4, 16)


def test_single_batches_plainly_and_speculates_again_when_alone() -> None:
    loop = build()
    loop.scheduler.submit(some_request("a", max_tokens=60, method="draft_model", num_draft_tokens=2))
    loop.turn()
    loop.turn()
    loop.scheduler.submit(some_request("b", prompt=2, max_tokens=4))
    loop.finish()
    planned = drafts_planned(loop, "a")
    assert planned[0] == 2
    assert 0 in planned
    assert planned[-2] == 2
    assert loop.end("a").statistics.reason == BATCHED
    assert loop.end("b").statistics.reason == BATCHED
    assert loop.end("b").statistics.methods == ("off",)


def test_every_step_says_why_it_did_not_draft() -> None:
    loop = build()
    loop.scheduler.submit(some_request("a", max_tokens=60, method="draft_model", num_draft_tokens=2))
    loop.turn()
    loop.turn()
    loop.scheduler.submit(some_request("b", prompt=2, max_tokens=4))
    loop.finish()
    for event in loop.events["a"]:
        assert bool(event.why_not_drafted) == (event.drafted == 0)
    assert all(event.why_not_drafted == BATCHED for event in loop.events["b"])


def test_how_much_of_a_prompt_is_read_is_known_until_its_first_token() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=4)))
    loop.scheduler.submit(some_request("a", prompt=40, max_tokens=2))
    assert loop.scheduler.prefill_progress == {}
    read = []
    while not loop.events.get("a"):
        loop.turn()
        read += loop.scheduler.prefill_progress.values()
    assert read[0] == 4
    assert read == sorted(set(read))
    assert loop.scheduler.prefill_progress == {}


def test_single_does_not_draft_beside_a_prompt_that_is_being_read() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(chunk=4)))
    loop.scheduler.submit(some_request("a", prompt=2, max_tokens=40, method="draft_model", num_draft_tokens=2))
    loop.turn()
    loop.scheduler.submit(some_request("b", prompt=40, max_tokens=1))
    begun = len(loop.plans)
    while not loop.events.get("b"):
        loop.turn()
    steps = [plan for plan in loop.plans[begun:] if isinstance(plan, DecodeStep)]
    assert len(steps) > 5
    assert all(row.num_draft_tokens == 0 for step in steps for row in step.rows)


def test_requests_that_cannot_be_admitted_yet_do_not_stop_drafting() -> None:
    loop = build(engine=ScriptedEngine(speculative_limits(rows=1)))
    for name in ("a", "b"):
        loop.scheduler.submit(some_request(name, max_tokens=20, method="draft_model", num_draft_tokens=4))
    loop.finish()
    assert loop.end("a").statistics.reason == NO_REASON
    assert loop.end("b").statistics.reason == NO_REASON


def test_auto_drafts_in_batches_too() -> None:
    loop = build(policy="auto")
    loop.run(*(some_request(name, max_tokens=40) for name in ("a", "bb", "ccc")))
    assert max(drafts_planned(loop, "bb")) > 1
    for plan in loop.plans:
        if isinstance(plan, DecodeStep) and min(row.remaining for row in plan.rows) > 16:
            assert len({row.num_draft_tokens for row in plan.rows}) == 1


def test_off_never_drafts_and_says_so() -> None:
    loop = build(policy="off")
    loop.run(some_request("a"))
    assert set(drafts_planned(loop, "a")) == {0}
    assert loop.end("a").statistics.reason == Reason("policy_off")


@pytest.mark.parametrize("wish", [{"method": "off"}, {"num_draft_tokens": 0}])
def test_a_request_may_ask_for_plain_decoding(wish: dict[str, object]) -> None:
    loop = build()
    loop.run(some_request("a", **wish))  # type: ignore[arg-type]
    assert set(drafts_planned(loop, "a")) == {0}
    assert loop.end("a").statistics.reason == Reason("asked")
    assert loop.end("a").statistics.methods == ("off",)
    assert loop.end("a").statistics.decision is None, "the governor had no say"


def test_without_drafters_the_reasons_of_all_are_told() -> None:
    why = {"draft_model": "none was chosen", "ngram": "switched off"}
    unavailable = {name: Reason("cannot_draft", {"detail": words}) for name, words in why.items()}
    limits = EngineLimits(4_096, 1, unavailable=unavailable)
    loop = build(engine=ScriptedEngine(limits))
    loop.run(some_request("a"))
    assert str(loop.end("a").statistics.reason) == "draft_model: none was chosen; ngram: switched off"
    loop = build(engine=ScriptedEngine(EngineLimits(4_096, 1)))
    loop.run(some_request("a"))
    assert loop.end("a").statistics.reason == Reason("no_drafter")


def test_an_explicit_method_is_the_one_that_runs() -> None:
    loop = build()
    loop.run(some_request("a", max_tokens=40, method="ngram"))
    assert loop.end("a").statistics.methods == ("ngram",)
    assert {event.method for event in loop.events["a"] if event.drafted} == {"ngram"}


def test_a_configured_length_and_method_hold_for_requests_that_name_none() -> None:
    engine = ScriptedEngine(accepts=lambda drafts: drafts * 0)
    default_speculation = SpeculationRequest(method="draft_model", num_draft_tokens=3)
    loop = Loop(Scheduler(engine.limits, default_speculation=default_speculation), engine)
    loop.run(some_request("a", max_tokens=10))
    assert drafts_planned(loop, "a") == [3] * 7 + [2, 1, 0]
    loop.run(some_request("b", max_tokens=10, method="draft_model", num_draft_tokens=5))
    assert drafts_planned(loop, "b")[0] == 5


def test_a_length_without_a_method_is_the_most_that_the_governor_may_draft() -> None:
    for default_speculation, asked in ((SpeculationRequest(), 3), (SpeculationRequest(num_draft_tokens=3), None)):
        engine = ScriptedEngine()
        loop = Loop(Scheduler(engine.limits, default_speculation=default_speculation), engine)
        loop.run(some_request("a", max_tokens=60, num_draft_tokens=asked))
        assert max(drafts_planned(loop, "a")) == 3
        engine = ScriptedEngine(accepts=lambda drafts: drafts * 0, seconds=lambda width: 0.01 * width)
        loop = Loop(Scheduler(engine.limits, default_speculation=default_speculation), engine)
        loop.run(some_request("a", max_tokens=300, num_draft_tokens=asked))
        assert sum(map(bool, drafts_planned(loop, "a"))) < 40, "what is never accepted is not drafted on"
        assert "plain decoding is faster" in str(loop.end("a").statistics.reason)


def test_each_request_of_a_batch_keeps_to_its_own_most_drafts() -> None:
    loop = build(policy="auto")
    wishes = {"a": 2, "bb": None, "ccc": 5}
    loop.run(*(some_request(name, max_tokens=60, num_draft_tokens=most) for name, most in wishes.items()))
    assert [max(drafts_planned(loop, name)) for name in ("a", "ccc")] == [2, 5]
    assert max(drafts_planned(loop, "bb")) > 5


def test_only_the_drafter_that_a_request_names_drafts_for_it() -> None:
    loop = build()
    wish = SpeculationRequest(methods=("ngram",))
    loop.run(msgspec.structs.replace(some_request("a", max_tokens=60), speculation=wish))
    assert {row.method for row in loop.decode_rows("a") if row.num_draft_tokens} == {"ngram"}
    wish = SpeculationRequest(methods=("dflash",))
    for refusing in (loop, build(policy="off")):
        with pytest.raises(SpeculationUnavailable, match="dflash"):
            refusing.scheduler.submit(msgspec.structs.replace(some_request("b"), speculation=wish))


def test_a_request_that_brings_its_own_policy_keeps_to_that() -> None:
    loop = build(policy="auto")
    own = SpeculationRequest(policy="single")
    loop.run(*(msgspec.structs.replace(some_request(name, max_tokens=20), speculation=own) for name in ("a", "bb")))
    assert loop.end("a").statistics.reason == BATCHED
    steps = [plan for plan in loop.plans if isinstance(plan, DecodeStep) and len(plan.rows) > 1]
    assert not any(row.num_draft_tokens for step in steps for row in step.rows)
    named = SpeculationRequest(policy="off", methods=("ngram",))
    with pytest.raises(SpeculationUnavailable, match="switched off"):
        loop.scheduler.submit(msgspec.structs.replace(some_request("c"), speculation=named))


def test_a_single_token_explains_why_nothing_was_drafted() -> None:
    loop = build()
    loop.run(some_request("a", max_tokens=1, method="draft_model", num_draft_tokens=4))
    assert loop.end("a").statistics.reason == Reason("last_token")


def test_a_drafter_that_never_proposes_explains_itself_once_nothing_was_drafted() -> None:
    loop = build(engine=ScriptedEngine(silent_rate=1.0))
    loop.run(some_request("a", method="draft_model", num_draft_tokens=4))
    assert loop.end("a").statistics.reason == Reason("no_match")


def test_a_drafter_that_is_silent_at_times_has_nothing_to_explain() -> None:
    loop = build(engine=ScriptedEngine(silent_rate=0.5))
    loop.run(some_request("a", max_tokens=100, method="draft_model", num_draft_tokens=4))
    assert loop.end("a").statistics.reason == NO_REASON


def test_a_lossy_drafter_is_dropped_and_the_governor_says_why() -> None:
    engine = ScriptedEngine(accepts=lambda drafts: drafts * 0, seconds=lambda width: 0.01 * width)
    loop = build(engine=engine)
    loop.run(some_request("a", max_tokens=300))
    statistics = loop.end("a").statistics
    assert "plain decoding is faster" in str(statistics.reason)
    assert statistics.decision is not None
    assert statistics.decision.kind in {"plain", "probe"}
    assert statistics.decision.cost_ratio > 1
    assert sum(map(bool, drafts_planned(loop, "a"))) < 40


def test_an_answer_that_ends_soon_is_not_drafted_for_as_if_it_went_on() -> None:
    measured = [StepCost("off", 1, 0, 0.01), *(StepCost("ngram", 1, drafts, 0.03) for drafts in (1, 2, 3, 5, 7, 15))]
    engine = ScriptedEngine(accepts=lambda drafts: drafts, seconds=lambda width: 0.01 if width == 1 else 0.03)
    loop = build(engine=engine, measured=measured)
    loop.run(some_request("long", max_tokens=300))
    assert max(drafts_planned(loop, "long")) > 4, "sixteen tokens for the price of three pay"
    for number in range(20):
        loop.run(some_request(f"short {number}", max_tokens=3))
    drafted = [number for number in range(20) if any(drafts_planned(loop, f"short {number}"))]
    assert len(drafted) <= 4, "three tokens do not"


def test_who_waits_for_memory_does_not_stop_the_one_that_runs_from_drafting() -> None:
    scheduler = Scheduler(speculative_limits(rows=2), policy="single")
    scheduler.submit(some_request("runs", method="ngram", num_draft_tokens=2))
    scheduler.admitted("runs", 0)
    scheduler.submit(some_request("waits"))
    plan = scheduler.plan()
    assert isinstance(plan, DecodeStep)
    assert [(row.sequence_id, row.num_draft_tokens) for row in plan.rows] == [("runs", 2)]
