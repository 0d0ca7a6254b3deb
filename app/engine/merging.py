"""Proposals of several drafters, for some rows each, as one for all rows of a step."""

from collections.abc import Sequence

import mlx.core as mx

from app.core.reason import NO_REASON
from app.engine.drafters import Proposal


def merged(rows: int, proposals: Sequence[tuple[Sequence[int], Proposal]]) -> Proposal:
    """One proposal for all rows from those of some rows each; the usual one, by one drafter for all rows, as it is.

    A row without logits beside rows with some, whose drafts were the only choice, gets certainty of them.
    """
    if len(proposals) == 1 and len(proposals[0][0]) == rows:
        return proposals[0][1]
    counts, reasons = [0] * rows, [NO_REASON] * rows
    for members, proposal in proposals:
        for index, count, reason in zip(members, proposal.counts, proposal.reasons, strict=True):
            counts[index], reasons[index] = count, reason
    if not any(counts):
        return Proposal(None, tuple(counts), tuple(reasons))
    tokens = mx.zeros((rows, max(counts)), dtype=mx.int32)
    for members, proposal in proposals:
        if proposal.tokens is not None:
            tokens[mx.array(list(members)), : proposal.tokens.shape[1]] = proposal.tokens
    drawn = [(members, proposal.logits) for members, proposal in proposals if proposal.logits is not None]
    if not drawn:
        return Proposal(tokens, tuple(counts), tuple(reasons))
    merged = mx.where(tokens[..., None] == mx.arange(drawn[0][1].shape[-1]), 0.0, -mx.inf)
    for members, logits in drawn:
        merged[mx.array(list(members)), : logits.shape[1]] = logits
    return Proposal(tokens, tuple(counts), tuple(reasons), merged)
