"""What is learned from the end of a worker: a readable cause, the pause before the next one, who is to blame.

Pure: time comes in as numbers. The supervisor owns one of each.
"""

import signal
from collections import deque
from collections.abc import Mapping

_CAUSES = {
    signal.SIGKILL: "it was killed (SIGKILL), usually out of memory",
    signal.SIGABRT: "it aborted (SIGABRT): a fatal error in the native libraries, see the log",
    signal.SIGSEGV: "it crashed (SIGSEGV): a memory error in the native libraries, see the log",
    signal.SIGBUS: "it crashed (SIGBUS): a model file changed or its disk went away while it was used",
    signal.SIGILL: "it crashed (SIGILL): the processor lacks an instruction that the libraries use",
    signal.SIGTERM: "it was terminated (SIGTERM)",
}


def describe_exit(code: int | None) -> str:
    """Why a process ended, from its exit code (negative: minus the signal) or None when it had to be killed."""
    if code is None:
        return "it closed its channel and did not exit"
    if code >= 0:
        return f"it exited with code {code}" + ("" if code == 0 else ", see the log")
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"it was ended by signal {-code}"
    return _CAUSES.get(number, f"it was ended by {number.name}")


class Backoff:
    """Pauses between restarts in seconds: none after a steady life, then first, 2 × first … up to the limit."""

    def __init__(self, first_seconds: float, limit_seconds: float, steady_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._limit_seconds = limit_seconds
        self._steady_seconds = steady_seconds
        self._next_seconds = 0.0

    def pause_seconds(self, lived_seconds: float) -> float:
        """The pause after a life of `lived_seconds`."""
        if lived_seconds >= self._steady_seconds:
            self._next_seconds = 0.0
        pause = self._next_seconds
        self._next_seconds = min(self._limit_seconds, max(self._first_seconds, pause * 2))
        return pause


def to_blame(code: int | None, at: str, in_flight: frozenset[str]) -> str:
    """The model whose doing the end of a worker was, or nobody's (empty).

    `at` is what the worker was at. SIGKILL and SIGTERM come from outside (a person, the system that is out of memory):
    they count only against a model that had the worker to itself.
    """
    from_outside = code is not None and -code in (signal.SIGKILL, signal.SIGTERM)
    return "" if from_outside and in_flight - {at} else at


class CrashLog:
    """Counts crashes by model: `limit` of them within the window quarantine it, until it is released or time is up."""

    def __init__(self, limit: int, window_seconds: float, quarantine_seconds: float) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._quarantine_seconds = quarantine_seconds
        self._crashes: deque[tuple[float, str]] = deque()
        self._quarantined: dict[str, tuple[float, str]] = {}

    def quarantined(self, now_seconds: float) -> Mapping[str, str]:
        """Model id -> why it is not loaded now."""
        self._quarantined = {name: kept for name, kept in self._quarantined.items() if kept[0] > now_seconds}
        return {
            name: f"{why}; it may run again in {max(1, round((until - now_seconds) / 60))} min"
            for name, (until, why) in self._quarantined.items()
        }

    def record(self, now_seconds: float, model_id: str, cause: str) -> bool:
        """One crash that was the doing of `model_id`; True when it is quarantined for it."""
        self._crashes.append((now_seconds, model_id))
        while self._crashes[0][0] < now_seconds - self._window_seconds:
            self._crashes.popleft()
        if sum(name == model_id for _, name in self._crashes) < self._limit:
            return False
        self._crashes = deque(crash for crash in self._crashes if crash[1] != model_id)
        self._quarantined[model_id] = (
            now_seconds + self._quarantine_seconds,
            f"the worker ended {self._limit} times within {self._window_seconds / 60:g} minutes"
            f" while it was at this model; the last time {cause}",
        )
        return True

    def release(self, model_id: str) -> bool:
        """Let a model run again, with a clean record; False when it was not quarantined."""
        self._crashes = deque(crash for crash in self._crashes if crash[1] != model_id)
        return self._quarantined.pop(model_id, None) is not None
