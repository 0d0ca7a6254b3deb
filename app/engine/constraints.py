"""Grammar constraints: masks for the logits of rows, made on the host while the device runs the forward."""

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
"""Tokens drawn before the host has read the first of them."""


class Constraints:
    """Constraints of one engine's rows."""

    def __init__(self, *, by_rejection: bool = False) -> None:
        self._by_rejection = by_rejection
        """Whether acceptance is by rejection: then a draft must not change depending on what was drawn."""
        self._held: dict[str, Constraint] = {}

    def admit(self, request: Request) -> None:
        if request.constraint is not None:
            self._held[request.id] = request.constraint.begin()

    def release(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def bind(self, rows: Sequence[DecodeRow], slots: int = LAUNCHED_AHEAD) -> bool:
        """Return whether any row may have a token forbidden within the next `slots`."""
        return bool(self._binding(rows, slots))

    def failure(self, row: DecodeRow, emitted: Sequence[int]) -> str:
        """Return why a row cannot continue, or not end, after what it emitted; empty while all is well."""
        held = self._held.get(row.sequence_id)
        return held.failure([*row.tokens[row.prompt_length :], *emitted]) if held else ""

    def forced(
        self, sequence_id: str, tokens: Sequence[int], prompt_length: int, emitted: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], ...]:
        """Return the forced tokens, as far as known, after a row's `tokens` (prompt and output) and `emitted`."""
        held = self._held.get(sequence_id)  # an unconstrained row copies no text
        return held.forced([*tokens[prompt_length:], *emitted]) if held else ()

    def led(self, row: DecodeRow) -> DecodeRow:
        """Return the row with its first drafts forced by the grammar, and no more drafts than its masks can afford."""
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
        """Append forced tokens after each row's drafts, in place of those from the first forbidden one on.
        This waits for the drafts, which the longer cycle is worth."""
        binding = {} if proposal.tokens is None or self._by_rejection else self._binding(rows, 1)
        if proposal.tokens is None or not any(proposal.counts[place] for place in binding):
            return proposal
        listed: Any = proposal.tokens.tolist()
        drafts = [tokens[:count] for tokens, count in zip(listed, proposal.counts, strict=True)]
        appended = [0] * len(rows)
        for place, (held, output) in binding.items():
            if own := drafts[place]:
                standing, forced = held.forced_after(output, own)
                more = forced[: max(0, rows[place].most_draft_tokens - standing)]
                drafts[place], appended[place] = [*own[:standing], *more], len(more)
        counts = tuple(map(len, drafts))
        # At least one slot: a drafter that drafted must observe the outcome.
        return proposal._replace(tokens=padded(drafts, 1), counts=counts, appended=tuple(appended))

    def mask(
        self,
        logits: mx.array,
        rows: Sequence[DecodeRow],
        sampled: Sequence[SampledRow],
        drafts: mx.array | None = None,
        counts: Sequence[int] = (),
    ) -> tuple[mx.array, Sequence[int]]:
        """Set forbidden tokens of `logits` float32 [rows, slots, vocabulary] to -inf; count each row's valid `drafts`.

        `drafts` are int32 [rows, slots - 1], of which `counts` are real. At the start of an answer, a draw from all
        tokens decides whether it begins with reasoning: among the few of a grammar, the opening mark may seem likely.
        """
        slots, vocabulary = logits.shape[1:]
        binding = self._binding(rows, slots)
        if not binding:
            return logits, counts
        mx.async_eval(logits)  # the host continues meanwhile
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
        """Return the binding constraints by index in `rows`, each with the output so far."""
        binding = {}
        for place, row in enumerate(rows if self._held else ()):
            held = self._held.get(row.sequence_id)
            if held is not None and held.binds(output := row.tokens[row.prompt_length :], slots):
                binding[place] = held, output
        return binding
