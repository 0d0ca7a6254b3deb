"""Attention for mlx-lm's models: one call per buffer of rows, in the device's fastest form, or over latents alone.

A call that needs none of this pays only for the checks. A row reads only the keys of its own buffer, however long the
rows in other buffers are. Metal's vector kernel takes at most 8 queries, and queries × query heads per key head may not
exceed 32. A wider verify forward falls off this kernel: over 16k to 32k tokens, attention of 8 to 12 queries takes 2.3
to 2.8 times as long (mlx issue 3826), while two chunks only read the keys twice.
On an NVIDIA GPU, mlx passes two or more queries to cuDNN, which spends some 40 ms on a plan for each new number of
keys. Every verify forward of a growing text would pay that, so `composed` uses two products and a softmax instead.

Latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1.2) caches one latent c per token for all heads. Each head derives
k = c·Q and v = c·U from it; mlx-lm computes these keys and values at every width but 1. With few queries, `absorbed`
gets the same result without them, from (q·Qᵀ)·cᵀ and (weights·c)·U, as mlx-lm does at width 1.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as remembered
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base
from mlx_lm.models.cache import CacheList

from app.models.footprint import group_size

KERNEL_QUERIES, KERNEL_PRODUCTS = 8, 32
KERNEL_DIMENSIONS = frozenset({64, 96, 128, 256})
MAX_QUERY_CHUNKS = 4
"""Maximum number of chunks that a forward's queries are split into: each chunk reads the keys again. Wider forwards are
left to the kernel for whole blocks."""
MIN_CONTEXT_TOKENS = 2048
"""Shortest context, in tokens, in which queries are split: below it, attention is a small part of a step."""
LATENT_QUERIES = 64
"""Maximum number of queries for the absorbed form. Making keys and values takes as many operations at
rank · (key + value) / (2 · rank - key - value) queries, in dimensions: 153 (Mistral 4) to 398 (GLM-4.7-Flash)."""

COMPOSED_QUERIES = 128
"""Maximum number of queries for `composed`: from twice as many on, cuDNN with its plan is faster in long contexts."""
MAX_PACKED_QUERIES = 96
"""Maximum number of queries that read packed keys: beyond it, the scores take more memory than unpacked keys."""

KvArrays = Sequence[mx.array]
"""Keys and values, or the codes, scales and biases of both; each array is [rows, heads, positions, any]."""
ChunkSize = Callable[[int, int, int, int], int]
"""Function from width, query heads per key head, number of keys and key dimension to the queries per chunk."""
Attend = Callable[..., mx.array]
"""One form of attention, called like mlx-lm's `scaled_dot_product_attention`."""
NAME = "scaled_dot_product_attention"
_whole = base.scaled_dot_product_attention


@dataclass(frozen=True)
class PerBuffer:
    """Keys, values or masks of a forward, one array per buffer of rows; the buffers of inactive rows have none."""

    rows: tuple[slice, ...]
    parts: Sequence[Any]

    def padded(self, rows: int) -> mx.array:
        """Pad the parts to one array [rows, heads, longest, dimension]."""
        longest = max(part.shape[2] for part in self.parts)
        _, heads, _, dimension = self.parts[0].shape
        whole = mx.zeros((rows, heads, longest, dimension), self.parts[0].dtype)
        for rows_slice, part in zip(self.rows, self.parts, strict=True):
            whole[rows_slice, :, : part.shape[2]] = part
        return whole


def quantised(keys: mx.array, values: mx.array, bits: int) -> KvArrays:
    """Quantise keys and values, each token separately, so that drafts and chunk boundaries do not change the result.
    Return them unchanged for 0 bits, or if no group size divides both dimensions."""
    size = group_size(keys.shape[-1], values.shape[-1]) if bits else 0
    if not size:
        return keys, values
    pack = partial(mx.quantize, group_size=size, bits=bits)
    return *pack(keys), *pack(values)


@dataclass(frozen=True)
class Packed:
    """Quantised keys or values of some rows; `parts` are as `mx.quantize` returns them, [rows, heads, context, any]."""

    parts: tuple[mx.array, ...]
    bits: int

    @property
    def group_size(self) -> int:
        """Number of values that share a scale."""
        codes, scales, _ = self.parts
        return int(codes.shape[-1] * 32 // self.bits // scales.shape[-1])

    def dequantised(self) -> mx.array:
        """Dequantise to [rows, heads, context, dimension]."""
        codes, scales, biases = self.parts
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)


