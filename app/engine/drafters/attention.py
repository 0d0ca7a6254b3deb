"""The attention of DFlash and EAGLE-3 layers: Llama's, with Qwen's norms of queries and keys where they exist."""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import initialize_rope

from app.core.drafter_config import DrafterConfig


class Attention(nn.Module):
    """Over inputs of `input_size`; `norms`: queries and keys are normed per head; not `causal`: a block sees itself."""

    def __init__(self, config: DrafterConfig, input_size: int, *, norms: bool, causal: bool) -> None:
        super().__init__()
        size, bias = config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.causal = config.num_attention_heads, config.num_key_value_heads, causal
        self.scale = size**-0.5
        self.q_proj = nn.Linear(input_size, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(input_size, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(input_size, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, config.hidden_size, bias=bias)
        if norms:
            self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            int(size * config.partial_rotary_factor),
            config.rope_theta,
            config.rope_traditional,
            dict(config.rope_scaling) if config.rope_scaling else None,
            config.max_position_embeddings,
        )

    def _turned(self, x: mx.array, heads: int, norm: str, offset: Any) -> mx.array:
        x = x.reshape(*x.shape[:2], heads, -1)
        x = (self[norm](x) if norm in self else x).transpose(0, 2, 1, 3)
        turned: mx.array = self.rope(x, offset=offset)
        return turned

    def extend(self, x: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Write keys and values of `x` [rows, width, input] behind the cache; all keys and values up to there."""
        keys = self._turned(self.k_proj(x), self.kv_heads, "k_norm", cache.offset)
        values = self.v_proj(x).reshape(*x.shape[:2], self.kv_heads, -1).transpose(0, 2, 1, 3)
        written: tuple[mx.array, mx.array] = cache.update_and_fetch(keys, values)
        return written

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        width = x.shape[1]
        queries = self._turned(self.q_proj(x), self.heads, "q_norm", cache.offset)
        keys, values = self.extend(x, cache)
        mask = cache.make_mask(width) if self.causal else cache.make_block_mask(width)
        output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))
