"""Cache families, chosen once at load from what the model's own `make_cache` answers.

trim      KVCache                     rewind = lower the row's length
slice     RotatingKVCache             a lane with a window; a margin of older tokens stays, so rewinding is exact
snapshot  ArraysCache (recurrent)     keep references; on partial acceptance run the recorded scan again, or carry over
list      CacheList                   recurse
alone     anything else               mlx-lm's own cache: one row, no drafts, and it says so

Rows are left-aligned, with a length each and masks made from lengths. A sequence sits in one slot for its life. A
forward covers the contiguous slots from the first to the last row that takes part; a row between them that does not
(`inert`) only writes behind its own length, where nothing is read. Joining copies nothing, leaving moves at most one
row, a ragged rollback is host arithmetic. The classes speak mlx-lm's cache protocol, so its models run unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from app.core.footprint import GROWTH_STEP_TOKENS
from app.engine.lanes import Lane, Selection, SlotTable

MARGIN_TOKENS = 96
"""Tokens kept behind a sliding window: more than the longest rewind (64 drafts and a carry-over)."""


class SlotKV:
    """Keys and values of one attention layer: two buffers [rows, heads, positions, dimension], at first of no rows."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.keys = self.values = mx.zeros((0, 0, 0, 0))

    @property
    def offset(self) -> int | mx.array:
        return self.lane.table.selection.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: FBT001, FBT002, N803  mlx-lm calls it so
        return self.lane.mask(N, return_array=return_array, window_size=window_size)

    def make_block_mask(self, width: int) -> mx.array | None:
        """For a block whose tokens see one another in both directions."""
        return self.lane.block_mask(width)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [rows, heads, width, dimension] behind each row's length; read everything up to the longest row."""
        starts = self.lane.begin()
        selection = self.lane.table.selection
        rows = slice(selection.first, selection.stop)
        self._reserve(keys, values, selection.stop, self.lane.room)
        for slot, begin, end in self.lane.moves:
            size = end - begin
            self.keys[slot : slot + 1, :, :size] = self.keys[slot : slot + 1, :, begin:end]
            self.values[slot : slot + 1, :, :size] = self.values[slot : slot + 1, :, begin:end]
        if self.lane.uniform:
            span = slice(starts[0], starts[0] + selection.width)
            self.keys[rows, :, span] = keys
            self.values[rows, :, span] = values
        else:
            self.keys = self._scatter(self.keys, keys, selection)
            self.values = self._scatter(self.values, values, selection)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the forward under way reads; layers that share the keys of this one ask for them."""
        selection = self.lane.table.selection
        rows = slice(selection.first, selection.stop)
        return self.keys[rows, :, : self.lane.extent], self.values[rows, :, : self.lane.extent]

    def _scatter(self, buffer: mx.array, fresh: mx.array, selection: Selection) -> mx.array:
        """One indexed write for all rows; the buffer is donated, so its size costs nothing."""
        rows = buffer.shape[0]
        if selection.first > 0 or selection.stop < rows:
            before = mx.zeros((selection.first, *fresh.shape[1:]), fresh.dtype)
            after = mx.zeros((rows - selection.stop, *fresh.shape[1:]), fresh.dtype)
            fresh = mx.concatenate([before, fresh, after])
        index = mx.broadcast_to(self.lane.write_index(rows), fresh.shape)
        return mx.put_along_axis(buffer, index, fresh, axis=2)

    def _reserve(self, keys: mx.array, values: mx.array, rows: int, positions: int) -> None:
        """Grow by rows to the next power of two, by positions to what was reserved, so that no prompt is copied while
        it is read; beyond that to a quarter more, so that copies amortise.

        What grows is as large as the rows of now need it: room that was for others is given back.
        """
        reserved = self.lane.reserved
        if rows <= self.keys.shape[0] and max(positions, reserved) <= self.keys.shape[2]:
            return
        rows = 1 << (max(rows, len(self.lane.table.lengths)) - 1).bit_length()
        positions = max(positions, self.lane.longest)
        positions = reserved if positions <= reserved else positions + positions // 4
        size = (rows, -(-positions // GROWTH_STEP_TOKENS) * GROWTH_STEP_TOKENS)
        self.keys = _lengthened(self.keys, keys, size)
        self.values = _lengthened(self.values, values, size)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the row `source` over the row `destination`: the one cost of leaving."""
        size = length - self.lane.base(source)
        if size > 0 and not self.empty():
            self.keys[destination : destination + 1, :, :size] = self.keys[source : source + 1, :, :size]
            self.values[destination : destination + 1, :, :size] = self.values[source : source + 1, :, :size]

    def read_row(self, slot: int, length: int) -> tuple[mx.array, mx.array] | None:
        """A compact copy [1, heads, positions, dimension] of the row; None when nothing was ever written."""
        if self.empty():
            return None
        keys, values = (each[slot : slot + 1, :, : length - self.lane.base(slot)] for each in (self.keys, self.values))
        return mx.contiguous(keys), mx.contiguous(values)

    def write_row(self, slot: int, keys: mx.array, values: mx.array, first: int = 0) -> None:
        """Put [1, heads, n, dimension] at the buffer positions of the row from `first` on."""
        stop = first + keys.shape[2]
        if stop > first:
            self._reserve(keys, values, slot + 1, stop)
            self.keys[slot : slot + 1, :, first:stop] = keys
            self.values[slot : slot + 1, :, first:stop] = values

    def read_span(self, slot: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Views [1, heads, n, dimension] of what is left of the positions `start` to `stop`: the last n of them."""
        base = self.lane.base(slot)
        span = slice(max(0, start - base), max(0, stop - base))
        return self.keys[slot : slot + 1, :, span], self.values[slot : slot + 1, :, span]

    def clear(self) -> None:
        self.keys = self.values = mx.zeros((0, 0, 0, 0))

    def size(self) -> int:
        return self.lane.extent

    def empty(self) -> bool:
        return self.keys.size == 0

    def arrays(self) -> list[mx.array]:
        return [] if self.empty() else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def position_nbytes(self) -> int:
        """Of one position of one row; 0 before the first write."""
        return sum(array.nbytes // (array.shape[0] * array.shape[2]) for array in self.arrays())


def _lengthened(buffer: mx.array, like: mx.array, size: tuple[int, int]) -> mx.array:
    rows, positions = size
    _, heads, _, dimension = like.shape
    grown = mx.zeros((rows, heads, positions, dimension), like.dtype)
    if buffer.size:
        kept = buffer[:rows, :, :positions]
        grown[: kept.shape[0], :, : kept.shape[2]] = kept
    return grown


class ChunkedSlotKV(SlotKV):
    """Of a layer that sees the chunk that a token is in: a window of that size holds it, and the model masks the rest.

    The model makes one mask for all rows from plain numbers, so each row has to run by itself.
    """

    @property
    def start_position(self) -> int:
        """Position of the first token that the selected row's buffer holds."""
        self.lane.begin()
        return self.lane.base(self.lane.table.selection.first)

    def maybe_trim_front(self) -> None:
        """The lane moves what lies too far back."""


class SlotState(mlx_cache.ArraysCache):
    """Recurrent states of one layer: arrays [rows, …] that nobody changes, so a reference is a snapshot.

    `store` has none before the first forward, and never a row behind the last sequence: what is missing is zero.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size
        self.store: tuple[mx.array, ...] = ()

    def begin(self, selection: Selection, widths: Sequence[int]) -> None:
        """Show the model the selected rows; `widths` are their real token counts inside the padded rectangle."""
        self.store = tuple(_grown(rows, selection.stop) for rows in self.store)
        begun = any(selection.lengths)  # to some models nothing yet is not the same as zero
        shown = [rows[selection.first : selection.stop] for rows in self.store] if begun else []
        self.cache: list[Any] = shown or [None] * self.size
        ragged = any(width != selection.width for width in widths)
        self.lengths = mx.array(list(widths), dtype=mx.int32) if ragged else None

    def fed(self) -> tuple[mx.array, ...]:
        """What the forward under way leaves: the states of its rows when everything stays."""
        return tuple(array for array in self.cache if array is not None)

    def commit(self, selection: Selection, live: Sequence[bool], states: Sequence[mx.array]) -> None:
        """Keep `states` of the live rows; an inert row keeps what it had."""
        if not all(live):
            wanted = mx.array(list(live))
            held = [rows[selection.first : selection.stop] for rows in self.store] or map(mx.zeros_like, states)
            pairs = zip(states, held, strict=True)
            states = [mx.where(wanted.reshape(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs]
        self.write_row(selection.first, states)
        self.cache = list(self.store)

    def read_row(self, slot: int) -> tuple[mx.array, ...]:
        """A copy [1, …] of each array; none when the row has not run yet."""
        return tuple(mx.contiguous(rows[slot : slot + 1]) for rows in self.store if slot < len(rows))

    def write_row(self, slot: int, arrays: Sequence[mx.array]) -> None:
        """The rows from `slot` on become `arrays` [n, …]."""
        stop = slot + max(map(len, arrays), default=0)
        if slot > 0 or any(len(old) > stop for old in self.store):
            rows = zip(self.store or [fresh[:0] for fresh in arrays], arrays, strict=True)
            pairs = [_alike(old, fresh) for old, fresh in rows]
            arrays = [mx.concatenate([_grown(old, slot)[:slot], fresh, old[stop:]]) for old, fresh in pairs]
        self.store = tuple(arrays)

    def release(self, hole: int, last: int) -> None:
        """The row `last` moves into the hole."""
        order = mx.array([*range(hole), last, *range(hole + 1, last)][:last], dtype=mx.int32)
        self.store = tuple(_grown(rows, last + 1)[order] for rows in self.store)
        self.cache = list(self.store) or self.cache


def _grown(rows: mx.array, count: int) -> mx.array:
    """`rows` [any, …] with so many more, all zero, that there are `count`."""
    missing = count - len(rows)
    return rows if missing <= 0 else mx.concatenate([rows, mx.zeros((missing, *rows.shape[1:]), rows.dtype)])


def _alike(first: mx.array, second: mx.array) -> tuple[mx.array, mx.array]:
    """Both with as many places for each row: a state that is still growing gets zeros in front."""
    if first.shape[1:] == second.shape[1:]:
        return first, second
    sizes = [max(pair) for pair in zip(first.shape[1:], second.shape[1:], strict=True)]
    pads = (
        [(0, 0), *((most - size, 0) for most, size in zip(sizes, each.shape[1:], strict=True))]
        for each in (first, second)
    )
    return mx.pad(first, next(pads)), mx.pad(second, next(pads))


@dataclass
class Caches:
    """All caches of one model, as the model wants them (`layers`) and by family."""

    table: SlotTable
    layers: list[Any]
    kv: list[SlotKV] = field(default_factory=list)
    states: list[SlotState] = field(default_factory=list)
    lanes: dict[int | None, Lane] = field(default_factory=dict)

    @property
    def families(self) -> tuple[str, ...]:
        names = ["slice" if window is not None else "trim" for window in self.lanes]
        return tuple(dict.fromkeys([*names, *(["snapshot"] if self.states else [])]))

    def arrays(self) -> list[mx.array]:
        kept = [*(cache.arrays() for cache in self.kv), *(state.store for state in self.states)]
        return [array for arrays in kept for array in arrays]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def row_nbytes(self, length: int) -> int:
        """What a copy of one row of so many positions takes, at most; states by one checkpoint."""
        kv = sum(cache.position_nbytes for cache in self.kv) * length
        return kv + sum(array.nbytes // max(1, len(array)) for state in self.states for array in state.store)

    def read_span(self, sequence_id: str, start: int, stop: int) -> tuple[tuple[mx.array, ...], ...]:
        """By KV layer keys and values [1, heads, n, dimension] of the positions `start` to `stop` that it still holds:
        the last n of them, n = 0 where its window has passed on.

        Lazy views: copy (`mx.contiguous`) and evaluate them before the next forward, or its write copies the buffers.
        """
        slot = self.table.slots[sequence_id]
        return tuple(cache.read_span(slot, start, stop) for cache in self.kv)

    def write_span(
        self, sequence_id: str, start: int, spans: Sequence[tuple[mx.array, ...]], *, stop: int | None = None
    ) -> None:
        """Put back what `read_span` gave, in the order of positions; the row is `stop` tokens long then.

        `stop` is where all the spans end: `start` plus the longest unless said, as where no layer holds all of it.
        Layers that hold less than that forget what lies before their gap: a window has passed on.
        """
        slot, length = self.table.slots[sequence_id], self.table.length(sequence_id)
        sizes = [span[0].shape[2] for span in spans]
        stop = start + max(sizes, default=0) if stop is None else stop
        for cache, size, (keys, _) in zip(self.kv, sizes, spans, strict=True):
            if stop - size > length and len(keys):  # a layer that never writes has no rows: its lane is others' too
                cache.lane.set_base(slot, stop - size)
        for cache, (keys, values) in zip(self.kv, spans, strict=True):
            cache.write_row(slot, keys, values, stop - keys.shape[2] - cache.lane.base(slot))
        self.table.lengths[slot] = stop

    def release(self, sequence_id: str) -> None:
        """Free the row; the last row moves into the hole, and the last one to leave frees the buffers."""
        last, hole = self.table.release(sequence_id)
        for cache in self.kv if hole != last else ():
            cache.move(last, hole, self.table.lengths[hole])
        for state in self.states:
            state.release(hole, last)
        for lane in self.lanes.values():
            lane.set_base(hole, lane.base(last))
            lane.set_base(last, 0)
        for cache in self.kv if last == 0 else ():
            cache.clear()


class UnknownCacheError(Exception):
    """The model keeps a cache class that no family covers."""


def make_caches(model: Any, *, margin_tokens: int = MARGIN_TOKENS, chunk_tokens: int = 512) -> Caches:
    """Slot caches in the shape that the model's own `make_cache` has. Raises UnknownCacheError."""
    caches = Caches(table=SlotTable(), layers=[])

    def convert(original: Any) -> Any:
        kind = type(original)
        if kind is mlx_cache.CacheList:
            return mlx_cache.CacheList(*(convert(member) for member in original.caches))
        if kind is mlx_cache.ArraysCache:
            caches.states.append(SlotState(len(original.cache)))
            return caches.states[-1]
        chunked = kind is mlx_cache.ChunkedKVCache
        sliding = kind is mlx_cache.RotatingKVCache and original.keep == 0
        if not (chunked or sliding or kind is mlx_cache.KVCache):
            raise UnknownCacheError(kind.__name__)
        window = original.chunk_size if chunked else original.max_size if sliding else None
        lane = Lane(caches.table, window, margin_tokens=margin_tokens, chunk_tokens=chunk_tokens)
        caches.kv.append((ChunkedSlotKV if chunked else SlotKV)(caches.lanes.setdefault(window, lane)))
        return caches.kv[-1]

    caches.layers = [convert(original) for original in mlx_cache.make_prompt_cache(model)]
    return caches