def attach(model: nn.Module) -> None:
    """Make an mlx-lm model's layers call `attention`, and make latent layers register with the caches they read."""
    modules = [module for _, module in model.named_modules()]
    kinds = {kind for module in modules for kind in type(module).__mro__}
    for source in {sys.modules[kind.__module__] for kind in kinds} - {base}:
        if getattr(source, NAME, None) is _whole:
            setattr(source, NAME, attention)
    for module in modules:
        kind: Any = type(module)
        if "unembed_out" in module and not hasattr(kind, "registers"):
            module.__class__ = _registering(kind)


@remembered
def _registering(kind: Any) -> Any:
    """Return a subclass of a latent attention class whose instances register with the cache of each call."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        kv_cache = _kv_cache(keywords["cache"] if "cache" in keywords else arguments[-1])
        if hasattr(kv_cache, "latent_reader"):
            kv_cache.latent_reader = self
        return kind.__call__(self, *arguments, **keywords)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "registers": kind})


def _kv_cache(cache: Any) -> Any:
    """Return a layer's KV cache; some layers have a second cache, used to select among the keys."""
    return cache[0] if isinstance(cache, CacheList) else cache


def attend_for(architecture: str) -> Attend:
    """Return this device's form of attention; `architecture` is mlx's GPU name ("applegpu_g16s", "sm_90") or ""."""
    if architecture.startswith("applegpu"):
        return in_query_chunks
    return composed_if_few if architecture.startswith("sm_") else _whole


def packed_queries_for(architecture: str) -> int:
    """Return the maximum number of queries per row that read packed keys directly; 0 except on Apple's GPUs.
    On a CPU, quantised products sum in a different order for few queries than for many, and would save nothing."""
    return MAX_PACKED_QUERIES if architecture.startswith("applegpu") else 0


