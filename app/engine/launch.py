"""A forward that was launched and not yet read: tokens of its rows, still on the device.

Plain decoding launches the next forward before it reads the current token, so the device never waits for the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Any

import mlx.core as mx

from app.core.step import DecodeRow, TokenLogprobs
from app.engine.rectangle import padded


@dataclass(frozen=True)
class Scores:
    """Raw log probabilities of a forward: `chosen` [rows, slots]; in `top` the likeliest ids and their values [rows,
    slots, k], if somebody wants any."""

    chosen: mx.array
    top: tuple[mx.array, ...] = ()

    def arrays(self) -> list[mx.array]:
        return [self.chosen, *self.top]

    def rows(self, index: mx.array) -> "Scores":
        return Scores(self.chosen[index], tuple(each[index] for each in self.top))

    @cached_property
    def _chosen(self) -> Any:
        """As numbers; waits for the device."""
        return self.chosen.tolist()

    def confidences(self, row: int, count: int) -> tuple[float, ...]:
        """Probabilities of what was chosen in the first `count` slots of a row."""
        return tuple(map(exp, self._chosen[row][:count]))

    def read(self, row: int, count: int, top: int) -> tuple[TokenLogprobs, ...]:
        """Values of the first `count` slots of a row with its `top` likeliest tokens; waits for the device."""
        chosen = self._chosen[row][:count]
        if not self.top:
            return tuple(map(TokenLogprobs, chosen))
        likeliest: list[Any] = [each[row, :count, :top].tolist() for each in self.top]
        return tuple(
            TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
            for logprob, ids, values in zip(chosen, *likeliest, strict=True)
        )

    def read_all(self) -> tuple[TokenLogprobs, ...]:
        """Everything of a forward of one row."""
        count, top = self.chosen.shape[1], self.top[0].shape[2] if self.top else 0
        return self.read(0, count, top)


def score(logits: mx.array, drawn: mx.array, top: int) -> Scores:
    """Log softmax (nat) of float32 `logits` [rows, slots, vocabulary] at `drawn` [rows, slots] and its `top` best."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(logits, drawn[..., None], axis=-1) - total)[..., 0]
    if top == 0:
        return Scores(chosen)
    best = mx.argpartition(-logits, kth=top - 1, axis=-1)[..., :top]
    values = mx.take_along_axis(logits, best, axis=-1) - total
    order = mx.argsort(-values, axis=-1)
    return Scores(chosen, (mx.take_along_axis(best, order, axis=-1), mx.take_along_axis(values, order, axis=-1)))


@dataclass(frozen=True)
class Launched:
    """int32 `tokens` [rows], one per row of `sequence_ids`. The device begins with them at once."""

    sequence_ids: tuple[str, ...]
    tokens: mx.array
    scores: Scores

    def __post_init__(self) -> None:
        mx.async_eval(self.tokens, *self.scores.arrays())

    def only(self, wanted: Sequence[str]) -> "Launched | None":
        """The same launch without the rows that are not wanted; None when none is left."""
        keep = [index for index, name in enumerate(self.sequence_ids) if name in wanted]
        if len(keep) == len(self.sequence_ids):
            return self
        if not keep:
            return None
        index = mx.array(keep)
        return Launched(
            tuple(self.sequence_ids[row] for row in keep),
            self.tokens[index],
            self.scores.rows(index),
        )


def feed(rows: Sequence[DecodeRow], launched: Launched | None) -> tuple[mx.array, list[int]]:
    """int32 [rows, width] of what each row feeds next, right-padded, and each row's real width.

    A row in `launched` feeds its token that the host has not read; the others feed `tokens[computed:]`.
    """
    if launched is not None and launched.sequence_ids == tuple(row.sequence_id for row in rows):
        return launched.tokens[:, None], [1] * len(rows)
    pending = {} if launched is None else {name: index for index, name in enumerate(launched.sequence_ids)}
    known = [[0] if row.sequence_id in pending else list(row.tokens[row.computed :]) for row in rows]
    fed = padded(known)
    for index, row in enumerate(rows):
        if launched is not None and row.sequence_id in pending:
            fed[index, 0] = launched.tokens[pending[row.sequence_id]]
    return fed, [len(tokens) for tokens in known]
