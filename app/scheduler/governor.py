"""Governor: chooses the drafter and draft length, or plain decoding, that promises the most tokens per second.

It reads no clock and does no I/O: the same steps lead to the same choices. Tokens never depend on the choices, so a
wrong one only costs time.

    expected tokens per second = sum over rows of sum_{j=0..K} prod_{i<=j} acceptance_i / (draft cost + verify cost)
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import sqrt
from typing import NamedTuple

from app.core.reason import NO_REASON, Reason
from app.core.request import OFF
from app.core.statistics import Decision
from app.core.step import Offer, StepCost
from app.models.draft_lengths import LONGEST_DRAFT, draft_lengths, longest_draft
from app.scheduler.costs import INTERVAL_STEPS, MAX_WEIGHT, NOISE, Average, CostTable, Shape
from app.scheduler.estimates import PRIOR_WEIGHT, RECENT_TOKENS, AcceptanceHistory, DraftingRow, DraftObservation

PLAIN_STEPS = 3
"""Number of steps in which plain decoding is measured if its cost is unknown; the first step only warms up."""
PLAIN_PAUSE_STEPS, CLEAR_SPEEDUP = 192, 1.5
"""Number of steps between measurements of plain decoding, unless drafting is `CLEAR_SPEEDUP` times as fast."""
CREDIT_STEPS, TRIAL_SHARE = 2.0, 0.01
"""Budget of trials: plain steps granted to each new request, then a share of its decoding time. Most is granted at the
start, because early knowledge pays longest."""
TRIAL_GAIN = 0.2
"""Relative gain that a trial must promise. It also bounds waste: with no credit left, the first step of a new text may
waste this share of one plain step."""


class Option(NamedTuple):
    """Method and draft length of a step."""

    method: str
    num_draft_tokens: int


PLAIN = Option(OFF, 0)


class DraftChoice(NamedTuple):
    """Method and draft length of one row, and the reasons for them."""

    method: str = OFF
    num_draft_tokens: int = 0
    decision: Decision = Decision()
    refusal: Reason = NO_REASON
    """Reason for not drafting, where it was not allowed or would not pay."""
    max_draft_tokens: int = LONGEST_DRAFT
    """Maximum number of drafts, including those that a grammar forces after the drafter's."""


class StepObservation(NamedTuple):
    """One decode step as the governor sees it.

    `width` is that of the padded forward, `seconds` includes drafting, `context_tokens` is the longest row's context.
    `draft_seconds` is None if drafting was not timed. `appended` counts positions of the width that no drafter drafted.
    `typical` is False if the step only delivered an earlier forward, or read a prompt: its time is not representative.
    """

    rows: int
    width: int
    seconds: float
    draft_seconds: float | None = None
    drafts: tuple[DraftObservation, ...] = ()
    typical: bool = True
    context_tokens: int = 0
    appended: int = 0

    @property
    def widest(self) -> DraftObservation:
        """Row that drafted most: the step's cost is attributed to its method."""
        return max(self.drafts, key=lambda draft: (draft.drafted, draft.requested), default=DraftObservation())


class _Estimate(NamedTuple):
    """Estimate for one option: `rate` is the expected number of tokens of all rows in the time of a plain step,
    `optimistic_rate` the same if all unknowns turn out well. `tokens` and `seconds` are those of one step. `seconds`
    and `catch_up`, the time for what the drafter must read first, are in plain steps."""

    rate: float
    tokens: float
    seconds: float = 1.0
    optimistic_rate: float = 0.0
    acceptance: float = 0.0
    catch_up: float = 0.0

    def loss(self, rate: float) -> float:
        """Return the expected loss of one step with this option, in plain steps, against the current `rate`."""
        return max(NOISE, self.seconds + self.catch_up - self.tokens / rate)


class _Expectation(NamedTuple):
    """Expectations of one row and method: tokens of a step by number of drafts, their uncertainty (1: nothing is
    known), and the maximum number of drafts."""

    tokens: Sequence[float]
    uncertainty: float
    most: int

    def expected(self, drafts: int) -> float:
        """Return the expected tokens of a step with `drafts` drafts."""
        return self.tokens[min(self.most, drafts)]

    def optimistic(self, drafts: int) -> float:
        """Return the same if all unknowns turn out well."""
        drafts = min(self.most, drafts)
        right = self.tokens[drafts]
        return right + self.uncertainty * (1 + drafts - right)


class _Judgement(NamedTuple):
    """The option to use, the best option that drafts, and the options worth a trial with their losses, best first."""

    estimates: Mapping[Option, _Estimate]
    option: Option
    best_drafting: Option
    trials: Sequence[tuple[float, Option]]


