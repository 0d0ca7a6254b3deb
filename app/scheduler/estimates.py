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
from app.models.draft_lengths import LONGEST_DRAFT
from app.scheduler.costs import Average

FIRST_WEIGHT, MEMORY = 3.0, 256.0
"""Weight of the prior, and maximum weight of all earlier cycles together, in cycles."""
OWN_CYCLES = 8.5
"""Cycles of a request that weigh as much as all that is known of its situation."""
SO_FAR = 0.98
"""Factor by which a request's record fades with each further cycle."""
RECENT_TOKENS = 64
"""Half-life, in tokens, of evidence about a drafter since its last miss, and of a request's record without its drafts.
Also the tokens within which a drafter must make up for what it has to read first."""
CONFIDENCES = (0.5, 0.9, 0.97, 0.99)
"""Bounds between the classes of how sure the target is of its tokens."""
CONTEXT_TOKENS = 1_024
"""Context, in tokens, where the first class ends; each doubling is another, because drafters get worse with length."""


class Kind(NamedTuple):
    """Kind of drafts: the method and, for an offer, the length class of its match: 1 token, 2-3, 4-7, ..."""

    method: str
    match: int = 0

    @classmethod
    def of(cls, method: str, offer: Offer | None) -> "Kind":
        """Return the kind of a method's drafts: an offer is as good as its match is long."""
        return cls(method, offer.matched_tokens.bit_length() if offer else 0)

    @property
    def first_belief(self) -> float:
        """Prior probability of a draft: as if it had held for its match's length, or once (the rule of succession)."""
        held = 1 << max(0, self.match - 1)
        return (held + 1) / (held + 2)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A row that may draft, with the lookup drafters' offers (`offered`).
    `confidence` is the probability the target gave its last tokens, None before the first; `forced` counts drafts that
    a grammar makes certain, before the offers; `most_drafts` is the request's bound on drafts, including these."""

    request_id: str = ""
    context_tokens: int = 0
    offered: Mapping[str, Offer] = field(default_factory=dict)
    confidence: float | None = None
    forced: int = 0
    most_drafts: int = LONGEST_DRAFT

    @property
    def sureness(self) -> int:
        """Class of the confidence; 0 if there is none."""
        return 0 if self.confidence is None else 1 + bisect(CONFIDENCES, self.confidence)


class DraftObservation(NamedTuple):
    """One row of a step: drafts asked of `method`, verified and accepted. `asked` 0: the method was not involved.

    A draft asked for and not verified counts as missed. `match` is the class of an offer's match; `first` counts drafts
    of the same proposal observed before.
    """

    method: str = OFF
    asked: int = 0
    drafted: int = 0
    accepted: int = 0
    row: Drafting = Drafting()
    match: int = 0
    first: int = 0


class _Record(NamedTuple):
    """A request's record of a kind of drafts: right and wrong ones, earlier ones faded, and its last context."""

    right: float = 0.0
    wrong: float = 0.0
    cycles: float = 0.0
    context_tokens: int = 0

    def after(self, draft: DraftObservation) -> "_Record":
        """Return the record with one more observation."""
        so_far = 1.0 if draft.first else SO_FAR
        return _Record(
            so_far * self.right + draft.accepted,
            so_far * self.wrong + (draft.accepted < draft.asked),
            so_far * self.cycles + (not draft.first),
            draft.row.context_tokens,
        )


