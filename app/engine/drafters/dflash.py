"""DFlash: a small block-diffusion model drafts a whole block in one forward (arXiv 2602.06036, z-lab's checkpoints).

Its context is the target's own hidden states: c = hidden_norm(fc(h_t0 ‖ … ‖ h_tn)) enters each layer as keys and values
and nothing else. The block [last token, mask, mask, …] attends to the whole context and, in full layers, to all of
itself; the hidden state of slot i gives the draft at slot i. Block keys are never committed to the cache.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.qwen3 import MLP

from app.core.drafter_config import SLIDING, DFlashConfig
from app.core.step import DecodeRow
from app.engine.drafters.attention import Attention
from app.engine.drafters.features import FeatureDrafter
from app.engine.drafters.target import Target
from app.engine.runner import Runner
from app.engine.sampling import SampledRow, adjust, draw


class Layer(nn.Module):
    """One decoder layer over the block."""

    def __init__(self, config: DFlashConfig, *, causal: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size, norms=True, causal=causal)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModel(nn.Module):
    """The checkpoint's own layers; embedding and head are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config, causal=causal) for causal in config.causal]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def make_cache(self) -> list[Any]:
        """The cache classes of the layers, as mlx-lm's models tell them."""
        window = self.config.sliding_window
        return [RotatingKVCache(max_size=window) if kind == SLIDING else KVCache() for kind in self.config.layer_types]

    def extend(self, features: mx.array, cache: Sequence[Any]) -> mx.array:
        """Let the context grow by `features` [rows, width, taps · hidden]."""
        context = self.hidden_norm(self.fc(features))
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            layer.self_attn.extend(context, layer_cache)
        return context

    def __call__(self, x: mx.array, cache: Sequence[Any]) -> mx.array:
        """Hidden states behind the final norm [rows, slots, hidden] of a block of embeddings [rows, slots, hidden]."""
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, layer_cache)
        return self.norm(x)


class DFlash(FeatureDrafter):
    """Drafts up to block size - 1 tokens at once."""

    name = "dflash"

    def __init__(self, runner: Runner, target: Target) -> None:
        config: DFlashConfig = runner.model.config
        super().__init__(
            runner,
            taps=config.taps,
            longest=config.block_size - 1,
            max_context_tokens=config.max_position_embeddings,
        )
        self._mask_token_id = config.mask_token_id
        self._target = target

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        names = [row.sequence_id for row in rows]
        self._extend(names, [row.tokens for row in rows])
        block = mx.array([[row.tokens[-1], *[self._mask_token_id] * width] for row in rows], dtype=mx.int32)
        hidden, _ = self.runner.forward(names, self._target.embed(block), [1 + width] * len(rows))
        logits = adjust(self._target.logits(hidden[:, 1:]), sampled, None)
        return draw(logits, sampled, noise_vocabulary=self._target.vocabulary_size), logits
