"""Slots and lanes: each sequence's row and cached length, its positions in the buffers, and the attention masks.

This is all arithmetic on host integers; the buffers are in `rollback`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from app.engine.caches.attention import Attend, PerBuffer, attend_for
from app.models.footprint import SHARED_TOKENS

MASK_CAUSAL = "causal"


def reservation(prompt_tokens: int, answer_tokens: int) -> int:
    """Return the positions to reserve when a request starts: its prompt, and up to 1/32 of that for its answer."""
    return prompt_tokens + min(answer_tokens, prompt_tokens // 32)


class Selection(NamedTuple):
    """Slots `first:stop` of a forward of `width` tokens per row, their previous cached lengths, and which take part."""

    first: int
    stop: int
    width: int
    lengths: tuple[int, ...]
    live: tuple[bool, ...]
    offset: int | mx.array
    """Position of the first fed token: an int when all rows agree, else int32 [rows]."""


def select(first: int, width: int, lengths: tuple[int, ...], live: tuple[bool, ...]) -> Selection:
    """Select the slots from `first` on."""
    offset = lengths[0] if len(set(lengths)) == 1 else mx.array(lengths, dtype=mx.int32)
    return Selection(first, first + len(lengths), width, lengths, live, offset)


class SlotTable:
    """Slot and cached length of each sequence. Shared by all layers of a model.

    The first `shared` slots are the rows of one rectangle of buffers; each later slot has buffers of its own. So short
    rows run in one call, whose cost does not depend on the long rows of the same forward.
    """

    def __init__(self, shared_tokens: int = SHARED_TOKENS) -> None:
        self.shared_tokens = shared_tokens
        """Longest row, in tokens, that shares the rectangle."""
        self.names: list[str] = []
        """Sequence id by slot."""
        self.slots: dict[str, int] = {}
        """Slot by sequence id."""
        self.lengths: list[int] = []
        """Number of cached tokens by slot; only `set_length` changes a sequence's number."""
        self.reserved: dict[str, int] = {}
        """Expected length of each row, in tokens, when it was claimed; 0 if unknown."""
        self.shared = 0
        self.attends_per_buffer = False
        """Whether the model's attention is called once per buffer."""
        self.attend: Attend = attend_for("")
        """The device's form of attention."""
        self.bits: dict[str, int] = {}
        """Bits per number of keys and values, by sequence id; quantised rows only."""
        self.packed_queries = 0
        """Maximum number of queries per row that may attend to packed keys."""
        self.selection = select(0, 1, (0,), (True,))

    def claim(self, sequence_id: str, reserve_tokens: int = 0, bits: int = 0) -> list[int]:
        """Take a slot; return the new order: for each slot, the previous slot of its row.
        Occupied slots are always 0 … n-1. A row with `bits` is quantised and has its own buffers."""
        last = len(self.names)
        self.names.append(sequence_id)
        self.lengths.append(0)
        self.reserved[sequence_id] = reserve_tokens
        if bits:
            self.bits[sequence_id] = bits
        if bits or reserve_tokens > self.shared_tokens:
            return self._swap(last, last)
        self.shared += 1
        return self._swap(self.shared - 1, last)

    def release(self, sequence_id: str) -> list[int]:
        """Free the slot; return the new order as `claim` does."""
        hole, last = self.slots[sequence_id], len(self.names) - 1
        del self.reserved[sequence_id]
        self.bits.pop(sequence_id, None)
        order = list(range(last + 1))
        if hole < self.shared:
            self.shared -= 1
            order[hole] = self.shared
            hole = self.shared
        order[hole] = last
        order.pop()
        return self._arrange(order)

    @property
    def outgrown(self) -> list[str]:
        """Sequences in the rectangle that have become too long for it."""
        return [
            name
            for name, size in zip(self.names[: self.shared], self.lengths, strict=False)
            if size > self.shared_tokens
        ]

    def separate(self, sequence_id: str) -> list[int]:
        """Take a row out of the rectangle; return the new order as `claim` does."""
        self.shared -= 1
        return self._swap(self.slots[sequence_id], self.shared)

    def _swap(self, first: int, second: int) -> list[int]:
        order = list(range(len(self.names)))
        order[first], order[second] = second, first
        return self._arrange(order)

    def _arrange(self, order: list[int]) -> list[int]:
        self.names, self.lengths = [self.names[slot] for slot in order], [self.lengths[slot] for slot in order]
        self.slots = {name: slot for slot, name in enumerate(self.names)}
        return order

    def length(self, sequence_id: str) -> int:
        return self.lengths[self.slots[sequence_id]]

    def set_length(self, sequence_id: str, length: int) -> None:
        """Set the row's number of cached tokens after a commit, a rewind or a prefix hit."""
        self.lengths[self.slots[sequence_id]] = length

    def slots_of(self, name: str) -> Sequence[int]:
        """Return the slots whose rows are in a sequence's own buffer, or in the shared one if `name` is empty."""
        return [self.slots[name]] if name else range(self.shared)

    def check(self, sequence_id: str, computed: int) -> None:
        """Check the one invariant: cached length == `computed`. Raises RuntimeError."""
        if (length := self.length(sequence_id)) != computed:
            raise RuntimeError(f"cache holds {length} tokens of {sequence_id}, the plan says {computed}")

    def select(self, sequence_ids: Sequence[str], width: int) -> Selection:
        """Select these sequences for the next forward."""
        slots = {self.slots[name] for name in sequence_ids}
        first, stop = min(slots), max(slots) + 1
        live = tuple([slot in slots for slot in range(first, stop)])
        self.selection = select(first, width, tuple(self.lengths[first:stop]), live)
        return self.selection


