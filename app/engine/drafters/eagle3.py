"""EAGLE-3 (arXiv 2503.01840): one decoder layer over three of the target's hidden states, with a vocabulary of its own.

Attention reads [norm(embedding) ‖ norm(hidden)], twice the hidden size; the residual is the hidden state. `d2t` maps
ids: target id = draft id + d2t[draft id]. The layer's output is fed back, before the final norm unless `norm_output`.
"""

from collections.abc import Container, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.qwen3 import TransformerBlock

from app.engine.drafters.features import Attention, FeatureDrafter, FeatureModule, load_tensors
from app.engine.layers import Target
from app.models.config_values import Config
from app.models.drafters.formats import Eagle3Config
from app.models.folder import ModelFolder


class Layer(TransformerBlock):
    """The `midlayer`: it reads [embedding ‖ hidden] and normalises both."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.self_attn.q_norm = self.self_attn.k_norm = nn.Identity()
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, inputs: mx.array, mask: Any, cache: Any) -> mx.array:
        embedded, hidden = mx.split(inputs, 2, axis=-1)
        normed = self.hidden_norm(hidden)
        attended = self.self_attn(mx.concatenate([self.input_layernorm(embedded), normed], axis=-1), mask, cache)
        hidden = (normed if self.args.norm_before_residual else hidden) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Model(FeatureModule):
    """The checkpoint's module; it has `d2t` (int [draft vocabulary]) and `embed_tokens` only if `tensor_names` do."""

    longest = 16

    def __init__(self, config: Eagle3Config, tensor_names: Container[str]) -> None:
        super().__init__(config)
        self.midlayer = Layer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in tensor_names:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if "d2t" in tensor_names:
            self.d2t = mx.zeros((config.draft_vocab_size,), dtype=mx.int32)

    @classmethod
    def load(cls, folder: ModelFolder, target_config: Config) -> Self:
        """Build the module from a folder that passed `check_drafter`, with lazy weights. Raises ModelUnavailable."""
        tensors = load_tensors(folder, "t2d")
        weights = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
        return cls(Eagle3Config.read(folder.config, target_config), weights).fill(weights)

    def extend(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the hidden states [rows, width, hidden] to feed back."""
        hidden: mx.array = self.midlayer(inputs, cache[0].make_mask(inputs.shape[1]), cache[0])
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Return logits by target id if there is a `d2t`; tokens that the drafter does not know get -inf."""
        normed = hidden if self.config.norm_output else self.norm(hidden)
        logits = self.lm_head(normed).astype(mx.float32)
        if "d2t" not in self:
            return logits
        wide = mx.full((*logits.shape[:-1], target.vocabulary_size), -mx.inf)
        wide[..., mx.arange(self.config.draft_vocab_size) + self.d2t] = logits
        return wide


class Eagle3(FeatureDrafter):
    """Drafts token by token with its own layer."""

    name = "eagle3"
    load = Eagle3Model.load
