"""What the modules of feature drafters share: how they are read from a folder, what they borrow, their attention."""

from collections.abc import Mapping
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from app.core.drafter_config import DrafterConfig
from app.core.errors import ModelUnavailable
from app.core.model_folder import ModelFolder
from app.engine.drafters.target import Target

Tensors = Mapping[str, mx.array]


class FeatureModule(nn.Module):
    """One attention layer that reads embeddings and hidden states of the target and whose head is the target's, unless
    a subclass says otherwise. Its verb `extend(inputs, cache)` lets the context grow."""

    config: Any

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config

    def fill(self, weights: Tensors) -> Self:
        """Take these weights, every one of them and nothing else. Raises ModelUnavailable."""
        try:
            return self.load_weights(list(weights.items()), strict=True)
        except ValueError as error:
            detail = " ".join(str(error).split())[:200]
            reason = f"its tensors are not those of its config ({detail}); download it again"
            raise ModelUnavailable(reason) from error

    def make_cache(self) -> list[Any]:
        """The cache classes of the layers, as mlx-lm's models tell them."""
        return [KVCache()]

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        """Embeddings [rows, width, hidden] of target tokens."""
        return target.embed(tokens)

    def fuse(self, features: mx.array) -> mx.array:
        """[rows, width, taps · target hidden] → [rows, width, hidden]."""
        return features

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """float32 logits [rows, width, vocabulary] over the target's tokens."""
        return target.logits(hidden)


class Attention(qwen3.Attention):
    """Qwen3's over inputs of `input_size`, with the biases and rotary positions of the config, or without `norms`."""

    def __init__(self, config: DrafterConfig, input_size: int, *, norms: bool) -> None:
        super().__init__(config)
        size, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=bias)
        if not norms:
            self.q_norm = self.k_norm = nn.Identity()
        self.rope = initialize_rope(
            int(size * config.partial_rotary_factor),
            config.rope_theta,
            config.rope_traditional,
            dict(config.rope_scaling) if config.rope_scaling else None,
            config.max_position_embeddings,
        )

    def extend(self, x: mx.array, cache: Any) -> None:
        """Write keys and values of `x` [rows, width, input] behind the cache."""
        shape = (*x.shape[:2], self.n_kv_heads, -1)
        keys = self.k_norm(self.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
        cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)


def own_tensors(folder: ModelFolder) -> dict[str, mx.array]:
    """The (lazy) tensors of a folder by name, less a leading `model.`."""
    tensors: dict[str, mx.array] = {}
    for name in folder.weight_files:
        loaded: Any = mx.load(str(folder.path / name))
        tensors.update({name.removeprefix("model."): value for name, value in loaded.items()})
    return tensors
