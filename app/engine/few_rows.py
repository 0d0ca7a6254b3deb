"""Matrix products of few rows with OpenBLAS, in the shape that a measurement, once per process, found fastest.

OpenBLAS takes longer for 5 or 12 rows than for 16, and 2 rows are faster transposed (docs/speed.md). Verifying drafts
and decoding several requests are such products. Nothing changes on Metal and CUDA, nor with `PACELINE_OPENBLAS=0`,
where results must be bit-identical at every width.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import mlx.core as mx
from mlx import nn

from app.engine.platform import openblas_is_loaded

KERNEL_ROWS = 16
"""Rows that OpenBLAS's widest kernel takes at once."""
SAMPLE_SHAPE, SAMPLES = (2304, 768), 6
REPEATS = 2
SMALLEST_WEIGHTS = 1 << 19
"""Smallest matrix, in weights, for which padding pays off."""
MAX_TIME_SHARE = 0.95
"""Largest share of the plain product's time at which another shape is used."""

Product = Callable[[mx.array, mx.array], mx.array]
"""(x float32 [rows, inputs], weight [outputs, inputs]) → [rows, outputs]."""


def direct(x: mx.array, weight: mx.array) -> mx.array:
    """Multiply as is."""
    return x @ weight.T


def transposed(x: mx.array, weight: mx.array) -> mx.array:
    """Multiply as the transpose of the transposed product."""
    return (weight @ x.T).T


def padded(size: int) -> Product:
    """Return a product that pads with zero rows up to `size` and cuts them off again."""

    def multiply(x: mx.array, weight: mx.array) -> mx.array:
        rows = x.shape[0]
        return (mx.pad(x, [(0, size - rows), (0, 0)]) @ weight.T)[:rows]

    return multiply


def use_fast_products(model: nn.Module) -> None:
    """Make a model's large dense projections, and its embedding as the head, use the fastest shape."""
    if not openblas_is_loaded():
        return
    for _, module in model.named_modules():
        kind = {nn.Linear: FewRowsLinear, nn.Embedding: FewRowsEmbedding}.get(type(module))
        if kind is not None and module["weight"].size >= SMALLEST_WEIGHTS:
            module.__class__ = kind


class FewRowsLinear(nn.Linear):
    """An `nn.Linear` that is fast for few rows."""

    def __call__(self, x: mx.array) -> mx.array:
        product = _apply(x, self["weight"])
        return product + self["bias"] if "bias" in self else product


class FewRowsEmbedding(nn.Embedding):
    """An `nn.Embedding` that is fast for few rows as the head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _apply(x, self["weight"])


def _apply(x: mx.array, weight: mx.array) -> mx.array:
    *leading, inputs = x.shape
    product = fastest_products().get(x.size // inputs)
    if product is None:
        return direct(x, weight)
    return product(x.reshape(-1, inputs), weight).reshape(*leading, weight.shape[0])


@cache
def fastest_products() -> Mapping[int, Product]:
    """Return, by number of rows, the product that beats the plain one here. Takes some 0.2 s, once.

    A forward reads its weights from memory, so this does too: the samples together exceed the CPU's cache.
    """
    weights = [mx.random.normal(SAMPLE_SHAPE) for _ in range(SAMPLES)]
    mx.eval(weights)
    fastest: dict[int, Product] = {}
    for rows, candidate in ((range(2, 4), transposed), (range(4, KERNEL_ROWS), padded(KERNEL_ROWS))):
        sample = rows[:: max(1, len(rows) // 4)]
        if sum(_seconds(candidate, n, weights) for n in sample) <= MAX_TIME_SHARE * sum(
            _seconds(direct, n, weights) for n in sample
        ):
            fastest.update(dict.fromkeys(rows, candidate))
    return fastest


def _seconds(product: Product, rows: int, weights: Sequence[mx.array]) -> float:
    x = mx.random.normal((rows, SAMPLE_SHAPE[1]))
    mx.eval(x)
    durations = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        mx.eval([product(x, weight) for weight in weights])
        durations.append(time.perf_counter() - started)
    return min(durations)
