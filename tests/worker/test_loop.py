"""The MLX thread's loop with fakes: loads, failures, leases, heartbeats, and random schedules of everything."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from app.core.errors import ModelUnavailable
from app.core.messages import (
    Cancel,
    Failed,
    Generate,
    KeepModels,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    ModelUnloaded,
    Shutdown,
    UnloadModel,
    error_of,
)
from app.core.request import Grammar
from app.core.step import StepPlan, StepResult
from app.core.unit import LiveValues, Stay
from app.worker.loop import PATIENCE_SECONDS
from app.worker.thread_commands import Halt
from tests.worker.fakes import FakeEngine
from tests.worker.pair import Pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def phases(pair: Pair) -> list[str]:
    return [event.phase for event in pair.events if isinstance(event, LoadProgress)]


def test_a_load_reports_its_progress_keeps_its_settings_and_gives_its_lease_back(pair: Pair) -> None:
    stay = Stay(pinned=True, idle_seconds=5.0)
    pair.say(LoadModel(id="l", model=pair.model(), stay=stay))
    pair.settle()
    assert phases(pair) == ["weights", "weights", "ready"]
    assert pair.of("l") == [ModelLoaded(id="l", model_id="m", seconds=0.3)]
    assert (pair.pool.said, pair.leases) == ({"m": stay}, 0)
    other = pair.model(live=LiveValues(policy="off"))
    pair.say(LoadModel(id="again", model=other, stay=Stay(idle_seconds=-1.0)))
    pair.settle()
    assert pair.of("again") == [ModelLoaded(id="again", model_id="m", seconds=0.0)]
    assert pair.pool.said == {"m": Stay(pinned=True, idle_seconds=-1.0)}
    assert pair.pool.used == [pair.model(), other]
    pair.say(UnloadModel(id="u", model_id="m"))
    pair.settle()
    assert pair.of("u") == [ModelUnloaded(id="u", model_id="m")]
    shown = [[model.id for model in beat.snapshot.models] for beat in pair.heartbeats() if beat.snapshot]
    assert shown == [[], ["m"], []]


def test_how_long_models_stay_is_told_without_loading_any(pair: Pair) -> None:
    settings = KeepModels(models={"m": Stay(pinned=True)})
    pair.say(settings)
    pair.settle()
    assert pair.pool.kept == settings
    assert phases(pair) == []


def test_a_failed_load_tells_everybody_who_waits(pair: Pair) -> None:
    pair.say(LoadModel(id="l", model=pair.model("broken")), pair.ask("r", model="broken", n=2))
    pair.settle()
    assert [(event.error, event.message) for event in pair.failed("l") + pair.failed("r")] == [
        ("ModelUnavailable", "the folder is broken")
    ] * 2
    assert phases(pair)[-1] == "failed"
    assert pair.leases == 0


@pytest.mark.parametrize(("name", "error"), [("refused", "ModelUnavailable"), ("crash", "PacelineError")])
def test_a_refused_lease_is_told_at_once(pair: Pair, name: str, error: str) -> None:
    pair.say(LoadModel(id="l", model=pair.model(name)), pair.ask("r", model=name))
    pair.settle()
    assert [event.error for event in pair.failed("l") + pair.failed("r")] == [error] * 2


def test_unloading_a_model_in_use_is_refused(pair: Pair) -> None:
    pair.say(pair.ask(max_tokens=150))
    pair.settle(8)
    pair.say(UnloadModel(id="u", model_id="m"))
    pair.settle(2)
    (refused,) = pair.failed("u")
    error = error_of(refused)
    assert (error.message, error.code, error.status, error.retry_after_seconds) == ("in use", "model_in_use", 409, 1)


def test_a_cancelled_load_ends_unless_somebody_else_waits(pair: Pair) -> None:
    pair.say(LoadModel(id="l", model=pair.model()))
    pair.settle(1)
    pair.say(Cancel(id="l"))
    pair.settle()
    assert pair.of("l") == []
    assert pair.pool.engines == {}
    pair.say(LoadModel(id="l", model=pair.model()), pair.ask())
    pair.settle(1)
    pair.say(Cancel(id="l"))
    pair.settle()
    assert pair.text() == "abcdefghij"
    assert pair.leases == 0


def test_a_load_right_behind_a_cancelled_one_does_not_share_its_end(pair: Pair) -> None:
    pair.say(LoadModel(id="l", model=pair.model()))
    pair.settle(1)
    pair.say(Cancel(id="l"), LoadModel(id="again", model=pair.model()))
    pair.settle()
    assert pair.of("l") == []
    (loaded,) = pair.of("again")
    assert isinstance(loaded, ModelLoaded)


def test_a_request_cancelled_while_its_model_loads_leaves_no_lease(pair: Pair) -> None:
    pair.say(pair.ask(n=2), pair.ask("other"))
    pair.settle(1)
    pair.say(Cancel(id="r"))
    pair.settle()
    assert [finished.finish_reason for finished in pair.finished()] == ["cancelled"] * 2
    assert pair.text("other") == "abcdefghij"
    assert pair.leases == 0


def test_a_grammar_that_lets_nothing_follow_is_the_fault_of_its_request(pair: Pair) -> None:
    grammar = Grammar(kind="regex", text="a*", parameter="regex")
    pair.say(pair.ask("held", max_tokens=150, grammar=grammar))
    pair.settle(8)
    pair.engine.dead_end = "too much"
    pair.settle()
    (failed,) = pair.failed("held")
    assert (failed.error, failed.code, failed.parameter) == ("InvalidRequest", "unsupported_grammar", "regex")
    assert failed.message == "The answer stops: too much"
    assert pair.leases == 0


@pytest.mark.parametrize("where", ["step", "admit", "plan", "commit", "fail_running"])
def test_whatever_raises_fails_only_the_requests_of_its_engine(pair: Pair, where: str) -> None:
    pair.say(pair.ask("bad", max_tokens=150), pair.ask("good", model="other", max_tokens=30))
    pair.settle(8)
    bad = pair.schedulers[0]
    if where in {"step", "fail_running"}:
        pair.pool.engines["m"].fail_next = "[metal::malloc] Resource limit exceeded\nand more"
    if where == "admit":
        pair.say(pair.ask("trigger", "boom!"))
    elif where != "step":
        bad.broken.add(where)
    pair.settle()
    (failed,) = pair.failed("trigger" if where == "admit" else "bad")
    assert failed.message.startswith("The model failed: ")
    assert "\n" not in failed.message
    assert len(pair.text("good")) == 30
    if where == "admit":
        pair.say(Cancel(id="bad"))
        pair.settle()
    assert pair.leases == 0
    bad.broken.clear()
    pair.say(pair.ask("next"))
    pair.settle()
    assert pair.text("next") == "abcdefghij"
    assert pair.pool.engines["m"].rows == set()


def test_a_request_that_the_engine_refuses_gets_the_error_as_it_was_raised(pair: Pair) -> None:
    pair.say(pair.ask("good", max_tokens=30))
    pair.settle(8)
    pair.engine.refusal = ModelUnavailable("the hidden states of this model cannot be read")
    pair.say(pair.ask("refused", "why?"))
    pair.settle()
    (failed,) = pair.failed("refused")
    assert (failed.error, failed.code, failed.message) == (
        "ModelUnavailable", "model_unavailable", "the hidden states of this model cannot be read"
    )  # fmt: skip
    assert len(pair.text("good")) == 30
    assert pair.leases == 0


def test_a_failed_admission_is_reported_even_if_the_next_one_raises(pair: Pair) -> None:
    pair.say(pair.ask("first"))
    pair.settle()
    pair.say(pair.ask("failed", "boom!!"), pair.ask("behind"))
    pair.settle()
    pair.engine.is_lost = False
    pair.settle()
    assert [event.message for event in pair.failed("failed")] == ["The model failed: RuntimeError: admission failed"]
    assert pair.text("behind") == "abcdefghij"
    assert pair.leases == 0


def test_a_row_that_cannot_be_freed_keeps_no_other_row(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.say(pair.ask("first"), pair.ask("second"))
    pair.settle(4)
    free = pair.engine.release

    def release(request_id: str, tokens: Sequence[int]) -> None:
        if request_id.startswith("first"):
            raise RuntimeError("[metal] the device is gone")
        free(request_id, tokens)

    monkeypatch.setattr(pair.engine, "release", release)
    pair.settle()
    assert [pair.text("first"), pair.text("second")] == ["abcdefghij"] * 2
    assert pair.engine.released == ["second"]
    assert pair.leases == 0


def test_a_scheduler_that_cannot_queue_or_cancel_is_survived(pair: Pair) -> None:
    pair.say(pair.ask("first", max_tokens=150))
    pair.settle(8)
    pair.schedulers[0].broken.add("submit")
    pair.say(pair.ask("second"))
    pair.settle(4)
    assert "could not be queued" in pair.failed("second")[0].message
    pair.schedulers[0].broken.add("cancel")
    pair.say(Cancel(id="first"))
    pair.settle()
    assert pair.finished("first")[0].finish_reason == "cancelled"
    pair.say(pair.ask("third"))
    pair.settle()
    assert pair.text("third") == "abcdefghij"
    assert pair.leases == 0


def test_the_line_before_a_load_is_bounded_too(pair: Pair) -> None:
    model = pair.model("m", live=LiveValues(queue_limit=2))
    owners = ("alice", "alice", "alice", "bob")
    commands = [
        Generate(id=f"r{number}", owner=owner, model=model, text="x", max_tokens=3)
        for number, owner in enumerate(owners)
    ]
    pair.pool.held = True
    pair.say(*commands)
    pair.settle(6)
    assert [event.error for event in pair.failed("r2")] == ["QueueFull"]
    pair.pool.held = False
    pair.settle()
    assert [pair.text(f"r{number}") for number in range(4)] == ["abc", "abc", "", "abc"]
    assert pair.leases == 0


def test_choices_that_find_no_room_in_the_line_are_refused_before_the_load(pair: Pair) -> None:
    model = pair.model("m", live=LiveValues(queue_limit=2))
    pair.pool.held = True
    pair.say(Generate(id="first", model=model, text="x", max_tokens=3), Generate(id="two", model=model, text="x", n=2))
    pair.settle(6)
    assert [event.error for event in pair.failed("two")] == ["QueueFull"]
    pair.pool.held = False
    pair.settle()
    assert (pair.text("first"), pair.leases) == ("abc", 0)


def test_a_prompt_that_is_read_from_disk_holds_up_no_stream(pair: Pair) -> None:
    pair.say(pair.ask("running", max_tokens=40))
    pair.settle(6)
    engine = pair.pool.engine("m")
    assert isinstance(engine, FakeEngine)
    engine.on_disk = {"left", "kept"}
    pair.say(pair.ask("left", max_tokens=3))
    pair.settle(3)
    pair.say(Cancel(id="left"), pair.ask("kept", max_tokens=3))
    pair.settle()
    assert "left" in engine.released, "nothing that was read for it is held"
    assert (len(pair.text("running")), pair.text("kept")) == (40, "")
    assert engine.reads > 50, "it asks in every turn, also with nothing else to do"
    engine.on_disk = set()
    pair.settle()
    assert pair.text("kept") == "abc"


@pytest.mark.parametrize("by", ["a request", "a load"])
def test_another_policy_counts_at_once_for_requests_that_run(pair: Pair, by: str) -> None:
    pair.say(pair.ask("running", max_tokens=100))
    pair.settle(12)
    model = pair.model("m", live=LiveValues(policy="off"))
    other = LoadModel(id="next", model=model)
    pair.say(Generate(id="next", model=model, text="x", max_tokens=30) if by == "a request" else other)
    pair.settle(150)
    (running,) = pair.finished("running")
    assert len(pair.schedulers) == 1
    assert 0 < running.usage.drafted < 40
    assert running.usage.reason.code == "policy_off"


def test_what_does_not_fit_into_memory_now_waits_and_is_answered_in_order(pair: Pair) -> None:
    pair.pool.room_tokens = 35
    names = [f"r{number}" for number in range(5)]
    pair.say(*map(pair.ask, names))  # 5 + 10 tokens each: two fit
    ended: list[str] = []
    shown: list[tuple[int, int]] = []
    for _ in range(100):
        pair.turn()
        shown += [(served.running, served.waiting) for served in pair.loop._served.values()]
        ended += [name for name in names if pair.finished(name) and name not in ended]
        assert pair.pool.reserved.get("m", 0) <= 35
    assert ended == names
    assert max(running for running, _ in shown) == 2
    assert (2, 3) in shown, "what does not run is told as waiting"
    assert (pair.pool.reserved["m"], pair.leases) == (0, 0)


def test_answers_that_outgrow_the_memory_wait_for_older_ones_and_lose_no_word(tmp_path: Path) -> None:
    pair = Pair(tmp_path, make_engine=lambda: FakeEngine(context_tokens=4000))
    pair.pool.room_tokens = 2500
    names = ["old", "new"]
    pair.say(*(pair.ask(name, max_tokens=2000) for name in names))
    shown: list[tuple[int, int]] = []
    for _ in range(5000):
        pair.turn()
        shown += [(served.running, served.waiting) for served in pair.loop._served.values()]
        assert pair.pool.reserved.get("m", 0) <= 2500
    assert shown.index((1, 1)) > shown.index((2, 0)), "both began, then the newer one waited"
    assert [pair.text(name) for name in names] == ["abcdefghij" * 200] * 2
    assert [pair.finished(name)[0].usage.preemptions for name in names] == [0, 1]
    assert pair.leases == 0


def test_what_never_fits_into_memory_is_refused_with_its_figures_and_nothing_else_is(pair: Pair) -> None:
    pair.pool.room_tokens = 35
    pair.say(pair.ask("large", text="x" * 40), pair.ask("small"))
    pair.settle()
    (refused,) = pair.failed("large")
    assert (refused.error, refused.code) == ("InvalidRequest", "context_length_exceeded")
    assert pair.text("small") == "abcdefghij"
    assert pair.leases == 0


def test_while_rows_wait_for_memory_of_another_model_nobody_turns_in_circles(pair: Pair) -> None:
    pair.say(pair.ask("first"))
    pair.settle()
    pair.pool.room_tokens, pair.pool.held_tokens = 20, 10
    pair.say(pair.ask("second"))
    pair.turn()
    steps = pair.engine.steps
    pair.turn()
    assert pair.loop._served["m"].waiting == 1
    assert pair.loop._seconds_to_sleep() > 0
    assert pair.engine.steps == steps
    pair.pool.held_tokens = 0
    pair.settle()
    assert pair.text("second") == "abcdefghij"


def test_a_model_gets_its_turn_although_another_one_is_never_without_requests(pair: Pair) -> None:
    pair.pool.room_tokens = 35
    waited_seconds = 0.0
    for number in range(400):
        if number % 4 == 0:  # two rows of 15 tokens fit, and take more than ten turns
            pair.say(pair.ask(f"m{number}"))
        if number == 50:
            pair.say(pair.ask("rare", model="n", max_tokens=20))  # 25 tokens: fits beside no row of "m"
        pair.turn()
        pair.now += 0.1
        waited_seconds += 0.1 if number >= 50 and not pair.text("rare") else 0.0
    assert PATIENCE_SECONDS <= waited_seconds < PATIENCE_SECONDS + 3
    pair.settle(4000)
    assert pair.text("rare") == "abcdefghij" * 2
    assert all(pair.text(f"m{number}") == "abcdefghij" for number in range(0, 400, 4))


def test_a_model_plans_its_steps_as_beside_streams_while_another_one_streams(pair: Pair) -> None:
    pair.say(pair.ask("short", max_tokens=60), pair.ask("long", model="n", max_tokens=120))
    pair.settle(200)
    assert (pair.text("short"), pair.text("long")) == ("abcdefghij" * 6, "abcdefghij" * 12)
    first, second = (scheduler.beside_others for scheduler in pair.schedulers)
    assert any(first)
    assert any(second)
    assert second[-10:] == [False] * 10, "it is alone once the other has ended"


def test_an_evicted_model_is_forgotten_and_loaded_again_on_demand(pair: Pair) -> None:
    pair.say(pair.ask())
    pair.settle()
    pair.pool.evict_on_expire.add("m")
    pair.now += 2
    pair.settle(2)
    assert pair.pool.engines == {}
    pair.pool.evict_on_expire.clear()
    pair.say(pair.ask("again"))
    pair.settle()
    assert pair.text("again") == "abcdefghij"
    assert len(pair.schedulers) == 2


def test_a_request_takes_its_model_away_after_its_answer_and_not_before(pair: Pair) -> None:
    pair.say(pair.ask())
    pair.settle()
    steps = pair.engine.steps
    pair.say(pair.ask("last", stay=Stay(idle_seconds=0.0)))
    pair.now += 2  # models are checked for expiry while it waits
    pair.settle(5)
    assert pair.engine.steps > steps, "the same engine"
    pair.settle()
    assert pair.text("last") == "abcdefghij"
    pair.now += 2
    pair.settle(2)
    assert pair.pool.engines == {}


def test_heartbeats_tell_every_step_and_come_every_second_and_pending_is_true(pair: Pair) -> None:
    pair.settle(5)
    idle = len(pair.heartbeats())
    assert idle == 1
    pair.now += 1.0
    pair.settle(2)
    assert len(pair.heartbeats()) == 2
    assert not pair.heartbeats()[-1].pending
    pair.say(pair.ask(max_tokens=30))
    pair.settle(30)
    assert sum(beat.pending for beat in pair.heartbeats()) >= 1
    pair.now += 1.0
    pair.settle(2)
    assert sum(len(beat.step_seconds) for beat in pair.heartbeats()) >= pair.engine.steps
    snapshots = [beat.snapshot for beat in pair.heartbeats() if beat.snapshot]
    assert [model.id for model in snapshots[-1].models] == ["m"]


def test_the_worker_beats_between_the_parts_of_a_long_step(pair: Pair) -> None:
    pair.say(pair.ask(max_tokens=30))
    pair.settle(rounds=3)
    real = pair.engine.step

    def slow(plan: StepPlan) -> StepResult:
        for _ in range(8):
            pair.now += 7.5
            pair.engine.on_progress()
        return real(plan)

    pair.engine.step = slow  # type: ignore[method-assign]
    before = len(pair.heartbeats())
    pair.turn()
    beats = pair.heartbeats()[before:]
    assert len(beats) >= 8
    assert all(beat.pending for beat in beats[:8])


def test_freed_buffers_go_back_every_256_steps_and_when_nobody_waits(pair: Pair) -> None:
    pair.say(LoadModel(id="l", model=pair.model()))
    pair.settle(rounds=10)
    asked = 0
    while not pair.pool.trims:  # time stands still: no housekeeping
        asked += 1
        pair.say(pair.ask(f"r{asked}", max_tokens=190))
        while not pair.pool.trims and not pair.finished(f"r{asked}"):
            pair.turn()
    assert 200 < pair.engine.steps <= 256
    pair.say(pair.ask("last"))
    pair.settle(rounds=250)
    assert pair.finished("last")
    assert pair.pool.trims == 2  # an idle worker gives back what is left, once


def test_a_snapshot_tells_whose_prompt_is_being_read(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.limits = replace(engine.limits, prefill_chunk_tokens=8)
    pair = Pair(tmp_path, make_engine=lambda: engine)
    pair.say(pair.ask("r", text="hello" * 12, n=2))
    for _ in range(40):
        pair.now += 1.0
        pair.turn()
    readings = [model.reading for beat in pair.heartbeats() if beat.snapshot for model in beat.snapshot.models]
    assert {name for reading in readings for name in reading} == {"r#0", "r#1"}
    assert readings[-1] == {}


def test_snapshots_are_told_only_when_something_changed(pair: Pair) -> None:
    pair.say(LoadModel(id="l", model=pair.model()))
    for _ in range(10):
        pair.settle(5)
        pair.now += 1.0
    assert len([beat for beat in pair.heartbeats() if beat.snapshot]) == 2


def test_the_loop_sleeps_when_idle_and_wakes_for_mail(pair: Pair) -> None:
    thread = threading.Thread(target=pair.loop.run)
    thread.start()
    pair.loop.post(Halt())
    thread.join(60)
    assert not thread.is_alive()


NAMES = some.sampled_from(["a", "b", "broken", "refused"])
ACTIONS = some.one_of(
    some.tuples(some.just("ask"), NAMES, some.integers(1, 3), some.integers(1, 40), some.sampled_from(["", "cd", "j"])),
    some.tuples(some.just("cancel"), some.integers(0, 30)),
    some.tuples(some.just("turn"), some.integers(1, 6)),
    some.tuples(some.just("fail"), NAMES),
    some.tuples(some.just("load"), NAMES),
    some.tuples(some.just("unload"), NAMES),
    some.tuples(some.just("break"), some.sampled_from(["plan", "commit", "cancel", "fail_running"])),
)


def do(pair: Pair, number: int, action: tuple[object, ...]) -> None:
    match action:
        case ("ask", str(name), int(n), int(max_tokens), str(stop)):
            pair.say(pair.ask(f"r{number}", model=name, n=n, max_tokens=max_tokens, stop=(stop,) if stop else ()))
        case ("cancel", int(which)):
            pair.say(Cancel(id=f"r{which}"))
        case ("turn", int(rounds)):
            pair.settle(rounds)
        case ("fail", str(name)) if name in pair.pool.engines:
            pair.pool.engines[name].fail_next = "as asked"
        case ("load", str(name)):
            pair.say(LoadModel(id=f"r{number}", model=pair.model(name)))
        case ("unload", str(name)):
            pair.say(UnloadModel(id=f"r{number}", model_id=name))
        case ("break", str(method)) if pair.schedulers:
            pair.schedulers[-1].broken.add(method)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=some.lists(ACTIONS, max_size=25))
def test_random_lives_end_exactly_once_and_every_lease_comes_back(
    tmp_path: Path, actions: list[tuple[object, ...]]
) -> None:
    pair = Pair(tmp_path)
    asked: dict[str, int] = {}
    for number, action in enumerate(actions):
        do(pair, number, action)
        if action[0] == "ask":
            asked[f"r{number}"] = int(str(action[2]))
    pair.settle(200)
    for request_id, choices in asked.items():
        indices = sorted(finished.index for finished in pair.finished(request_id))
        failures = len(pair.failed(request_id))
        assert failures == 1 or indices == list(range(choices)), request_id
        assert failures <= 1
        assert len(set(indices)) == len(indices)
        last = pair.of(request_id)[-1]
        assert isinstance(last, Failed) or last in pair.finished(request_id)
    assert pair.leases == 0
    assert all(engine.rows == set() for engine in pair.pool.engines.values())
    pair.say(Shutdown())
    assert not pair.turn()


def test_the_text_side_hears_which_folders_are_in_memory(tmp_path: Path) -> None:
    heard: list[frozenset[str]] = []
    pair = Pair(tmp_path, close_idle=heard.append)
    pair.say(pair.ask())
    pair.settle()
    pair.now += 2
    pair.settle(2)
    assert heard[-1] == {f"/models/{name}" for name in pair.pool.engines}
    pair.say(UnloadModel(id="u", model_id="m"))
    pair.now += 2
    pair.settle(2)
    assert heard[-1] == frozenset()