def queries_per_chunk(width: int, group: int, context: int, dimension: int) -> int:
    """Return the number of queries per chunk on Metal; a result of `width` means a single chunk, as in prefill."""
    queries = min(KERNEL_QUERIES, KERNEL_PRODUCTS // group)
    if dimension not in KERNEL_DIMENSIONS or context < MIN_CONTEXT_TOKENS:
        return width
    return queries if queries < width <= MAX_QUERY_CHUNKS * queries else width


def attention(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """Compute attention as mlx-lm does. Keys and values may also be `Packed`; keys, values and mask may be `PerBuffer`.
    Queries are [rows, heads, width, dimension], keys and values [rows, key heads, context, dimension]."""
    if type(keys) is Packed:
        return _packed_attention(queries, keys, values, scale, mask, sinks)
    kv_cache = _kv_cache(cache)
    attend, reader = getattr(kv_cache, "attend", _whole), getattr(kv_cache, "latent_reader", None)
    if reader is not None and queries.shape[2] <= LATENT_QUERIES:
        if queries.shape[2] > 1:
            return absorbed(reader, queries, *kv_cache.keys_and_values(), scale=scale, mask=mask)
        if attend is not in_query_chunks:  # on a Mac, the call below lets mlx choose the kernel
            return _for_all_heads(queries, keys, scale, mask)
    if type(keys) is not PerBuffer:
        return attend(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
    outputs: list[mx.array] = []
    for index, rows in enumerate(keys.rows):
        part_mask = None if mask is None else mask.parts[index]
        part = attention(queries[rows], keys.parts[index], values.parts[index], cache, scale, part_mask, sinks)
        outputs += _zeros(rows.start - sum(map(len, outputs)), part)
        outputs.append(part)
    return mx.concatenate([*outputs, *_zeros(len(queries) - sum(map(len, outputs)), outputs[0])])


def _packed_attention(
    queries: mx.array, keys: Packed, values: Packed, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    if sinks is not None:  # mlx-lm's quantised products take no sinks
        return _whole(queries, keys.dequantised(), values.dequantised(), None, scale, mask, sinks)
    sizes = {"group_size": keys.group_size, "bits": keys.bits}
    return base.quantized_scaled_dot_product_attention(queries, keys.parts, values.parts, scale, mask, **sizes)


def in_query_chunks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *arguments: Any,
    mask: Any,
    chunk_size: ChunkSize = queries_per_chunk,
    **keywords: Any,
) -> mx.array:
    """Run attention on as many queries at a time as `chunk_size` allows."""
    width = size = queries.shape[2]
    if width > 1 and keys.shape[-1] == values.shape[-1] == queries.shape[-1]:
        size = chunk_size(width, queries.shape[1] // keys.shape[1], keys.shape[2], keys.shape[3])
    if size >= width:
        return _whole(queries, keys, values, *arguments, mask=mask, **keywords)
    chunks = []
    for start, stop in pairwise([*range(0, width, size), width]):
        visible_keys, chunk_mask, visible_values = keys, mask, values
        if isinstance(mask, str):  # "causal" aligns the last query with the last key, so cut off later keys
            end = keys.shape[2] - (width - stop)
            visible_keys, visible_values = keys[:, :, :end], values[:, :, :end]
        elif mask is not None and mask.shape[-2] == width:
            chunk_mask = mask[..., start:stop, :]
        chunks.append(
            _whole(queries[:, :, start:stop], visible_keys, visible_values, *arguments, mask=chunk_mask, **keywords)
        )
    return mx.concatenate(chunks, axis=2)


def composed_if_few(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, *, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """Leave single queries and wide prompt chunks to mlx's kernels; use `composed` for the widths in between."""
    if 1 < queries.shape[2] <= COMPOSED_QUERIES:
        return composed(queries, keys, values, scale, mask, sinks)
    return _whole(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def composed(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """Compute attention with two products and a softmax; query heads that share keys become rows of one product."""
    rows, heads, width, _ = queries.shape
    key_heads, context = keys.shape[1:3]
    shape = rows, key_heads, heads // key_heads, width, context
    folded = (queries * scale).reshape(rows, key_heads, -1, queries.shape[-1])
    scores = (folded @ keys.swapaxes(-1, -2)).reshape(shape)
    if isinstance(mask, str):
        mask = causal_mask(width, context)
    if mask is not None:
        mask_rows, mask_heads, *rest = (1,) * (4 - mask.ndim) + mask.shape  # each is 1 or the full number
        mask = mask.reshape(mask_rows, -1, shape[2] if mask_heads > 1 else 1, *rest)
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:  # one more score per head, whose weight is dropped
        sink = mx.broadcast_to(sinks.reshape(1, key_heads, -1, 1, 1), (*shape[:4], 1))
        scores = mx.concatenate([scores, sink.astype(scores.dtype)], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., :context].reshape(rows, key_heads, -1, context)
    return (weights @ values).reshape(rows, heads, width, -1)


@lru_cache(maxsize=1)
def causal_mask(width: int, context: int) -> mx.array:
    """Return bool [width, context]: the keys visible to each of the last `width` positions; all layers share it."""
    return mx.arange(context - width, context)[:, None] >= mx.arange(context)


def _zeros(rows: int, like: mx.array) -> list[mx.array]:
    return [mx.zeros((rows, *like.shape[1:]), like.dtype)] if rows else []


def absorbed(
    reader: Any, queries: mx.array, latents: mx.array, positional_keys: mx.array, *, scale: float, mask: Any
) -> mx.array:
    """Compute latent attention [rows, heads, width, value dimension] without making keys or values.

    `queries` [rows, heads, width, dimension] may end in a positional part, scored against `positional_keys` [rows, 1,
    context, dimension]; else `mask` is its scores. `mask` also hides keys; `latents` are [rows, 1, context, rank].
    """
    content_queries, positional_queries = mx.split(queries, [reader.qk_nope_head_dim], axis=-1)
    if positional_queries.shape[-1]:
        scores = (positional_queries * scale) @ positional_keys.swapaxes(-1, -2)
        width, context = scores.shape[-2:]
        if isinstance(mask, str):
            mask = causal_mask(width, context)
        mask = scores if mask is None else mx.where(mask, scores, mx.finfo(scores.dtype).min)
    output: mx.array = reader.unembed_out(_for_all_heads(reader.embed_q(content_queries), latents, scale, mask))
    return output


def _for_all_heads(queries: mx.array, latents: mx.array, scale: float, mask: mx.array) -> mx.array:
    """Attend with the queries of all heads as one head: all read the same latents, which one product reads once."""
    rows, heads, width, rank = queries.shape
    queries, mask = queries.reshape(rows, 1, heads * width, rank), mask.reshape(rows, 1, heads * width, -1)
    return _whole(queries, latents, latents, cache=None, scale=scale, mask=mask).reshape(rows, heads, width, rank)
