"""Submit, queue, admit, cancel, fail, release: every request has one terminal event, and every row is freed once."""

import msgspec
import pytest

from app.core.errors import InvalidRequest, ModelUnavailable, QueueFull, SpeculationUnavailable
from app.core.reason import Reason
from app.core.step import EngineLimits, FinishReason
from app.scheduler.scheduler import Scheduler
from tests.scheduler.scripted import (
    VOCABULARY,
    Loop,
    ManualClock,
    ScriptedEngine,
    build,
    check_against_naive,
    some_request,
)


def test_a_request_runs_to_its_end_and_leaves_nothing_behind() -> None:
    loop = build()
    request = some_request("a")
    loop.run(request)
    check_against_naive(loop, request)
    assert loop.engine.freed == ["a"]
    assert not loop.engine.rows
    assert (loop.scheduler.running, loop.scheduler.waiting, loop.scheduler.has_work) == (0, 0, False)


def test_requests_are_admitted_in_the_order_they_came() -> None:
    loop = build(engine=ScriptedEngine(EngineLimits(4_096, 2)))
    loop.run(
        *(some_request(name, max_tokens=length) for name, length in zip("abcdef", (9, 2, 7, 1, 4, 3), strict=True))
    )
    assert loop.admitted == list("abcdef")


def test_owners_take_turns_however_much_one_of_them_asks() -> None:
    loop = build(engine=ScriptedEngine(EngineLimits(4_096, 2)))
    flood = [some_request(f"flood {number}", owner="alice") for number in range(12)]
    loop.run(*flood, *(some_request(f"{owner} {turn}", owner=owner) for turn in (1, 2) for owner in ("bob", "carol")))
    others = ["bob 1", "carol 1", "flood 1", "bob 2", "carol 2"]
    assert loop.admitted[:6] == ["flood 0", *others], "who asks much waits behind himself"
    assert loop.admitted[6:] == [f"flood {number}" for number in range(2, 12)]


def test_a_full_line_of_one_owner_turns_nobody_else_away() -> None:
    scheduler = Scheduler(EngineLimits(4_096, 1), queue_limit=2)
    for name in "ab":
        scheduler.submit(some_request(name, owner="alice"))
    with pytest.raises(QueueFull):
        scheduler.submit(some_request("c", owner="alice"))
    scheduler.submit(some_request("d", owner="bob"))
    assert scheduler.waiting == 3


def test_cancelling_costs_an_owner_no_turn() -> None:
    scheduler = Scheduler(EngineLimits(4_096, 4))
    for name, owner in (("a", "alice"), ("b", "bob"), ("a2", "alice")):
        scheduler.submit(some_request(name, owner=owner))
    scheduler.cancel("a")
    head = scheduler.next_admission()
    assert head is not None
    assert head.id == "a2"


def test_a_row_is_free_again_only_when_the_engine_was_told() -> None:
    scheduler = Scheduler(EngineLimits(4_096, 1))
    scheduler.submit(some_request("a"))
    scheduler.admitted("a", 0)
    scheduler.submit(some_request("b"))
    assert scheduler.next_admission() is None
    scheduler.cancel("a")
    assert scheduler.next_admission() is None
    assert scheduler.has_work
    assert scheduler.drain_released() == [("a", ())]
    assert scheduler.drain_released() == []
    head = scheduler.next_admission()
    assert head is not None
    assert head.id == "b"


def test_requests_of_an_engine_with_one_row_run_one_by_one() -> None:
    loop = build(engine=ScriptedEngine(EngineLimits(4_096, 1)))
    requests = [some_request(name) for name in "abc"]
    loop.run(*requests)
    assert loop.engine.freed == ["a", "b", "c"]
    for request in requests:
        check_against_naive(loop, request)


def test_cancelling_a_waiting_request_tells_once_and_frees_no_row() -> None:
    scheduler = Scheduler(EngineLimits(4_096, 1))
    scheduler.submit(some_request("a"))
    [event] = scheduler.cancel("a")
    assert event.finish_reason is FinishReason.CANCELLED
    assert scheduler.cancel("a") == []
    assert scheduler.drain_released() == []


def test_cancelling_a_running_request_keeps_what_is_cached() -> None:
    loop = build()
    loop.scheduler.submit(some_request("a", max_tokens=50))
    for _ in range(4):
        loop.turn()
    [event] = loop.scheduler.cancel("a")
    assert event.finish_reason is FinishReason.CANCELLED
    assert event.statistics.completion_tokens == len(loop.output("a")) > 0
    [(name, tokens)] = loop.scheduler.drain_released()
    assert name == "a"
    assert list(tokens) == loop.engine.rows["a"]
    assert loop.scheduler.cancel("a") == []
    assert loop.scheduler.cancel("never heard of") == []


def test_a_step_that_raised_fails_the_running_requests_only() -> None:
    loop = build(engine=ScriptedEngine(EngineLimits(4_096, 2)))
    requests = [some_request(name) for name in "abc"]
    for request in requests:
        loop.scheduler.submit(request)
    loop.turn()
    loop.scheduler.plan()
    loop.tell(loop.scheduler.fail_running("out of memory"))
    assert [loop.end(name).finish_reason for name in "ab"] == [FinishReason.FAILED] * 2
    assert loop.end("a").error == "out of memory"
    assert loop.scheduler.waiting == 1
    loop.finish()
    check_against_naive(loop, requests[2])
    assert sorted(loop.engine.freed) == ["a", "b", "c"]


