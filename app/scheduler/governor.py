"""Which drafter proposes how many tokens: what earns the most expected tokens per second here, plain decoding included.

Pure decisions: no clock and no I/O. Tokens never depend on them, so a wrong guess costs time and nothing else.

    expected tokens per second = sum over rows of sum_{j=0..K} prod_{i<=j} acceptance_i / (draft cost + verify cost)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from app.core.step import DRAFT_LENGTHS, Decision, StepCost
from app.scheduler.costs import PLAIN, CostTable
from app.scheduler.estimates import History

WARM_UP_STEPS = 3
FIRST_MEASURE_AFTER_STEPS = 64
LAST_MEASURE_AFTER_STEPS = 512
"""Drafting steps after which plain decoding is measured again, by two steps: the first only leaves the other pace."""
SAFE_LEAD = 1.5
"""While drafting is expected to be so much faster, plain decoding need not be measured again."""
PROBE_MISSES = 2
STRANGER_AFTER_STEPS = 4
"""A method that never ran here is probed as soon as the one in use was."""
FIRST_PROBE_AFTER_STEPS = 16
LAST_PROBE_AFTER_STEPS = 128
PROBE_SHARE = 0.01
"""Part of the time that probes may lose, besides so many plain steps at the start. What is not spent is kept, up to:"""
FIRST_CREDIT_STEPS, LARGEST_CREDIT_STEPS = 4, 8
YOUNG_STEPS, STRIDE_STEPS = 32, 4
"""A new situation is weighed again at every step, later at every fourth."""
START_DRAFTING_GAIN, CHANGE_GAIN, STOP_DRAFTING_GAIN = 1.05, 1.03, 1.01
"""A change must promise this much: leaving plain decoding the most, returning to it the least (never slower)."""


class Option(NamedTuple):
    """What a step may do."""

    method: str
    num_draft_tokens: int


OFF = Option(PLAIN, 0)
DRAFTING = Decision()


@dataclass(frozen=True, slots=True)
class Choice:
    """How one row drafts, and why."""

    method: str = PLAIN
    num_draft_tokens: int = 0
    why: Decision = DRAFTING


@dataclass(frozen=True, slots=True)
class Drafting:
    """A row that may draft."""

    request_id: str = ""
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftObservation:
    """One row of a step: drafts asked of `method`, verified ones, accepted ones. `asked` 0: the method had no say."""

    method: str = PLAIN
    asked: int = 0
    drafted: int = 0
    accepted: int = 0
    row: Drafting = Drafting()


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One decode step as the governor sees it. `width` is the padded forward's, `seconds` includes the drafting.

    `draft_seconds` None: the drafting was not timed. `typical` False: a drafter also read a prompt in this step, so
    its time says nothing about the next ones.
    """

    rows: int
    width: int
    seconds: float
    draft_seconds: float | None = None
    drafts: tuple[DraftObservation, ...] = ()
    typical: bool = True

    @property
    def widest(self) -> DraftObservation:
        """The row that drafted most: the step's cost is put down to its method."""
        return max(self.drafts, key=lambda draft: (draft.drafted, draft.asked), default=DraftObservation())


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Of one option: tokens per second of all rows, seconds of a step, and of one in which something is proposed."""

    rate: float
    seconds: float
    cycle_seconds: float
    acceptance: float = 0.0


@dataclass(slots=True)
class _Seat:
    """What the governor remembers of one situation: so many rows, so many of them drafting, with these methods."""

    measuring: int
    current: Option = OFF
    speakers: tuple[str, ...] = ()
    measure_after: int = FIRST_MEASURE_AFTER_STEPS
    since_measured: int = 0
    since_probe: int = 0
    probe_after: int = FIRST_PROBE_AFTER_STEPS
    credit_seconds: float = 0.0
    misses_left: int = 0
    rival: str = ""
    age: int = 0
    estimates: Mapping[Option, _Estimate] = field(default_factory=dict)


class Governor:
    """One per loaded model, shared by its requests.

    `measured`: what steps cost, from the warm-up; `longest`: the most drafts of methods that have a limit.
    """

    def __init__(self, measured: Iterable[StepCost] = (), *, longest: Mapping[str, int] | None = None) -> None:
        self._longest = longest or {}
        self.costs = CostTable(measured)
        self._history = History()
        self._last_use: dict[str, int] = {}
        self._steps = 0
        self._seats: dict[tuple[int, int, tuple[str, ...]], _Seat] = {}
        self._probing: _Seat | None = None

    def choose(self, rows: int, drafting: Sequence[Drafting], methods: tuple[str, ...]) -> Choice:
        """The choice for the next step of `rows` rows, of which `drafting` may use `methods`. Ask once per step."""
        seat = self._seat(rows, drafting, methods)
        if seat.age < YOUNG_STEPS or seat.age % STRIDE_STEPS == 0 or seat.misses_left > 0:
            seat.estimates = self._estimates(rows, drafting, methods)
        seat.age += 1
        estimates = seat.estimates
        if self._must_measure(seat, rows, estimates):
            detail = "measuring what a plain step costs, to compare"
            return Choice(why=_decision("measuring", seat.current, estimates, detail))
        self._settle(seat, estimates)
        option = self._probe(seat, rows, drafting, estimates)
        if option is not None:
            return Choice(*option, _decision("probe", option, estimates))
        if seat.current != OFF:
            seat.since_measured += 1
            return Choice(*seat.current, _decision("draft", seat.current, estimates))
        best = max((option for option in estimates if option != OFF), key=lambda option: estimates[option].rate)
        return Choice(why=_decision("plain", best, estimates))

    def observe(self, step: StepObservation) -> None:
        """Learn from a finished decode step, whoever chose it."""
        self._steps += 1
        for draft in step.drafts:
            if draft.asked:
                self._last_use[draft.method] = self._steps
                self._history.observe(
                    draft.method,
                    draft.row.request_id,
                    draft.row.context_tokens,
                    asked=draft.asked,
                    drafted=draft.drafted,
                    accepted=draft.accepted,
                )
        if self._probing and not any(draft.accepted for draft in step.drafts):
            self._probing.misses_left -= 1
        self._probing = None
        widest = step.widest
        # A step whose drafter had nothing to propose is no plain step: nothing could be launched ahead of it.
        self.costs.observe(
            widest.method if widest.asked else PLAIN,
            rows=step.rows,
            width=step.width,
            seconds=step.seconds if step.typical else 0.0,
            draft_seconds=step.draft_seconds if widest.drafted else 0.0,
        )

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._history.forget(request_id)

    def _seat(self, rows: int, drafting: Sequence[Drafting], methods: tuple[str, ...]) -> _Seat:
        """Where these rows sit; new ones keep what pays and are asked about the rivals sooner."""
        key = rows, len(drafting), methods
        if key not in self._seats:
            known = self.costs.knows_plain(rows, WARM_UP_STEPS - 1)
            credit = FIRST_CREDIT_STEPS * self.costs.curve(PLAIN, rows=rows).narrowest_seconds
            self._seats[key] = _Seat(measuring=0 if known else WARM_UP_STEPS, credit_seconds=credit)
        seat, speakers = self._seats[key], tuple(row.request_id for row in drafting)
        if seat.speakers != speakers:
            seat.speakers = speakers
            seat.age, seat.since_probe, seat.probe_after, seat.misses_left = 0, 0, FIRST_PROBE_AFTER_STEPS, 0
        return seat

    def _must_measure(self, seat: _Seat, rows: int, estimates: Mapping[Option, _Estimate]) -> bool:
        due = seat.since_measured >= seat.measure_after and self.costs.plain_age(rows) >= seat.measure_after
        if due and estimates[seat.current].rate < SAFE_LEAD * estimates[OFF].rate:
            seat.since_measured, seat.measuring = 0, 2
            seat.measure_after = min(2 * seat.measure_after, LAST_MEASURE_AFTER_STEPS)
        if not seat.measuring:
            return False
        seat.measuring -= 1
        return True

    def _settle(self, seat: _Seat, estimates: Mapping[Option, _Estimate]) -> None:
        """Move to the best option when it is better by more than noise."""
        best = max(estimates, key=lambda option: estimates[option].rate)
        needed = CHANGE_GAIN
        if seat.current == OFF:
            needed = START_DRAFTING_GAIN
        elif best == OFF:
            needed = STOP_DRAFTING_GAIN
        if estimates[best].rate <= needed * estimates[seat.current].rate:
            return
        if best.method != seat.current.method:
            seat.since_probe, seat.misses_left = 0, 0
            seat.probe_after = max(FIRST_PROBE_AFTER_STEPS, seat.probe_after // 2)
        seat.current = best

    def _probe(
        self, seat: _Seat, rows: int, drafting: Sequence[Drafting], estimates: Mapping[Option, _Estimate]
    ) -> Option | None:
        """Now and then a method that is not in use, until it missed twice: ever more rarely while it loses, and never
        at a cost above the credit."""
        rivals = {option.method for option in estimates} - {PLAIN, seat.current.method}
        current, plain = estimates[seat.current], estimates[OFF].seconds
        seat.credit_seconds += PROBE_SHARE * current.seconds
        if seat.since_probe <= seat.probe_after:  # a probe that is due is saved for, however much it may lose
            seat.credit_seconds = min(seat.credit_seconds, LARGEST_CREDIT_STEPS * plain)
        if not rivals:
            return None
        seat.since_probe += 1
        stranger = any(method not in self._last_use for method in rivals) and seat.age > STRANGER_AFTER_STEPS
        if seat.misses_left <= 0 and (stranger or seat.since_probe > seat.probe_after):
            seat.rival = min(sorted(rivals), key=lambda method: self._last_use.get(method, 0))
            option = _best_of(seat.rival, estimates)
            loss = PROBE_MISSES * max(0.0, estimates[option].cycle_seconds - rows / current.rate)
            if loss > seat.credit_seconds:
                return None
            seat.credit_seconds -= loss
            seat.since_probe, seat.misses_left = 0, PROBE_MISSES
            seat.probe_after = min(2 * seat.probe_after, LAST_PROBE_AFTER_STEPS)
            for row in drafting:
                self._history.doubt(seat.rival, row.request_id, 1)
        if seat.misses_left <= 0 or seat.rival not in rivals:
            return None
        self._probing = seat
        return _best_of(seat.rival, estimates)

    def _estimates(self, rows: int, drafting: Sequence[Drafting], methods: tuple[str, ...]) -> dict[Option, _Estimate]:
        plain = self.costs.curve(PLAIN, rows=rows).narrowest_seconds
        estimates = {OFF: _Estimate(rows / plain, plain, plain)}
        for method in methods:
            curve, drafted = self.costs.curve(method, rows=rows), self.costs.drafting(method, rows=rows)
            rates = [self._history.rates(method, row.request_id, row.context_tokens) for row in drafting]
            proposes = 1 - prod(1 - each.proposal for each in rates)
            first = sum(each.positions[0] for each in rates) / len(rates)
            expected = [sum(column) for column in zip(*(each.expected_tokens() for each in rates), strict=True)]
            longest = self._longest.get(method, DRAFT_LENGTHS[-1])
            for length in sorted({min(length, longest) for length in DRAFT_LENGTHS}):
                cycle = drafted(length) + curve.seconds(1 + length)
                seconds = proposes * cycle + (1 - proposes) * curve.narrowest_seconds
                tokens = rows - len(drafting) + expected[length]
                estimates[Option(method, length)] = _Estimate(tokens / seconds, seconds, cycle, first)
        return estimates


def _best_of(method: str, estimates: Mapping[Option, _Estimate]) -> Option:
    return max((option for option in estimates if option.method == method), key=lambda option: estimates[option].rate)


def _decision(kind: str, option: Option, estimates: Mapping[Option, _Estimate], detail: str = "") -> Decision:
    weighed = estimates[option]
    ratio = weighed.cycle_seconds / estimates[OFF].cycle_seconds
    return Decision(kind, *option, cost_ratio=ratio, acceptance=weighed.acceptance, detail=detail)
