"""Pairs of models with real costs and no training (layer skip).

The target is random, and the output projections of all but a few layers are scaled by ε; the draft is these few layers
with the target's embedding and head. Greedy acceptance falls as ε grows, while every matrix keeps its full size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3, qwen3_next
from mlx_lm.models.cache import make_prompt_cache

from app.engine.memory import on_cpu

SPECIAL_TOKENS = 32
"""Number of lowest token ids, which are never generated, so that no end of sequence cuts a measurement short."""

ATTENTION_EPSILON = 0.01
HYBRID_EPSILON = 0.016
"""Values of ε with an acceptance of about 0.8 for four drafts at the default sizes; `calibrate` adjusts them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a bench model. The default target has 113 M parameters."""

    hidden: int = 768
    layers: int = 16
    vocabulary: int = 2048
    context: int = 4096

    @property
    def heads(self) -> int:
        """Number of query heads, of 64 dimensions each."""
        return self.hidden // 64


@dataclass(slots=True)
class LayerSkipPair:
    """Target and draft that share arrays, and the projections that ε scales."""

    target: nn.Module
    draft: nn.Module
    target_config: dict[str, Any]
    draft_config: dict[str, Any]
    epsilon: float
    scaled: list[tuple[nn.Module, mx.array]]
    """Pairs of a projection and its weight at ε = 1."""

    def set_epsilon(self, epsilon: float) -> None:
        """Scale the projections of the layers that the draft does not have."""
        self.epsilon = epsilon
        for projection, weight in self.scaled:
            projection.weight = weight * epsilon
        mx.eval(self.target.parameters())


def make_attention_pair(
    sizes: Sizes | None = None, *, epsilon: float = ATTENTION_EPSILON, draft_layers: int = 2, seed: int = 0
) -> LayerSkipPair:
    """Make a qwen3 target, and a draft of its first layers."""
    sizes = sizes or Sizes()
    config = {
        "model_type": "qwen3",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.hidden * 3,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": max(1, sizes.heads // 3),
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.context,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    return _make_pair(qwen3, config, {"num_hidden_layers": draft_layers}, list(range(draft_layers)), epsilon, seed)


def make_hybrid_pair(sizes: Sizes | None = None, *, epsilon: float = HYBRID_EPSILON, seed: int = 0) -> LayerSkipPair:
    """Make a qwen3_next target (gated delta, every fourth layer full attention) and a draft of its layers 0 and 3."""
    sizes = sizes or Sizes()
    config = {
        "model_type": "qwen3_next",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.hidden * 3,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": max(1, sizes.heads // 3),
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.context,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "full_attention_interval": 4,
        "linear_num_key_heads": max(1, sizes.heads // 2),
        "linear_num_value_heads": max(1, sizes.heads // 2),
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "moe_intermediate_size": 0,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    changes = {"num_hidden_layers": 2, "full_attention_interval": 2}
    return _make_pair(qwen3_next, config, changes, [0, 3], epsilon, seed)


def make_copying_target(sizes: Sizes | None = None, *, period: int = 64, seed: int = 0) -> LayerSkipPair:
    """Make a qwen3 target whose greedy text repeats itself: it walks around a ring of `period` tokens."""
    pair = make_attention_pair(sizes, epsilon=0.0, draft_layers=1, seed=seed)
    table = pair.target.model.embed_tokens.weight
    ring = ring_of(period)
    rows = list(range(table.shape[0]))
    for token, follower in zip(ring, [*ring[1:], ring[0]], strict=True):
        rows[follower] = token
    in_ring = mx.zeros((table.shape[0], 1))
    in_ring[mx.array(ring)] = 1.0
    pair.target.lm_head.weight = table[mx.array(rows)] * in_ring
    for projection in _projections(pair.target.model.layers[0]):
        projection.weight = projection.weight * 0.0
    mx.eval(pair.target.parameters())
    return pair


def ring_of(period: int) -> list[int]:
    """Return the tokens that the copying target walks through, in order."""
    return list(range(SPECIAL_TOKENS, SPECIAL_TOKENS + period))


def _make_pair(
    module: Any, config: dict[str, Any], changes: dict[str, Any], kept: list[int], epsilon: float, seed: int
) -> LayerSkipPair:
    """Build the target, and the draft from its `kept` layers."""
    mx.random.seed(seed)
    draft_config = {**config, **changes}
    target = module.Model(module.ModelArgs.from_dict(config))
    target.set_dtype(fast_dtype())  # before evaluation, so that a large model never exists in float32
    draft = module.Model(module.ModelArgs.from_dict(draft_config))
    head = target.lm_head
    head.weight = mx.where(mx.arange(head.weight.shape[0])[:, None] < SPECIAL_TOKENS, 0.0, head.weight)
    draft.model.embed_tokens = target.model.embed_tokens
    draft.model.norm = target.model.norm
    draft.lm_head = head
    draft.model.layers = [target.model.layers[index] for index in kept]
    skipped = [layer for index, layer in enumerate(target.model.layers) if index not in kept]
    scaled = [(projection, projection.weight) for layer in skipped for projection in _projections(layer)]
    pair = LayerSkipPair(target, draft, config, draft_config, epsilon, scaled)
    mx.eval(target.parameters())
    pair.set_epsilon(epsilon)
    return pair


def fast_dtype() -> mx.Dtype:
    """Return float32 on a CPU, where half precision is slow, and float16 on a GPU."""
    return mx.float32 if on_cpu() else mx.float16


def _projections(layer: Any) -> list[Any]:
    """Return the two matrices through which a layer writes to the residual stream."""
    mixer = layer.linear_attn.out_proj if "linear_attn" in layer else layer.self_attn.o_proj
    return [mixer, layer.mlp.down_proj]


def greedy_text(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> mx.array:
    """Generate greedily after prompts of one length, all rows in one batch."""
    cache = make_prompt_cache(model)
    current = mx.argmax(model(mx.array(list(prompts)), cache=cache)[:, -1], axis=-1)
    generated = []
    for _ in range(tokens):
        generated.append(current)
        current = mx.argmax(model(current[:, None], cache=cache)[:, -1], axis=-1)
        mx.eval(current)
    return mx.stack(generated, axis=1)


def accepted_share(agreement: Sequence[bool], drafts: int) -> float:
    """Return accepted / drafted of a greedy speculative run, given where the draft agrees with the target."""
    position = drafted = accepted = 0
    while position + drafts < len(agreement):
        run = 0
        while run < drafts and agreement[position + run]:
            run += 1
        drafted, accepted, position = drafted + drafts, accepted + run, position + run + 1
    return accepted / drafted if drafted else 0.0


def measure_acceptance(
    pair: LayerSkipPair, prompts: Sequence[Sequence[int]], *, tokens: int = 64, drafts: int = 4
) -> float:
    """Measure the acceptance of the pair, by one target run and one draft forward over its text."""
    generated = greedy_text(pair.target, prompts, tokens)
    start = len(prompts[0]) - 1
    drafted = mx.argmax(pair.draft(mx.concatenate([mx.array(list(prompts)), generated], axis=1)), axis=-1)[:, start:-1]
    agreement: Any = (drafted == generated).tolist()
    return sum(accepted_share(row, drafts) for row in agreement) / len(agreement)


def calibrate(
    pair: LayerSkipPair,
    prompts: Sequence[Sequence[int]],
    *,
    target_acceptance: float = 0.8,
    tolerance: float = 0.04,
    drafts: int = 4,
    tokens: int = 64,
) -> float:
    """Bisect ε on short greedy runs until acceptance is near the target; return the acceptance reached."""
    low, high = 0.0, 0.0
    reached = measure_acceptance(pair, prompts, tokens=tokens, drafts=drafts)
    for _ in range(8):
        if abs(reached - target_acceptance) <= tolerance:
            break
        low, high = (pair.epsilon, high) if reached > target_acceptance else (low, pair.epsilon)
        pair.set_epsilon(_between(low, high))
        reached = measure_acceptance(pair, prompts, tokens=tokens, drafts=drafts)
    return reached


def _between(low: float, high: float) -> float:
    """Return the geometric mean; a bound of 0 has not been found yet."""
    if not low:
        return high / 3
    return math.sqrt(low * high) if high else low * 3
