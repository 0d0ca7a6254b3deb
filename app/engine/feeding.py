"""Inputs of a decode step: tokens the host knows, one token still on the device, and drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.forward_results import Scores
from app.engine.runner import padded


@dataclass(frozen=True)
class LaunchedForward:
    """A launched forward: int32 `tokens` [rows], one drawn per id in `sequence_ids`. Construction starts the device."""

    sequence_ids: tuple[str, ...]
    tokens: mx.array
    scores: Scores

    def __post_init__(self) -> None:
        mx.async_eval(self.tokens, *self.scores.arrays())

    def only(self, sequence_ids: Sequence[str]) -> "LaunchedForward | None":
        """Return the forward with only the rows of `sequence_ids`; None if no row is left."""
        kept_rows = [index for index, name in enumerate(self.sequence_ids) if name in sequence_ids]
        if len(kept_rows) == len(self.sequence_ids):
            return self
        if not kept_rows:
            return None
        index = mx.array(kept_rows)
        return LaunchedForward(
            tuple(self.sequence_ids[row] for row in kept_rows),
            self.tokens[index],
            self.scores.rows(index),
        )


def feed(rows: Sequence[DecodeRow], launched: LaunchedForward | None) -> tuple[mx.array, list[int]]:
    """Return int32 [rows, width], the next inputs of each row, right-padded, and each row's real width.

    A row in `launched` feeds the token drawn there, not yet read by the host; the others feed `tokens[computed:]`.
    """
    if launched is not None and launched.sequence_ids == tuple(row.sequence_id for row in rows):
        return launched.tokens[:, None], [1] * len(rows)
    pending_indices = {} if launched is None else {name: index for index, name in enumerate(launched.sequence_ids)}
    known_tokens = [[0] if row.sequence_id in pending_indices else list(row.tokens[row.computed :]) for row in rows]
    fed = padded(known_tokens)
    for index, row in enumerate(rows):
        if launched is not None and row.sequence_id in pending_indices:
            fed[index, 0] = launched.tokens[pending_indices[row.sequence_id]]
    return fed, [len(tokens) for tokens in known_tokens]


def feed_drafts(rows: Sequence[DecodeRow], drafts: mx.array) -> tuple[mx.array, mx.array]:
    """Return int32 [rows, width], each row's `tokens[computed:]` followed by its `drafts` [rows, K].
    Also return int32 [rows, 1 + K], the positions in it of the last known token and of the drafts."""
    known_widths = [len(row.tokens) - row.computed for row in rows]
    positions = mx.array(known_widths, dtype=mx.int32)[:, None] - 1 + mx.arange(1 + drafts.shape[1])
    fed = padded([row.tokens[row.computed :] for row in rows], max(known_widths) + drafts.shape[1])
    return mx.put_along_axis(fed, positions[:, 1:], drafts, axis=1), positions
