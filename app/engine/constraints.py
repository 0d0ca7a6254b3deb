"""Rows that are held to something: masks for their logits, made on the host while the device is at the forward."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from app.core.request import Constraint, Request
from app.core.step import DecodeRow

LAUNCHED_AHEAD = 2
"""Tokens that are drawn before the host has read the first of them."""


class Constraints:
    """Those of one engine's rows."""

    def __init__(self) -> None:
        self._held: dict[str, Constraint] = {}

    def admit(self, request: Request) -> None:
        if request.constraint is not None:
            self._held[request.id] = request.constraint.begin()

    def release(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def bind(self, rows: Sequence[DecodeRow], slots: int = LAUNCHED_AHEAD) -> bool:
        """Whether a token of the next `slots` may be forbidden to one of the rows."""
        return bool(self._binding(rows, slots))

    def error(self, row: DecodeRow) -> str:
        """Why a row cannot go on; empty while it can."""
        held = self._held.get(row.sequence_id)
        return held.error if held else ""

    def mask(
        self, logits: mx.array, rows: Sequence[DecodeRow], drafts: mx.array | None = None, counts: Sequence[int] = ()
    ) -> tuple[mx.array, Sequence[int]]:
        """`logits` float32 [rows, slots, vocabulary] with -inf where a token may not come, and how many of each row's
        `drafts` int32 [rows, slots - 1], of which `counts` are real, can stand."""
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
