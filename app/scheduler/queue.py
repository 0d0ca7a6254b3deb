"""The bounded line of waiting sequences: first come, first served; a full line says when to come back."""

import math

from app.core.errors import QueueFull
from app.scheduler.sequence import Sequence

LONGEST_RETRY_SECONDS = 60


class WaitingQueue:
    """FIFO of at most `limit` sequences, found by id. Cancelling one never reorders the others."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a queue holds at least one request, not {limit}")
        self._limit = limit
        self._sequences: dict[str, Sequence] = {}
        self._service_seconds = 0.0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def push(self, sequence: Sequence, *, rows: int) -> None:
        """Join the end of the line that `rows` rows serve. Raises `QueueFull` when `limit` sequences wait already."""
        if len(self._sequences) >= self._limit:
            seconds = self._retry_after_seconds(rows)
            raise QueueFull(
                f"{self._limit} requests are waiting already; try again in {seconds} s",
                retry_after_seconds=seconds,
            )
        self._sequences[sequence.request.id] = sequence

    def head(self) -> Sequence | None:
        """The sequence that is next, still in the line."""
        return next(iter(self._sequences.values()), None)

    def take(self, request_id: str) -> Sequence | None:
        """Remove one sequence, wherever it stands; None when it is not waiting."""
        return self._sequences.pop(request_id, None)

    def note_service(self, seconds: float) -> None:
        """A request ran for `seconds` from admission to its natural end: what the next retry hint is made of."""
        weight = 0.25 if self._service_seconds else 1.0
        self._service_seconds += weight * (seconds - self._service_seconds)

    def _retry_after_seconds(self, rows: int) -> int:
        # While the line is full all rows are busy, so one of them becomes free every service time / rows.
        return min(LONGEST_RETRY_SECONDS, max(1, math.ceil(self._service_seconds / rows)))
