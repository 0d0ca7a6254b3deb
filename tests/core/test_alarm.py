"""Alarms on an event loop whose time only moves when the test says so."""

import asyncio
from collections.abc import Callable

from app.core.clock import Alarm


class Loop(asyncio.SelectorEventLoop):
    """Event loop whose clock moves only when a test sets `now`."""

    now = 0.0

    def time(self) -> float:
        return self.now


def rings_of(*steps: tuple[float, Callable[[Alarm], None]], until: float) -> list[float]:
    """Apply each step to an alarm at its time, in seconds; return the times at which the alarm rings."""
    rings: list[float] = []
    loop = Loop()

    async def run() -> None:
        alarm = Alarm(lambda: rings.append(loop.now))
        moments = dict(steps)
        while loop.now <= until:
            if loop.now in moments:
                moments[loop.now](alarm)
            for _ in range(3):
                await asyncio.sleep(0)
            loop.now = round(loop.now + 0.5, 1)
        alarm.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return rings


def test_an_alarm_rings_once_after_the_time_that_was_set_last() -> None:
    assert rings_of((0.0, lambda alarm: alarm.set(2)), until=10) == [2.0]
    assert rings_of((0.0, lambda alarm: alarm.set(2)), (1.0, lambda alarm: alarm.set(2)), until=10) == [3.0]


def test_an_alarm_that_is_set_earlier_rings_earlier() -> None:
    assert rings_of((0.0, lambda alarm: alarm.set(8)), (1.0, lambda alarm: alarm.set(1)), until=10) == [2.0]


def test_an_alarm_that_was_put_off_or_closed_stays_silent_until_it_is_set_again() -> None:
    disarm = (1.0, Alarm.disarm)
    assert rings_of((0.0, lambda alarm: alarm.set(2)), disarm, until=10) == []
    assert rings_of((0.0, lambda alarm: alarm.set(2)), disarm, (5.0, lambda alarm: alarm.set(2)), until=10) == [7.0]
    assert rings_of((0.0, lambda alarm: alarm.set(2)), (1.0, Alarm.close), until=10) == []
