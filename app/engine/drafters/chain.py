"""Drafts that are drawn one after the other, each with the ones before it as its prefix."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from app.engine.sampling import SampledRow, adjust, draw


class Chain:
    """The drafts of one proposal so far: int32 [rows, 1] each, in `drafts`.

    They are drawn with the same noise as the target will use at that position (Gumbel coupling, arXiv 2408.07978).
    `vocabulary` is the width of the target's logits.
    """

    def __init__(self, sampled: Sequence[SampledRow], vocabulary: int) -> None:
        self._sampled = sampled
        self._vocabulary = vocabulary
        self._logits: list[mx.array] = []
        self.drafts: list[mx.array] = []

    def pick(self, logits: mx.array) -> mx.array:
        """Draw the next draft of each row from `logits` [rows, 1, vocabulary or more]; the device starts on it."""
        drafted = len(self.drafts)
        ahead = [replace(row, pending=row.pending + drafted) for row in self._sampled]
        fed = mx.concatenate(self.drafts, axis=1) if drafted else None
        logits = adjust(logits[..., : self._vocabulary].astype(mx.float32), ahead, fed)
        self._logits.append(logits)
        self.drafts.append(draw(logits, ahead, noise_vocabulary=self._vocabulary))
        mx.async_eval(self.drafts[-1])  # the device drafts while the host builds the next forward
        return self.drafts[-1]

    def result(self) -> tuple[mx.array, mx.array]:
        """int32 [rows, drafts] and the logits [rows, drafts, vocabulary] that they were drawn from."""
        return mx.concatenate(self.drafts, axis=1), mx.concatenate(self._logits, axis=1)
