"""The bounded lines of waiting sequences: owners take turns; a full line says when to come back."""

import math

from app.core.errors import QueueFull
from app.scheduler.sequence import Sequence

LONGEST_RETRY_SECONDS = 60


class WaitingQueue:
    """First come, first served within an owner, and one owner after the other: who asks much waits behind himself.

    At most `limit` sequences of each owner wait. Cancelling one never reorders the others.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a queue holds at least one request, not {limit}")
        self._limit = limit
        self._lines: dict[str, dict[str, Sequence]] = {}
        """By owner, the one whose turn it is first; none is empty."""
        self._service_seconds = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in line for line in self._lines.values())

    def push(self, sequence: Sequence, *, rows: int) -> None:
        """Join the owner's line, one of those that `rows` rows serve. Raises `QueueFull` when `limit` wait in it."""
        owner = sequence.request.owner
        if len(self._lines.get(owner, ())) >= self._limit:
            seconds = self._retry_after_seconds(rows)
            raise QueueFull(
                f"{self._limit} requests are waiting already; try again in {seconds} s",
                retry_after_seconds=seconds,
            )
        self._lines.setdefault(owner, {})[sequence.request.id] = sequence

    def head(self) -> Sequence | None:
        """The sequence that is next, still in its line."""
        return next((sequence for line in self._lines.values() for sequence in line.values()), None)

    def take(self, request_id: str) -> Sequence | None:
        """Remove one sequence, wherever it stands; None when it is not waiting."""
        for owner, line in self._lines.items():
            if request_id in line:
                sequence = line.pop(request_id)
                if not line:
                    del self._lines[owner]
                return sequence
        return None

    def serve(self, sequence: Sequence) -> None:
        """Remove the head: its owner's next turn comes after everybody else's."""
        owner = sequence.request.owner
        self.take(sequence.request.id)
        if owner in self._lines:
            self._lines[owner] = self._lines.pop(owner)

    def note_service(self, seconds: float) -> None:
        """A request ran for `seconds` from admission to its natural end: what the next retry hint is made of."""
        weight = 0.25 if self._service_seconds else 1.0
        self._service_seconds += weight * (seconds - self._service_seconds)

    def _retry_after_seconds(self, rows: int) -> int:
        # While the line is full all rows are busy, so one of them becomes free every service time / rows.
        return min(LONGEST_RETRY_SECONDS, max(1, math.ceil(self._service_seconds / rows)))
