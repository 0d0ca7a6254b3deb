"""Chooses how each row of a decode step drafts: the policy decides what is allowed, the governor what pays off."""

from collections.abc import Iterable, Mapping, Sequence

from app.core.reason import DRAFTER_READS, Reason
from app.core.request import AUTO, OFF, DraftingPolicy, Request, SpeculationRequest
from app.core.statistics import PhaseSeconds
from app.core.step import DecodeRow, EngineLimits, RowOutcome, StepCost, StepResult
from app.models.draft_lengths import LONGEST_DRAFT, longest_draft
from app.scheduler.estimates import DraftingRow, DraftObservation
from app.scheduler.governor import DraftChoice, Governor, StepObservation
from app.scheduler.sequence import LiveSequence


def allowed_methods(
    request: Request, *, policy: DraftingPolicy, limits: EngineLimits, others: int
) -> tuple[tuple[str, ...], DraftChoice]:
    """Return the methods that may draft for a request while `others` run, best first; if none, the choice says why."""
    requested = request.speculation
    policy = requested.policy or policy
    if requested.method == OFF:
        return (), _refused("asked")
    if policy == OFF:
        return (), _refused("policy_off")
    allowed = (requested.methods or limits.drafters) if requested.method == AUTO else (requested.method,)
    available = limits.available
    methods = tuple(name for name in allowed if name in available)
    if not methods:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in limits.unavailable.items())
        return (), _refused("drafters", detail=reasons) if reasons else _refused("no_drafter")
    if policy == "single" and others:
        return (), _refused("batched")
    return methods, DraftChoice()


def _refused(code: str, **values: str) -> DraftChoice:
    return DraftChoice(refusal=Reason(code, values))


class PhaseSplitter:
    """Splits the seconds of steps by phase: timed steps as measured, others like the method's last timed step."""

    def __init__(self) -> None:
        self._shares: dict[str, tuple[float, float]] = {}

    def split(self, result: StepResult, method: str, draft_seconds: float) -> PhaseSeconds:
        """Return a step's seconds by phase; `draft_seconds` is the usual duration of its drafting."""
        if method == OFF:
            return PhaseSeconds(verify_seconds=result.seconds)
        if phases := result.phase_seconds:
            if (rest := result.seconds - phases.draft_seconds) > 0:
                self._shares[method] = phases.verify_seconds / rest, phases.rewind_seconds / rest
            return phases
        drafting = min(draft_seconds, result.seconds)
        verify, rewind = self._shares.get(method, (1.0, 0.0))
        rest = result.seconds - drafting
        return PhaseSeconds(drafting, verify * rest, rewind * rest)


