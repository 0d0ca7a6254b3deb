"""The attention of mlx-lm's models in parts: for each buffer that rows of a forward lie in, on Metal for few queries at
a time, and over latents as they are. All that a usual call costs is the question.

A row reads what it has and no more, however long the rows beside it are. And Metal's vector kernel takes 8 queries at
most, and 32 of queries × query heads per key head: a verify forward beyond either leaves it, and from 8 to 12 queries
attention then takes 2.3 to 2.8 times as long at 16k to 32k tokens (mlx issue 3826); two pieces read the keys twice.

Latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1.2) keeps one latent c of each token for all heads: k = c·Q and
v = c·U of each head. mlx-lm makes all of them at every width but 1. With few queries, (q·Qᵀ)·cᵀ and (weights·c)·U say
the same and make none: `absorbed`, as mlx-lm does it at width 1.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as remembered
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base
from mlx_lm.models.cache import CacheList

from app.core.footprint import group_size

KERNEL_QUERIES, KERNEL_PRODUCTS = 8, 32
KERNEL_DIMENSIONS = frozenset({64, 96, 128, 256})
MOST_PIECES = 4
"""Each reads the keys again; wider forwards are left to the kernel for whole blocks."""
LEAST_CONTEXT_TOKENS = 2048
"""In shorter contexts attention is a small part of a step."""
LATENT_QUERIES = 64
"""Wider forwards make keys and values: those cost as many operations as the absorbed form with 153 (Mistral 4) to 398
queries (GLM-4.7-Flash), rank · (key + value) / (2 · rank - key - value) dimensions."""

MOST_PACKED_QUERIES = 96
"""More read their keys unpacked: quantised products keep every score, which of a chunk are more than the keys."""

Parts = Sequence[mx.array]
"""Keys and values, or codes, scales and biases of both, [rows, heads, positions, any] each."""
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


def quantised(keys: mx.array, values: mx.array, bits: int) -> Parts:
    """What is kept of keys and values, by each token alone: so drafts and chunks change nothing. No bits: themselves,
    and where their dimensions are divided by no group size."""
    size = group_size(keys.shape[-1], values.shape[-1]) if bits else 0
    if not size:
        return keys, values
    pack = partial(mx.quantize, group_size=size, bits=bits)
    return *pack(keys), *pack(values)


@dataclass(frozen=True)
class Packed:
    """Keys or values of some rows, quantised: `parts` as `mx.quantize` gives them, [rows, heads, context, any]."""

    parts: tuple[mx.array, ...]
    bits: int

    @property
    def group_size(self) -> int:
        """How many numbers share a scale."""
        codes, scales, _ = self.parts
        return int(codes.shape[-1] * 32 // self.bits // scales.shape[-1])

    def whole(self) -> mx.array:
        """[rows, heads, context, dimension]."""
        codes, scales, biases = self.parts
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)


def attach(model: nn.Module) -> None:
    """Let the layers of a model of mlx-lm call `attention` for its own, and latent ones tell their caches who reads."""
    modules = [module for _, module in model.named_modules()]
    kinds = {kind for module in modules for kind in type(module).__mro__}
    for source in {sys.modules[kind.__module__] for kind in kinds} - {base}:
        if getattr(source, NAME, None) is _whole:
            setattr(source, NAME, attention)
    for module in modules:
        kind: Any = type(module)
        if "unembed_out" in module and not hasattr(kind, "tells"):
            module.__class__ = _telling(kind)


@remembered
def _telling(kind: Any) -> Any:
    """A subclass of a latent attention's own class that only makes itself known to the cache that it is called with."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        store = _store(keywords["cache"] if "cache" in keywords else arguments[-1])
        if hasattr(store, "latent_reader"):
            store.latent_reader = self
        return kind.__call__(self, *arguments, **keywords)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "tells": kind})


def _store(cache: Any) -> Any:
    """Where keys and values lie: beside them, some layers keep what picks among them."""
    return cache[0] if isinstance(cache, CacheList) else cache


def cut_for(architecture: str) -> Cut | None:
    """How this device wants queries cut; `architecture` is what mlx calls the GPU ("applegpu_g16s"), "" on a CPU."""
    return piece_queries if architecture.startswith("applegpu") else None


