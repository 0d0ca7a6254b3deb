"""Merges the proposals of several drafters into one, and prepends the tokens that a grammar forces."""

from collections.abc import Sequence

import mlx.core as mx

from app.core.reason import NO_REASON
from app.engine.drafters.drafter import Proposal

Forced = Sequence[tuple[tuple[int, ...], ...]]
"""Forced tokens by row and position: the usual token, then the others that a grammar allows there."""


def merge(rows: int, proposals: Sequence[tuple[Sequence[int], Proposal]]) -> Proposal:
    """Merge proposals, each for some of the rows, into one for all; return a single proposal for all rows unchanged.

    If only some rows have logits, the others' drafts get logits that make them certain: they were the only choice.
    """
    if len(proposals) == 1 and len(proposals[0][0]) == rows:
        return proposals[0][1]
    counts, reasons = [0] * rows, [NO_REASON] * rows
    for members, proposal in proposals:
        for index, count, reason in zip(members, proposal.counts, proposal.reasons, strict=True):
            counts[index], reasons[index] = count, reason
    if not any(counts):
        return Proposal.none(tuple(reasons))
    tokens = mx.zeros((rows, max(counts)), dtype=mx.int32)
    for members, proposal in proposals:
        if proposal.width:
            tokens[mx.array(list(members)), : proposal.width] = proposal.tokens
    with_logits = [(members, proposal.logits) for members, proposal in proposals if proposal.logits is not None]
    if not with_logits:
        return Proposal(tokens, tuple(counts), tuple(reasons))
    all_logits = _certain(tokens, with_logits[0][1].shape[-1])
    for members, logits in with_logits:
        all_logits[mx.array(list(members)), : logits.shape[1]] = logits
    return Proposal(tokens, tuple(counts), tuple(reasons), all_logits)


def _certain(tokens: mx.array, vocabulary: int) -> mx.array:
    """Return logits float32 [rows, slots, vocabulary] from which only `tokens` [rows, slots] can be drawn."""
    return mx.where(tokens[..., None] == mx.arange(vocabulary), 0.0, -mx.inf)


class ForcedPrefix:
    """Forced tokens of rows, position by position, in the drafter's spelling if the grammar allows it.
    After an unusual spelling a row is no longer forced: the drafter continues from that spelling."""

    def __init__(self, forced: Forced) -> None:
        self._forced = forced
        self._still_forced = mx.ones((len(forced), 1), mx.bool_)
        self.width = max(map(len, forced))

    def choose(self, position: int, draft: mx.array) -> mx.array:
        """Return the drafts at `position`, int32 [rows, 1], given the drafter's (negative: none). Call it in order."""
        if position >= self.width:
            return draft
        alternatives = [row[position] if position < len(row) else (-1,) for row in self._forced]
        widest = max(map(len, alternatives))
        padded = mx.array([[*tokens, *tokens[:1] * (widest - len(tokens))] for tokens in alternatives])
        usual = padded[:, :1]
        may_keep = mx.any(draft == padded, axis=1, keepdims=True) | ~self._still_forced
        drafts = mx.where((usual < 0) | ((draft >= 0) & may_keep), draft, usual)
        self._still_forced = self._still_forced & (drafts == usual)
        return drafts


def prepend_forced(proposal: Proposal, forced: Forced) -> Proposal:
    """Put each row's `forced` tokens first in the proposal, except where its drafts spell them differently."""
    prefix = ForcedPrefix(forced)
    if not (width := prefix.width):
        return proposal
    counts = tuple(max(count, len(row_forced)) for count, row_forced in zip(proposal.counts, forced, strict=True))
    reasons = tuple(NO_REASON if row_forced else why for why, row_forced in zip(proposal.reasons, forced, strict=True))
    padding = [(0, 0), (0, max(0, width - proposal.width))]
    tokens, slots = mx.pad(proposal.tokens, padding), mx.arange(max(width, proposal.width))
    drafter_tokens = mx.where(slots < mx.array(proposal.counts)[:, None], tokens, -1)
    is_forced = slots < mx.array([len(row_forced) for row_forced in forced])[:, None]
    columns = [prefix.choose(position, drafter_tokens[:, position : position + 1]) for position in range(width)]
    tokens = mx.maximum(mx.concatenate([*columns, tokens[:, width:]], axis=1), 0)
    logits = proposal.logits
    if logits is not None:
        logits = mx.where(is_forced[..., None], _certain(tokens, logits.shape[-1]), mx.pad(logits, [*padding, (0, 0)]))
    return Proposal(tokens, counts, reasons, logits)
