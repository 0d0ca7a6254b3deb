"""Rows that are held to something: masks for their logits, made on the host while the device is at the forward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from app.core.request import Constraint, Request
from app.core.step import DecodeRow
from app.engine.drafters import Proposal
from app.engine.runner import padded
from app.engine.sampling import OPENING_SALT, SampledRow, draw

LAUNCHED_AHEAD = 2
"""Tokens that are drawn before the host has read the first of them."""


class Constraints:
    """Those of one engine's rows."""

    def __init__(self, *, by_rejection: bool = False) -> None:
        self._by_rejection = by_rejection
        """Drafts are accepted by how likely they were drawn: what else was drawn must not change them."""
        self._held: dict[str, Constraint] = {}

    def admit(self, request: Request) -> None:
        if request.constraint is not None:
            self._held[request.id] = request.constraint.begin()

    def release(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def bind(self, rows: Sequence[DecodeRow], slots: int = LAUNCHED_AHEAD) -> bool:
        """Whether a token of the next `slots` may be forbidden to one of the rows."""
        return bool(self._binding(rows, slots))

    def failure(self, row: DecodeRow, emitted: Sequence[int]) -> str:
        """Why a row cannot go on with what it emitted, or not end so; empty while all is well."""
        held = self._held.get(row.sequence_id)
        return held.failure([*row.tokens[row.prompt_length :], *emitted]) if held else ""

    def forced(
        self, sequence_id: str, tokens: Sequence[int], prompt_length: int, emitted: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], ...]:
        """What must come once a row's `tokens`, prompt and output, go on with `emitted`, as far as it is known."""
        held = self._held.get(sequence_id)  # no text is copied for a row that is free
        return held.forced([*tokens[prompt_length:], *emitted]) if held else ()

    def led(self, row: DecodeRow) -> DecodeRow:
        """The row with the first ones of its drafts, where a grammar forces them, and with no more than its masks
        allow."""
        held = self._held.get(row.sequence_id)
        if held is None:
            return row
        most = held.affordable_drafts
        drafts = min(row.num_draft_tokens, most)
        forced = held.forced(row.tokens[row.prompt_length :])[:drafts]
        if self._by_rejection:
            forced = tuple(ways[:1] for ways in forced)
        return replace(row, forced=forced, num_draft_tokens=drafts, most_draft_tokens=min(row.most_draft_tokens, most))

    def extended(self, rows: Sequence[DecodeRow], proposal: Proposal) -> Proposal:
        """The proposal with what is forced behind each row's drafts, or in place of the first that cannot stand. This
        waits for the drafts: a longer cycle is worth it."""
        binding = {} if proposal.tokens is None or self._by_rejection else self._binding(rows, 1)
        if proposal.tokens is None or not any(proposal.counts[place] for place in binding):
            return proposal
        listed: Any = proposal.tokens.tolist()
        drafts = [tokens[:count] for tokens, count in zip(listed, proposal.counts, strict=True)]
        appended = [0] * len(rows)
        for place, (held, output) in binding.items():
            if own := drafts[place]:
                standing, forced = held.forced_behind(output, own)
                more = forced[: max(0, rows[place].most_draft_tokens - standing)]
                drafts[place], appended[place] = [*own[:standing], *more], len(more)
        counts = tuple(map(len, drafts))
        # One slot at least: a drafter that drafted has to hear what came of it.
        return proposal._replace(tokens=padded(drafts, 1), counts=counts, appended=tuple(appended))

    def mask(
        self,
        logits: mx.array,
        rows: Sequence[DecodeRow],
        sampled: Sequence[SampledRow],
        drafts: mx.array | None = None,
        counts: Sequence[int] = (),
    ) -> tuple[mx.array, Sequence[int]]:
        """`logits` float32 [rows, slots, vocabulary] with -inf where a token may not come, and how many of each row's
        `drafts` int32 [rows, slots - 1], of which `counts` are real, can stand. Where an answer begins, a draw from all
        tokens says whether it is with reasoning: among the few of a grammar, the mark of that may seem likely."""
        slots, vocabulary = logits.shape[1:]
        binding = self._binding(rows, slots)
        if not binding:
            return logits, counts
        mx.async_eval(logits)  # what follows is done beside it
        listed: Any = drafts.tolist() if drafts is not None else [()] * len(rows)
        standing = list(counts) or [0] * len(rows)
        masks = np.full((len(binding), slots, (vocabulary + 31) // 32), -1, dtype=np.int32)
        for (place, (held, output)), mask in zip(binding.items(), masks, strict=True):
            standing[place] = held.allow(output, listed[place][: standing[place]], mask)
        bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocabulary, bitorder="little")
        allowed = mx.array(bits.view(np.bool_))
        for index, (place, (held, output)) in enumerate(binding.items()):
            if (opening := held.opening(output)) is not None:
                own = draw(logits[place : place + 1, :1], [sampled[place]._replace(salt=OPENING_SALT)]) == opening
                allowed[index, 0] = mx.where(own[0], mx.arange(vocabulary) == opening, allowed[index, 0])
        if len(binding) == len(rows):
            return mx.where(allowed, logits, -mx.inf), standing
        places = mx.array(list(binding))
        logits[places] = mx.where(allowed, logits[places], -mx.inf)
        return logits, standing

    def _binding(self, rows: Sequence[DecodeRow], slots: int) -> dict[int, tuple[Constraint, Sequence[int]]]:
        """By place in `rows`: the constraints that matter, each with the output so far."""
        found = {}
        for place, row in enumerate(rows if self._held else ()):
            held = self._held.get(row.sequence_id)
            if held is not None and held.binds(output := row.tokens[row.prompt_length :], slots):
                found[place] = held, output
        return found
