"""EAGLE-3 (arXiv 2503.01840): one decoder layer over three of the target's hidden states, with a vocabulary of its own.

Attention reads [norm(embedding) ‖ norm(hidden)], twice as wide; the residual is the hidden state. `d2t` maps a draft
token to the target's: target id = draft id + d2t[draft id]. Its state before the final norm is fed back.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP

from app.core.drafter_config import Eagle3Config
from app.engine.drafters.attention import Attention
from app.engine.drafters.recurrent import RecurrentDrafter
from app.engine.drafters.target import Target
from app.engine.runner import Runner

LONGEST_DRAFT = 16


class Layer(nn.Module):
    """The `midlayer`."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config, 2 * config.hidden_size, norms=False, causal=True)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        embedded, hidden = mx.split(inputs, 2, axis=-1)
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended = self.self_attn(mx.concatenate([self.input_layernorm(embedded), normed], axis=-1), cache)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Model(nn.Module):
    """The checkpoint. `d2t` int [draft vocabulary]; `embed_tokens` only when the checkpoint brings its own."""

    def __init__(self, config: Eagle3Config, *, own_embedding: bool, own_map: bool) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if own_map:
            self.d2t = mx.zeros((config.draft_vocab_size,), dtype=mx.int32)

    def make_cache(self) -> list[Any]:
        """One attention layer."""
        return [KVCache()]

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        """Embeddings [rows, width, hidden] of target tokens."""
        if "embed_tokens" not in self:
            return target.embed(tokens)
        embedded: mx.array = self.embed_tokens(tokens)
        return embedded

    def fuse(self, features: mx.array) -> mx.array:
        """[rows, width, taps · target hidden] → [rows, width, hidden]."""
        fused: mx.array = self.fc(features)
        return fused

    def extend(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Hidden states to feed back [rows, width, hidden]."""
        hidden: mx.array = self.midlayer(inputs, cache[0])
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """float32 logits over the target's vocabulary; tokens that the drafter does not know get -inf."""
        normed = hidden if self.config.norm_output else self.norm(hidden)
        logits = self.lm_head(normed).astype(mx.float32)
        if "d2t" not in self:
            return logits
        wide = mx.full((*logits.shape[:-1], target.vocabulary_size), -mx.inf)
        wide[..., mx.arange(self.config.draft_vocab_size) + self.d2t] = logits
        return wide


class Eagle3(RecurrentDrafter):
    """Drafts token by token with its own layer."""

    name = "eagle3"

    def __init__(self, runner: Runner, target: Target) -> None:
        super().__init__(runner, target, longest=LONGEST_DRAFT)
