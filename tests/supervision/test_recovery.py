"""The pure parts of supervision: causes, pauses, blame, silence."""

import signal
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from app.core.messages import Heartbeat
from app.core.reason import Reason
from app.machine.channel import NOTE_BYTES, CrashNote
from app.supervision.child import describe_exit
from app.supervision.recovery import Backoff, CrashLog, Timing, Watchdog, model_to_blame

CRASH = Reason("exit_aborted")
QUARANTINE = Timing(crash_limit=3, crash_window_seconds=300.0, quarantine_seconds=600.0)
MODELS = some.sampled_from("abc")


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
    assert words in str(describe_exit(code))


def test_the_first_restart_is_at_once_and_pauses_double_up_to_the_limit() -> None:
    backoff = Backoff(Timing(first_pause_seconds=1.0, longest_pause_seconds=60.0, steady_seconds=60.0))
    assert [backoff.pause_seconds(0.1) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.pause_seconds(61.0) == 0
    assert backoff.pause_seconds(0.1) == 1


def test_only_crashes_within_the_window_count() -> None:
    log = CrashLog(QUARANTINE)
    assert not any(log.record(at, "a", CRASH) for at in (0.0, 200.0, 400.0))
    assert log.record(450.0, "a", CRASH)


def test_what_the_worker_was_at_takes_the_blame_and_nobody_who_ran_beside_it() -> None:
    assert model_to_blame(-signal.SIGABRT, "bad", frozenset({"bad", "good"})) == "bad"
    assert model_to_blame(3, "", frozenset({"good"})) == ""
    assert model_to_blame(None, "bad", frozenset({"good"})) == "bad"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_from_outside_counts_only_against_a_model_that_had_the_worker_to_itself(number: signal.Signals) -> None:
    assert model_to_blame(-number, "a", frozenset({"a", "b"})) == ""
    assert model_to_blame(-number, "a", frozenset({"a"})) == "a"
    assert model_to_blame(-number, "a", frozenset({"a", ""})) == "a", "a prompt that is counted is nobody's model"
    assert model_to_blame(-number, "a", frozenset()) == "a"


def test_a_quarantine_tells_when_it_ends_and_ends_then() -> None:
    log = CrashLog(replace(QUARANTINE, crash_limit=1))
    assert log.record(0.0, "a", CRASH)
    assert "see the log; it may run again in 10 min" in str(log.quarantined(1.0)["a"])
    assert "in 1 min" in str(log.quarantined(590.0)["a"])
    assert log.quarantined(600.0) == {}
    assert not log.release("a")


@given(some.lists(some.tuples(some.floats(min_value=0, max_value=100), MODELS), max_size=30))
def test_blame_needs_three_crashes_of_that_model(crashes: list[tuple[float, str]]) -> None:
    log, now, seen = CrashLog(QUARANTINE), 0.0, dict.fromkeys("abc", 0)
    for later, model in crashes:
        now += later
        seen[model] += 1
        if log.record(now, model, CRASH):
            assert seen[model] >= 3
            assert log.release(model)
            assert not log.release(model)
            seen[model] = 0


def test_a_note_outlives_the_process_that_wrote_it() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(NOTE_BYTES)
        note = CrashNote(file.fileno())
        assert note.model_id == ""
        begin = "import os; from app.machine.channel import CrashNote"
        script = f"{begin}\nwith CrashNote({file.fileno()}).on('model/ü'): os.abort()"
        subprocess.run([sys.executable, "-c", script], pass_fds=(file.fileno(),), check=False)
        assert note.model_id == "model/ü"
        with CrashNote(file.fileno()).on("x" * 10_000):
            assert set(note.model_id) == {"x"}
        assert note.model_id == ""


def test_a_worker_without_work_may_be_silent_for_longer_and_is_noticed_too() -> None:
    watchdog = Watchdog(Timing(silence_seconds=3.0, longest_silence_seconds=100.0, poll_seconds=1.0))
    assert [watchdog.is_hung(1.0, in_flight=True) for _ in range(5)] == [False, False, False, False, True]
    watchdog.record_heartbeat(Heartbeat(pending=True))
    assert [watchdog.is_hung(1.0, in_flight=False) for _ in range(5)] == [False, False, False, False, True]
    watchdog.record_heartbeat(Heartbeat(pending=False))
    assert not any(watchdog.is_hung(1.0, in_flight=False) for _ in range(101))
    assert watchdog.is_hung(1.0, in_flight=False)
    watchdog.record_heartbeat(Heartbeat(pending=False))
    assert not any(watchdog.is_hung(1.0, in_flight=False) for _ in range(50))
    assert watchdog.is_hung(1.0, in_flight=True), "who asks such a worker does not wait as long again"


def test_slow_steps_and_a_stopped_server_are_forgiven() -> None:
    watchdog = Watchdog(Timing(silence_seconds=3.0, step_factor=10.0, poll_seconds=1.0))
    assert not watchdog.is_hung(3600.0, in_flight=True)  # the server slept: that is not the worker's silence
    for _ in range(100):
        watchdog.record_heartbeat(Heartbeat(pending=True, step_seconds=(1.0,)))
    assert watchdog.allowed_seconds == 10.0


def test_a_step_of_a_minute_is_served_for_ever_and_a_stuck_one_is_noticed_within_two() -> None:
    watchdog = Watchdog(Timing())
    for second in range(3_600):
        if second % 8 == 0:  # a heartbeat after each eighth of a step
            done = (60.0,) if second % 64 == 0 else ()
            watchdog.record_heartbeat(Heartbeat(pending=True, step_seconds=done))
        assert not watchdog.is_hung(1.0, in_flight=True)
    assert sum(1 for _ in iter(lambda: watchdog.is_hung(1.0, in_flight=True), True)) <= 130
    quick = Watchdog(Timing())
    quick.record_heartbeat(Heartbeat(pending=True, step_seconds=(0.02,)))
    assert sum(1 for _ in iter(lambda: quick.is_hung(1.0, in_flight=True), True)) <= 32
