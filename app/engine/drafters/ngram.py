"""Prompt lookup: the text itself drafts. What followed the longest earlier match of the last tokens is proposed.

Free of any model; it pays on copying, editing and code (after prompt lookup decoding, A. Saxena 2023, and vLLM's n-gram
proposer: the longest match wins). Of several continuations the most frequent one is taken, the latest on ties, and the
drafts before it belong to the context of the next (SuffixDecoding, arXiv 2411.04975). `suffixes.py` holds the index.
"""

from collections.abc import Sequence

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters import Drafter, Outcome, Proposal
from app.engine.drafters.suffixes import Suffixes
from app.engine.sampling import SampledRow

SHORTEST_MATCH_TOKENS = 2
LONGEST_MATCH_TOKENS = 32
ACROSS_TOKENS = 32_768


class Ngram(Drafter):
    """Drafts from the sequence's own prompt and output; matches have `prompt_lookup_min` tokens at least and count up
    to `prompt_lookup_max`.

    With `across_requests` also from earlier requests to this model, the last `across_tokens` tokens of them. All of its
    users share that index, and how fast an answer comes tells what others have said: switch it on for one user only.
    """

    name = "ngram"

    def __init__(
        self,
        *,
        prompt_lookup_min: int = SHORTEST_MATCH_TOKENS,
        prompt_lookup_max: int = LONGEST_MATCH_TOKENS,
        across_requests: bool = False,
        across_tokens: int = ACROSS_TOKENS,
    ) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min must lie between 1 and {prompt_lookup_max}, not {prompt_lookup_min}")
        self._min = prompt_lookup_min
        self._max = prompt_lookup_max
        self._own: dict[str, Suffixes] = {}
        self._texts: dict[str, Sequence[int]] = {}
        self._earlier = Earlier(prompt_lookup_min, prompt_lookup_max, across_tokens) if across_requests else None

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:  # noqa: ARG002  drafts do not depend on sampling
        found = [self._continuation(row) for row in rows]
        counts = tuple(len(tokens) for tokens in found)
        reasons = tuple("" if count else "no earlier text matches" for count in counts)
        if not any(counts):
            return Proposal(None, counts, reasons)
        width = max(counts)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
        return Proposal(mx.array(padded, dtype=mx.int32), counts, reasons)

    def _continuation(self, row: DecodeRow) -> list[int]:
        """Up to `row.num_draft_tokens` tokens; of several texts the one with the longest match says them."""
        own = self._own.get(row.sequence_id)
        if own is None:
            own = self._own[row.sequence_id] = Suffixes(shortest=self._min, longest=self._max)
        own.extend(row.tokens[own.tokens :])
        best, context = own, own.followed(own.end)
        for index in self._earlier.indices if self._earlier else ():
            found = index.followed(index.match(row.tokens[-self._max :]))
            if found is not None and (context is None or found.size > context.size):
                best, context = index, found
        return [] if context is None else best.continuation(context, row.num_draft_tokens)

    def observe(self, outcome: Outcome) -> None:
        """Keep a view of each text, for the requests after it."""
        if self._earlier is not None:
            self._texts.update(zip(outcome.sequence_ids, outcome.tokens, strict=True))

    def release(self, sequence_id: str) -> None:
        self._own.pop(sequence_id, None)
        text = self._texts.pop(sequence_id, None)
        if self._earlier is not None and text is not None:
            self._earlier.add(text)


class Earlier:
    """The texts of earlier requests, at most `tokens` of them: when the newer half is full, the older one goes."""

    def __init__(self, shortest: int, longest: int, tokens: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._half = max(1, tokens // 2)
        self.indices: list[Suffixes] = []
        """The newer half first."""

    def add(self, text: Sequence[int]) -> None:
        """A request is over; of a very long text only the end is kept."""
        text = text[-self._half :]
        if not self.indices or self.indices[0].tokens + len(text) > self._half:
            self.indices = [Suffixes(shortest=self._shortest, longest=self._longest), *self.indices[:1]]
        self.indices[0].begin()
        self.indices[0].extend(text)
