"""Prefill planning: which chunks of which prompts a step feeds. Chunks are sized by time, larger if no stream waits.

A wide forward costs less per token than a narrow one, but a long step makes streams wait, and macOS kills a process
that occupies the GPU for too long. Sizes are the largest one, halved repeatedly, so that few shapes are compiled.
"""

from collections.abc import Collection

from app.core.step import EngineLimits, PrefillRow, PrefillStep
from app.models.footprint import SHARED_CHUNK_TOKENS, SMALLEST_CHUNK_TOKENS
from app.scheduler.costs import Average
from app.scheduler.sequence import LiveSequence

FIRST_CHUNK_TOKENS = 512
"""Chunk size, in tokens, until this machine's prefill speed is known."""
TARGET_SECONDS, TARGET_SECONDS_WITH_STREAMS = 1.5, 0.25
"""Target duration of a chunk, in seconds: if no stream waits for it, and if streams do."""
MAX_WEIGHT = 4
"""Maximum weight of all earlier chunks together, in chunks."""
SCORED_CHUNK_TOKENS = 64
"""Chunk size, in tokens, of scored prompts: all logits of a chunk are in memory together, and a CPU takes some 7 ms per
token to find the likeliest of 150,000."""
SHORTEST_SHARE = 0.5
"""Minimum share of the padded width that a prompt's chunk must fill to share a forward with a longer one."""


def plan_prefill(waiting: Collection[LiveSequence], chunk_tokens: int) -> PrefillStep:
    """Plan the oldest prompt's next chunk, with chunks of similarly long prompts that fit into `chunk_tokens` too.

    One wide product costs less than several narrow ones, and prompts that arrived together start together.
    """
    rows: list[PrefillRow] = []
    first, *_ = waiting
    if first.request.scores_prompt:
        chunk_tokens = min(chunk_tokens, SCORED_CHUNK_TOKENS)
    for sequence in sorted(waiting, key=lambda other: abs(other.uncached_tokens - first.uncached_tokens)):
        if sequence.request.scores_prompt != first.request.scores_prompt:
            continue  # logits of a whole chunk are expensive: no other prompt pays for them
        size = sequence.chunk_end(chunk_tokens) - sequence.computed
        widths = [*(row.end - row.start for row in rows), size]
        if rows and (len(widths) * max(widths) > chunk_tokens or min(widths) < SHORTEST_SHARE * max(widths)):
            continue
        rows.append(PrefillRow(sequence.request.id, sequence.tokens, sequence.computed, sequence.computed + size))
    return PrefillStep(tuple(rows))


class ChunkSizes:
    """Sizes of prefill steps, from the speed of earlier ones in contexts of similar length."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._rates: dict[int, Average] = {}
        """Tokens per second by class of context."""

    def learn(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """Record the speed of one prefill step. Steps under `SMALLEST_CHUNK_TOKENS` are ignored: too noisy."""
        if seconds > 0 and tokens >= SMALLEST_CHUNK_TOKENS:
            rate = self._rates.setdefault(_context_class(context_tokens), Average(0.0))
            rate.learn(tokens / seconds, MAX_WEIGHT)

    def size(self, context_tokens: int, *, alone: bool, streams: bool) -> int:
        """Return the maximum tokens of a step. `alone`: no other request has a row; `streams`: running streams wait."""
        size = self._limits.prefill_chunk_tokens
        most = self._affordable(context_tokens, TARGET_SECONDS_WITH_STREAMS if streams else TARGET_SECONDS)
        if not alone:
            most = min(most, SHARED_CHUNK_TOKENS)
        while size >= 2 * SMALLEST_CHUNK_TOKENS and (
            size > most or size * (context_tokens + size) > self._limits.prefill_pairs
        ):
            size //= 2
        return size

    def _affordable(self, context_tokens: int, seconds: float) -> float:
        known = sorted(
            self._rates, key=lambda context_class: (abs(context_class - _context_class(context_tokens)), context_class)
        )
        return self._rates[known[0]].value * seconds if known else FIRST_CHUNK_TOKENS


def _context_class(context_tokens: int) -> int:
    """Return the class of a context: speeds are about equal within a factor of two, and in all short contexts."""
    return (context_tokens // 2048).bit_length()
