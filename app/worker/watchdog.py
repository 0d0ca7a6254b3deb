"""Decides that a living worker hangs: no heartbeat for max(silence, factor × p99 step) while work is pending.

Pure: the supervisor tells it heartbeats and the time between its own looks. One look never counts for more than
`look_limit_seconds`, so that a server that was itself stopped (sleep, debugger) does not blame the worker.
"""

from collections import deque

from app.core.messages import Heartbeat

_KEPT_STEPS = 512


class Watchdog:
    """The silence of one worker, in seconds of attentive watching."""

    def __init__(self, silence_seconds: float, step_factor: float, look_limit_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._step_factor = step_factor
        self._look_limit_seconds = look_limit_seconds
        self._steps: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._silent_seconds = 0.0
        self._pending = False
        self._heard = True

    @property
    def allowed_seconds(self) -> float:
        """How long the worker may be silent while work is pending."""
        if not self._steps:
            return self._silence_seconds
        ordered = sorted(self._steps)
        slowest = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        return max(self._silence_seconds, self._step_factor * slowest)

    def beat(self, heartbeat: Heartbeat) -> None:
        """The worker is alive."""
        self._heard = True
        self._pending = heartbeat.pending
        if heartbeat.step_seconds > 0:
            self._steps.append(heartbeat.step_seconds)

    def look(self, elapsed_seconds: float, *, in_flight: bool) -> bool:
        """True when the worker hangs. `in_flight`: the server itself waits for an answer."""
        if self._heard or not (self._pending or in_flight):
            self._heard = False
            self._silent_seconds = 0.0
            return False
        self._silent_seconds += min(elapsed_seconds, self._look_limit_seconds)
        return self._silent_seconds > self.allowed_seconds
