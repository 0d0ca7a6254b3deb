"""Slots and lanes: which row a sequence sits in, how many of its tokens are cached, where they lie, who sees whom.

All of it is arithmetic on host integers; the buffers are in `rollback`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from app.core.footprint import SHARED_TOKENS
from app.engine.attention import Cut, Pieces

MASK_FULL = "causal"


def reservation(prompt_tokens: int, answer_tokens: int) -> int:
    """Positions to set aside for a request at once: its prompt, and of its answer at most 1/32 of that."""
    return prompt_tokens + min(answer_tokens, prompt_tokens // 32)


class Selection(NamedTuple):
    """The slots `first:stop` of one forward of `width` tokens a row, their cached lengths before it, and which of them
    take part."""

    first: int
    stop: int
    width: int
    lengths: tuple[int, ...]
    live: tuple[bool, ...]
    offset: int | mx.array
    """Position of the first fed token: an int when all rows agree, else int32 [rows]."""


def select(first: int, width: int, lengths: tuple[int, ...], live: tuple[bool, ...]) -> Selection:
    """The slots from `first` on."""
    offset = lengths[0] if len(set(lengths)) == 1 else mx.array(lengths, dtype=mx.int32)
    return Selection(first, first + len(lengths), width, lengths, live, offset)


class SlotTable:
    """Which sequence sits in which slot, and how many of its tokens are cached. Shared by all layers of a model.

    The first `shared` slots are the rows of one rectangle of buffers; each one behind them has buffers of its own. So a
    short row costs what short rows cost, whoever runs beside it, and short rows run in one call.
    """

    def __init__(self, shared_tokens: int = SHARED_TOKENS) -> None:
        self.shared_tokens = shared_tokens
        """A longer row gets buffers of its own."""
        self.names: list[str] = []
        """By slot."""
        self.slots: dict[str, int] = {}
        """By name."""
        self.lengths: list[int] = []
        self.reserved: dict[str, int] = {}
        """How many tokens each row was expected to have when it was claimed; 0: not known."""
        self.shared = 0
        self.in_pieces = False
        """Whether the model's attention is called for each buffer by itself."""
        self.cut: Cut | None = None
        """How many queries attention gets at a time."""
        self.bits: dict[str, int] = {}
        """Of each number of keys and values, by the names of quantised rows."""
        self.packed_queries = 0
        """How many of them may meet packed keys."""
        self.selection = select(0, 1, (0,), (True,))

    def claim(self, sequence_id: str, reserve_tokens: int = 0, bits: int = 0) -> list[int]:
        """Take a slot; the answer is, for each slot, the one that its row had. Occupied slots are always 0 … n-1.
        A row with `bits` is quantised, and has buffers of its own."""
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
        """Free the slot; the answer is as that of `claim`."""
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
        """Sequences of the rectangle that have become too long for it."""
        return [
            name
            for name, size in zip(self.names[: self.shared], self.lengths, strict=False)
            if size > self.shared_tokens
        ]

    def part(self, sequence_id: str) -> list[int]:
        """Take a row out of the rectangle; the answer is as that of `claim`."""
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

    def slots_of(self, name: str) -> Sequence[int]:
        """Whose rows lie in the buffer of a sequence, or in the shared one."""
        return [self.slots[name]] if name else range(self.shared)

    def check(self, sequence_id: str, computed: int) -> None:
        """The one invariant: cached length == `computed`. Raises RuntimeError."""
        if (length := self.length(sequence_id)) != computed:
            raise RuntimeError(f"cache holds {length} tokens of {sequence_id}, the plan says {computed}")

    def select(self, sequence_ids: Sequence[str], width: int) -> Selection:
        """Aim the next forward at these sequences."""
        slots = {self.slots[name] for name in sequence_ids}
        first, stop = min(slots), max(slots) + 1
        live = tuple([slot in slots for slot in range(first, stop)])
        self.selection = select(first, width, tuple(self.lengths[first:stop]), live)
        return self.selection


