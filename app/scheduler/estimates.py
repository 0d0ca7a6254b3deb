"""How likely drafts are accepted: by position, method, context length, and how sure the target is of its tokens."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from app.core.draft_lengths import LONGEST_DRAFT
from app.core.step import Offer
from app.scheduler.costs import PLAIN, Average

FIRST_WEIGHT, MEMORY = 3.0, 256.0
"""Cycles that outweigh what was believed before, and that all former ones count for at most."""
OWN_CYCLES = 8.5
"""Of a request, which count as much as all that is known of such situations."""
SO_FAR = 0.98
"""What a cycle counts for in the record of its request once the next one was seen."""
RECENT_TOKENS = 64
"""After so many without a miss of a drafter, what is known of it weighs half; without its drafts, its record does.
Within so many it has to make up for what it must read first."""
CONFIDENCES = (0.5, 0.9, 0.97, 0.99)
"""How sure the target is of its tokens; texts between two of them are alike."""
CONTEXT_TOKENS = 1_024
"""A drafter gets worse with the context: lengths below, and each doubling, are told apart."""


class Kind(NamedTuple):
    """Whose drafts; `match`: of an offer, how long the match behind it is: 1 token, 2-3, 4-7, ..."""

    method: str
    match: int = 0

    @classmethod
    def of(cls, method: str, offer: Offer | None) -> "Kind":
        """An offer is as good as the match behind it is long."""
        return cls(method, offer.matched_tokens.bit_length() if offer else 0)

    @property
    def first_belief(self) -> float:
        """How likely a draft is before anything was seen: as if it had held for the length of its match, or once (the
        rule of succession)."""
        held = 1 << max(0, self.match - 1)
        return (held + 1) / (held + 2)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A row that may draft. `offered`: by the methods that tell it for nothing; `confidence`: how likely the target
    thought its last tokens, None before the first; `forced`: how many drafts a grammar makes certain, before what is
    offered; `most_drafts`: what its request bounds a draft to, with these."""

    request_id: str = ""
    context_tokens: int = 0
    offered: Mapping[str, Offer] = field(default_factory=dict)
    confidence: float | None = None
    forced: int = 0
    most_drafts: int = LONGEST_DRAFT

    @property
    def sureness(self) -> int:
        """A class of confidences; 0: there is none."""
        return 0 if self.confidence is None else 1 + bisect(CONFIDENCES, self.confidence)


class DraftObservation(NamedTuple):
    """One row of a step: drafts asked of `method`, verified ones, accepted ones. `asked` 0: the method had no say.

    What is asked for and not drafted counts as missed. `match`: of an offer, the class of its match; `first`: so many
    drafts of the same proposal were told before.
    """

    method: str = PLAIN
    asked: int = 0
    drafted: int = 0
    accepted: int = 0
    row: Drafting = Drafting()
    match: int = 0
    first: int = 0


class _Record(NamedTuple):
    """What one request had of a kind of drafts: right and wrong ones, earlier ones faded; its context at the last."""

    right: float = 0.0
    wrong: float = 0.0
    cycles: float = 0.0
    context_tokens: int = 0

    def after(self, draft: DraftObservation) -> "_Record":
        """The record with one observation more."""
        so_far = 1.0 if draft.first else SO_FAR
        return _Record(
            so_far * self.right + draft.accepted,
            so_far * self.wrong + (draft.accepted < draft.asked),
            so_far * self.cycles + (not draft.first),
            draft.row.context_tokens,
        )


class _Situation(NamedTuple):
    """What evidence is about: a kind of drafts, a range of context lengths, and how sure the target is; 0: any."""

    kind: Kind
    context: int
    sureness: int = 0

    @classmethod
    def of(cls, kind: Kind, row: Drafting) -> "_Situation":
        """A row's."""
        return cls(kind, (row.context_tokens // CONTEXT_TOKENS).bit_length(), row.sureness)


class AcceptanceHistory:
    """Beliefs by situation, and the records of the requests that run."""

    def __init__(self) -> None:
        self._beliefs = defaultdict[_Situation, list[Average]](lambda: [Average(0.0) for _ in range(LONGEST_DRAFT + 1)])
        """By position."""
        self._drawn: dict[Kind, dict[_Situation, Sequence[float]]] = {}
        """What follows from the beliefs, until one of the kind changes."""
        self._records: dict[str, dict[Kind, _Record]] = {}
        """By request and kind."""
        self.tokens = 0
        self._missed: dict[_Situation, int] = {}
        """How many tokens a row got, whichever request was that, in all and before a draft was last wrong."""

    def observe(self, draft: DraftObservation) -> None:
        """What one row had accepted of a proposal, or would have."""
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
        """What to expect of the method's next proposal for this row: tokens of a step by draft length 0, 1, 2, ... (the
        target's own one plus the drafts that survive, first those that are forced), and how many cycles of such a
        situation are behind that, or of texts that the target is surer of: a less sure one is no easier to draft."""
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
        seen = [each for sureness in surer if (each := situation._replace(sureness=sureness)) in self._beliefs]
        ages = {each: self.tokens - self._missed.get(each, 0) for each in seen}
        return tokens, sum(_freshness(age) * self._beliefs[each][0].weight for each, age in ages.items())

    def unread(self, method: str, row: Drafting) -> int:
        """Tokens of the row since the method drafted for it, or all; 0 for the few that any cycle brings."""
        if method in row.offered:
            return 0
        record = self._records.get(row.request_id, {}).get(Kind(method), _Record())
        behind = row.context_tokens - record.context_tokens
        return behind if behind > LONGEST_DRAFT + 2 else 0

    def forget(self, request_id: str) -> None:
        """The request is over; what it taught stays."""
        self._records.pop(request_id, None)

    def _chances(self, situation: _Situation) -> Sequence[float]:
        drawn = self._drawn.setdefault(situation.kind, {})
        if situation not in drawn:
            drawn[situation] = self._draw(situation)
        return drawn[situation]

    def _draw(self, situation: _Situation) -> Sequence[float]:
        """Evidence, and as much as `FIRST_WEIGHT` cycles of what is believed anyway: that a position is like the one
        before it, and for the other half what is known in general."""
        context = situation.context if situation.sureness else situation.context - 1
        general = self._chances(_Situation(situation.kind, context)) if context >= 0 else None
        positions = self._beliefs.get(situation)
        if positions is None:
            return general or [situation.kind.first_belief] * (LONGEST_DRAFT + 1)
        chances, before = [], general[0] if general else situation.kind.first_belief
        for place, each in enumerate(positions):
            believed = (general[place] + before) / 2 if general else before
            before = (each.weight * each.value + FIRST_WEIGHT * believed) / (each.weight + FIRST_WEIGHT)
            chances.append(before)
        return chances


def _freshness(tokens: int) -> float:
    """What is left of evidence after so many."""
    return RECENT_TOKENS / (RECENT_TOKENS + max(0, tokens))
