"""Which drafter proposes how many tokens: what earns the most expected tokens per second here, plain decoding included.

Pure decisions: no clock and no I/O. Tokens never depend on them, so a wrong guess costs time and nothing else.

    expected tokens per second = sum over rows of sum_{j=0..K} prod_{i<=j} acceptance_i / (draft cost + verify cost)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import NamedTuple

from app.core.step import DRAFT_LENGTHS, Decision, StepCost
from app.scheduler.costs import PLAIN, CostTable
from app.scheduler.estimates import Chances, Drafting, DraftObservation, History, expected_tokens

FIRST_STEPS, PLAIN_STEPS = 3, 2
"""In which plain decoding is measured: when nothing is known of it, and again."""
PLAIN_PAUSE_STEPS, PLAIN_DOUBT = 192, 1.5
"""After so many steps without it, plain decoding is measured again, unless drafting is that much better."""
FIRST_CREDIT, MOST_CREDIT, LEAST_LOSS = 0.7, 1.5, 0.05
"""Plain steps that trials may lose when a request starts and that can be saved for them; a trial counts as one of at
least the last."""
EARLY_SHARE, ROOT_SHARE, LATE_SHARE = 0.3, 0.25, 0.005
"""Of the time may be lost: the second divided by the root of the plain steps since the last request started, at most
the first and at least the third. What is learnt early pays longest."""
HOPE_GAIN = 1.25
"""A trial must promise this much, should it go as well as it may; should only its cost be the least, which one trial
tells, as much as a start of drafting."""
START_DRAFTING_GAIN, CHANGE_GAIN, STAY_GAIN = 1.05, 1.03, 1.0
"""A change must promise this much, from plain decoding the most; what promises less than the last goes back to it."""
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
    """Of one option, with a plain step as the unit of time: `rate`, `hope` and `bargain` in tokens of all rows, as
    believed, should it go well and should it be cheap; `tokens` and `seconds` of a step. `cost_ratio` is that of one in
    which something is proposed."""

    rate: float
    tokens: float
    hope: float = 0.0
    seconds: float = 1.0
    cost_ratio: float = 1.0
    acceptance: float = 0.0
    bargain: float = 0.0

    def loss(self, rate: float) -> float:
        """What a step of it probably loses where `rate` is earned."""
        return max(LEAST_LOSS, self.seconds - self.tokens / rate)


@dataclass(slots=True)
class _Seat:
    """What the governor remembers of the requests that may use the same methods."""

    current: Option = OFF
    measuring_steps: int = 0
    credit_steps: float = 0.0
    age_steps: float = 0.0
    trial_seconds: float = 0.0
    speakers: frozenset[str] = frozenset()
    estimates: Mapping[Option, _Estimate] = field(default_factory=dict)

    def rate(self, option: Option) -> float:
        """Tokens per second that it promises."""
        return self.estimates[option].rate

    def settle(self) -> None:
        """Move to the best option when it is better by more than noise."""
        if self.rate(self.current) < STAY_GAIN * self.rate(OFF):
            self.current = OFF
        best = max(self.estimates, key=self.rate)
        gain = START_DRAFTING_GAIN if self.current == OFF else CHANGE_GAIN
        if self.rate(best) > gain * self.rate(self.current):
            self.current = best

    def earn(self, rows: int) -> None:
        """Credit for the coming step. A trial tells about all its rows, so a batch needs fewer."""
        seconds = self.estimates[self.current].seconds
        self.age_steps += seconds
        share = min(EARLY_SHARE, max(LATE_SHARE, ROOT_SHARE / sqrt(self.age_steps)))
        self.credit_steps = min(MOST_CREDIT, self.credit_steps + share * seconds / rows)

    def trial(self) -> Option | None:
        """What may gain most for what it probably loses, among what the credit pays for."""
        current = self.estimates[self.current].rate
        losses = {option: each.loss(current) for option, each in self.estimates.items()}
        rivals = [
            option
            for option, each in self.estimates.items()
            if option not in {OFF, self.current}
            and (each.hope > HOPE_GAIN * current or each.bargain > START_DRAFTING_GAIN * current)
            and losses[option] <= self.credit_steps
        ]
        best = max(rivals, key=lambda each: (self.estimates[each].hope - current) / sqrt(losses[each]), default=None)
        self.trial_seconds = self.estimates[best].cost_ratio if best else 0.0
        return best

    def pay(self, step: StepObservation) -> None:
        """For a trial, what it lost. A step that only delivered an earlier forward was none: it is still to come."""
        if step.widest.asked:
            tokens = step.rows + sum(draft.accepted for draft in step.drafts)
            seconds = self.trial_seconds if step.widest.drafted else 1.0
            self.credit_steps -= max(LEAST_LOSS, seconds - tokens / self.rate(self.current))


class Governor:
    """One per loaded model, shared by its requests.

    `measured`: what steps cost, from the warm-up; `longest`: the most drafts of methods that have a limit.
    """

    def __init__(self, measured: Iterable[StepCost] = (), *, longest: Mapping[str, int] | None = None) -> None:
        self._longest = longest or {}
        self.costs = CostTable(measured)
        self._history = History()
        self._steps_since_plain = 0
        self._trying: _Seat | None = None
        self._seats: dict[tuple[str, ...], _Seat] = {}

    def choose(self, rows: int, drafting: Sequence[Drafting], methods: tuple[str, ...]) -> Choice:
        """The choice for the next step of `rows` rows, of which `drafting` may use `methods`. Ask once per step."""
        seat = self._seat(rows, drafting, methods)
        seat.settle()
        seat.earn(rows)
        option, kind, detail = seat.current, "draft", ""
        if self._measures(seat):
            option = OFF
        elif trial := seat.trial():
            option, kind = trial, "probe"
            self._trying = seat
        weighed = option
        if option == OFF:
            kind, detail = ("measuring", MEASURING) if seat.measuring_steps else ("plain", "")
            seat.measuring_steps = max(0, seat.measuring_steps - 1)
            weighed = max((each for each in seat.estimates if each != OFF), key=seat.rate)
        why = seat.estimates[weighed]
        return Choice(*option, Decision(kind, *weighed, why.cost_ratio, why.acceptance, detail))

    def observe(self, step: StepObservation) -> None:
        """Learn from a finished decode step, whoever chose it."""
        self._history.steps += 1
        for draft in step.drafts:
            if draft.asked:
                self._history.observe(draft)
        widest, trying, self._trying = step.widest, self._trying, None
        if trying:
            trying.pay(step)
        self._steps_since_plain = self._steps_since_plain + 1 if widest.asked else 0
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

    def _measures(self, seat: _Seat) -> bool:
        """Whether plain decoding is to be measured now: nothing is known of it, or it may be better than is thought."""
        if self._steps_since_plain > PLAIN_PAUSE_STEPS and not seat.measuring_steps:
            self._steps_since_plain = 0
            if seat.rate(seat.current) < PLAIN_DOUBT * seat.rate(OFF):
                seat.measuring_steps = PLAIN_STEPS
        return seat.measuring_steps > 0

    def _seat(self, rows: int, drafting: Sequence[Drafting], methods: tuple[str, ...]) -> _Seat:
        """Where these rows sit, weighed anew; new ones keep what pays, and may try its rivals."""
        seat, speakers = self._seats.setdefault(methods, _Seat()), frozenset(row.request_id for row in drafting)
        if not speakers <= seat.speakers:
            seat.credit_steps, seat.age_steps = max(seat.credit_steps, FIRST_CREDIT), 0.0
            if not any(self.costs.knows_plain(each, FIRST_STEPS - 1) for each in (1, rows)):
                seat.measuring_steps = FIRST_STEPS
        seat.speakers = speakers
        seat.estimates = self._estimates(rows, drafting, methods)
        return seat

    def _estimates(self, rows: int, drafting: Sequence[Drafting], methods: tuple[str, ...]) -> dict[Option, _Estimate]:
        plain = self.costs.forward(PLAIN, rows=rows).seconds(1)
        estimates = {OFF: _Estimate(rows, rows)}
        for method in methods:
            forward, drafted = self.costs.forward(method, rows=rows), self.costs.drafting(method, rows=rows)
            chances = [self._history.chances(method, row) for row in drafting]
            hopes = [self._history.hopes(method, row) for row in drafting]
            first = sum(each[1] for each in chances) / len(chances)
            idle = max(1.0, forward.seconds(1) / plain)
            longest = self._longest.get(method, DRAFT_LENGTHS[-1])
            for length in sorted({min(length, longest) for length in DRAFT_LENGTHS}):
                cycle = (drafted.seconds(length) + forward.seconds(1 + length)) / plain
                least = (drafted.seconds(length) + forward.least(1 + length)) / plain
                tokens, seconds = _promise(chances, rows, length, cycle, idle)
                most_tokens, least_seconds = _promise(hopes, rows, length, least, idle)
                hope, bargain = most_tokens / least_seconds, tokens / _promise(chances, rows, length, least, idle)[1]
                estimates[Option(method, length)] = _Estimate(
                    tokens / seconds, tokens, hope, seconds, cycle, first, bargain
                )
        return estimates


def _promise(chances: Sequence[Chances], rows: int, length: int, cycle: float, idle: float) -> tuple[float, float]:
    """Tokens of a step and its seconds: those of a cycle, unless nobody proposes anything."""
    proposes = 1 - prod(1 - proposal for proposal, *_ in chances)
    tokens = rows - len(chances) + sum(expected_tokens(each)[length] for each in chances)
    return tokens, proposes * cycle + (1 - proposes) * idle
