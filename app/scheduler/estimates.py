"""Acceptance estimates for drafts, by position, method, context length, and how sure the target is of its tokens."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from app.core.request import OFF
from app.core.step import Offer
from app.models.draft_lengths import LONGEST_CHAIN, LONGEST_DRAFT
from app.scheduler.costs import Average

PRIOR_WEIGHT, MAX_WEIGHT = 3.0, 256.0
"""Weight of the prior, and maximum weight of all earlier cycles together, in cycles."""
REQUEST_CYCLES = 8.5
"""Number of cycles after which a request's record weighs as much as the estimate for its situation."""
RECORD_DECAY = 0.98
"""Factor by which a request's record fades with each further cycle."""
RECENT_TOKENS = 64
"""Number of tokens after which evidence loses half its weight, counted from a drafter's last miss or a request's last
drafts. Also the number of tokens within which a drafter must make up for its catching up."""
CONFIDENCES = (0.5, 0.9, 0.97, 0.99)
"""Boundaries between classes of the target's confidence in its tokens."""
CONTEXT_TOKENS = 1_024
"""Context length, in tokens, that ends the first class; each doubling ends another: drafters get worse with length."""


class Kind(NamedTuple):
    """Kind of drafts: the method and, for an offer, the length class of its match: 1 token, 2-3, 4-7, ..."""

    method: str
    match: int = 0

    @classmethod
    def of(cls, method: str, offer: Offer | None) -> "Kind":
        """Return the kind of a method's drafts: an offer is as good as its match is long."""
        return cls(method, offer.matched_tokens.bit_length() if offer else 0)

    @property
    def prior(self) -> float:
        """Prior acceptance probability: the rule of succession after as many hits as the match is long, or one."""
        hits = 1 << max(0, self.match - 1)
        return (hits + 1) / (hits + 2)


@dataclass(frozen=True, slots=True)
class DraftingRow:
    """A row that may draft, with the lookup drafters' offers (`offered`).
    `confidence` is the probability that the target gave the row's last tokens, None before the first; `forced` counts
    drafts that a grammar makes certain, which precede offers; `max_drafts` bounds all drafts, including these."""

    request_id: str = ""
    context_tokens: int = 0
    offered: Mapping[str, Offer] = field(default_factory=dict)
    confidence: float | None = None
    forced: int = 0
    max_drafts: int = LONGEST_DRAFT

    @property
    def confidence_class(self) -> int:
        """Class of the confidence; 0 if there is none."""
        return 0 if self.confidence is None else 1 + bisect(CONFIDENCES, self.confidence)


class DraftObservation(NamedTuple):
    """One row of a step: number of drafts requested from `method`, verified (`drafted`) and accepted. None is requested
    if the method is `off`, or its drafter is still reading the text.

    A draft requested and not verified counts as missed. `match` is the class of an offer's match; `offset` counts the
    drafts of the same proposal that were observed earlier.
    """

    method: str = OFF
    requested: int = 0
    drafted: int = 0
    accepted: int = 0
    row: DraftingRow = DraftingRow()
    match: int = 0
    offset: int = 0


class _Record(NamedTuple):
    """A request's record of one kind of drafts: hits, misses and cycles, which fade, and the latest context length."""

    hits: float = 0.0
    misses: float = 0.0
    cycles: float = 0.0
    context_tokens: int = 0

    def after(self, draft: DraftObservation) -> "_Record":
        """Return the record with one more observation."""
        decay = 1.0 if draft.offset else RECORD_DECAY
        return _Record(
            decay * self.hits + draft.accepted,
            decay * self.misses + (draft.accepted < draft.requested),
            decay * self.cycles + (not draft.offset),
            draft.row.context_tokens,
        )


