"""Which pieces of prompts one prefill step feeds."""

from collections.abc import Iterable

from app.core.step import PrefillRow, PrefillStep
from app.scheduler.sequence import Sequence

SHORTEST_SHARE = 0.5
"""A prompt joins a longer one when it fills at least this share of the padded rectangle's width."""


def plan_prefill(waiting: Iterable[Sequence], chunk_tokens: int) -> PrefillStep:
    """The oldest prompt's next piece, and others of about its length that fit beside it into one chunk.

    One wide product costs less than several narrow ones, and prompts that came together start together.
    """
    rows: list[PrefillRow] = []
    sizes: list[int] = []
    for sequence in waiting:
        size = min(sequence.behind - 1, chunk_tokens)
        wanted = [*sizes, size]
        if rows and (len(wanted) * max(wanted) > chunk_tokens or min(wanted) < SHORTEST_SHARE * max(wanted)):
            continue
        sizes = wanted
        rows.append(PrefillRow(sequence.request.id, sequence.tokens, sequence.computed, sequence.computed + size))
    return PrefillStep(tuple(rows))