class Speculation:
    """Drafting choices of one loaded model. `default_speculation` is for requests that set no draft length."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        policy: DraftingPolicy,
        default_speculation: SpeculationRequest,
        measured: Iterable[StepCost],
    ) -> None:
        self._limits = limits
        self.policy = policy
        self.default_speculation = default_speculation
        self._governor = Governor(measured, longest=limits.longest_drafts, cheap_tokens=limits.cheap_tokens)
        self._phase_splitter = PhaseSplitter()
        self.costs = self._governor.costs

    def choose(self, decoding: Sequence[LiveSequence], *, others: int) -> dict[str, DraftChoice]:
        """Return a choice per row. Rows that are left to the governor and may use the same methods share a choice."""
        choices: dict[str, DraftChoice] = {}
        longest = longest_draft(len(decoding))
        governed: dict[tuple[str, ...], list[tuple[LiveSequence, DraftingRow]]] = {}
        for sequence in decoding:
            request = sequence.request
            methods, refusal = allowed_methods(request, policy=self.policy, limits=self._limits, others=others)
            is_named, length = self._length(sequence, longest)
            if not methods:
                choices[request.id] = refusal
            elif length == 0:
                choices[request.id] = _refused("asked")
            elif is_named and length is not None:
                choices[request.id] = DraftChoice(methods[0], length, max_draft_tokens=longest)
            else:
                # One token is the target's own; the last step drafts nothing, whatever is chosen.
                room = max(1, min(length or longest, sequence.remaining(self._limits.max_context_tokens) - 1))
                governed.setdefault(methods, []).append((sequence, _drafting_row(sequence, room)))
        for methods, rows in governed.items():
            drafting = [row for _, row in rows]
            choice = self._governor.choose(len(decoding), drafting, methods, tries=len(governed) == 1)
            if choice.num_draft_tokens and any(sequence.request.constraint for sequence, _ in rows):
                most = self._governor.widest(len(decoding), drafting, methods, choice)
                choice = choice._replace(max_draft_tokens=most)
            for sequence, row in rows:
                drafts = min(choice.num_draft_tokens, row.max_drafts)
                choices[sequence.request.id] = choice._replace(num_draft_tokens=drafts)
                sequence.decision = choice.decision
        return choices

    def _length(self, sequence: LiveSequence, longest: int) -> tuple[bool, int | None]:
        """Return whether a method is named, and the number of drafts requested: exact if one is named, else a maximum.
        Tokens that a grammar forces are not guesses: they are added to that number."""
        requested = sequence.request.speculation
        is_named = {requested.method, self.default_speculation.method} != {AUTO}
        length = self.default_speculation.num_draft_tokens
        if requested.num_draft_tokens is not None:
            is_named, length = requested.method != AUTO, requested.num_draft_tokens
        return is_named, length and max(length, min(longest, length + sequence.forced))

    def must_time(self, rows: Sequence[DecodeRow]) -> bool:
        """Return whether to wait for the phases of this step one by one, to time them."""
        widest = max(rows, key=lambda row: row.num_draft_tokens)
        if not widest.num_draft_tokens:
            return False
        context = max(len(row.tokens) for row in rows)
        return self._governor.costs.must_time(
            widest.method, rows=len(rows), drafts=widest.num_draft_tokens, context=context
        )

    def observe(
        self, planned: Mapping[str, DecodeRow], running: Mapping[str, LiveSequence], result: StepResult
    ) -> PhaseSeconds:
        """Learn from a step; return its seconds by phase."""
        step = _observation(planned, running, result)
        widest = step.widest
        drafting = 0.0
        if widest.drafted:
            curves = self._governor.costs.curves(widest.method, step.rows, step.context_tokens)
            drafting = curves.drafting.at(widest.drafted)
        self._governor.observe(step)
        return self._phase_splitter.split(result, widest.method if widest.drafted else OFF, drafting)

    def observe_offers(self, running: Mapping[str, LiveSequence], result: StepResult) -> None:
        """Learn what earlier offers would have been worth, and record the new ones."""
        emitted = {outcome.sequence_id: outcome.emitted for outcome in result.outcomes}
        for name, offers in result.offers.items():
            if sequence := running.get(name):
                row, sequence.forced = _drafting_row(sequence), result.forced.get(name, 0)
                new = emitted.get(name, ())
                self._governor.observe_drafts(sequence.offer_tracker.update(new, offers, row, forced=sequence.forced))

    def forget(self, request_id: str) -> None:
        """Forget a finished request."""
        self._governor.forget(request_id)


def _drafting_row(sequence: LiveSequence, max_drafts: int = LONGEST_DRAFT) -> DraftingRow:
    confidence = sequence.confidence.value if sequence.confidence.weight else None
    offered, forced = sequence.offer_tracker.offered, sequence.forced
    return DraftingRow(sequence.request.id, len(sequence.tokens), offered, confidence, forced, max_drafts)


def _observation(
    planned: Mapping[str, DecodeRow], running: Mapping[str, LiveSequence], result: StepResult
) -> StepObservation:
    """Return what the governor may learn from a step."""
    rows = [
        _observed(outcome, planned.get(outcome.sequence_id), running.get(outcome.sequence_id))
        for outcome in result.outcomes
    ]
    whole = max((outcome.drafted for outcome in result.outcomes), default=0)
    by_drafters = max((outcome.drafted - outcome.appended for outcome in result.outcomes), default=0)
    return StepObservation(
        rows=len(rows),
        width=result.width,
        seconds=result.seconds,
        appended=whole - by_drafters,
        draft_seconds=result.phase_seconds.draft_seconds if result.phase_seconds else None,
        drafts=tuple(draft for draft, _ in rows),
        typical=all(is_typical for _, is_typical in rows),
        context_tokens=max((len(row.tokens) for row in planned.values()), default=0),
    )


def _observed(
    outcome: RowOutcome, row: DecodeRow | None, sequence: LiveSequence | None
) -> tuple[DraftObservation, bool]:
    """Return what a row shows about its drafter, and whether the step's time is representative."""
    if row is None:
        return DraftObservation(), True
    reads = row.computed < row.prompt_length - 1  # it fed the whole prompt, and its drafter had no features yet
    if sequence is not None and outcome.why_not_drafted == DRAFTER_READS:
        return DraftObservation(row.method, row=_drafting_row(sequence)), False
    if outcome.method not in {OFF, row.method}:  # its step took several slices: it was planned earlier, and otherwise
        return DraftObservation(), False
    drafts_or_says_why = outcome.drafted or (outcome.why_not_drafted and not reads)
    if sequence is None or not drafts_or_says_why:
        # It delivered an earlier plain forward. If drafts were planned, nothing was launched and the step took no time.
        return DraftObservation(), not reads and not row.num_draft_tokens
    # Forced drafts are no evidence about the drafter. If one is rejected, the text was merely tokenized differently, so
    # the drafts after it are not counted either.
    by_drafter = outcome.drafted - outcome.appended
    forced = min(by_drafter, sequence.forced)
    requested, accepted = row.num_draft_tokens - forced, min(by_drafter, outcome.accepted) - forced
    is_typical = accepted >= 0 and not reads
    if requested <= 0 or accepted < 0:
        return DraftObservation(), is_typical
    return DraftObservation(row.method, requested, by_drafter - forced, accepted, _drafting_row(sequence)), is_typical
