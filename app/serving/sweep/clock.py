"""Times the decode phase of several rows: it starts when every row has said something, and counts what comes after."""

from collections.abc import Hashable, Iterable
from time import perf_counter

from app.core.ports import Clock


class DecodeClock:
    """Tell it who said how many tokens, at the moment they are known."""

    def __init__(self, rows: Iterable[Hashable], now: Clock = perf_counter) -> None:
        self._silent = set(rows)
        self._now = now
        self._started = self._stopped = 0.0
        self._tokens = 0

    def tell(self, row: Hashable, tokens: int) -> None:
        """`row` said `tokens` more tokens."""
        self._stopped = self._now()
        if not self._silent:
            self._tokens += tokens
            return
        self._silent.discard(row)
        self._started = self._stopped

    @property
    def started(self) -> float:
        """When every row had spoken, by its clock; 0 before anyone did."""
        return self._started

    @property
    def tokens_per_second(self) -> float:
        """Rate over the decode phase; 0 when there was none."""
        elapsed = self._stopped - self._started
        return self._tokens / elapsed if elapsed > 0 else 0.0
