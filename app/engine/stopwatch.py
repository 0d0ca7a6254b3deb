"""Takes one decode step apart: how long it drafted, verified and rewound. Waiting for each part costs its overlap with
the next, so it only happens in steps that were planned to be timed.
"""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx


class Stopwatch:
    """Of one step; the seconds stay 0 unless it is `timed` and drafts. Each call ends a part."""

    def __init__(self, *, timed: bool = False) -> None:
        self._timed = timed
        self._since = time.perf_counter()
        self.timed = False
        """Whether drafts were waited for."""
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0
        self.rewind_seconds = 0.0

    def drafted(self, arrays: Sequence[mx.array]) -> None:
        """The drafts are under way."""
        if self._timed:
            mx.eval(arrays)
            self.draft_seconds = self._lap()
            self.timed = True

    def launched(self) -> None:
        """The verify forward is built. On the CPU its launch already waits for most of it."""
        self._lap()

    def verified(self) -> None:
        """What it drew was read."""
        if self.timed:
            self.verify_seconds = self._lap()

    def rewound(self, cached: Callable[[], Sequence[mx.array]]) -> None:
        """The caches, whose arrays are `cached()`, hold what stayed."""
        if self.timed:
            mx.eval(cached())
            self.rewind_seconds = self._lap()

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds
