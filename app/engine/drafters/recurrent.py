"""What EAGLE-3 and MTP share: one decoder layer that reads (token, hidden state of the position before) and is fed its
own hidden state while it drafts.

The pairing is shifted: the feature of position t enters together with the token at t + 1. What drafting wrote is taken
back at once; the accepted tokens enter again with the target's true features (EAGLE, arXiv 2401.15077 and 2503.01840).
"""

from collections.abc import Sequence

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters.chain import Chain
from app.engine.drafters.features import FeatureDrafter
from app.engine.drafters.target import Target
from app.engine.runner import Runner
from app.engine.sampling import SampledRow


class RecurrentDrafter(FeatureDrafter):
    """Over a module with `config` (taps, max_position_embeddings), `embed(tokens, target)`, `fuse(features)`,
    `extend([embedding ‖ hidden], cache)` → hidden, and `logits(hidden, target)`."""

    shift = 1

    def __init__(self, runner: Runner, target: Target, *, longest: int) -> None:
        config = runner.model.config
        super().__init__(runner, taps=config.taps, longest=longest, max_context_tokens=config.max_position_embeddings)
        self._module = runner.model
        self._target = target

    def _input(self, features: mx.array, tokens: Sequence[int]) -> mx.array:
        embedded = self._module.embed(mx.array([list(tokens)], dtype=mx.int32), self._target)
        return mx.concatenate([embedded, self._module.fuse(features)], axis=-1)

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        names = [row.sequence_id for row in rows]
        hidden, widths = self._extend(names, [row.tokens for row in rows])
        if max(widths) > 1:
            hidden = mx.take_along_axis(hidden, mx.array(widths, dtype=mx.int32)[:, None, None] - 1, axis=1)
        lengths = [self.runner.length(name) for name in names]
        drawn = Chain(sampled, self._target.vocabulary_size)
        drawn.pick(self._module.logits(hidden, self._target))
        for _ in range(width - 1):
            inputs = mx.concatenate([self._module.embed(drawn.drafts[-1], self._target), hidden], axis=-1)
            hidden, forward = self.runner.forward(names, inputs, [1] * len(names), call=self._module.extend)
            self.runner.commit(forward, [1] * len(names))
            drawn.pick(self._module.logits(hidden, self._target))
        for name, length in zip(names, lengths, strict=True):
            self.runner.rewind(name, length)
        return drawn.result()
