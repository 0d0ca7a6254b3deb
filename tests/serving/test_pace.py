"""The pace: tokens by second, the current token rate, and the share of drafted tokens accepted."""

from app.core.messages import Delta, Heartbeat
from app.serving.metrics import SMOOTHED_SECONDS, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.25

    def __call__(self) -> float:
        return self.now


def delta(tokens: int, drafted: int = 0, accepted: int = 0) -> Delta:
    return Delta(id="r", index=0, text="x", tokens=tokens, drafted=drafted, accepted=accepted)


def test_an_idle_server_has_no_speed_and_no_acceptance() -> None:
    history = Pace(clock=Clock(), span_seconds=5).history()
    assert history.tokens == history.drafted == history.accepted == (0,) * 5
    assert history.tokens_per_second == 0
    assert history.acceptance is None


def test_tokens_are_counted_in_the_second_that_told_them() -> None:
    clock = Clock()
    pace = Pace(clock=clock, span_seconds=5)
    for count in (3, 4):
        pace.on_event(delta(count, drafted=4, accepted=3))
    assert pace.history().tokens == (0,) * 5, "the second that runs is not told yet"
    clock.now += 1
    pace.on_event(delta(5))
    pace.on_event(Heartbeat(pending=True))
    clock.now += 1
    history = pace.history()
    assert history.tokens == (0, 0, 0, 7, 5)
    assert (history.drafted, history.accepted) == ((0, 0, 0, 8, 0), (0, 0, 0, 6, 0))
    assert history.tokens_per_second == 12 / SMOOTHED_SECONDS
    assert history.acceptance == 6 / 8


def test_once_nothing_runs_any_more_no_acceptance_is_told() -> None:
    clock = Clock()
    pace = Pace(clock=clock, span_seconds=30)
    pace.on_event(delta(9, drafted=4, accepted=4))
    clock.now += 1
    assert pace.history().acceptance == 1.0
    clock.now += SMOOTHED_SECONDS
    assert pace.history().acceptance is None


def test_what_is_older_than_the_span_is_forgotten() -> None:
    clock = Clock()
    pace = Pace(clock=clock, span_seconds=5)
    pace.on_event(delta(9))
    clock.now += 5
    assert pace.history().tokens == (9, 0, 0, 0, 0)
    clock.now += 1
    assert pace.history().tokens == (0,) * 5
    clock.now += 1e6
    assert pace.history().tokens == (0,) * 5


def test_a_clock_that_stands_still_loses_nothing() -> None:
    pace = Pace(clock=Clock(), span_seconds=2)
    for _ in range(100):
        pace.on_event(delta(1))
        pace.history()
    assert sum(pace.history().tokens) == 0


def test_a_day_is_told_by_its_minutes_and_no_more_is_kept() -> None:
    clock = Clock()
    pace = Pace(clock=clock, span_seconds=5)
    pace.on_event(delta(9))
    pace.on_event(delta(3))
    assert len(pace.minutes()) == 24 * 60
    assert sum(pace.minutes()) == 0, "the minute that runs is not told yet"
    clock.now += 60
    assert pace.minutes()[-1] == 12
    clock.now += 24 * 3600 - 60
    assert pace.minutes()[0] == 12
    clock.now += 60
    assert sum(pace.minutes()) == 0
