"""What the modules of feature drafters share: how they are read from a folder, their attention, and what they borrow
from the target: its token embedding and its head.
"""

from collections.abc import Mapping
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from app.core.config_values import text_part
from app.core.drafter_config import DrafterConfig
from app.core.errors import ModelUnavailable
from app.core.model_folder import ModelFolder
from app.engine.layers import embedding_of, head_of

Tensors = Mapping[str, mx.array]


class Target:
    """Embedding and head of a loaded model. Raises ValueError when they are in no known place."""

    def __init__(self, model: nn.Module, config: Mapping[str, Any], vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._embedding = embedding_of(model)
        self._head = head_of(model)
        settings = text_part(config)
        scaled = str(config.get("model_type", "")).startswith("gemma")
        self._scale = float(settings["hidden_size"]) ** 0.5 if scaled else 1.0
        self._cap = float(settings.get("final_logit_softcapping") or 0.0)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [rows, width, hidden] of int32 `tokens` [rows, width], as the target's first layer reads them."""
        embedded: mx.array = self._embedding(tokens)
        return embedded if self._scale == 1.0 else embedded * self._scale

    def logits(self, hidden: mx.array) -> mx.array:
        """float32 logits [rows, width, vocabulary] of hidden states behind the final norm."""
        logits: mx.array = self._head(hidden)[..., : self.vocabulary_size].astype(mx.float32)
        return mx.tanh(logits / self._cap) * self._cap if self._cap else logits


class FeatureModule(nn.Module):
    """One attention layer that reads embeddings and hidden states of the target and whose head is the target's, unless
    a subclass says otherwise. Its verb `extend(inputs, cache)` lets the context grow; `fc` makes its inputs of features
    [rows, width, taps · target hidden]."""

    config: Any
    longest: int
    """Tokens that one proposal can hold at most."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc: Any = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=False)

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

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """float32 logits [rows, width, vocabulary] over the target's tokens."""
        return target.logits(hidden)


class Attention(qwen3.Attention):
    """Qwen3's over inputs of `input_size`, with the biases and rotary positions of the config."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__(config)
        size, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=bias)
        turned, scaling = int(size * config.partial_rotary_factor), dict(config.rope_scaling or {}) or None
        self.rope = initialize_rope(
            turned, config.rope_theta, config.rope_traditional, scaling, config.max_position_embeddings
        )

    def extend(self, x: mx.array, cache: Any) -> None:
        """Write keys and values of `x` [rows, width, input] behind the cache."""
        shape = (*x.shape[:2], self.n_kv_heads, -1)
        keys = self.k_norm(self.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
        cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)


def own_tensors(folder: ModelFolder, *borrowed: str) -> dict[str, mx.array]:
    """The (lazy) tensors of a folder by name, less a leading `model.`; none whose name begins like a `borrowed` one."""
    files: list[Any] = [mx.load(str(folder.path / name)) for name in folder.weight_files]
    tensors = {name.removeprefix("model."): value for file in files for name, value in file.items()}
    return {name: value for name, value in tensors.items() if not name.startswith(borrowed)}
