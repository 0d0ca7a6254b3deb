"""How likely drafts are accepted: by position, method and context length, and by how the request fared of late."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from app.core.step import Offer
from app.scheduler.costs import PLAIN, Average

FIRST_WEIGHT, MEMORY = 3.0, 256.0
"""Cycles that outweigh what was believed before, and that all former ones count for at most."""
OWN_WEIGHT = 12.0
"""Cycles of a request that count as much as all that is known of such situations."""
LATELY, SO_FAR = 0.6, 0.95
"""What a cycle of a request counts for once the next one was seen: for its mood, and for its record."""
RECENT_TOKENS = 64
"""After so many without a draft the mood tells nothing any more; without a drafter, what is known of it weighs half."""
MOODS = (0.15, 0.4, 0.65, 0.85)
"""Shares of drafts that are right; texts between two of them are alike."""
FIRST_BELIEF = 0.7
"""How likely a draft is, before the first observation."""
CONTEXT_TOKENS = 1_024
"""A drafter gets worse with the context: lengths below, and each doubling, are told apart."""
POSITIONS = 16


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
        """How likely a draft is before anything was seen: a match that held so often (the rule of succession)."""
        held = 1 << self.match - 1 if self.match else 0
        return (held + 1) / (held + 2) if held else FIRST_BELIEF


VERIFIED = Kind("")
"""All drafts that the target was asked about, whoever proposed them."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """A row that may draft. `offered`: by the methods that tell it for nothing."""

    request_id: str = ""
    context_tokens: int = 0
    offered: Mapping[str, Offer] = field(default_factory=dict)


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
    """What one request had of a kind of drafts: right and wrong ones so far and lately, earlier ones faded, in how many
    cycles, and the context when it was asked last."""

    right: float = 0.0
    wrong: float = 0.0
    lately_right: float = 1.0
    lately_wrong: float = 1.0
    cycles: float = 0.0
    context_tokens: int = 0

    @property
    def mood(self) -> int:
        """A class of texts: 1 while no draft was ever right, then by their share of late."""
        return 2 + bisect(MOODS, self.lately_right / (self.lately_right + self.lately_wrong)) if self.right else 1

    def after(self, draft: DraftObservation) -> "_Record":
        """The record with one observation more."""
        lately, so_far = (1.0, 1.0) if draft.first else (LATELY, SO_FAR)
        wrong = draft.accepted < draft.asked
        return _Record(
            so_far * self.right + draft.accepted,
            so_far * self.wrong + wrong,
            lately * self.lately_right + draft.accepted,
            lately * self.lately_wrong + wrong,
            so_far * self.cycles + (not draft.first),
            draft.row.context_tokens,
        )


class _Situation(NamedTuple):
    """What evidence is about: a kind of drafts, a range of context lengths, and the mood of the request; 0: any."""

    kind: Kind
    context: int
    mood: int = 0


class History:
    """Beliefs by situation, and the records of the requests that run."""

    def __init__(self) -> None:
        self._beliefs = defaultdict[_Situation, list[Average]](lambda: [Average(0.0) for _ in range(POSITIONS)])
        """By position."""
        self._drawn: dict[Kind, dict[_Situation, Sequence[float]]] = {}
        """What follows from the beliefs, until one of the kind changes."""
        self._records: dict[str, dict[Kind, _Record]] = {}
        """By request: of each kind, and of all that were verified together (`VERIFIED`)."""
        self.version = 0
        """Changes with everything that is learnt."""

    def observe(self, draft: DraftObservation) -> None:
        """What one row had accepted of a proposal, or would have."""
        kind, records = Kind(draft.method, draft.match), self._records.setdefault(draft.row.request_id, {})
        situation = self._situation(kind, draft.row)
        for about in {situation, situation._replace(mood=0)}:
            positions = self._beliefs[about]
            survived = draft.first + draft.accepted
            for place in range(draft.first, min(survived + 1, draft.first + draft.asked, POSITIONS)):
                positions[place].learn(float(place < survived), MEMORY)
        self._drawn.pop(kind, None)
        for each in (kind,) if kind.match else (kind, VERIFIED):
            records[each] = records.get(each, _Record()).after(draft)
        self.version += 1

    def outlook(self, method: str, row: Drafting) -> tuple[Sequence[float], float]:
        """What to expect of the method's next proposal for this row: tokens of a step by draft length 0, 1, 2, ... (the
        target's own one plus the drafts that survive), and how many cycles of such a situation are behind that."""
        kind = Kind.of(method, row.offered.get(method))
        situation, record = self._situation(kind, row), self._records.get(row.request_id, {}).get(kind)
        chances, positions = self._chances(situation), self._beliefs.get(situation)
        if record is not None and situation.mood:
            share = record.right / (record.right + record.wrong)
            weight = record.cycles / (record.cycles + OWN_WEIGHT)
            chances = [(1 - weight) * chance + weight * share for chance in chances]
        tokens = list(accumulate(accumulate(chances, mul), initial=1.0))
        since = max(0, row.context_tokens - record.context_tokens) if record else 0
        return tokens, positions[0].weight * RECENT_TOKENS / (RECENT_TOKENS + since) if positions else 0.0

    def unread(self, method: str, row: Drafting) -> int:
        """Tokens of the row since the method drafted for it, or all; 0 for the few that any cycle brings."""
        if method in row.offered:
            return 0
        record = self._records.get(row.request_id, {}).get(Kind(method), _Record())
        behind = row.context_tokens - record.context_tokens
        return behind if behind > POSITIONS + 1 else 0

    def forget(self, request_id: str) -> None:
        """The request is over; what it taught stays."""
        self._records.pop(request_id, None)

    def _situation(self, kind: Kind, row: Drafting) -> _Situation:
        records = self._records.get(row.request_id, {})
        record = records.get(kind if kind.match and kind in records else VERIFIED)
        mood = record.mood if record and row.context_tokens - record.context_tokens <= RECENT_TOKENS else 0
        return _Situation(kind, (row.context_tokens // CONTEXT_TOKENS).bit_length(), mood)

    def _chances(self, situation: _Situation) -> Sequence[float]:
        drawn = self._drawn.setdefault(situation.kind, {})
        if situation not in drawn:
            drawn[situation] = self._draw(situation)
        return drawn[situation]

    def _draw(self, situation: _Situation) -> Sequence[float]:
        """Evidence, and as much as `FIRST_WEIGHT` cycles of what is believed anyway: that a position is like the one
        before it, and for the other half what is known in general."""
        context = situation.context if situation.mood else situation.context - 1
        general = self._chances(_Situation(situation.kind, context)) if context >= 0 else None
        positions = self._beliefs.get(situation)
        if positions is None:
            return general or [situation.kind.first_belief] * POSITIONS
        chances, before = [], general[0] if general else situation.kind.first_belief
        for place, each in enumerate(positions):
            believed = (general[place] + before) / 2 if general else before
            before = (each.weight * each.value + FIRST_WEIGHT * believed) / (each.weight + FIRST_WEIGHT)
            chances.append(before)
        return chances
