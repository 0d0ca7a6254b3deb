"""The padded rectangle that a forward reads: rows of different lengths side by side, padding at their right."""

from collections.abc import Sequence

import mlx.core as mx


def padded(rows: Sequence[Sequence[int]], width: int = 0) -> mx.array:
    """int32 [rows, width] of token ids; `width` is at least the longest row's."""
    width = max(width, *(len(row) for row in rows))
    return mx.array([[*row, *[0] * (width - len(row))] for row in rows], dtype=mx.int32)


def last_of(values: mx.array, widths: Sequence[int]) -> mx.array:
    """[rows, 1, size]: of `values` [rows, width, size] what stands at the last real place of each row."""
    if values.shape[1] == 1:
        return values
    return mx.take_along_axis(values, mx.array(list(widths), dtype=mx.int32)[:, None, None] - 1, axis=1)
