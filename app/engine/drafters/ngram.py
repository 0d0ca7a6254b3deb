"""Prompt lookup: the text itself drafts. What followed the longest earlier match of the last tokens is proposed.

Free of any model; it pays on copying, editing and code. An index of pairs keeps a proposal O(matches), not O(text)
(after prompt lookup decoding, A. Saxena 2023, and vLLM's n-gram proposer: longest match wins, here the latest on ties).
"""

from collections.abc import Sequence

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters import Drafter, Proposal
from app.engine.sampling import SampledRow

LONGEST_MATCH_TOKENS = 32
CANDIDATES = 24
"""How many of the latest occurrences of the last pair are compared."""


class _Index:
    """Where each pair of tokens of one sequence ends, grown as the sequence grows."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, int], list[int]] = {}
        self.indexed = 1

    def grow(self, tokens: Sequence[int]) -> None:
        for end in range(self.indexed, len(tokens)):
            self.ends.setdefault((tokens[end - 1], tokens[end]), []).append(end)
        self.indexed = max(self.indexed, len(tokens))

    def continuation(self, tokens: Sequence[int], limit: int, minimum: int) -> list[int]:
        """Up to `limit` tokens after the best earlier match of at least `minimum` tokens; empty without one."""
        self.grow(tokens)
        last = len(tokens) - 1
        if last < 1:
            return []
        best, best_end = minimum - 1, -1
        for end in reversed(self.ends.get((tokens[last - 1], tokens[last]), ())[-CANDIDATES - 1 :]):
            if end == last:
                continue
            size = 2
            while size < LONGEST_MATCH_TOKENS and size <= end and tokens[end - size] == tokens[last - size]:
                size += 1
            if size > best:
                best, best_end = size, end
        if best_end < 0:
            return []
        follow: list[int] = []
        for position in range(best_end + 1, best_end + 1 + limit):
            known = position < len(tokens)
            follow.append(tokens[position] if known else follow[position - len(tokens)])
        return follow


class Ngram(Drafter):
    """Drafts from the sequence's own prompt and output. `minimum_match` tokens must match."""

    name = "ngram"

    def __init__(self, *, minimum_match: int = 2) -> None:
        self.minimum_match = minimum_match
        self._indices: dict[str, _Index] = {}

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:  # noqa: ARG002  drafts do not depend on sampling
        found = [
            self._indices.setdefault(row.sequence_id, _Index()).continuation(
                row.tokens, row.num_draft_tokens, self.minimum_match
            )
            for row in rows
        ]
        counts = tuple(len(tokens) for tokens in found)
        reasons = tuple("" if count else "no earlier text matches" for count in counts)
        if not any(counts):
            return Proposal(None, counts, reasons)
        width = max(counts)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
        return Proposal(mx.array(padded, dtype=mx.int32), counts, reasons)

    def release(self, sequence_id: str) -> None:
        self._indices.pop(sequence_id, None)
