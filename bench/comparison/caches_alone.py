"""The cost of a ragged rewind by itself: forwards of a model that has key-value caches and nothing else."""

from statistics import quantiles
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache

from app.engine.runner import Runner
from bench.comparison.measure import Sample

CHUNK_TOKENS = 512
WIDTH = 5
RETAINED = ((1, 3, 5, 2), (4, 1, 2, 5), (2, 5, 1, 3))
"""Number of tokens that each row keeps, cycle by cycle."""


class CachesAlone(nn.Module):  # type: ignore[misc]  # mlx's types are not read here
    """Writes each token into every layer's cache and reads some numbers back, as attention does, without its work."""

    def __init__(self, *, layers: int, heads: int, dimension: int) -> None:
        super().__init__()
        self._sizes = (layers, heads, dimension)

    def make_cache(self) -> list[Any]:
        """Make one plain cache per layer."""
        return [KVCache() for _ in range(self._sizes[0])]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        _, heads, dimension = self._sizes
        rows, width = tokens.shape
        fresh = mx.broadcast_to(tokens[:, None, :, None].astype(mx.float32), (rows, heads, width, dimension))
        read = mx.zeros((rows, width))
        for layer in cache:
            keys, values = layer.update_and_fetch(fresh, fresh)
            read = read + keys[:, 0, -width:, 0] + values[:, 0, -width:, 0]
        return read[..., None]


class RaggedRows:
    """Four rows of about `context` cached tokens, verified and rewound again and again."""

    def __init__(self, context: int, *, layers: int, heads: int, dimension: int = 64) -> None:
        self._runner = Runner(CachesAlone(layers=layers, heads=heads, dimension=dimension))
        self._names = [f"row-{row}" for row in range(len(RETAINED[0]))]
        for name in self._names:
            self._runner.claim(name)
        for start in range(0, context, CHUNK_TOKENS):
            width = min(CHUNK_TOKENS, context - start)
            self._forward(width, [width] * len(self._names))

    def turn(self, cycles: int) -> Sample:
        """Return the milliseconds of a cycle: a ragged write for all rows, then a rewind of each by a different number.

        It is the lower quartile, because other programs on the machine disturb cycles as short as a millisecond.
        """
        seconds = []
        for cycle in range(cycles):
            started = perf_counter()
            self._forward(WIDTH, list(RETAINED[cycle % len(RETAINED)]))
            seconds.append(perf_counter() - started)
        return Sample(quantiles(seconds, n=4)[0] * 1000, {"cached tokens": float(self._runner.length(self._names[0]))})

    def _forward(self, width: int, retained: list[int]) -> None:
        tokens = mx.ones((len(self._names), width), dtype=mx.int32)
        read, forward = self._runner.forward(self._names, tokens, [width] * len(self._names))
        mx.eval(read, *self._runner.caches.arrays())
        self._runner.commit(forward, retained)
