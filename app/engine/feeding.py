"""Inputs of a decode step: tokens the host knows, one token still on the device, and drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.readings import Scores
from app.engine.runner import padded


@dataclass(frozen=True)
class Launched:
    """A launched forward: int32 `tokens` [rows], one per row of `sequence_ids`. The device starts on them at once."""

    sequence_ids: tuple[str, ...]
    tokens: mx.array
    scores: Scores

    def __post_init__(self) -> None:
        mx.async_eval(self.tokens, *self.scores.arrays())

    def only(self, wanted: Sequence[str]) -> "Launched | None":
        """Return the launch without unwanted rows; None if no row is left."""
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
    """Return int32 [rows, width], the next inputs of each row, right-padded, and each row's real width.

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


def feed_drafts(rows: Sequence[DecodeRow], drafts: mx.array) -> tuple[mx.array, mx.array]:
    """Return int32 [rows, width], each row's `tokens[computed:]` and `drafts` [rows, K], and the places of the latter.
    These are int32 [rows, 1 + K] and begin with the place of the last known token."""
    known = [len(row.tokens) - row.computed for row in rows]
    places = mx.array(known, dtype=mx.int32)[:, None] - 1 + mx.arange(1 + drafts.shape[1])
    fed = padded([row.tokens[row.computed :] for row in rows], max(known) + drafts.shape[1])
    return mx.put_along_axis(fed, places[:, 1:], drafts, axis=1), places
