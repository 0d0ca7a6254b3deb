"""How fast tokens come, of all requests together: by seconds for two minutes, by minutes for a day."""

import time
from collections import deque
from dataclasses import dataclass

from app.core.messages import Delta, Event
from app.core.ports import Clock

SPAN_SECONDS = 120
SPAN_MINUTES = 24 * 60
SMOOTHED_SECONDS = 3
"""The present speed is that of the last full seconds: steps are too lumpy for one alone."""


@dataclass(slots=True)
class Period:
    """What was told within one second or one minute."""

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


class Track:
    """The last periods of one length, the oldest first; the very last one still runs."""

    def __init__(self, clock: Clock, period_seconds: int, count: int) -> None:
        self._clock = clock
        self._period_seconds = period_seconds
        self._periods = deque([Period() for _ in range(count + 1)], maxlen=count + 1)
        self._now = self._present()

    def running(self) -> Period:
        """The one to count into."""
        self._advance()
        return self._periods[-1]

    def full(self) -> list[Period]:
        """Those that are over."""
        self._advance()
        return list(self._periods)[:-1]

    def _present(self) -> int:
        return int(self._clock() // self._period_seconds)

    def _advance(self) -> None:
        now = self._present()
        for _ in range(min(now - self._now, len(self._periods))):
            self._periods.append(Period())
        self._now = now


class Pace:
    """Listens to the worker. Called from the event loop only."""

    def __init__(self, *, clock: Clock = time.monotonic, span_seconds: int = SPAN_SECONDS) -> None:
        self._seconds = Track(clock, 1, span_seconds)
        self._minutes = Track(clock, 60, SPAN_MINUTES)

    def hear(self, event: Event) -> None:
        """Count the tokens of one event."""
        if isinstance(event, Delta):
            for period in (self._seconds.running(), self._minutes.running()):
                period.tokens += event.tokens
                period.drafted += event.drafted
                period.accepted += event.accepted

    def course(self) -> Course:
        """The full seconds; the one that runs is not among them."""
        full = self._seconds.full()
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

    def minutes(self) -> tuple[int, ...]:
        """The tokens of each full minute of the last day, the oldest first."""
        return tuple(minute.tokens for minute in self._minutes.full())
