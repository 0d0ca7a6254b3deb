"""Slots and lanes: which row a sequence sits in, how many of its tokens are cached, where they lie, who sees whom.

All of it is arithmetic on host integers; the buffers are in `rollback`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from app.core.footprint import GROWTH_STEP_TOKENS

MASK_FULL = "causal"


def reservation(prompt_tokens: int, answer_tokens: int) -> int:
    """Positions to set aside for a request at once: its prompt, and of its answer a quarter of that or a step."""
    return prompt_tokens + min(answer_tokens, max(GROWTH_STEP_TOKENS, prompt_tokens // 4))


@dataclass(frozen=True)
class Selection:
    """The slots `first:stop` of one forward of `width` tokens a row, and their cached lengths before it."""

    first: int
    stop: int
    width: int
    lengths: tuple[int, ...]

    @cached_property
    def uniform(self) -> bool:
        return len(set(self.lengths)) == 1

    @cached_property
    def offset(self) -> int | mx.array:
        """Position of the first fed token: an int when all rows agree, else int32 [rows]."""
        return self.lengths[0] if self.uniform else mx.array(self.lengths, dtype=mx.int32)


class SlotTable:
    """Which sequence sits in which slot, and how many of its tokens are cached. Shared by all layers of a model."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.lengths: list[int] = []
        self.reserved: list[int] = []
        """By slot, how many tokens its row was expected to have when it was claimed; 0: not known."""
        self.selection = Selection(0, 1, 1, (0,))

    def claim(self, sequence_id: str, reserve_tokens: int = 0) -> None:
        """Take the next slot. Occupied slots are always 0 … n-1."""
        self.slots[sequence_id] = len(self.slots)
        self.lengths.append(0)
        self.reserved.append(reserve_tokens)

    def release(self, sequence_id: str) -> tuple[int, int]:
        """Free the slot; the answer is the last slot and the hole that its row must move into, often the same."""
        hole, length, reserved = self.slots.pop(sequence_id), self.lengths.pop(), self.reserved.pop()
        last = len(self.slots)
        if hole != last:
            mover = next(name for name, slot in self.slots.items() if slot == last)
            self.slots[mover] = hole
            self.lengths[hole], self.reserved[hole] = length, reserved
        return last, hole

    def length(self, sequence_id: str) -> int:
        return self.lengths[self.slots[sequence_id]]

    def check(self, sequence_id: str, computed: int) -> None:
        """The one invariant: cached length == `computed`. Raises RuntimeError."""
        if (length := self.length(sequence_id)) != computed:
            raise RuntimeError(f"cache holds {length} tokens of {sequence_id}, the plan says {computed}")

    def select(self, sequence_ids: Sequence[str], width: int) -> Selection:
        """Aim the next forward at these sequences."""
        slots = [self.slots[name] for name in sequence_ids]
        first, stop = min(slots), max(slots) + 1
        self.selection = Selection(first, stop, width, tuple(self.lengths[first:stop]))
        return self.selection


