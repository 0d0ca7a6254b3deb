"""A clock type, and a timer that is cheap enough to set again for every token."""

import asyncio
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic clock, in seconds."""


def steady_unix_time() -> Clock:
    """Return a clock that is right now, in Unix seconds, and does not follow when the computer's clock is set."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class Alarm:
    """Calls `callback` at the deadline that was set last.

    A new timer object per token would cost more than the token. Instead, a timer that fires too early is rescheduled.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._due_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Ring in `seconds`, replacing the previous deadline."""
        self._due_at = due_at = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > due_at:
            self._wait_until(due_at)

    def disarm(self) -> None:
        """Do not ring until the next `set`."""
        self._due_at = None

    def close(self) -> None:
        """Cancel for good and release `callback`."""
        self._due_at, self._callback = None, lambda: None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_until(self, due_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._due_at is None:
            return
        if self._loop.time() < self._due_at:
            self._wait_until(self._due_at)
        else:
            self._due_at = None
            self._callback()
