"""How likely drafts are accepted: by position, by method, by context length, and for each request on its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from app.scheduler.costs import PLAIN, Average

MODEL_WEIGHT, REQUEST_WEIGHT = 4.0, 2.0
"""Cycles that outweigh what was believed before."""
MODEL_MEMORY, REQUEST_MEMORY = 256.0, 48.0
"""Evidence of a request is worth half after 33 further cycles, so that a new kind of text is noticed."""
HOPE, HOPE_OF_PROPOSAL = 6.0, 0.5
"""Cycles that all go well and are added to the evidence of a request to tell what a method may be worth."""
HALF_LIFE_STEPS = 32
"""After which evidence of a method that was not asked again counts for half of that."""
FREE_MISSES, MOST_MISSES, MISSES_PER_HALF_LIFE = 8, 32, 4
"""Of a request, one after the other: so many count as evidence alone, each further one takes away as much hope as a
cycle gives, up to so many; and so many let that last for one half-life more."""
TAUGHT = 64.0
"""Cycles that the model saw; from there on what a request inherits counts twice for what it hopes."""
NEIGHBOUR_SHARE = 0.25
"""How far a position that was not tried moves towards the one before it, at each observation."""
PROPOSAL_WEIGHT = 0.5
"""Of a request: whether n-grams match changes from one stretch of a text to the next."""
FIRST_BELIEFS = {"ngram": (0.5, 0.6)}
"""How likely a proposal is, and each position's draft, before the first observation: others always propose, at 0.8."""
CONTEXTS = (1_024, 4_096, 16_384)
"""A drafter gets worse with the context; lengths up to each of these, and beyond the last, are told apart."""
POSITIONS = 16

Chances = tuple[float, ...]
"""That anything is proposed when asked, then of each position that its draft is accepted like those before it."""


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


def expected_tokens(chances: Chances) -> list[float]:
    """Tokens per step, by draft length 0, 1, 2, ...: the target's own one plus the drafts that survive."""
    _, *reached = accumulate(chances, mul)
    return list(accumulate(reached, initial=1.0))


class History:
    """Beliefs by method, in each context length (the model's) and for each request. Each starts as a copy of the next
    more general one."""

    def __init__(self) -> None:
        self._beliefs: dict[tuple[str, int | str], list[Average]] = {}
        self._last_asked: dict[tuple[str, int | str], int] = {}
        self._misses: dict[tuple[str, int | str], int] = {}
        self.steps = 0
        """Decode steps so far, whatever they asked for."""

    def observe(self, draft: DraftObservation) -> None:
        """One row was asked for drafts. A proposal shorter than asked counts as a miss where it ended."""
        levels = _levels(draft.method, draft.row)
        for belief in self._beliefs.get(levels[-1], ()):
            belief.weight = max(min(belief.weight, 1.0), belief.weight * self._fading(levels[-1]))
        self._last_asked[levels[-1]] = self.steps
        if draft.drafted:
            self._misses[levels[-1]] = 0 if draft.accepted else min(MOST_MISSES, self._misses.get(levels[-1], 0) + 1)
        first = [MODEL_WEIGHT] * (1 + POSITIONS), _first_weights(draft.method)
        for level, weights, memory in zip(levels[-2:], first, (MODEL_MEMORY, REQUEST_MEMORY), strict=True):
            if level not in self._beliefs:
                inherited = self._chances(draft.method, levels[: levels.index(level)])
                self._beliefs[level] = [Average(*each) for each in zip(inherited, weights, strict=True)]
            _learn(self._beliefs[level], draft, memory)

    def chances(self, method: str, row: Drafting) -> Chances:
        """What to expect of the method's next proposal for this row."""
        return self._chances(method, _levels(method, row))

    def hopes(self, method: str, row: Drafting) -> Chances:
        """What to expect should it go well: the more, the less was tried for this request and the longer ago."""
        level = (method, row.request_id)
        known = self._beliefs.get(level)
        weights = [self._fading(level) * each.weight for each in known] if known else self._inherited(method, row)
        misses = self._misses.get(level, 0)
        doubt = max(0, misses - FREE_MISSES) * self._fading(level, max(1.0, misses / MISSES_PER_HALF_LIFE))
        hopes = (HOPE_OF_PROPOSAL if method in FIRST_BELIEFS else HOPE, *(HOPE,) * POSITIONS)
        return tuple(
            (weight * chance + hope) / (weight + hope + doubt * (place > 0))
            for place, (weight, chance, hope) in enumerate(zip(weights, self.chances(method, row), hopes, strict=True))
        )

    def _inherited(self, method: str, row: Drafting) -> list[float]:
        """What the beliefs of the model count for before this request tried the method."""
        taught = self._beliefs.get(_levels(method, row)[-2])
        times = 2 if taught and taught[1].weight >= TAUGHT else 1
        return [times * weight for weight in _first_weights(method)]

    def _fading(self, level: tuple[str, int | str], slowness: float = 1.0) -> float:
        """What evidence is still worth."""
        idle = self.steps - self._last_asked.get(level, self.steps)
        return float(0.5 ** (idle / (slowness * HALF_LIFE_STEPS)))

    def forget(self, request_id: str) -> None:
        """The request is over; what it taught the model stays."""
        for table in (self._beliefs, self._last_asked, self._misses):
            for level in [level for level in table if level[1] == request_id]:
                del table[level]

    def _chances(self, method: str, levels: Sequence[tuple[str, int | str]]) -> Chances:
        known = next((level for level in reversed(levels) if level in self._beliefs), None)
        if known:
            return tuple(belief.value for belief in self._beliefs[known])
        proposal, position = FIRST_BELIEFS.get(method, (1.0, 0.8))
        return proposal, *(position,) * POSITIONS


def _learn(beliefs: Sequence[Average], draft: DraftObservation, memory: float) -> None:
    """Where nothing was tried, a position becomes as likely as the one before it: what is better or worse there should
    be so here."""
    survived = 1 + draft.accepted if draft.drafted else 0
    tried = min(survived, draft.asked, POSITIONS)
    for place, belief in enumerate(beliefs if draft.drafted else beliefs[:1]):
        if place <= tried:
            belief.learn(float(place < survived), memory)
        else:
            belief.value += NEIGHBOUR_SHARE * (beliefs[place - 1].value - belief.value)


def _first_weights(method: str) -> list[float]:
    """Of what a request inherits."""
    return [PROPOSAL_WEIGHT if method in FIRST_BELIEFS else REQUEST_WEIGHT, *(REQUEST_WEIGHT,) * POSITIONS]


def _levels(method: str, row: Drafting) -> list[tuple[str, int | str]]:
    """Where evidence counts, the most particular last."""
    bucket = sum(row.context_tokens >= limit for limit in CONTEXTS)
    return [*((method, each) for each in range(bucket + 1)), (method, row.request_id)]
