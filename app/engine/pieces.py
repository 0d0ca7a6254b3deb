"""Rows of one forward whose keys and values lie in several buffers: attention runs once for each of them.

A row reads what it has and no more, however long the rows beside it are. mlx-lm's models call a module-level function
for their attention; `attach` wraps it once, and all that a forward over one buffer costs is the question.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

ATTENTION = "scaled_dot_product_attention"


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
    """Let the attention of the model's layers take `Pieces`."""
    for _, module in model.named_modules():
        source = sys.modules[type(module).__module__]
        attend = getattr(source, ATTENTION, None)
        if attend is not None and not hasattr(attend, "of_one_buffer"):
            setattr(source, ATTENTION, _by_pieces(attend))


def _by_pieces(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
    signature = inspect.signature(attend)

    def wrapper(queries: mx.array, keys: Any, *arguments: Any, **keywords: Any) -> mx.array:
        if type(keys) is not Pieces:
            return attend(queries, keys, *arguments, **keywords)
        call = signature.bind(queries, keys, *arguments, **keywords).arguments
        told: list[mx.array] = []
        for place, rows in enumerate(keys.rows):
            own = {name: value.each[place] for name, value in call.items() if type(value) is Pieces}
            part = attend(**{**call, **own, "queries": queries[rows]})
            told += _zeros(rows.start - sum(map(len, told)), part)
            told.append(part)
        return mx.concatenate([*told, *_zeros(len(queries) - sum(map(len, told)), told[0])])

    wrapper.of_one_buffer = attend  # type: ignore[attr-defined]
    return wrapper


def _zeros(rows: int, like: mx.array) -> list[mx.array]:
    return [mx.zeros((rows, *like.shape[1:]), like.dtype)] if rows else []
