"""What a decode step feeds: tokens that the host knows, one that is still on the device, and drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.readings import Scores
from app.engine.runner import padded


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


def feed_drafts(rows: Sequence[DecodeRow], drafts: mx.array) -> tuple[mx.array, mx.array]:
    """int32 [rows, width] of `tokens[computed:]` and, behind them, `drafts` [rows, K]; and int32 [rows, 1 + K], where
    the last known token and the drafts lie."""
    known = [len(row.tokens) - row.computed for row in rows]
    places = mx.array(known, dtype=mx.int32)[:, None] - 1 + mx.arange(1 + drafts.shape[1])
    fed = padded([row.tokens[row.computed :] for row in rows], max(known) + drafts.shape[1])
    return mx.put_along_axis(fed, places[:, 1:], drafts, axis=1), places
