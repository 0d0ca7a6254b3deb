"""Which pieces of which prompts a prefill step reads: large ones where nobody waits, of about so many seconds each.

A wide forward costs less per token than a narrow one; a long step makes streams wait, and macOS ends what keeps the GPU
for too long. Sizes are halves of the largest one, so that few shapes are compiled.
"""

from collections.abc import Collection

from app.core.footprint import SHARED_CHUNK_TOKENS
from app.core.step import EngineLimits, PrefillRow, PrefillStep
from app.scheduler.costs import Average
from app.scheduler.sequence import Sequence

SMALLEST_CHUNK_TOKENS = 64
FIRST_CHUNK_TOKENS = 512
"""Until it is known how fast this machine reads."""
ALONE_SECONDS, BESIDE_SECONDS = 1.5, 0.5
"""How long a chunk may take where nobody waits for it, and beside streams."""
MEMORY = 4
"""Chunks that all former ones count for at most."""
SCORED_CHUNK_TOKENS = 64
"""Tokens of a chunk whose prompts are scored: the logits of each are in memory at once, and the likeliest of 150,000
take a CPU some 7 ms."""
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
        size = sequence.next_stop(chunk_tokens) - sequence.computed
        wanted = [*sizes, size]
        if rows and (len(wanted) * max(wanted) > chunk_tokens or min(wanted) < SHORTEST_SHARE * max(wanted)):
            continue
        sizes = wanted
        rows.append(PrefillRow(sequence.request.id, sequence.tokens, sequence.computed, sequence.computed + size))
    return PrefillStep(tuple(rows))


class ChunkSizes:
    """How many tokens a prefill step may read, from how fast former ones were in contexts of about that length."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._rates: dict[int, Average] = {}
        """Tokens per second by class of context."""

    def learn(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """A step read so many tokens behind so many. What is short says little about what is long."""
        if seconds > 0 and tokens >= SMALLEST_CHUNK_TOKENS:
            rate = self._rates.setdefault(_class_of(context_tokens), Average(0.0))
            rate.learn(tokens / seconds, MEMORY)

    def size(self, context_tokens: int, *, alone: bool, streams: bool) -> int:
        """The most tokens of a step behind so many. `alone`: no other request has a row; `streams`: some wait."""
        size = self._limits.prefill_chunk_tokens
        most = self._affordable(context_tokens, BESIDE_SECONDS if streams else ALONE_SECONDS)
        if not alone:
            most = min(most, SHARED_CHUNK_TOKENS)
        while size >= 2 * SMALLEST_CHUNK_TOKENS and (
            size > most or size * (context_tokens + size) > self._limits.prefill_pairs
        ):
            size //= 2
        return size

    def _affordable(self, context_tokens: int, seconds: float) -> float:
        known = sorted(self._rates, key=lambda each: (abs(each - _class_of(context_tokens)), each))
        return self._rates[known[0]].value * seconds if known else FIRST_CHUNK_TOKENS


def _class_of(context_tokens: int) -> int:
    """Contexts that differ by less than a factor of two read about equally fast; short ones all do."""
    return (context_tokens // 2048).bit_length()
