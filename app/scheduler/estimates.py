"""How likely drafts are accepted: by position, by method, by context length, and for each request on its own."""

from collections import defaultdict
from typing import NamedTuple

MODEL_MEMORY, REQUEST_MEMORY = 1 - 1 / 256, 1 - 1 / 48
"""Evidence of a request is worth half after 33 further cycles, so that a new kind of text is noticed."""
MODEL_PRIOR_WEIGHT, REQUEST_PRIOR_WEIGHT = 8.0, 4.0
"""Cycles of own evidence that outweigh what was believed before. A model's first request counts for both."""
CONTEXTS = (1_024, 4_096, 16_384)
"""A drafter gets worse with the context; lengths up to each of these, and beyond the last, are told apart."""
NEIGHBOUR_WEIGHT = 8.0
"""Tries at one position that outweigh what its predecessor suggests: alone, each of sixteen would be noise."""
POSITIONS = 16
HIGHEST = 0.99


class Rates(NamedTuple):
    """Chance that anything is proposed when asked, and at each position that the draft is accepted like its elders."""

    proposal: float
    positions: tuple[float, ...]

    @classmethod
    def flat(cls, proposal: float, position: float) -> "Rates":
        return cls(proposal, (position,) * POSITIONS)

    def expected_tokens(self) -> list[float]:
        """Tokens per step, by draft length 0, 1, 2, ...: the target's own one plus the drafts that survive."""
        reached, expected = self.proposal, 1.0
        totals = [expected]
        for rate in self.positions:
            reached *= rate
            expected += reached
            totals.append(expected)
        return totals


class Acceptance:
    """Evidence that fades. Positions that are no longer drafted fade too, so they are tried again."""

    def __init__(self, *, memory: float, prior_weight: float) -> None:
        self._memory = memory
        self._weight = prior_weight
        self._hits = [0.0] * POSITIONS
        self._tries = [0.0] * POSITIONS
        self._proposed = 0.0
        self._asked = 0.0

    def observe(self, *, asked: int, drafted: int, accepted: int) -> None:
        """One row was asked for drafts. A proposal shorter than asked counts as a miss where it ended."""
        self._scale(self._memory)
        self._asked += 1
        if not drafted:
            return
        self._proposed += 1
        for position in range(min(accepted + 1, asked, POSITIONS)):
            self._tries[position] += 1
            self._hits[position] += position < accepted

    def forget(self, weight: float) -> None:
        """Keep at most `weight` cycles' worth of evidence: the next few observations decide."""
        self._scale(min(1.0, weight / max(self._asked, weight)))

    def rates(self, prior: Rates) -> Rates:
        """The evidence on top of `prior`; where it is better or worse at one position, it should be at the next."""
        proposal = (self._proposed + self._weight * prior.proposal) / (self._asked + self._weight)
        ratio, weight, rates = 1.0, self._weight, list[float]()
        for hits, tries, expected in zip(self._hits, self._tries, prior.positions, strict=True):
            believed = min(HIGHEST, expected * ratio)
            rates.append((hits + weight * believed) / (tries + weight))
            ratio, weight = rates[-1] / expected, NEIGHBOUR_WEIGHT
        return Rates(proposal, tuple(rates))

    def _scale(self, factor: float) -> None:
        self._hits = [hits * factor for hits in self._hits]
        self._tries = [tries * factor for tries in self._tries]
        self._proposed *= factor
        self._asked *= factor


class History:
    """What the model's requests taught, and each running one; a request starts from what the model believes."""

    def __init__(self) -> None:
        self._of_model: dict[tuple[str, int], Acceptance] = {}
        self._of_requests: defaultdict[str, dict[str, Acceptance]] = defaultdict(dict)

    def observe(
        self, method: str, request_id: str, context_tokens: int, *, asked: int, drafted: int, accepted: int
    ) -> None:
        key = method, _bucket(context_tokens)
        if key not in self._of_model:
            self._of_model[key] = Acceptance(memory=MODEL_MEMORY, prior_weight=MODEL_PRIOR_WEIGHT)
        for evidence in (self._of_model[key], self._of_request(request_id, method)):
            evidence.observe(asked=asked, drafted=drafted, accepted=accepted)

    def rates(self, method: str, request_id: str, context_tokens: int) -> Rates:
        """What to expect of the method's next proposal for this request."""
        rates = Rates.flat(0.5, 0.6) if method == "ngram" else Rates.flat(1.0, 0.8)
        for bucket in range(_bucket(context_tokens) + 1):
            if (method, bucket) in self._of_model:
                rates = self._of_model[method, bucket].rates(rates)
        own = self._of_requests[request_id].get(method) if request_id in self._of_requests else None
        return own.rates(rates) if own else rates

    def doubt(self, method: str, request_id: str, weight: float) -> None:
        """Let the next few observations of this request decide about the method."""
        self._of_request(request_id, method).forget(weight)

    def forget(self, request_id: str) -> None:
        """The request is over; what it taught the model stays."""
        self._of_requests.pop(request_id, None)

    def _of_request(self, request_id: str, method: str) -> Acceptance:
        known = self._of_requests[request_id]
        if method not in known:
            known[method] = Acceptance(memory=REQUEST_MEMORY, prior_weight=REQUEST_PRIOR_WEIGHT)
        return known[method]


def _bucket(context_tokens: int) -> int:
    return sum(context_tokens >= limit for limit in CONTEXTS)