def packed_queries_for(architecture: str) -> int:
    """How many queries a row may have for attention to read packed keys as they are. On a CPU none: its products of
    packed numbers add up in another order for few queries than for many, and nothing would be gained."""
    return MOST_PACKED_QUERIES if architecture.startswith("applegpu") else 0


def piece_queries(width: int, group: int, context: int, dimension: int) -> int:
    """On Metal; `width`: one piece. Whole chunks of a prompt are one."""
    queries = min(KERNEL_QUERIES, KERNEL_PRODUCTS // group)
    if dimension not in KERNEL_DIMENSIONS or context < LEAST_CONTEXT_TOKENS:
        return width
    return queries if queries < width <= MOST_PIECES * queries else width


def attention(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """As mlx-lm's: queries [rows, heads, width, dimension], keys and values [rows, key heads, context, dimension],
    `Packed`, or `Pieces` of such, with their masks."""
    if type(keys) is Packed:
        return _of_packed(queries, keys, values, scale, mask, sinks)
    store = _store(cache)
    cut, reader = getattr(store, "cut", None), getattr(store, "latent_reader", None)
    if reader is not None and queries.shape[2] <= LATENT_QUERIES:
        if queries.shape[2] > 1:
            return absorbed(reader, queries, *store.keys_and_values(), scale=scale, mask=mask)
        if cut is None:  # on a Mac, mlx chooses a kernel for it
            return _for_all_heads(queries, keys, scale, mask)
    attend = partial(_whole, cache=cache, scale=scale, sinks=sinks)
    if cut is not None:
        attend = partial(_cut, cut, attend)
    if type(keys) is not Pieces:
        return attend(queries, keys, values, mask=mask)
    told: list[mx.array] = []
    for place, rows in enumerate(keys.rows):
        shown = None if mask is None else mask.each[place]
        part = attention(queries[rows], keys.each[place], values.each[place], cache, scale, shown, sinks)
        told += _zeros(rows.start - sum(map(len, told)), part)
        told.append(part)
    return mx.concatenate([*told, *_zeros(len(queries) - sum(map(len, told)), told[0])])


def _of_packed(
    queries: mx.array, keys: Packed, values: Packed, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    if sinks is not None:  # mlx-lm's products know none
        return _whole(queries, keys.whole(), values.whole(), None, scale, mask, sinks)
    sizes = {"group_size": keys.group_size, "bits": keys.bits}
    return base.quantized_scaled_dot_product_attention(queries, keys.parts, values.parts, scale, mask, **sizes)


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


def absorbed(
    reader: Any, queries: mx.array, latents: mx.array, places: mx.array, *, scale: float, mask: Any
) -> mx.array:
    """Latent attention [rows, heads, width, value dimension] that makes neither keys nor values.

    `queries` [rows, heads, width, dimension] are without places, and `mask` is what those add to the scores, or have
    them behind, and it says who sees whom; `latents` [rows, 1, context, rank], `places` [rows, 1, context, dimension].
    """
    bare, placed = mx.split(queries, [reader.qk_nope_head_dim], axis=-1)
    if placed.shape[-1]:
        scores = (placed * scale) @ places.swapaxes(-1, -2)
        width, context = scores.shape[-2:]
        if isinstance(mask, str):  # "causal"
            mask = mx.arange(context - width, context)[:, None] >= mx.arange(context)
        mask = scores if mask is None else mx.where(mask, scores, mx.finfo(scores.dtype).min)
    told: mx.array = reader.unembed_out(_for_all_heads(reader.embed_q(bare), latents, scale, mask))
    return told


def _for_all_heads(queries: mx.array, latents: mx.array, scale: float, mask: mx.array) -> mx.array:
    """All heads read the same latents, so their queries are those of one: one product reads the latents once."""
    rows, heads, width, rank = queries.shape
    queries, mask = queries.reshape(rows, 1, heads * width, rank), mask.reshape(rows, 1, heads * width, -1)
    return _whole(queries, latents, latents, cache=None, scale=scale, mask=mask).reshape(rows, heads, width, rank)
