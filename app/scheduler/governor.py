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
from app.scheduler.estimates import Drafting, DraftObservation, History, expected_tokens

FIRST_STEPS, TRIAL_STEPS = 3, 2
"""Steps of a trial in which nothing is accepted: of plain decoding before it was ever measured, and of later ones."""
PAUSE_STEPS, PLAIN_PAUSE_STEPS = 16, 192
"""Between trials, and since plain decoding: what that costs depends on the machine, not on the text."""
FIRST_CREDIT_STEPS, TRIAL_SHARE = 3, 0.005
"""Trials may lose so many plain steps when a request starts, and then this part of the time."""
START_DRAFTING_GAIN, CHANGE_GAIN, STOP_DRAFTING_GAIN = 1.05, 1.03, 1.01
"""A change must promise this much: leaving plain decoding the most, returning to it the least (never slower)."""
MEASURING = "measuring what a plain step costs, to compare"


class Option(NamedTuple):
    """What a step may do."""

    method: str
    num_draft_tokens: int


OFF = Option(PLAIN, 0)
ALLOWED = Decision()


@dataclass(frozen=True, slots=True)
class Choice:
    """How one row drafts, and why."""

    method: str = PLAIN
    num_draft_tokens: int = 0
    why: Decision = ALLOWED


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
    """Of one option, with a plain step as the unit of time: tokens of all rows in it, and what a step of the option
    costs in which something is proposed."""

    rate: float
    cost_ratio: float = 1.0
    acceptance: float = 0.0


@dataclass(slots=True)
class _Seat:
    """What the governor remembers of one situation: so many rows, so many of them drafting, with these methods."""

    steps_left: int
    """Of the trial of `rival`, which goes on while its drafts hit."""
    rival: str = PLAIN
    current: Option = OFF
    since_trial: int = 0
    credit_steps: float = 0.0
    speakers: tuple[str, ...] = ()
    estimates: Mapping[Option, _Estimate] = field(default_factory=dict)

    def best(self, method: str) -> Option:
        """The length that promises most."""
        return max((each for each in self.estimates if each.method == method), key=self.rate)

    def rate(self, option: Option) -> float:
        """Tokens per second that it promises."""
        return self.estimates[option].rate

    def settle(self) -> None:
        """Move to the best option when it is better by more than noise."""
        best = max(self.estimates, key=self.rate)
        gain = STOP_DRAFTING_GAIN if best == OFF else CHANGE_GAIN
        if self.current == OFF:
            gain = START_DRAFTING_GAIN
        if self.rate(best) <= gain * self.rate(self.current):
            return
        self.current = best
        if best.method == self.rival:
            self.steps_left = 0


class Governor:
    """One per loaded model, shared by its requests.

    `measured`: what steps cost, from the warm-up; `longest`: the most drafts of methods that have a limit.
    """

    def __init__(self, measured: Iterable[StepCost] = (), *, longest: Mapping[str, int] | None = None) -> None:
        self._longest = longest or {}
        self.costs = CostTable(measured)
        self._history = History()
        self._last_use = {PLAIN: 0}
        self._steps = 0
        self._seats: dict[tuple[int, int, tuple[str, ...]], _Seat] = {}
        self._trying: _Seat | None = None

    def choose(self, rows: int, drafting: Sequence[Drafting], methods: tuple[str, ...]) -> Choice:
        """The choice for the next step of `rows` rows, of which `drafting` may use `methods`. Ask once per step."""
        seat = self._seat(rows, drafting, methods)
        seat.settle()
        self._consider_trial(seat, rows, drafting)
        option, kind, detail = seat.current, "draft", ""
        if seat.steps_left:
            self._trying = seat
            option, kind = seat.best(seat.rival), "probe"
        weighed = option
        if option == OFF:
            kind, detail = ("measuring", MEASURING) if seat.steps_left else ("plain", "")
            weighed = max((each for each in seat.estimates if each != OFF), key=seat.rate)
        why = seat.estimates[weighed]
        return Choice(*option, Decision(kind, *weighed, why.cost_ratio, why.acceptance, detail))

    def observe(self, step: StepObservation) -> None:
        """Learn from a finished decode step, whoever chose it."""
        self._steps += 1
        for draft in step.drafts:
            self._last_use[draft.method] = self._steps
            if draft.asked:
                self._history.observe(draft)
        trying, self._trying = self._trying, None
        if trying and not any(draft.accepted for draft in step.drafts if draft.method == trying.rival):
            trying.steps_left = max(0, trying.steps_left - 1)
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
        """Where these rows sit, weighed anew; new ones keep what pays, and may try its rivals."""
        key, speakers = (rows, len(drafting), methods), tuple(row.request_id for row in drafting)
        if key not in self._seats:
            known = self.costs.knows_plain(rows, FIRST_STEPS - 1)
            self._seats[key] = _Seat(0 if known else FIRST_STEPS)
        seat = self._seats[key]
        if seat.speakers != speakers:
            seat.speakers, seat.credit_steps = speakers, max(seat.credit_steps, FIRST_CREDIT_STEPS)
        seat.estimates = self._estimates(rows, drafting, methods)
        return seat

    def _consider_trial(self, seat: _Seat, rows: int, drafting: Sequence[Drafting]) -> None:
        """Begin to try what is not in use when that is due and the credit pays for it, however little is accepted."""
        current = seat.estimates[seat.current]
        seat.credit_steps += TRIAL_SHARE * current.cost_ratio
        seat.since_trial += 1
        rivals = {option.method for option in seat.estimates} - {seat.current.method}
        if self._steps - self._last_use[PLAIN] <= PLAIN_PAUSE_STEPS:
            rivals -= {PLAIN}
        if seat.steps_left or not rivals or seat.since_trial <= PAUSE_STEPS:
            return
        rival = min(sorted(rivals), key=lambda method: self._last_use.get(method, -1))
        loss = TRIAL_STEPS * max(0.0, seat.estimates[seat.best(rival)].cost_ratio - rows / current.rate)
        if loss > seat.credit_steps:
            return
        seat.credit_steps -= loss
        seat.rival, seat.steps_left, seat.since_trial = rival, TRIAL_STEPS, 0
        for row in drafting:
            self._history.doubt(rival, row)

    def _estimates(self, rows: int, drafting: Sequence[Drafting], methods: tuple[str, ...]) -> dict[Option, _Estimate]:
        plain = self.costs.forward(PLAIN, rows=rows).seconds(1)
        estimates = {OFF: _Estimate(rows)}
        for method in methods:
            forward, drafted = self.costs.forward(method, rows=rows), self.costs.drafting(method, rows=rows)
            chances = [self._history.chances(method, row) for row in drafting]
            proposes = 1 - prod(1 - proposal for proposal, *_ in chances)
            first = sum(each[1] for each in chances) / len(chances)
            expected = [sum(column) for column in zip(*map(expected_tokens, chances), strict=True)]
            longest = self._longest.get(method, DRAFT_LENGTHS[-1])
            for length in sorted({min(length, longest) for length in DRAFT_LENGTHS}):
                cycle = drafted.seconds(length) + forward.seconds(1 + length)
                seconds = proposes * cycle + (1 - proposes) * forward.seconds(1)
                tokens = rows - len(drafting) + expected[length]
                estimates[Option(method, length)] = _Estimate(plain * tokens / seconds, cycle / plain, first)
        return estimates
