"""The pure parts of supervision: causes, pauses, blame, silence."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from app.core.messages import Heartbeat
from app.worker.recovery import Backoff, CrashLog, describe_exit
from app.worker.watchdog import Watchdog

MODELS = some.frozensets(some.sampled_from("abc"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "code 0"),
        (3, "code 3"),
        (-9, "out of memory"),
        (-6, "aborted"),
        (-99, "signal 99"),
        (-1, "SIGHUP"),
        (None, "not exit"),
    ],
)
def test_exits_are_readable(code: int | None, words: str) -> None:
    assert words in describe_exit(code)


def test_the_first_restart_is_at_once_and_pauses_double_up_to_the_limit() -> None:
    backoff = Backoff(1.0, 60.0, steady_seconds=60.0)
    assert [backoff.pause_seconds(0.1) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.pause_seconds(61.0) == 0
    assert backoff.pause_seconds(0.1) == 1


def test_only_crashes_within_the_window_count() -> None:
    log = CrashLog(3, 300.0)
    for at in (0.0, 200.0, 400.0):
        assert log.record(at, frozenset("a"), "it crashed") == ()
    assert log.record(450.0, frozenset("a"), "it crashed") == ("a",)


def test_a_model_that_crashed_alone_takes_the_blame() -> None:
    log = CrashLog(3, 300.0)
    log.record(0.0, frozenset("ab"), "x")
    log.record(1.0, frozenset("a"), "x")
    log.record(2.0, frozenset("b"), "x")
    assert log.record(3.0, frozenset("a"), "x") == ("a",)
    together = CrashLog(3, 300.0)
    for at in range(3):
        told = together.record(float(at), frozenset("ab"), "x")
    assert told == ("a", "b")


@given(some.lists(some.tuples(some.floats(min_value=0, max_value=100), MODELS), max_size=30))
def test_blame_needs_three_crashes_of_that_model(crashes: list[tuple[float, frozenset[str]]]) -> None:
    log, now, seen = CrashLog(3, 300.0), 0.0, dict.fromkeys("abc", 0)
    for later, models in crashes:
        now += later
        for model in models:
            seen[model] += 1
        told = log.record(now, models, "x")
        assert all(seen[model] >= 3 and model in models for model in told)
        for model in told:
            assert log.release(model)
            assert not log.release(model)
            seen[model] = 0


def test_silence_counts_only_while_work_is_pending() -> None:
    watchdog = Watchdog(silence_seconds=3.0, step_factor=10.0, look_limit_seconds=2.0)
    assert not any(watchdog.look(1.0, in_flight=False) for _ in range(100))
    assert [watchdog.look(1.0, in_flight=True) for _ in range(4)] == [False, False, False, True]
    watchdog.beat(Heartbeat(pending=True))
    assert [watchdog.look(1.0, in_flight=False) for _ in range(5)] == [False, False, False, False, True]


def test_slow_steps_and_a_stopped_server_are_forgiven() -> None:
    watchdog = Watchdog(silence_seconds=3.0, step_factor=10.0, look_limit_seconds=2.0)
    assert not watchdog.look(3600.0, in_flight=True)  # the server slept: that is not the worker's silence
    for _ in range(100):
        watchdog.beat(Heartbeat(pending=True, step_seconds=1.0))
    assert watchdog.allowed_seconds == 10.0
