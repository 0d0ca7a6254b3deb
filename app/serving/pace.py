"""How fast tokens come, second by second: what the worker told of all requests together, over the last two minutes."""

import time
from collections import deque
from dataclasses import dataclass

from app.core.messages import Delta, Event
from app.core.ports import Clock

SPAN_SECONDS = 120
SMOOTHED_SECONDS = 3
"""The present speed is that of the last full seconds: steps are too lumpy for one alone."""


@dataclass(slots=True)
class Second:
    """What was told within one second."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Course:
    """One value for each of the last seconds, the oldest first, and the present speed."""

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens_per_second: float
    acceptance: float | None
    """The share of drafts that stayed, over the whole span; None where nothing was drafted, or nothing runs now."""


class Pace:
    """Listens to the worker. Called from the event loop only."""

    def __init__(self, *, clock: Clock = time.monotonic, span_seconds: int = SPAN_SECONDS) -> None:
        self._clock = clock
        self._seconds = deque([Second() for _ in range(span_seconds + 1)], maxlen=span_seconds + 1)
        self._now = int(clock())

    def hear(self, event: Event) -> None:
        """Count the tokens of one event."""
        if isinstance(event, Delta):
            self._advance()
            second = self._seconds[-1]
            second.tokens += event.tokens
            second.drafted += event.drafted
            second.accepted += event.accepted

    def course(self) -> Course:
        """The full seconds; the one that runs is not among them."""
        self._advance()
        full = list(self._seconds)[:-1]
        recent = full[-SMOOTHED_SECONDS:]
        speed = sum(second.tokens for second in recent) / len(recent)
        drafted, accepted = sum(second.drafted for second in full), sum(second.accepted for second in full)
        return Course(
            tokens=tuple(second.tokens for second in full),
            drafted=tuple(second.drafted for second in full),
            accepted=tuple(second.accepted for second in full),
            tokens_per_second=round(speed, 1),
            acceptance=accepted / drafted if drafted and speed else None,
        )

    def _advance(self) -> None:
        now = int(self._clock())
        for _ in range(min(now - self._now, len(self._seconds))):
            self._seconds.append(Second())
        self._now = now