class Governor:
    """One per loaded model, shared by its requests.

    `measured` are step costs known at load; `longest` is the maximum number of drafts of each method;
    `cheap_tokens` are the token counts just before a forward gets slower on this chip.
    """

    def __init__(
        self,
        measured: Iterable[StepCost] = (),
        *,
        longest: Mapping[str, int] | None = None,
        cheap_tokens: tuple[int, ...] = (),
    ) -> None:
        self._longest = longest or {}
        self._cheap_tokens = cheap_tokens
        self.costs = CostTable(measured, cheap_tokens=cheap_tokens)
        self._history = AcceptanceHistory()
        self._lookup_methods: set[str] = set()
        self._catch_up_costs = defaultdict[str, tuple[Average, Average]](lambda: (Average(0.0), Average(0.0)))
        """Average catch-up in plain steps, and in tokens, by method: their ratio gives long catch-ups more weight."""
        self._caught_up = set[str]()
        """Methods that have caught up once; the first time also reads weights from disk and compiles kernels."""
        self._reading_steps = defaultdict[str, float](float)
        """Time, in plain steps, for which a drafter has read each request's text without having drafted yet."""
        self._memo: tuple[object, _Judgement] | None = None
        self._known_requests: set[str] = set()
        self._current: dict[tuple[str, ...], Option] = {}
        self._measuring_steps = self._steps_since_plain = 0
        self._credit_steps = 0.0
        self._trial: tuple[float, float] | None = None
        """Cost of the trial in progress, in plain steps, and the rate of the option it replaces; None: no trial."""

    def choose(
        self, rows: int, drafting: Sequence[DraftingRow], methods: tuple[str, ...], *, tries: bool = True
    ) -> DraftChoice:
        """Choose for the next step of `rows` rows, of which `drafting` may use `methods`. Without `tries`,
        nothing is measured or tried: if other rows use other methods, the step's cost would say nothing about these."""
        estimates, option, best_drafting, trials = self._current_judgement(rows, drafting, methods)
        self._credit_new_requests(rows, drafting)
        # A trial informs about all its rows, so a batch needs fewer trials.
        most = max(CREDIT_STEPS, min((loss for loss, _ in trials), default=0.0))
        self._credit_steps = min(most, self._credit_steps + TRIAL_SHARE * estimates[option].seconds / rows)
        kind, refusal = "draft", NO_REASON
        context = max(row.context_tokens for row in drafting)
        # No forward is cheaper than a plain one. If one seems to be, a pause was counted in the plain cost.
        known = self.costs.knows_context(context) and estimates[option].seconds >= 1 - NOISE
        if tries and self._take_plain_measurement(estimates[option].rate / estimates[PLAIN].rate, known=known):
            option, refusal = PLAIN, Reason("measuring")
        elif trial := next((shape for loss, shape in trials if tries and loss <= self._credit_steps), None):
            self._trial = estimates[trial].seconds + estimates[trial].catch_up, estimates[option].rate
            option, kind = trial, "probe"
        elif option == PLAIN:
            refusal = Reason("no_match") if best_drafting == PLAIN else _slower(best_drafting, estimates[best_drafting])
        weighed = best_drafting if option == PLAIN else option
        estimate = estimates[weighed]
        return DraftChoice(
            *option, Decision(refusal.code or kind, *weighed, estimate.seconds, estimate.acceptance), refusal
        )

    def widest(self, rows: int, drafting: Sequence[DraftingRow], methods: tuple[str, ...], choice: DraftChoice) -> int:
        """Return the maximum number of drafts that pays off if a grammar forces those after the chosen ones.
        Forced drafts cost no drafting, and are accepted whenever all drafts before them are."""
        method, length = option = Option(choice.method, choice.num_draft_tokens)
        rate = self._current_judgement(rows, drafting, methods).estimates[option].rate
        cycle = self.costs.curves(OFF, rows, max(row.context_tokens for row in drafting)).cycle
        expectations = [self._history.expected_tokens(method, row)[0] for row in drafting]
        survival = sum(tokens[length] - tokens[length - 1] for tokens in expectations)
        gains = {length + more: more * survival for more in range(max(0, longest_draft(rows) - length) + 1)}
        return max(most for most, gain in gains.items() if gain >= rate * (cycle(most)[0] - cycle(length)[0]))

    def observe(self, step: StepObservation) -> None:
        """Learn from a finished decode step, whether or not the governor chose it."""
        unread = self._observe_reading(step)
        accepted = sum(draft.accepted for draft in step.drafts)
        self._history.tokens += 1 + accepted // step.rows
        self.observe_drafts(draft for draft in step.drafts if draft.requested and draft.method not in draft.row.offered)
        widest, trial, self._trial = step.widest, self._trial, None
        if trial and widest.requested:  # else it only delivered an earlier forward, and the trial is still to come
            seconds, rate = trial
            self._credit_steps -= max(NOISE, (seconds if widest.drafted else 1.0) - (step.rows + accepted) / rate)
        self._steps_since_plain = self._steps_since_plain + 1 if widest.requested else 0
        # A step whose drafter had nothing to propose is not a plain step: the next forward was not launched ahead.
        shape, saved_seconds = Shape(widest.method if widest.requested else OFF, step.rows, step.width - 1), 0.0
        if step.appended:  # as if all had been drafted
            drafting = self.costs.curves(shape.method, step.rows, step.context_tokens).drafting
            saved_seconds = drafting.at(shape.drafts) - drafting.at(shape.drafts - step.appended)
        self.costs.observe(
            shape,
            seconds=step.seconds + saved_seconds if step.typical and not unread else 0.0,
            draft_seconds=(None if step.appended else step.draft_seconds) if widest.drafted else 0.0,
            context=step.context_tokens,
        )

    def _observe_reading(self, step: StepObservation) -> int:
        """Learn how long drafters take to catch up. Return how many tokens were read for the drafts of this step."""
        drafted = [draft for draft in step.drafts if draft.drafted]
        unread = sum(self._history.unread(draft.method, draft.row) for draft in drafted)
        reading = [draft for draft in step.drafts if draft.method != OFF and not draft.requested]
        if not (step.seconds and (reading or (unread and step.typical))):
            return unread
        method = step.widest.method
        curves = self.costs.curves(method, step.rows, step.context_tokens)
        steps = step.seconds / curves.plain - curves.cycle(step.width - 1)[0]
        for draft in reading:
            self._reading_steps[draft.row.request_id] += steps / len(reading)
        if not reading:
            steps += sum(self._reading_steps.pop(draft.row.request_id, 0.0) for draft in drafted)
            if method in self._caught_up:
                for average, sample in zip(self._catch_up_costs[method], (steps, float(unread)), strict=True):
                    average.learn(sample, MAX_WEIGHT)
            self._caught_up.add(method)
        return unread

    def observe_drafts(self, drafts: Iterable[DraftObservation]) -> None:
        """Learn how many drafts were accepted, or would have been accepted of offers."""
        for draft in drafts:
            self._history.observe(draft)
            self._memo = None

    def forget(self, request_id: str) -> None:
        """Forget a finished request."""
        self._history.forget(request_id)
        self._known_requests.discard(request_id)
        self._reading_steps.pop(request_id, None)

    def _credit_new_requests(self, rows: int, drafting: Sequence[DraftingRow]) -> None:
        """Give new requests credit for trials, and have plain decoding measured if it is unknown."""
        if new := {row.request_id for row in drafting} - self._known_requests:
            self._known_requests |= new
            self._credit_steps = max(self._credit_steps, min(CREDIT_STEPS, self._credit_steps + CREDIT_STEPS))
            if not any(self.costs.knows_plain(row_count, PLAIN_STEPS - 1) for row_count in (1, rows)):
                self._measuring_steps = PLAIN_STEPS

    def _take_plain_measurement(self, speedup: float, *, known: bool) -> bool:
        """Return whether to measure plain decoding now: its cost is unknown, at all or in this context, or outdated."""
        if self._steps_since_plain > (PLAIN_PAUSE_STEPS if known else INTERVAL_STEPS) and not self._measuring_steps:
            self._steps_since_plain = 0
            self._measuring_steps = PLAIN_STEPS - 1 if speedup < CLEAR_SPEEDUP or not known else 0
        measures = self._measuring_steps > 0
        self._measuring_steps -= measures
        return measures

    def _current_judgement(self, rows: int, drafting: Sequence[DraftingRow], methods: tuple[str, ...]) -> _Judgement:
        """Return the judgement, renewed only after a change: consecutive plain steps cost the host next to nothing."""
        rows_key = tuple(
            (
                row.request_id in self._known_requests,
                row.request_id,
                row.confidence_class,
                row.max_drafts,
                row.forced,
                offers,
            )
            for row, offers in ((row, tuple(row.offered.values())) for row in drafting)
        )
        context = max(row.context_tokens for row in drafting)
        key = (rows, methods, rows_key, context // INTERVAL_STEPS, self.costs.version)
        if not self._memo or self._memo[0] != key:
            judgement = _judge(self._current.get(methods, PLAIN), self._weigh(rows, drafting, methods))
            self._memo, self._current[methods] = (key, judgement), judgement.option
        return self._memo[1]

    def _weigh(
        self, rows: int, drafting: Sequence[DraftingRow], methods: tuple[str, ...]
    ) -> Mapping[Option, _Estimate]:
        """Return the estimates of all options, plain decoding included; those too risky for a new text are left out."""
        self._lookup_methods |= {name for row in drafting for name in row.offered}
        is_new = not any(row.request_id in self._known_requests for row in drafting)
        estimates = {PLAIN: _Estimate(rows, rows)}
        for method in methods:
            for option, estimate in self._estimates(method, rows, drafting):
                # A new text's kind is unknown: it may risk the credit, or little by the acceptance of earlier texts.
                wasted = estimate.seconds * (1 - estimate.tokens / (rows * (1 + option.num_draft_tokens)))
                if not is_new or estimate.seconds <= 1 + CREDIT_STEPS or wasted <= TRIAL_GAIN:
                    estimates[option] = estimate
        return estimates

    def _estimates(self, method: str, rows: int, drafting: Sequence[DraftingRow]) -> Iterator[tuple[Option, _Estimate]]:
        """Yield each option of a method with its estimate; none if the method can draft for no row."""
        longest = [self._longest_draft(method, row) for row in drafting]
        if not any(longest):
            return
        expectations = [
            self._expectation(method, row, longest_allowed)
            for row, longest_allowed in zip(drafting, longest, strict=True)
        ]
        context, forced = max(row.context_tokens for row in drafting), min(row.forced for row in drafting)
        curves, plain = (self.costs.curves(name, rows, context) for name in (method, OFF))
        first = sum(expectation.tokens[1] - 1 for expectation in expectations) / len(expectations)
        catch_up = self._catch_up_steps(method, drafting)
        longest_allowed = max(longest) if self.costs.knows_drafting(method) else min(max(longest), forced + 1)
        for option in _options(method, longest_allowed, draft_lengths(self._cheap_tokens, rows)):
            length, other_rows = option.num_draft_tokens, float(rows - len(drafting))
            expected = sum((expectation.expected(length) for expectation in expectations), start=other_rows)
            optimistic = sum((expectation.optimistic(length) for expectation in expectations), start=other_rows)
            runs_drafter = length > forced  # forced tokens need no drafter
            catch_up_share = runs_drafter * catch_up * expected / (rows * RECENT_TOKENS)
            cycle, at_best = (curves if runs_drafter else plain).cycle(length)
            yield (
                option,
                _Estimate(
                    expected / (cycle + catch_up_share),
                    expected,
                    cycle,
                    optimistic / (at_best + catch_up_share),
                    first,
                    catch_up,
                ),
            )

    def _longest_draft(self, method: str, row: DraftingRow) -> int:
        """Return how many tokens a method may draft for a row; a lookup method's offer follows forced tokens."""
        offered = row.offered.get(method, Offer()) if method in self._lookup_methods else None
        most = max(row.forced, self._longest.get(method, LONGEST_DRAFT))
        return min(row.max_drafts, most if offered is None else row.forced + len(offered.tokens))

    def _expectation(self, method: str, row: DraftingRow, most: int) -> _Expectation:
        tokens, weight = self._history.expected_tokens(method, row)
        # Offers need no trial: they are assessed without being used.
        uncertainty = 0.0 if method in self._lookup_methods else PRIOR_WEIGHT / (PRIOR_WEIGHT + weight)
        return _Expectation(tokens, uncertainty, most)

    def _catch_up_steps(self, method: str, drafting: Sequence[DraftingRow]) -> float:
        """Return the time, in plain steps, that a drafter takes to catch up on these rows."""
        steps, tokens_read = self._catch_up_costs[method]
        unread = sum(self._history.unread(method, row) for row in drafting)
        return max(0.0, steps.value) / max(1.0, tokens_read.value) * unread


def _slower(option: Option, estimate: _Estimate) -> Reason:
    method, count = option
    share, ratio = round(estimate.acceptance, 2), round(estimate.seconds, 1)
    return Reason("plain", {"method": method, "count": count, "ratio": ratio, "share": share})


@cache
def _options(method: str, most: int, lengths: tuple[int, ...]) -> Sequence[Option]:
    """Return the options to consider for a method if at most `most` drafts are possible."""
    return [Option(method, length) for length in sorted({min(length, most) for length in lengths})]


def _judge(current: Option, estimates: Mapping[Option, _Estimate]) -> _Judgement:
    """Judge which option is best by more than noise, and which may gain most for their expected loss."""
    if current not in estimates or estimates[current].rate < estimates[PLAIN].rate:
        current = PLAIN
    best_drafting = max(
        (candidate for candidate in estimates if candidate != PLAIN),
        key=lambda candidate: estimates[candidate].rate,
        default=PLAIN,
    )
    option = best_drafting if estimates[best_drafting].rate > (1 + NOISE) * estimates[current].rate else current
    rate = estimates[option].rate
    candidates = (
        (estimate.optimistic_rate - rate, estimate.loss(rate), name)
        for name, estimate in estimates.items()
        if name != option
    )
    trials = sorted((-gain / sqrt(loss), loss, name) for gain, loss, name in candidates if gain > TRIAL_GAIN * rate)
    return _Judgement(estimates, option, best_drafting, [trial[1:] for trial in trials])