class Placement(NamedTuple):
    """Where the rows of one buffer lie in a forward and in it: all that its layers ask for, computed once."""

    name: str
    """The sequence whose buffer it is; empty: the shared one."""
    bits: int
    """Of each number that is kept; 0: it is not quantised."""
    rows: slice
    """In the forward."""
    in_buffer: slice
    starts: tuple[int, ...]
    """Buffer index at which each of them writes."""
    uniform: bool
    """Whether all rows write at the same buffer index."""
    width: int
    extent: int
    """Number of buffer positions that the forward reads."""
    room: int
    """Number of buffer positions that a write may touch: a ragged one touches every row of the buffer."""
    reserved: int
    """Number of them that the longest row of the buffer was expected to take, where one begins; else 0."""
    moves: tuple[tuple[int, int, int], ...]
    """(row of the buffer, begin, end) of what goes to the front of its row first."""


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
        self.places: tuple[Placement, ...] = ()
        """Of the forward under way."""
        self._begun: Selection | None = None
        self._starts: tuple[int, ...] = ()
        self._masks: dict[tuple[int, bool, int | None], Any] = {}
        self._indices: dict[tuple[str, int], mx.array] = {}

    def base(self, slot: int) -> int:
        return self.bases[slot] if slot < len(self.bases) else 0

    def set_base(self, slot: int, base: int) -> None:
        self.bases.extend([0] * (slot + 1 - len(self.bases)))
        self.bases[slot] = base

    def held(self, slot: int) -> int:
        """Buffer positions that the row takes."""
        return self.table.lengths[slot] - self.base(slot)

    def longest(self, name: str) -> int:
        """Buffer positions that the longest row of a buffer takes."""
        return max(map(self.held, self.table.slots_of(name)), default=0)

    def reserved(self, name: str) -> int:
        """Buffer positions that it was expected to take."""
        table = self.table
        tokens = max((table.reserved[table.names[slot]] - self.base(slot) for slot in table.slots_of(name)), default=0)
        return tokens if self.capacity is None else min(tokens, self.capacity)

    def reorder(self, order: Sequence[int]) -> None:
        """Each slot becomes what `order` names for it."""
        self.bases = [self.base(slot) for slot in order]

    def begin(self) -> tuple[Placement, ...]:
        """Where the selected rows lie; plans the moves of those that reached the capacity."""
        selection = self.table.selection
        if self._begun is not selection:
            self._begun = selection
            self._masks.clear()
            self._indices.clear()
            shared, slots = self.table.shared, range(selection.first, selection.first + len(selection.lengths))
            # a row in a buffer of its own that takes no part is not there
            there = [slot for slot, live in zip(slots, selection.live, strict=True) if live or slot < shared]
            moves = {} if self.capacity is None else self._plan_moves(there, selection.width, self.capacity)
            self._starts = tuple([self.held(slot) if slot in there else 0 for slot in slots])
            self.places = tuple(self._places(selection, moves))
        return self.places

    def _places(self, selection: Selection, moves: Mapping[int, tuple[int, int]]) -> Iterator[Placement]:
        shared = min(max(self.table.shared - selection.first, 0), len(selection.lengths))
        if shared:
            moved = tuple((slot, *span) for slot, span in moves.items() if slot < self.table.shared)
            yield self._place("", slice(0, shared), selection.first, moved)
        for row in range(shared, len(selection.lengths)):
            slot = selection.first + row
            if selection.live[row]:
                own = ((0, *moves[slot]),) if slot in moves else ()
                yield self._place(self.table.names[slot], slice(row, row + 1), 0, own)

    def _place(self, name: str, rows: slice, first: int, moves: tuple[tuple[int, int, int], ...]) -> Placement:
        starts, width = self._starts[rows], self.table.selection.width
        extent, uniform = max(starts) + width, len(set(starts)) == 1
        return Placement(
            name=name,
            bits=self.table.bits.get(name, 0) if self.window is None else 0,  # windows are short
            rows=rows,
            in_buffer=slice(first, first + len(starts)),
            starts=starts,
            uniform=uniform,
            width=width,
            extent=extent,
            room=extent if uniform else self.longest(name) + width,
            reserved=self.reserved(name) if 0 in starts else 0,  # a row's first write makes room for all of it
            moves=moves,
        )

    def _plan_moves(self, slots: Sequence[int], width: int, capacity: int) -> dict[int, tuple[int, int]]:
        moves: dict[int, tuple[int, int]] = {}
        for slot in slots:
            index = self.held(slot)
            if index + width > capacity and index > self.keep_tokens:
                moves[slot] = index - self.keep_tokens, index
                self.set_base(slot, self.base(slot) + index - self.keep_tokens)
        return moves

    def write_index(self, place: Placement, rows: int) -> mx.array:
        """int32 [rows, 1, width, 1]: where each row of the whole buffer writes; rows that are not selected write junk
        behind their own length."""
        key = place.name, rows
        if key not in self._indices:
            starts = [self.held(row) if row < self.table.shared else 0 for row in range(rows)]
            index = mx.array(starts, dtype=mx.int32)[:, None] + mx.arange(place.width, dtype=mx.int32)
            self._indices[key] = index[:, None, :, None]
        return self._indices[key]

    def mask(self, width: int, *, return_array: bool, window_size: int | None) -> Any:
        """None, "causal", or bool [width, extent] / [rows, 1, width, extent]; made once per forward. Where rows lie in
        several buffers and attention is called for each, the `Pieces` of such."""
        places = self.begin()
        windows = [size for size in (window_size, self.window) if size is not None]
        window = min(windows) if windows else None
        key = (width, return_array, window)
        if key not in self._masks:
            make = partial(self._make_mask, width, return_array=return_array, window=window)
            if len(places) > 1 and self.table.in_pieces:
                self._masks[key] = Pieces(
                    tuple(place.rows for place in places), [make(place.starts) for place in places]
                )
            else:
                self._masks[key] = make(self._starts)
        return self._masks[key]

    def block_mask(self, width: int) -> mx.array | None:
        """None, or bool [rows, 1, 1 or width, extent]: each token of the block sees all before and all of the block."""
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
                    return None  # as mlx-lm's caches do, whatever is asked for
                if not return_array:
                    return MASK_FULL
            queries = mx.arange(starts[0], extent)[:, None]
        else:
            queries = mx.array(starts, dtype=mx.int32)[:, None, None, None] + mx.arange(width)[:, None]
        keys = mx.arange(extent)
        mask = queries >= keys
        return mask if window is None else mask & (queries < keys + window)