class _Situation(NamedTuple):
    """Subject of evidence: a kind of drafts, a class of context lengths, and how sure the target is; 0 means any."""

    kind: Kind
    context: int
    sureness: int = 0

    @classmethod
    def of(cls, kind: Kind, row: Drafting) -> "_Situation":
        """Return the situation of a row."""
        return cls(kind, (row.context_tokens // CONTEXT_TOKENS).bit_length(), row.sureness)


class AcceptanceHistory:
    """Acceptance estimates by situation, and the records of running requests."""

    def __init__(self) -> None:
        self._beliefs = defaultdict[_Situation, list[Average]](lambda: [Average(0.0) for _ in range(LONGEST_DRAFT + 1)])
        """Estimates of each situation by draft position."""
        self._drawn: dict[Kind, dict[_Situation, Sequence[float]]] = {}
        """Probabilities derived from the estimates, kept until one of the kind changes."""
        self._records: dict[str, dict[Kind, _Record]] = {}
        """Records by request and kind."""
        self.tokens = 0
        self._missed: dict[_Situation, int] = {}
        """Value of `tokens`, a count per row over all requests, at the last wrong draft in each situation."""

    def observe(self, draft: DraftObservation) -> None:
        """Learn what one row had accepted of a proposal, or would have."""
        kind, records = Kind(draft.method, draft.match), self._records.setdefault(draft.row.request_id, {})
        situation = _Situation.of(kind, draft.row)
        for about in {situation, situation._replace(sureness=0)}:
            if draft.accepted < draft.asked:
                self._missed[about] = self.tokens
            positions = self._beliefs[about]
            survived = draft.first + draft.accepted
            for place in range(draft.first, min(survived + 1, draft.first + draft.asked, LONGEST_DRAFT + 1)):
                positions[place].learn(float(place < survived), MEMORY)
        self._drawn.pop(kind, None)
        records[kind] = records.get(kind, _Record()).after(draft)

    def outlook(self, method: str, row: Drafting) -> tuple[Sequence[float], float]:
        """Return the expected tokens of a step by draft length 0, 1, 2, ..., and the cycles of evidence behind them.

        Tokens are the target's own and the surviving drafts, forced ones first. Evidence includes texts that the target
        is surer of: a less sure one is no easier to draft.
        """
        kind = Kind.of(method, row.offered.get(method))
        situation, record = _Situation.of(kind, row), self._records.get(row.request_id, {}).get(kind)
        chances = self._chances(situation)
        if record is not None:
            # A few misses say little (first drafts often miss), a dozen in a row say nearly everything.
            known = (_freshness(row.context_tokens - record.context_tokens) * record.cycles / OWN_CYCLES) ** 2
            share = record.right / (record.right + record.wrong)
            chances = [(chance + known * share) / (1 + known) for chance in chances]
        tokens = list(accumulate(accumulate([1.0] * row.forced + list(chances), mul), initial=1.0))
        surer = range(row.sureness, len(CONFIDENCES) + 2) if row.sureness else (0,)
        seen = [variant for sureness in surer if (variant := situation._replace(sureness=sureness)) in self._beliefs]
        ages = {variant: self.tokens - self._missed.get(variant, 0) for variant in seen}
        return tokens, sum(_freshness(age) * self._beliefs[variant][0].weight for variant, age in ages.items())

    def unread(self, method: str, row: Drafting) -> int:
        """Return the row's tokens since the method last drafted for it, or all; 0 for the few that any cycle brings."""
        if method in row.offered:
            return 0
        record = self._records.get(row.request_id, {}).get(Kind(method), _Record())
        unread_tokens = row.context_tokens - record.context_tokens
        return unread_tokens if unread_tokens > LONGEST_DRAFT + 2 else 0

    def forget(self, request_id: str) -> None:
        """Drop the record of a finished request; what it taught is kept."""
        self._records.pop(request_id, None)

    def _chances(self, situation: _Situation) -> Sequence[float]:
        drawn = self._drawn.setdefault(situation.kind, {})
        if situation not in drawn:
            drawn[situation] = self._draw(situation)
        return drawn[situation]

    def _draw(self, situation: _Situation) -> Sequence[float]:
        """Return probabilities by position: evidence, and a prior worth `FIRST_WEIGHT` cycles.
        The prior is half the previous position's probability and half what is known in general."""
        context = situation.context if situation.sureness else situation.context - 1
        general = self._chances(_Situation(situation.kind, context)) if context >= 0 else None
        positions = self._beliefs.get(situation)
        if positions is None:
            return general or [situation.kind.first_belief] * (LONGEST_DRAFT + 1)
        chances, before = [], general[0] if general else situation.kind.first_belief
        for place, evidence in enumerate(positions):
            believed = (general[place] + before) / 2 if general else before
            before = (evidence.weight * evidence.value + FIRST_WEIGHT * believed) / (evidence.weight + FIRST_WEIGHT)
            chances.append(before)
        return chances


def _freshness(tokens: int) -> float:
    """Return what is left of evidence after `tokens` tokens."""
    return RECENT_TOKENS / (RECENT_TOKENS + max(0, tokens))
