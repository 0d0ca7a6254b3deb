"""Which drafter proposes how many tokens in the next step: the policy says what is allowed, the governor what pays.

Pure decisions: no clock and no I/O. Tokens never depend on them, so a wrong guess costs time and nothing else.

    expected tokens per second = sum over rows of sum_{j=0..K} prod_{i<=j} acceptance_i / (draft cost + verify cost)
"""

from dataclasses import dataclass

from app.core.ports import EngineLimits
from app.core.request import Request
from app.scheduler.estimates import PLAIN, Acceptance, CostTable, smooth

POLICIES = ("single", "auto", "off")
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
WARM_UP_STEPS = 3
FIRST_MEASURE_AFTER_STEPS = 32
LAST_MEASURE_AFTER_STEPS = 256
"""Drafting steps after which plain decoding is measured again, by two steps: the first only leaves the other pace."""
PROBE_STEPS = 4
FIRST_PROBE_AFTER_STEPS = 64
LAST_PROBE_AFTER_STEPS = 1_024
START_DRAFTING_GAIN, CHANGE_LENGTH_GAIN, STOP_DRAFTING_GAIN = 1.05, 1.03, 1.01
"""A change must promise this much: leaving plain decoding the most, returning to it the least (never slower)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How one row drafts. `reason` says why it does not, or not freely; `kind` groups reasons whose numbers change."""

    method: str = PLAIN
    num_draft_tokens: int = 0
    reason: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class DraftObservation:
    """One row of a step: drafts asked of `method`, verified ones, accepted ones. `asked` 0: the method had no say."""

    method: str = PLAIN
    asked: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One decode step as the governor sees it. `seconds` includes `draft_seconds`; `width` is the padded forward's."""

    rows: int
    width: int
    seconds: float
    draft_seconds: float = 0.0
    drafts: tuple[DraftObservation, ...] = ()
    typical: bool = True
    """False: a drafter also read a prompt in this step, so its time says nothing about the next ones."""


def allowed_methods(
    request: Request, *, policy: str, limits: EngineLimits, others: int
) -> tuple[tuple[str, ...], Choice]:
    """The methods that may draft for a request beside `others` more, best first; none, and the choice says why."""
    wish = request.speculation
    if wish.method == PLAIN:
        return (), Choice(reason="the request asked for it", kind="request")
    if policy == "off":
        return (), Choice(reason="speculation is switched off for this model (policy 'off')", kind="policy")
    methods = limits.drafters if wish.method == "auto" else (wish.method,)
    if not methods:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in limits.unavailable.items())
        return (), Choice(reason=reasons or "no drafter is loaded with this model", kind="drafters")
    if policy == "single" and others:
        noun = "request" if others == 1 else "requests"
        return (), Choice(
            reason=f"batched with {others} other {noun}: policy 'single' speculates when one runs", kind="batch"
        )
    return methods, Choice()


@dataclass(slots=True)
class _Seat:
    """What the governor remembers of one situation: so many rows, so many of them drafting, with these methods."""

    measuring: int
    current: Choice = Choice()
    measure_after: int = FIRST_MEASURE_AFTER_STEPS
    since_measured: int = 0
    since_probe: int = 0
    probe_after: int = FIRST_PROBE_AFTER_STEPS
    probing: int = 0
    rival: str = ""