class Lane:
    """Where rows of one attention window lie in their buffers. All layers with the same window share one lane.

    Without a window, index = position. With one, a row that reaches the capacity is moved to the front of its buffer
    so that `window + margin` tokens stay: enough to see the window after rewinding up to `margin` tokens.
    """

    def __init__(self, table: SlotTable, window: int | None, *, margin_tokens: int, chunk_tokens: int) -> None:
        self.table = table
        self.window = window
        self.keep_tokens = (window or 0) + margin_tokens
        self.capacity = None if window is None else self.keep_tokens + chunk_tokens
        self.bases: list[int] = []
        self.moves: list[tuple[int, int, int]] = []
        self.uniform = True
        """Whether all selected rows write at the same buffer index."""
        self.extent = 0
        """Number of buffer positions that the forward reads."""
        self.room = 0
        """Number of buffer positions that a write may touch: a ragged one touches every row of the table."""
        self._begun: Selection | None = None
        self._starts: tuple[int, ...] = ()
        self._masks: dict[tuple[int, bool, int | None], Any] = {}
        self._indices: dict[int, mx.array] = {}

    @property
    def longest(self) -> int:
        """Buffer positions that the longest row of all takes."""
        return max((length - self.base(slot) for slot, length in enumerate(self.table.lengths)), default=0)

    @property
    def reserved(self) -> int:
        """Buffer positions that the rows are expected to take at most."""
        most = max((tokens - self.base(slot) for slot, tokens in enumerate(self.table.reserved)), default=0)
        return most if self.capacity is None else min(most, self.capacity)

    def base(self, slot: int) -> int:
        return self.bases[slot] if slot < len(self.bases) else 0

    def set_base(self, slot: int, base: int) -> None:
        self.bases.extend([0] * (slot + 1 - len(self.bases)))
        self.bases[slot] = base

    def begin(self) -> tuple[int, ...]:
        """Buffer index at which each selected row writes; plans the moves of rows that reached the capacity."""
        selection = self.table.selection
        if self._begun is not selection:
            self._begun = selection
            self._masks.clear()
            self._indices.clear()
            self.moves = self._plan_moves(selection)
            self._starts = tuple(
                length - self.base(slot) for slot, length in enumerate(selection.lengths, selection.first)
            )
            self.uniform = len(set(self._starts)) == 1
            self.extent = max(self._starts) + selection.width
            self.room = self.longest + selection.width
        return self._starts

    def _plan_moves(self, selection: Selection) -> list[tuple[int, int, int]]:
        moves: list[tuple[int, int, int]] = []
        if self.capacity is None:
            return moves
        for slot, length in enumerate(selection.lengths, selection.first):
            index = length - self.base(slot)
            if index + selection.width > self.capacity and index > self.keep_tokens:
                moves.append((slot, index - self.keep_tokens, index))
                self.set_base(slot, self.base(slot) + index - self.keep_tokens)
        return moves

    def write_index(self, rows: int) -> mx.array:
        """int32 [rows, 1, width, 1]: where each row of the whole buffer writes; rows outside the range write junk
        behind their own length."""
        self.begin()
        if rows not in self._indices:
            selection = self.table.selection
            starts = [
                (self.table.lengths[slot] if slot < len(self.table.lengths) else 0) - self.base(slot)
                for slot in range(rows)
            ]
            index = mx.array(starts, dtype=mx.int32)[:, None] + mx.arange(selection.width, dtype=mx.int32)
            self._indices[rows] = index[:, None, :, None]
        return self._indices[rows]

    def mask(self, width: int, *, return_array: bool, window_size: int | None) -> Any:
        """None, "causal", or bool [width, extent] / [rows, 1, width, extent]; made once per forward."""
        self.begin()
        windows = [size for size in (window_size, self.window) if size is not None]
        window = min(windows) if windows else None
        key = (width, return_array, window)
        if key not in self._masks:
            self._masks[key] = self._make_mask(width, return_array=return_array, window=window)
        return self._masks[key]

    def block_mask(self, width: int) -> mx.array | None:
        """None, or bool [rows, 1, 1 or width, extent]: each token of the block sees all before and all of the block."""
        starts = self.begin()
        extent = max(starts) + width
        if self.uniform and (self.window is None or extent <= self.window):
            return None
        first = mx.array(starts, dtype=mx.int32)[:, None, None, None]
        keys = mx.arange(extent)
        mask = keys < first + width
        return mask if self.window is None else mask & (first + mx.arange(width)[:, None] < keys + self.window)

    def _make_mask(self, width: int, *, return_array: bool, window: int | None) -> Any:
        starts = self.begin()
        extent = max(starts) + width
        if len(set(starts)) == 1:
            if window is None or extent <= window:
                if width == 1:
                    return None  # as mlx-lm's caches do, whatever is asked for
                if not return_array:
                    return MASK_FULL
            queries = mx.arange(starts[0], extent)[:, None]
        else:
            queries = mx.array(starts, dtype=mx.int32)[:, None, None, None] + mx.arange(width)[:, None]
        keys = mx.arange(extent)
        mask = queries >= keys
        return mask if window is None else mask & (queries < keys + window)
