"""Attention of few queries over a long context, in pieces that stay in Metal's vector kernel.

That kernel takes 8 queries at most, and 32 of queries × query heads per key head; a verify forward beyond either leaves
it, and from 8 to 12 queries attention then takes 2.3 to 2.8 times as long at 16k to 32k tokens (mlx issue 3826), while
two pieces read the keys twice. Elsewhere, and for whole chunks of a prompt, nothing changes.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx import nn

KERNEL_QUERIES, KERNEL_PRODUCTS = 8, 32
KERNEL_DIMENSIONS = frozenset({64, 96, 128, 256})
MOST_PIECES = 4
"""Each reads the keys again; wider forwards are left to the kernel for whole blocks."""
LEAST_CONTEXT_TOKENS = 2048
"""In shorter contexts attention is a small part of a step."""
FUNCTION = "scaled_dot_product_attention"

Attention = Callable[..., mx.array]
"""mlx-lm's (queries [rows, heads, width, dimension], keys, values, cache, scale, mask, sinks) → as the queries."""
Choice = Callable[[int, int, int, int], int]
"""What `piece_queries` answers on one device."""


def piece_queries(architecture: str, width: int, group: int, context: int, dimension: int) -> int:
    """How many of `width` queries each piece has, with `group` query heads to a key head; `width`: one piece.

    `architecture` is what mlx calls the GPU ("applegpu_g16s"), "" on a CPU; `context` counts the keys.
    """
    queries = min(KERNEL_QUERIES, KERNEL_PRODUCTS // group)
    is_metal = architecture.startswith("applegpu")
    if not is_metal or dimension not in KERNEL_DIMENSIONS or context < LEAST_CONTEXT_TOKENS:
        return width
    return queries if queries < width <= MOST_PIECES * queries else width


def use_vector_attention(model: nn.Module, architecture: str) -> None:
    """Let the attention of a model's layers run in pieces where this GPU has the kernel for them."""
    if not architecture.startswith("applegpu"):
        return

    def choose(width: int, group: int, context: int, dimension: int) -> int:
        return piece_queries(architecture, width, group, context, dimension)

    kinds = {kind for _, module in model.named_modules() for kind in type(module).__mro__}
    for source in {sys.modules[kind.__module__] for kind in kinds}:
        attention = getattr(source, FUNCTION, None)
        if attention is not None and not hasattr(attention, "whole"):
            setattr(source, FUNCTION, in_pieces(attention, choose))


def in_pieces(attention: Attention, choose: Choice) -> Attention:
    """`attention` for as many queries at a time as `choose(width, group, context, dimension)` says."""

    def wrapper(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        width, extra = queries.shape[2], {} if sinks is None else {"sinks": sinks}
        size = width
        if width > 1 and isinstance(keys, mx.array) and keys.shape[-1] == values.shape[-1] == queries.shape[-1]:
            size = choose(width, queries.shape[1] // keys.shape[1], keys.shape[2], keys.shape[3])
        if size >= width:
            return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, **extra)
        pieces = []
        for start, stop in pairwise([*range(0, width, size), width]):
            part = queries[:, :, start:stop]
            seen, shown, told = keys, mask, values
            if isinstance(mask, str):  # "causal" counts from the last key, so later ones are cut off
                end = keys.shape[2] - (width - stop)
                seen, told = keys[:, :, :end], values[:, :, :end]
            elif mask is not None and mask.shape[-2] == width:
                shown = mask[..., start:stop, :]
            pieces.append(attention(part, seen, told, cache=cache, scale=scale, mask=shown, **extra))
        return mx.concatenate(pieces, axis=2)

    wrapper.whole = attention  # type: ignore[attr-defined]
    return wrapper
