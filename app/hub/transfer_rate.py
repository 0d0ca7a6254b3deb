"""How fast bytes arrive: smoothed over some seconds, so that a number on a page can be read."""

from app.core.ports import Clock

SMOOTHING_SECONDS = 5.0
SHORTEST_SECONDS = 0.5


class TransferRate:
    """Fed with totals; forgets what happened long ago."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock()
        self._bytes: int | None = None
        self._rate = 0.0

    def note(self, total_bytes: int) -> None:
        """So many bytes are here now. A total below the last one starts anew."""
        now = self._clock()
        if self._bytes is None or total_bytes < self._bytes:
            self._at, self._bytes = now, total_bytes
            return
        passed = now - self._at
        if passed < SHORTEST_SECONDS:
            return
        present = (total_bytes - self._bytes) / passed
        weight = min(1.0, passed / SMOOTHING_SECONDS) if self._rate else 1.0
        self._rate += weight * (present - self._rate)
        self._at, self._bytes = now, total_bytes

    def bytes_per_second(self) -> float:
        """0 when nothing came for a while."""
        return self._rate if self._clock() - self._at < 2 * SMOOTHING_SECONDS else 0.0

    def seconds_left(self, missing_bytes: int) -> float | None:
        """None while nobody can tell."""
        rate = self.bytes_per_second()
        return missing_bytes / rate if rate > 0 else None