class Placement(NamedTuple):
    """Positions of one buffer's rows in a forward and in the buffer, computed once for all layers."""

    name: str
    """Sequence that owns the buffer; empty for the shared one."""
    bits: int
    """Bits of each stored number; 0 if it is not quantised."""
    rows: slice
    """Rows of the forward."""
    in_buffer: slice
    starts: tuple[int, ...]
    """Buffer index at which each row writes."""
    uniform: bool
    """Whether all rows write at the same buffer index."""
    width: int
    extent: int
    """Number of buffer positions that the forward reads."""
    room: int
    """Number of buffer positions that a write may touch: a ragged write touches every row of the buffer."""
    reserved: int
    """Number of positions reserved for the buffer's longest row if this is the first forward of any row; else 0."""
    moves: tuple[tuple[int, int, int], ...]
    """Spans (buffer row, begin, end) that move to the front of their row before the write."""


class Lane:
    """Positions of rows in their buffers for one attention window. All layers with the same window share one lane.

    Buffer index = position - base. In a window's lane, a row that reaches the capacity moves its last `window + margin`
    tokens to the front of its buffer: enough to fill the window after a rewind of up to `margin` tokens.
    """

    def __init__(self, table: SlotTable, window: int | None, *, margin_tokens: int, chunk_tokens: int) -> None:
        self.table = table
        self.window = window
        self.keep_tokens = (window or 0) + margin_tokens
        self.capacity = None if window is None else self.keep_tokens + chunk_tokens
        self.bases: list[int] = []
        self.placements: tuple[Placement, ...] = ()
        """Placements of the forward in progress."""
        self._selection: Selection | None = None
        self._starts: tuple[int, ...] = ()
        self._masks: dict[tuple[int, bool, int | None], Any] = {}
        self._indices: dict[tuple[str, int], mx.array] = {}

    def base(self, slot: int) -> int:
        return self.bases[slot] if slot < len(self.bases) else 0

    def set_base(self, slot: int, base: int) -> None:
        self.bases.extend([0] * (slot + 1 - len(self.bases)))
        self.bases[slot] = base

    def occupied(self, slot: int) -> int:
        """Return the number of buffer positions that the row takes."""
        return self.table.lengths[slot] - self.base(slot)

    def longest(self, name: str) -> int:
        """Return the number of buffer positions that the longest row of a buffer takes."""
        return max(map(self.occupied, self.table.slots_of(name)), default=0)

    def reserved(self, name: str) -> int:
        """Return the number of buffer positions reserved for the longest row of a buffer."""
        table = self.table
        tokens = max((table.reserved[table.names[slot]] - self.base(slot) for slot in table.slots_of(name)), default=0)
        return tokens if self.capacity is None else min(tokens, self.capacity)

    def reorder(self, order: Sequence[int]) -> None:
        """Reorder the bases: slot i gets the base of slot `order[i]`."""
        self.bases = [self.base(slot) for slot in order]

    def begin(self) -> tuple[Placement, ...]:
        """Return the placements of the selected rows; plan moves for rows that reached the capacity."""
        selection = self.table.selection
        if self._selection is not selection:
            self._selection = selection
            self._masks.clear()
            self._indices.clear()
            shared, slots = self.table.shared, range(selection.first, selection.first + len(selection.lengths))
            # an inactive row with its own buffer is not part of the forward
            participating = [slot for slot, live in zip(slots, selection.live, strict=True) if live or slot < shared]
            moves = {} if self.capacity is None else self._plan_moves(participating, selection.width, self.capacity)
            self._starts = tuple([self.occupied(slot) if slot in participating else 0 for slot in slots])
            self.placements = tuple(self._placements(selection, moves))
        return self.placements

    def _placements(self, selection: Selection, moves: Mapping[int, tuple[int, int]]) -> Iterator[Placement]:
        shared = min(max(self.table.shared - selection.first, 0), len(selection.lengths))
        if shared:
            moved = tuple((slot, *span) for slot, span in moves.items() if slot < self.table.shared)
            yield self._placement("", slice(0, shared), selection.first, moved)
        for row in range(shared, len(selection.lengths)):
            slot = selection.first + row
            if selection.live[row]:
                row_moves = ((0, *moves[slot]),) if slot in moves else ()
                yield self._placement(self.table.names[slot], slice(row, row + 1), 0, row_moves)

    def _placement(self, name: str, rows: slice, first: int, moves: tuple[tuple[int, int, int], ...]) -> Placement:
        starts, width = self._starts[rows], self.table.selection.width
        extent, uniform = max(starts) + width, len(set(starts)) == 1
        return Placement(
            name=name,
            bits=self.table.bits.get(name, 0) if self.window is None else 0,  # windows are too short to be worth it
            rows=rows,
            in_buffer=slice(first, first + len(starts)),
            starts=starts,
            uniform=uniform,
            width=width,
            extent=extent,
            room=extent if uniform else self.longest(name) + width,
            reserved=self.reserved(name) if 0 in starts else 0,  # a row's first write makes room for the whole row
            moves=moves,
        )

    def _plan_moves(self, slots: Sequence[int], width: int, capacity: int) -> dict[int, tuple[int, int]]:
        moves: dict[int, tuple[int, int]] = {}
        for slot in slots:
            index = self.occupied(slot)
            if index + width > capacity and index > self.keep_tokens:
                moves[slot] = index - self.keep_tokens, index
                self.set_base(slot, self.base(slot) + index - self.keep_tokens)
        return moves

    def write_index(self, placement: Placement, rows: int) -> mx.array:
        """Return int32 [rows, 1, width, 1]: the index of each write; unselected rows write junk past their end."""
        key = placement.name, rows
        if key not in self._indices:
            starts = [self.occupied(row) if row < self.table.shared else 0 for row in range(rows)]
            index = mx.array(starts, dtype=mx.int32)[:, None] + mx.arange(placement.width, dtype=mx.int32)
            self._indices[key] = index[:, None, :, None]
        return self._indices[key]

    def mask(self, width: int, *, return_array: bool, window_size: int | None) -> Any:
        """Return None, "causal", or bool [width, extent] / [rows, 1, width, extent], made once per forward.
        If attention is called once per buffer and there are several buffers, return a `PerBuffer` of such masks."""
        placements = self.begin()
        windows = [size for size in (window_size, self.window) if size is not None]
        window = min(windows) if windows else None
        key = (width, return_array, window)
        if key not in self._masks:
            make = partial(self._make_mask, width, return_array=return_array, window=window)
            if len(placements) > 1 and self.table.attends_per_buffer:
                self._masks[key] = PerBuffer(
                    tuple(placement.rows for placement in placements),
                    [make(placement.starts) for placement in placements],
                )
            else:
                self._masks[key] = make(self._starts)
        return self._masks[key]

    def block_mask(self, width: int) -> mx.array | None:
        """Return None or bool [rows, 1, 1 or width, extent]: a block's tokens see the context and the whole block."""
        self.begin()
        starts = self._starts
        extent = max(starts) + width
        if len(set(starts)) == 1 and (self.window is None or extent <= self.window):
            return None
        first = mx.array(starts, dtype=mx.int32)[:, None, None, None]
        keys = mx.arange(extent)
        mask = keys < first + width
        return mask if self.window is None else mask & (first + mx.arange(width)[:, None] < keys + self.window)

    def _make_mask(self, width: int, starts: tuple[int, ...], *, return_array: bool, window: int | None) -> Any:
        extent = max(starts) + width
        if len(set(starts)) == 1:
            if window is None or extent <= window:
                if width == 1:
                    return None  # as in mlx-lm's caches, even if an array is requested
                if not return_array:
                    return MASK_CAUSAL
            queries = mx.arange(starts[0], extent)[:, None]
        else:
            queries = mx.array(starts, dtype=mx.int32)[:, None, None, None] + mx.arange(width)[:, None]
        keys = mx.arange(extent)
        mask = queries >= keys
        return mask if window is None else mask & (queries < keys + window)
