"""Proposals put together: those of several drafters into one, and the tokens that a grammar forces before them."""

from collections.abc import Sequence

import mlx.core as mx

from app.core.reason import NO_REASON
from app.engine.drafters import Proposal

Forced = Sequence[tuple[tuple[int, ...], ...]]
"""Forced tokens by row and place: the usual token, then the others that a grammar allows there."""


def merged(rows: int, proposals: Sequence[tuple[Sequence[int], Proposal]]) -> Proposal:
    """Merge proposals for some rows each into one for all rows; a single one for all rows is returned as is.

    If only some rows have logits, the drafts of the others, the only choice there, get logits that make them certain.
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
    chances = _certain(tokens, drawn[0][1].shape[-1])
    for members, logits in drawn:
        chances[mx.array(list(members)), : logits.shape[1]] = logits
    return Proposal(tokens, tuple(counts), tuple(reasons), chances)


def _certain(tokens: mx.array, vocabulary: int) -> mx.array:
    """Return logits float32 [rows, slots, vocabulary] from which only `tokens` [rows, slots] can be drawn."""
    return mx.where(tokens[..., None] == mx.arange(vocabulary), 0.0, -mx.inf)


class Lead:
    """Forced tokens of rows that draft place by place, spelled as the drafter prefers.
    After an unusual spelling a row is no longer forced: the drafter continues from its own."""

    def __init__(self, forced: Forced) -> None:
        self._forced = forced
        self._follows = mx.ones((len(forced), 1), mx.bool_)
        self.width = max(map(len, forced))

    def choose(self, place: int, own: mx.array) -> mx.array:
        """Return int32 [rows, 1], the drafts at `place`; `own` are the drafter's, negative for none. Call in order."""
        if place >= self.width:
            return own
        ways = [row[place] if place < len(row) else (-1,) for row in self._forced]
        widest = max(map(len, ways))
        known = mx.array([[*tokens, *tokens[:1] * (widest - len(tokens))] for tokens in ways])
        usual = known[:, :1]
        free = mx.any(own == known, axis=1, keepdims=True) | ~self._follows
        drafts = mx.where((usual < 0) | ((own >= 0) & free), own, usual)
        self._follows = self._follows & (drafts == usual)
        return drafts


def led(proposal: Proposal, forced: Forced) -> Proposal:
    """Put each row's `forced` tokens first in the proposal, except where its drafts spell them differently."""
    lead = Lead(forced)
    if not (width := lead.width):
        return proposal
    counts = tuple(max(count, len(known)) for count, known in zip(proposal.counts, forced, strict=True))
    reasons = tuple(NO_REASON if known else why for why, known in zip(proposal.reasons, forced, strict=True))
    tokens = mx.zeros((len(forced), width), mx.int32) if proposal.tokens is None else proposal.tokens
    missing = [(0, 0), (0, max(0, width - tokens.shape[1]))]
    tokens, slots = mx.pad(tokens, missing), mx.arange(max(width, tokens.shape[1]))
    own = mx.where(slots < mx.array(proposal.counts)[:, None], tokens, -1)
    leads = slots < mx.array([len(known) for known in forced])[:, None]
    columns = [lead.choose(place, own[:, place : place + 1]) for place in range(width)]
    tokens = mx.maximum(mx.concatenate([*columns, tokens[:, width:]], axis=1), 0)
    logits = proposal.logits
    if logits is not None:
        logits = mx.where(leads[..., None], _certain(tokens, logits.shape[-1]), mx.pad(logits, [*missing, (0, 0)]))
    return Proposal(tokens, counts, reasons, logits)
