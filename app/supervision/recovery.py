"""Consequences of a worker's silence and end: the longest silence, the pause before a restart, the model to blame.

Nothing here reads the clock: times are passed in.
"""

import signal
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.core.messages import Heartbeat
from app.core.reason import Reason

_STEP_WINDOW = 512


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts (in seconds) and limits of the supervisor; the defaults are what the product promises."""

    start_seconds: float = 120.0
    silence_seconds: float = 30.0
    step_factor: float = 10.0
    longest_silence_seconds: float = 120.0
    """Longest silence allowed with slow steps (which send heartbeats) or without work (the worker may be suspended)."""
    poll_seconds: float = 1.0
    reap_seconds: float = 1.0
    abort_seconds: float = 2.0
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0
    awaited_pause_seconds: float = 1.0
    """Longest pause while a caller waits for the worker."""
    steady_seconds: float = 60.0
    crash_limit: int = 3
    crash_window_seconds: float = 300.0
    quarantine_seconds: float = 600.0
    stop_seconds: float = 5.0


DEFAULT_TIMING = Timing()


class Watchdog:
    """Measures the silence of one worker, in seconds during which the server was awake."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._steps: deque[float] = deque(maxlen=_STEP_WINDOW)
        self._silent_seconds = 0.0
        self._pending = False
        self._beat_received = True

    @property
    def allowed_seconds(self) -> float:
        """Longest allowed silence while work is pending, in seconds."""
        ordered = sorted(self._steps)
        slowest = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else 0.0
        slow = min(self._timing.longest_silence_seconds, self._timing.step_factor * slowest)
        return max(self._timing.silence_seconds, slow)

    def record_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat: the worker is alive."""
        self._beat_received = True
        self._pending = heartbeat.pending
        self._steps.extend(seconds for seconds in heartbeat.step_seconds if seconds > 0)

    def is_hung(self, elapsed_seconds: float, *, in_flight: bool) -> bool:
        """Return whether the worker hangs. `in_flight`: the server itself waits for an answer."""
        if self._beat_received:
            self._beat_received = False
            self._silent_seconds = 0.0
            return False
        self._silent_seconds += min(elapsed_seconds, 2 * self._timing.poll_seconds)  # a longer gap: the server slept
        is_busy = self._pending or in_flight
        return self._silent_seconds > (self.allowed_seconds if is_busy else self._timing.longest_silence_seconds)


class Backoff:
    """Exponential backoff between restarts, in seconds; it begins with 0, also after a long enough run."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._next_seconds = 0.0

    def pause_seconds(self, uptime_seconds: float) -> float:
        """Return the pause after a worker that ran for `uptime_seconds`."""
        pause = 0.0 if uptime_seconds >= self._timing.steady_seconds else self._next_seconds
        next_pause = max(self._timing.first_pause_seconds, pause * 2)
        self._next_seconds = min(self._timing.longest_pause_seconds, next_pause)
        return pause


def model_to_blame(code: int | None, active_model: str, in_flight: frozenset[str]) -> str:
    """Return the model to blame for the end of a worker; empty for none.

    `active_model` is the model that it was working on; in `in_flight`, "" stands for prompts that are only tokenized.
    SIGKILL and SIGTERM come from outside (a person, the system when out of memory): they count only against a model
    that had the worker to itself.
    """
    from_outside = code is not None and -code in (signal.SIGKILL, signal.SIGTERM)
    return "" if from_outside and in_flight - {active_model, ""} else active_model


class CrashLog:
    """Counts crashes by model. Enough within the window quarantine the model until `release`, or for a limited time."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._crashes: deque[tuple[float, str]] = deque()
        self._quarantined: dict[str, tuple[float, Reason]] = {}
        self._lock = threading.Lock()

    def quarantined(self, now_seconds: float) -> Mapping[str, Reason]:
        """Return the reason of each current quarantine, by model id. Any thread may call this."""
        with self._lock:
            self._quarantined = {name: entry for name, entry in self._quarantined.items() if entry[0] > now_seconds}
            return {
                name: replace(reason, values={**reason.values, "again": max(1, round((until - now_seconds) / 60))})
                for name, (until, reason) in self._quarantined.items()
            }

    def record(self, now_seconds: float, model_id: str, cause: Reason) -> bool:
        """Record a crash that `model_id` caused; return whether that quarantines it."""
        self._crashes.append((now_seconds, model_id))
        window_seconds, count = self._timing.crash_window_seconds, self._timing.crash_limit
        while self._crashes[0][0] < now_seconds - window_seconds:
            self._crashes.popleft()
        if sum(name == model_id for _, name in self._crashes) < count:
            return False
        self.release(model_id)
        reason = Reason("quarantined", {"count": count, "minutes": window_seconds / 60, "cause": str(cause)})
        with self._lock:
            self._quarantined[model_id] = now_seconds + self._timing.quarantine_seconds, reason
        return True

    def release(self, model_id: str) -> bool:
        """Let a model run again, and forget its crashes; return whether it was quarantined."""
        self._crashes = deque(crash for crash in self._crashes if crash[1] != model_id)
        with self._lock:
            return self._quarantined.pop(model_id, None) is not None
