"""The attention of mlx-lm's models in parts: for each buffer that rows of a forward lie in, and on Metal for few
queries at a time. All that a usual call costs is the question.

A row reads what it has and no more, however long the rows beside it are. And Metal's vector kernel takes 8 queries at
most, and 32 of queries × query heads per key head: a verify forward beyond either leaves it, and from 8 to 12 queries
attention then takes 2.3 to 2.8 times as long at 16k to 32k tokens (mlx issue 3826); two pieces read the keys twice.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base

KERNEL_QUERIES, KERNEL_PRODUCTS = 8, 32
KERNEL_DIMENSIONS = frozenset({64, 96, 128, 256})
MOST_PIECES = 4
"""Each reads the keys again; wider forwards are left to the kernel for whole blocks."""
LEAST_CONTEXT_TOKENS = 2048
"""In shorter contexts attention is a small part of a step."""

Cut = Callable[[int, int, int, int], int]
"""How many queries a piece has, by width, query heads to a key head, number of keys and their dimension."""
NAME = "scaled_dot_product_attention"
_whole = base.scaled_dot_product_attention


@dataclass(frozen=True)
class Pieces:
    """Keys, values or masks of some rows of a forward each; rows that take no part have none."""

    rows: tuple[slice, ...]
    each: Sequence[Any]

    def padded(self, rows: int) -> mx.array:
        """[rows, heads, longest, dimension] of all of them, for attention that wants one array."""
        longest = max(part.shape[2] for part in self.each)
        _, heads, _, dimension = self.each[0].shape
        whole = mx.zeros((rows, heads, longest, dimension), self.each[0].dtype)
        for place, part in zip(self.rows, self.each, strict=True):
            whole[place, :, : part.shape[2]] = part
        return whole


def attach(model: nn.Module) -> None:
    """Let the layers of a model of mlx-lm call `attention` for its own."""
    kinds = {kind for _, module in model.named_modules() for kind in type(module).__mro__}
    for source in {sys.modules[kind.__module__] for kind in kinds} - {base}:
        if getattr(source, NAME, None) is _whole:
            setattr(source, NAME, attention)


def cut_for(architecture: str) -> Cut | None:
    """How this device wants queries cut; `architecture` is what mlx calls the GPU ("applegpu_g16s"), "" on a CPU."""
    return piece_queries if architecture.startswith("applegpu") else None


def piece_queries(width: int, group: int, context: int, dimension: int) -> int:
    """On Metal; `width`: one piece. Whole chunks of a prompt are one."""
    queries = min(KERNEL_QUERIES, KERNEL_PRODUCTS // group)
    if dimension not in KERNEL_DIMENSIONS or context < LEAST_CONTEXT_TOKENS:
        return width
    return queries if queries < width <= MOST_PIECES * queries else width


def attention(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """As mlx-lm's: queries [rows, heads, width, dimension], keys and values [rows, key heads, context, dimension] or
    `Pieces` of such, with their masks."""
    attend = partial(_whole, cache=cache, scale=scale, sinks=sinks)
    cut = getattr(cache, "cut", None)
    if cut is not None:
        attend = partial(_cut, cut, attend)
    if type(keys) is not Pieces:
        return attend(queries, keys, values, mask=mask)
    told: list[mx.array] = []
    for place, rows in enumerate(keys.rows):
        part = attend(
            queries[rows], keys.each[place], values.each[place], mask=None if mask is None else mask.each[place]
        )
        told += _zeros(rows.start - sum(map(len, told)), part)
        told.append(part)
    return mx.concatenate([*told, *_zeros(len(queries) - sum(map(len, told)), told[0])])


def _cut(
    cut: Cut, attend: Callable[..., mx.array], queries: mx.array, keys: mx.array, values: mx.array, *, mask: Any
) -> mx.array:
    """As many queries at a time as `cut` says."""
    width = size = queries.shape[2]
    if width > 1 and keys.shape[-1] == values.shape[-1] == queries.shape[-1]:
        size = cut(width, queries.shape[1] // keys.shape[1], keys.shape[2], keys.shape[3])
    if size >= width:
        return attend(queries, keys, values, mask=mask)
    pieces = []
    for start, stop in pairwise([*range(0, width, size), width]):
        seen, shown, told = keys, mask, values
        if isinstance(mask, str):  # "causal" counts from the last key, so later ones are cut off
            end = keys.shape[2] - (width - stop)
            seen, told = keys[:, :, :end], values[:, :, :end]
        elif mask is not None and mask.shape[-2] == width:
            shown = mask[..., start:stop, :]
        pieces.append(attend(queries[:, :, start:stop], seen, told, mask=shown))
    return mx.concatenate(pieces, axis=2)


def _zeros(rows: int, like: mx.array) -> list[mx.array]:
    return [mx.zeros((rows, *like.shape[1:]), like.dtype)] if rows else []
