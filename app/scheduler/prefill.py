"""Which pieces of prompts one prefill step feeds."""

from collections.abc import Collection

from app.core.step import PrefillRow, PrefillStep
from app.scheduler.sequence import Sequence

SCORED_CHUNK_TOKENS = 128
"""Of prompts whose tokens are scored: logits of so many positions are in memory at once."""
SHORTEST_SHARE = 0.5
"""A prompt joins a longer one when it fills at least this share of the padded rectangle's width."""


def plan_prefill(waiting: Collection[Sequence], chunk_tokens: int) -> PrefillStep:
    """The oldest prompt's next piece, and others of about its length that fit beside it into one chunk.

    One wide product costs less than several narrow ones, and prompts that came together start together.
    """
    rows: list[PrefillRow] = []
    sizes: list[int] = []
    first, *_ = waiting
    if first.request.scores_prompt:
        chunk_tokens = min(chunk_tokens, SCORED_CHUNK_TOKENS)
    for sequence in waiting:
        if sequence.request.scores_prompt != first.request.scores_prompt:
            continue  # logits of a whole chunk are dear: nobody pays for those of another
        size = min(sequence.behind - 1, chunk_tokens)
        wanted = [*sizes, size]
        if rows and (len(wanted) * max(wanted) > chunk_tokens or min(wanted) < SHORTEST_SHARE * max(wanted)):
            continue
        sizes = wanted
        rows.append(PrefillRow(sequence.request.id, sequence.tokens, sequence.computed, sequence.computed + size))
    return PrefillStep(tuple(rows))
