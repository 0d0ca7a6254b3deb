"""DFlash, EAGLE-3 and Qwen's MTP written out in NumPy from their papers and published formats: whole sequences at once,
no caches, no batch, nothing shared with the code under test."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Weights = Mapping[str, Array]
EPSILON = 1e-6


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * weight


def rotate(x: Array, positions: npt.NDArray[np.int64], theta: float) -> Array:
    """Apply half-split rotary embeddings to `x` [heads, length, size]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )


def heads_of(x: Array, heads: int) -> Array:
    """Reshape [length, heads · size] to [heads, length, size]."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def attend(queries: Array, keys: Array, values: Array, seen: npt.NDArray[np.bool_]) -> Array:
    """Compute softmax attention with grouped heads; `seen` [queries, keys] is the mask."""
    groups = len(queries) // len(keys)
    keys, values = np.repeat(keys, groups, axis=0), np.repeat(values, groups, axis=0)
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1])
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output = weights / weights.sum(axis=-1, keepdims=True) @ values
    joined: Array = output.transpose(1, 0, 2).reshape(output.shape[1], -1)
    return joined


def swiglu(x: Array, weights: Weights, prefix: str) -> Array:
    gate = x @ weights[f"{prefix}.gate_proj.weight"].T
    output: Array = (gate / (1 + np.exp(-gate)) * (x @ weights[f"{prefix}.up_proj.weight"].T)) @ weights[
        f"{prefix}.down_proj.weight"
    ].T
    return output


def dflash(features: Array, block: Array, weights: Weights, *, heads: int, kv_heads: int, window: int) -> Array:
    """Return the states of a block of embeddings [slots, hidden] after a context of features [length, taps · hidden].

    Layer 0 sees everything; layer 1 slides over `window` positions and is causal inside the block.
    """
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    length, slots = len(context), len(block)
    positions = np.arange(length + slots)
    x = block
    for layer in range(2):
        name = f"layers.{layer}"
        a = norm(x, weights[f"{name}.input_layernorm.weight"])
        both = np.concatenate([context, a])
        queries = heads_of(a @ weights[f"{name}.self_attn.q_proj.weight"].T, heads)
        keys = heads_of(both @ weights[f"{name}.self_attn.k_proj.weight"].T, kv_heads)
        values = heads_of(both @ weights[f"{name}.self_attn.v_proj.weight"].T, kv_heads)
        queries = rotate(norm(queries, weights[f"{name}.self_attn.q_norm.weight"]), positions[length:], 10_000.0)
        keys = rotate(norm(keys, weights[f"{name}.self_attn.k_norm.weight"]), positions, 10_000.0)
        at = positions[length:, None]
        seen = np.ones((slots, length + slots), dtype=bool)
        if layer == 1:
            seen = (positions <= at) & (at < positions + window)
        x = x + attend(queries, keys, values, seen) @ weights[f"{name}.self_attn.o_proj.weight"].T
        x = x + swiglu(norm(x, weights[f"{name}.post_attention_layernorm.weight"]), weights, f"{name}.mlp")
    return norm(x, weights["norm.weight"])


def eagle3(embedded: Array, hidden: Array, weights: Weights, *, heads: int, kv_heads: int) -> tuple[Array, Array]:
    """Return (states to feed back, draft logits) of pairs (next token's embedding, fused hidden state), [length, …]."""
    name = "midlayer"
    positions = np.arange(len(hidden))
    both = np.concatenate(
        [
            norm(embedded, weights[f"{name}.input_layernorm.weight"]),
            norm(hidden, weights[f"{name}.hidden_norm.weight"]),
        ],
        axis=-1,
    )
    queries = rotate(heads_of(both @ weights[f"{name}.self_attn.q_proj.weight"].T, heads), positions, 10_000.0)
    keys = rotate(heads_of(both @ weights[f"{name}.self_attn.k_proj.weight"].T, kv_heads), positions, 10_000.0)
    values = heads_of(both @ weights[f"{name}.self_attn.v_proj.weight"].T, kv_heads)
    seen = positions <= positions[:, None]
    x = hidden + attend(queries, keys, values, seen) @ weights[f"{name}.self_attn.o_proj.weight"].T
    x = x + swiglu(norm(x, weights[f"{name}.post_attention_layernorm.weight"]), weights, f"{name}.mlp")
    return x, norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T


def mtp(embedded: Array, hidden: Array, weights: Weights, *, heads: int, kv_heads: int, rotary: int) -> Array:
    """Return the states after the final norm of Qwen3-Next's MTP head (gated attention); `rotary` dimensions rotate."""
    positions = np.arange(len(hidden))
    joined = np.concatenate([norm(embedded, weights["enorm.weight"]), norm(hidden, weights["hnorm.weight"])], axis=-1)
    x = joined @ weights["eh_proj.weight"].T
    a = norm(x, weights["layer.input_layernorm.weight"])
    both = (a @ weights["layer.self_attn.q_proj.weight"].T).reshape(len(x), heads, -1)
    queries, gate = np.split(both, 2, axis=-1)
    queries = norm(queries, weights["layer.self_attn.q_norm.weight"]).transpose(1, 0, 2)
    keys = heads_of(a @ weights["layer.self_attn.k_proj.weight"].T, kv_heads)
    keys = norm(keys, weights["layer.self_attn.k_norm.weight"])
    values = heads_of(a @ weights["layer.self_attn.v_proj.weight"].T, kv_heads)
    queries, keys = (_partly_rotated(part, positions, rotary) for part in (queries, keys))
    attended = attend(queries, keys, values, positions <= positions[:, None])
    gated = attended / (1 + np.exp(-gate.reshape(len(x), -1)))
    x = x + gated @ weights["layer.self_attn.o_proj.weight"].T
    x = x + swiglu(norm(x, weights["layer.post_attention_layernorm.weight"]), weights, "layer.mlp")
    return norm(x, weights["norm.weight"])


def _partly_rotated(x: Array, positions: npt.NDArray[np.int64], size: int) -> Array:
    return np.concatenate([rotate(x[..., :size], positions, 10_000.0), x[..., size:]], axis=-1)
