"""Prompt lookup: the text itself drafts. What followed the longest earlier match of the last tokens is proposed.

Free of any model; it pays on copying, editing and code (after prompt lookup decoding, A. Saxena 2023, and vLLM's n-gram
proposer: the longest match wins). Of several continuations the most frequent one is taken, the latest on ties, and the
drafts before it belong to the context of the next (SuffixDecoding, arXiv 2411.04975). `suffixes.py` holds the index.
"""

from collections.abc import Sequence
from functools import partial

from app.core.request import Request
from app.core.step import DecodeRow
from app.engine.drafters import Drafter, Outcome, Proposal
from app.engine.drafters.suffixes import Suffixes
from app.engine.rectangle import padded
from app.engine.sampling import SampledRow
from app.engine.unit import LoadedUnit

SHORTEST_MATCH_TOKENS = 2
LONGEST_MATCH_TOKENS = 32
ACROSS_TOKENS = 32_768
OWNERS = 8
"""Of whom earlier requests are kept; whoever asked longest ago goes."""


class Ngram(Drafter):
    """Drafts from the sequence's own prompt and output; matches have `prompt_lookup_min` tokens at least and count up
    to `prompt_lookup_max`. A bound that is not given is the usual one, or what the other bound allows.

    With `across_requests` also from earlier requests of the same owner, the last `across_tokens` tokens of them. Nobody
    else's: how fast an answer comes tells what was said before.
    """

    name = "ngram"

    def __init__(
        self,
        *,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        across_requests: bool = False,
        across_tokens: int = ACROSS_TOKENS,
    ) -> None:
        shortest = prompt_lookup_min or min(SHORTEST_MATCH_TOKENS, prompt_lookup_max or SHORTEST_MATCH_TOKENS)
        self._longest = prompt_lookup_max or max(LONGEST_MATCH_TOKENS, shortest)
        if not 1 <= shortest <= self._longest:
            raise ValueError(f"prompt_lookup_min must lie between 1 and {self._longest}, not {shortest}")
        self._index = partial(Suffixes, shortest=shortest, longest=self._longest)
        self._own: dict[str, Suffixes] = {}
        self._across = across_requests
        self._half_tokens = max(1, across_tokens // 2)
        self._owners: dict[str, str] = {}
        self._texts: dict[str, Sequence[int]] = {}
        self._earlier: dict[str, list[Suffixes]] = {}
        """By owner, earlier requests in two halves, the newer one first: when it is full, the older one goes."""

    @classmethod
    def open(cls, unit: LoadedUnit) -> Drafter | str:
        try:
            return cls(
                prompt_lookup_min=unit.spec.prompt_lookup_min,
                prompt_lookup_max=unit.spec.prompt_lookup_max,
                across_requests=unit.spec.ngram_across_requests,
            )
        except ValueError as error:
            return str(error)

    def admit(self, request: Request) -> None:
        if self._across:
            self._owners[request.id] = request.owner

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:  # noqa: ARG002  drafts do not depend on sampling
        found = [self._continuation(row) for row in rows]
        counts = tuple(len(tokens) for tokens in found)
        reasons = tuple("" if count else "no earlier text matches" for count in counts)
        if not any(counts):
            return Proposal(None, counts, reasons)
        return Proposal(padded(found), counts, reasons)

    def _continuation(self, row: DecodeRow) -> list[int]:
        """Up to `row.num_draft_tokens` tokens; of several texts the one with the longest match says them."""
        if row.sequence_id not in self._own:
            self._own[row.sequence_id] = self._index()
        best = self._own[row.sequence_id]
        best.extend(row.tokens[best.tokens :])
        context = best.followed(best.end)
        for index in self._earlier.get(self._owners.get(row.sequence_id, ""), ()):
            found = index.followed(index.match(row.tokens[-self._longest :]))
            if found.size > context.size:
                best, context = index, found
        return best.continuation(context, row.num_draft_tokens)

    def observe(self, outcome: Outcome) -> None:
        """Keep a view of each text, for the requests after it."""
        texts = zip(outcome.sequence_ids, outcome.tokens, strict=True)
        self._texts.update((name, text) for name, text in texts if name in self._owners)

    def release(self, sequence_id: str) -> None:
        """The text joins the earlier ones; of a very long one only the end."""
        self._own.pop(sequence_id, None)
        owner = self._owners.pop(sequence_id, "")
        text = self._texts.pop(sequence_id, ())[-self._half_tokens :]
        if not text:
            return
        halves = self._earlier.pop(owner, [])
        if not halves or halves[0].tokens + len(text) > self._half_tokens:
            halves = [self._index(), *halves[:1]]
        halves[0].begin()
        halves[0].extend(text)
        self._earlier[owner] = halves
        if len(self._earlier) > OWNERS:
            del self._earlier[next(iter(self._earlier))]
