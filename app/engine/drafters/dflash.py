"""DFlash: a small block-diffusion model drafts a whole block in one forward (arXiv 2602.06036, z-lab's checkpoints).

Its context is the target's own hidden states: each layer reads c = hidden_norm(fc(h_t0 ‖ … ‖ h_tn)) as keys and
values only. The block [last token, mask, mask, …] attends to the context and, in layers that are not causal, to the
whole block. The hidden state of slot i gives the draft at slot i. Block keys are never committed to the cache.
"""

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.qwen3 import TransformerBlock

from app.core.step import DecodeRow
from app.engine.drafters.draft_model import draw_after
from app.engine.drafters.features import Attention, FeatureDrafter, FeatureModule, load_tensors
from app.engine.sampling.drawing import SampledRow
from app.models.config_values import Config
from app.models.drafters.config import SLIDING
from app.models.drafters.formats import TARGET_PREFIXES, DFlashConfig
from app.models.folder import ModelFolder


class DFlashModel(FeatureModule):
    """The checkpoint's own layers."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [TransformerBlock(config) for _ in config.layer_types]
        self.longest = config.block_size - 1
        for layer in self.layers:
            layer.self_attn = Attention(config, config.hidden_size)

    @classmethod
    def load(cls, folder: ModelFolder, target_config: Config) -> Self:
        """Build the module from a folder, with lazy weights. Raises ModelUnavailable."""
        return cls(DFlashConfig.read(folder.config, target_config)).fill(load_tensors(folder, *TARGET_PREFIXES))

    def make_cache(self) -> list[Any]:
        window = self.config.sliding_window
        return [RotatingKVCache(max_size=window) if kind == SLIDING else KVCache() for kind in self.config.layer_types]

    def extend(self, features: mx.array, cache: Sequence[Any]) -> mx.array:
        """Extend the context by `features` [rows, width, hidden]."""
        context = self.hidden_norm(features)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            layer.self_attn.extend(context, layer_cache)
        return context

    def __call__(self, x: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return hidden states after the final norm for a block of embeddings, both [rows, slots, hidden]."""
        for layer, layer_cache, causal in zip(self.layers, cache, self.config.causal, strict=True):
            mask = (layer_cache.make_mask if causal else layer_cache.make_block_mask)(x.shape[1])
            x = layer(x, mask, layer_cache)
        return self.norm(x)


class DFlash(FeatureDrafter):
    """Drafts up to block size - 1 tokens in one forward."""

    name = "dflash"
    load = DFlashModel.load

    def _inputs(self, tokens: mx.array, output: mx.array) -> mx.array:  # noqa: ARG002
        """Return the features alone; the tokens are not an input."""
        return output

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        tokens_by_id, mask = {row.sequence_id: row.tokens for row in rows}, self._module.config.mask_token_id
        self._catch_up(tokens_by_id)
        blocks = []
        for row in rows:  # later slots see forced tokens, except the last, which may be spelled differently
            forced = [usual for usual, *_ in row.forced[:-1]][:width]
            blocks.append([row.tokens[-1], *forced, *[mask] * (width - len(forced))])
        block = mx.array(blocks, dtype=mx.int32)
        hidden, _ = self.runner.forward(list(tokens_by_id), self._target.embed(block), [1 + width] * len(rows))
        return draw_after((), self._target.logits(hidden[:, 1:]), sampled, self._target_vocabulary)