def test_nothing_of_a_failed_cache_is_kept() -> None:
    loop = build()
    loop.scheduler.submit(some_request("a", prompt=40))
    loop.turn()
    loop.scheduler.fail_running("boom")
    assert loop.scheduler.drain_released() == [("a", ())]


def test_an_admission_that_raised_fails_that_request_alone() -> None:
    loop = build()
    loop.scheduler.submit(some_request("a"))
    loop.scheduler.submit(some_request("b"))
    loop.tell(loop.scheduler.fail("a", "no memory for this context"))
    assert loop.scheduler.fail("a", "again") == []
    loop.finish()
    assert loop.end("a").finish_reason is FinishReason.FAILED
    assert loop.end("b").finish_reason is FinishReason.LENGTH
    assert loop.engine.freed == ["b"]


def test_a_full_queue_says_when_to_come_back() -> None:
    clock = ManualClock()
    engine = ScriptedEngine(EngineLimits(4_096, 2))
    scheduler = Scheduler(engine.limits, queue_limit=2, clock=clock)
    loop = Loop(scheduler, engine)
    scheduler.submit(some_request("first", prompt=30, max_tokens=1))
    for _ in range(2):
        loop.turn()
        clock.now += 8.0
    loop.finish()
    scheduler.submit(some_request("a"))
    scheduler.submit(some_request("b"))
    with pytest.raises(QueueFull) as refused:
        scheduler.submit(some_request("c"))
    assert refused.value.retry_after_seconds == 4, "8 s of service on 2 rows"
    assert scheduler.waiting == 2


def test_the_first_hint_of_a_full_queue_is_one_second() -> None:
    scheduler = Scheduler(EngineLimits(4_096, 1), queue_limit=1)
    scheduler.submit(some_request("a"))
    with pytest.raises(QueueFull) as refused:
        scheduler.submit(some_request("b"))
    assert refused.value.retry_after_seconds == 1


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (some_request("a", prompt=0), "empty_prompt"),
        (some_request("a", prompt=64), "context_length_exceeded"),
        (some_request("a", max_tokens=0), "invalid_request"),
        (some_request("a", num_draft_tokens=-1), "invalid_request"),
        (some_request("a", method="dflash"), "speculation_unavailable"),
    ],
)
def test_impossible_requests_are_refused_before_they_wait(request_: object, code: str) -> None:
    scheduler = Scheduler(EngineLimits(64, 1))
    with pytest.raises(InvalidRequest) as refused:
        scheduler.submit(request_)  # type: ignore[arg-type]
    assert refused.value.code == code
    assert not scheduler.has_work


def test_tokens_that_the_loaded_model_does_not_have_never_reach_it() -> None:
    scheduler = Scheduler(EngineLimits(4_096, 1, vocabulary_size=VOCABULARY))
    scheduler.submit(some_request("fits"))
    with pytest.raises(ModelUnavailable, match="replaced"):
        scheduler.submit(msgspec.structs.replace(some_request("wide"), prompt_tokens=(1, VOCABULARY, 2)))
    assert scheduler.waiting == 1


def test_a_prompt_that_leaves_one_token_free_is_answered_with_one_token() -> None:
    loop = build(engine=ScriptedEngine(EngineLimits(64, 1)))
    request = some_request("a", prompt=63)
    loop.run(request)
    check_against_naive(loop, request)
    assert loop.end("a").statistics.completion_tokens == 1


def test_an_id_is_used_by_one_request_at_a_time() -> None:
    loop = build()
    loop.scheduler.submit(some_request("a"))
    with pytest.raises(InvalidRequest, match="running already"):
        loop.scheduler.submit(some_request("a"))
    loop.finish()
    loop.scheduler.submit(some_request("a"))
    assert loop.scheduler.waiting == 1


def test_a_method_asked_for_by_name_is_refused_with_its_reason() -> None:
    misfit = Reason("cannot_draft", {"detail": "the vocabularies differ"})
    limits = EngineLimits(64, 1, drafters=("ngram",), unavailable={"draft_model": misfit})
    with pytest.raises(SpeculationUnavailable, match="the vocabularies differ"):
        Scheduler(limits).submit(some_request("a", method="draft_model"))
    with pytest.raises(SpeculationUnavailable, match="eagle3 is not loaded with this model"):
        Scheduler(limits).submit(some_request("a", method="eagle3"))
    with pytest.raises(SpeculationUnavailable, match="policy 'off'"):
        Scheduler(limits, policy="off").submit(some_request("a", method="ngram"))


@pytest.mark.parametrize("cached", [-1, 5])
def test_an_admission_with_the_whole_prompt_cached_is_a_mistake_of_the_engine(cached: int) -> None:
    scheduler = Scheduler(EngineLimits(64, 1))
    scheduler.submit(some_request("a", prompt=5))
    with pytest.raises(ValueError, match="cached tokens"):
        scheduler.admitted("a", cached)
    with pytest.raises(KeyError):
        scheduler.admitted("nobody", 0)
    assert [event.finish_reason for event in scheduler.fail("a", "bad admission")] == [FinishReason.FAILED]


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="queue"):
        Scheduler(EngineLimits(64, 1), queue_limit=0)