class Governor:
    """Picks method and draft length by expected tokens per second; one per loaded model, shared by its requests."""

    def __init__(self) -> None:
        self._costs = CostTable()
        self._acceptance: dict[str, Acceptance] = {}
        self._draft_seconds: dict[tuple[str, int], float] = {}
        self._last_use: dict[str, int] = {}
        self._carried_tokens = 0.0
        self._steps = 0
        self._seats: dict[tuple[int, int, tuple[str, ...]], _Seat] = {}

    def choose(self, rows: int, drafting: int, methods: tuple[str, ...]) -> Choice:
        """The choice for the next step of `rows` rows, `drafting` of which may use `methods`. Ask once per step."""
        seat = self._seats.get((rows, drafting, methods))
        if seat is None:
            measured = self._costs.plain_samples(rows) >= WARM_UP_STEPS - 1
            seat = self._seats[rows, drafting, methods] = _Seat(measuring=0 if measured else WARM_UP_STEPS)
        if self._must_measure(seat, rows):
            return Choice(reason="measuring what a plain step costs, to compare", kind="measuring")
        rates = self._rates(rows, drafting, methods)
        self._settle(seat, rates)
        choice = self._probe(seat, rates) or seat.current
        if choice.method == PLAIN:
            return Choice(reason=self._why_plain(rates, rows, drafting), kind="governor")
        seat.since_measured += 1
        return choice

    def observe(self, step: StepObservation) -> None:
        """Learn from a finished decode step, whoever chose it."""
        self._steps += 1
        for draft in step.drafts:
            if draft.asked:
                self._last_use[draft.method] = self._steps
                self._accepts(draft.method).observe(asked=draft.asked, drafted=draft.drafted, accepted=draft.accepted)
        widest = max(step.drafts, key=lambda draft: (draft.drafted, draft.asked), default=DraftObservation())
        # A step whose drafter had nothing to propose is no plain step: nothing could be launched ahead of it.
        method = widest.method if widest.asked else PLAIN
        seconds = step.seconds - step.draft_seconds if widest.drafted else step.seconds
        self._costs.observe(method, rows=step.rows, width=step.width, seconds=seconds if step.typical else 0.0)
        if widest.drafted:
            if step.typical:
                self._learn_drafting(method, step.rows, step.draft_seconds / widest.drafted)
            self._carried_tokens += 0.1 * (step.width - 1 - widest.drafted - self._carried_tokens)

    def _learn_drafting(self, method: str, rows: int, seconds_per_token: float) -> None:
        known = self._draft_seconds.get((method, rows)) or None
        self._draft_seconds[method, rows] = smooth(known, seconds_per_token, 0.1)

    def _must_measure(self, seat: _Seat, rows: int) -> bool:
        due = seat.since_measured >= seat.measure_after
        if due and self._costs.plain_age(rows) >= seat.measure_after:
            seat.since_measured, seat.measuring = 0, 2
            seat.measure_after = min(2 * seat.measure_after, LAST_MEASURE_AFTER_STEPS)
        if not seat.measuring:
            return False
        seat.measuring -= 1
        return True

    def _settle(self, seat: _Seat, rates: dict[Choice, float]) -> None:
        """Move to the best option when it is better by more than noise."""
        best = max(rates, key=rates.__getitem__)
        needed = CHANGE_LENGTH_GAIN
        if seat.current.method == PLAIN:
            needed = START_DRAFTING_GAIN
        elif best.method == PLAIN:
            needed = STOP_DRAFTING_GAIN
        if rates[best] <= needed * rates[seat.current]:
            return
        if best.method != seat.current.method:
            seat.since_probe, seat.probing = 0, 0
            seat.probe_after = max(FIRST_PROBE_AFTER_STEPS, seat.probe_after // 2)
        seat.current = best

    def _probe(self, seat: _Seat, rates: dict[Choice, float]) -> Choice | None:
        """Now and then a few steps with a method that is not in use, ever more rarely while it loses."""
        rivals = {choice.method for choice in rates} - {PLAIN, seat.current.method}
        if not rivals:
            return None
        seat.since_probe += 1
        if seat.since_probe > seat.probe_after:
            seat.rival = min(sorted(rivals), key=lambda method: self._last_use.get(method, 0))
            seat.since_probe, seat.probing = 0, PROBE_STEPS
            seat.probe_after = min(2 * seat.probe_after, LAST_PROBE_AFTER_STEPS)
            self._accepts(seat.rival).forget(PROBE_STEPS)
        if not seat.probing:
            return None
        seat.probing -= 1
        return max((choice for choice in rates if choice.method == seat.rival), key=rates.__getitem__)

    def _rates(self, rows: int, drafting: int, methods: tuple[str, ...]) -> dict[Choice, float]:
        """Expected tokens per second of all rows, by choice."""
        rates = {Choice(): rows / self._costs.curve(PLAIN, rows=rows).narrowest_seconds}
        for method in methods:
            curve, accepts = self._costs.curve(method, rows=rows), self._accepts(method)
            expected = accepts.expected_tokens()
            proposes = 1 - (1 - accepts.proposal_rate) ** drafting
            draft_seconds = self._draft_seconds.get((method, rows), 0.0)
            for length in LENGTHS:
                speculative = length * draft_seconds + curve.seconds(1 + length + self._carried_tokens)
                seconds = proposes * speculative + (1 - proposes) * curve.narrowest_seconds
                rates[Choice(method, length)] = (rows - drafting + drafting * expected[length]) / seconds
        return rates

    def _why_plain(self, rates: dict[Choice, float], rows: int, drafting: int) -> str:
        best = max((choice for choice in rates if choice.method != PLAIN), key=rates.__getitem__)
        accepts = self._accepts(best.method)
        tokens = rows - drafting + drafting * accepts.expected_tokens()[best.num_draft_tokens]
        ratio = (tokens / rates[best]) / (rows / rates[Choice()])
        return (
            f"drafting {best.num_draft_tokens} with {best.method} costs {ratio:.1f}x a plain step, "
            f"acceptance {accepts.first:.2f}: plain is faster"
        )

    def _accepts(self, method: str) -> Acceptance:
        if method not in self._acceptance:
            prior, proposal_prior = (0.6, 0.5) if method == "ngram" else (0.8, 1.0)
            self._acceptance[method] = Acceptance(maximum=LENGTHS[-1], prior=prior, proposal_prior=proposal_prior)
        return self._acceptance[method]