class _Situation(NamedTuple):
    """Subject of evidence: a kind of drafts, a class of context lengths, and a class of confidence (0: any)."""

    kind: Kind
    context: int
    confidence_class: int = 0

    @classmethod
    def of(cls, kind: Kind, row: DraftingRow) -> "_Situation":
        """Return the situation of a row."""
        return cls(kind, (row.context_tokens // CONTEXT_TOKENS).bit_length(), row.confidence_class)


class AcceptanceHistory:
    """Acceptance estimates by situation, and the records of running requests."""

    def __init__(self) -> None:
        self._estimates = defaultdict[_Situation, list[Average]](
            lambda: [Average(0.0) for _ in range(LONGEST_DRAFT + 1)]
        )
        """Estimates of each situation by draft position."""
        self._probabilities: dict[Kind, dict[_Situation, Sequence[float]]] = {}
        """Probabilities derived from the estimates, cached until an estimate of the same kind changes."""
        self._records: dict[str, dict[Kind, _Record]] = {}
        """Records by request and kind."""
        self.tokens = 0
        self._last_miss: dict[_Situation, int] = {}
        """Value of `tokens` (tokens per row, over all requests) at the last rejected draft in each situation."""

    def observe(self, draft: DraftObservation) -> None:
        """Learn how many drafts of a proposal one row accepted, or would have accepted of an offer."""
        kind, records = Kind(draft.method, draft.match), self._records.setdefault(draft.row.request_id, {})
        situation = _Situation.of(kind, draft.row)
        for variant in {situation, situation._replace(confidence_class=0)}:
            if draft.accepted < draft.requested:
                self._last_miss[variant] = self.tokens
            positions = self._estimates[variant]
            accepted_end = draft.offset + draft.accepted
            for position in range(
                draft.offset, min(accepted_end + 1, draft.offset + draft.requested, LONGEST_DRAFT + 1)
            ):
                positions[position].learn(float(position < accepted_end), MAX_WEIGHT)
        self._probabilities.pop(kind, None)
        records[kind] = records.get(kind, _Record()).after(draft)

    def expected_tokens(self, method: str, row: DraftingRow) -> tuple[Sequence[float], float]:
        """Return the expected tokens of a step by draft length 0, 1, 2, ..., and the evidence for them, in cycles.

        Tokens are the target's own and the accepted drafts, forced ones first. Evidence includes texts in which the
        target is more confident: a text in which it is less confident is no easier to draft.
        """
        kind = Kind.of(method, row.offered.get(method))
        situation, record = _Situation.of(kind, row), self._records.get(row.request_id, {}).get(kind)
        probabilities = self._position_probabilities(situation)
        if record is not None:
            # A few misses say little (first drafts often miss), a dozen in a row say nearly everything.
            weight = (
                _remaining_weight(row.context_tokens - record.context_tokens) * record.cycles / REQUEST_CYCLES
            ) ** 2
            share = record.hits / (record.hits + record.misses)
            probabilities = [(probability + weight * share) / (1 + weight) for probability in probabilities]
        tokens = list(accumulate(accumulate([1.0] * row.forced + list(probabilities), mul), initial=1.0))
        classes = range(row.confidence_class, len(CONFIDENCES) + 2) if row.confidence_class else (0,)
        known = [
            variant
            for confidence_class in classes
            if (variant := situation._replace(confidence_class=confidence_class)) in self._estimates
        ]
        ages = {variant: self.tokens - self._last_miss.get(variant, 0) for variant in known}
        return tokens, sum(_remaining_weight(age) * self._estimates[variant][0].weight for variant, age in ages.items())

    def unread(self, method: str, row: DraftingRow) -> int:
        """Return the tokens since the method last drafted for the row, or all; 0 if one cycle may emit as many."""
        if method in row.offered:
            return 0
        record = self._records.get(row.request_id, {}).get(Kind(method), _Record())
        unread_tokens = row.context_tokens - record.context_tokens
        return unread_tokens if unread_tokens > LONGEST_CHAIN + 2 else 0

    def forget(self, request_id: str) -> None:
        """Drop the record of a finished request; the estimates keep what it showed."""
        self._records.pop(request_id, None)

    def _position_probabilities(self, situation: _Situation) -> Sequence[float]:
        cached = self._probabilities.setdefault(situation.kind, {})
        if situation not in cached:
            cached[situation] = self._derive(situation)
        return cached[situation]

    def _derive(self, situation: _Situation) -> Sequence[float]:
        """Return acceptance probabilities by position, from evidence and a prior worth `PRIOR_WEIGHT` cycles.
        The prior is the mean of the previous position's probability and that in a more general situation."""
        context = situation.context if situation.confidence_class else situation.context - 1
        general = self._position_probabilities(_Situation(situation.kind, context)) if context >= 0 else None
        positions = self._estimates.get(situation)
        if positions is None:
            return general or [situation.kind.prior] * (LONGEST_DRAFT + 1)
        probabilities, previous = [], general[0] if general else situation.kind.prior
        for position, evidence in enumerate(positions):
            prior = (general[position] + previous) / 2 if general else previous
            previous = (evidence.weight * evidence.value + PRIOR_WEIGHT * prior) / (evidence.weight + PRIOR_WEIGHT)
            probabilities.append(previous)
        return probabilities


def _remaining_weight(tokens: int) -> float:
    """Return the share of its weight that evidence keeps after `tokens` more tokens."""
    return RECENT_TOKENS / (RECENT_TOKENS + max(0, tokens))
