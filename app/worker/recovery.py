"""What is learned from the end of a worker: a readable cause, the pause before the next one, who is to blame.

Pure: time comes in as numbers. The supervisor owns one of each.
"""

import signal
from collections import deque
from collections.abc import Mapping

_CAUSES = {
    signal.SIGKILL: "it was killed (SIGKILL): most often the system was out of memory",
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


class CrashLog:
    """Counts crashes by the models that were in flight and quarantines a model after `limit` within the window.

    When several models reach the limit at once and some of them crashed alone, only those are blamed.
    """

    def __init__(self, limit: int, window_seconds: float) -> None:
        self._limit = limit
        self._window_seconds = window_seconds
        self._crashes: deque[tuple[float, frozenset[str]]] = deque()
        self._quarantined: dict[str, str] = {}

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Model id -> why it is not loaded any more."""
        return self._quarantined

    def record(self, now_seconds: float, models: frozenset[str], cause: str) -> tuple[str, ...]:
        """One crash while `models` were in flight; the answer names the models that are quarantined by it."""
        self._crashes.append((now_seconds, models))
        while self._crashes and self._crashes[0][0] < now_seconds - self._window_seconds:
            self._crashes.popleft()
        blamed = self._blame(models)
        for model in blamed:
            self._quarantined[model] = (
                f"the worker ended {self._limit} times within {self._window_seconds / 60:g} minutes"
                f" while this model ran; the last time {cause}"
            )
        return blamed

    def release(self, model_id: str) -> bool:
        """Let a model run again, with a clean record; False when it was not quarantined."""
        self._crashes = deque((at, models - {model_id}) for at, models in self._crashes)
        return self._quarantined.pop(model_id, None) is not None

    def _blame(self, models: frozenset[str]) -> tuple[str, ...]:
        reached = [
            model
            for model in sorted(models)
            if model not in self._quarantined and sum(model in present for _, present in self._crashes) >= self._limit
        ]
        alone = [model for model in reached if any(present == {model} for _, present in self._crashes)]
        return tuple(alone or reached)
