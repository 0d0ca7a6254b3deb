"""Cache families, chosen once at load from what the model's own `make_cache` returns.

trim      KVCache                     rewind = lower the row's length
slice     RotatingKVCache             a lane with a window; a margin of older tokens is kept, so rewinding is exact
snapshot  ArraysCache (recurrent)     keep references; on partial acceptance rerun the recorded scan, or carry over
list      CacheList                   recurse
alone     anything else               mlx-lm's own cache: one row, no drafts, reported as such

Rows are left-aligned, each with its own length, and masks are made from lengths. Short rows share one rectangle of
buffers; a long row has its own buffers, allocated once if the length of its prompt is known. A forward covers the
contiguous slots from the first to the last row that takes part. A row of the rectangle between them that takes no part
(`inert`) only writes past its own length, where nothing is read. Joining copies nothing, leaving moves at most one
short row, and a ragged rollback is host arithmetic. The classes follow mlx-lm's cache protocol: its models run as is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from app.core.request import MAX_DRAFT_TOKENS
from app.engine.caches.attention import Attend, KvArrays, Packed, PerBuffer, quantised
from app.engine.caches.lanes import Lane, Placement, Selection, SlotTable
from app.models.footprint import GROWTH_STEP_TOKENS, SHARED_TOKENS, grown_capacity

MARGIN_TOKENS = MAX_DRAFT_TOKENS + 32
"""Number of tokens kept beyond a sliding window: more than the longest rewind (all drafts and a carry-over)."""


def copied(view: mx.array) -> mx.array:
    """Copy into separate memory: `mx.contiguous` alone keeps a view's whole array, if that is up to 16 kB larger."""
    return mx.contiguous(view * 1)


class Buffer:
    """Storage of keys and values, initially without rows."""

    def __init__(self) -> None:
        self.parts: list[mx.array] = [mx.zeros((0, 0, 0, 0))] * 2
        self.rows = self.positions = 0

    def write(self, lane: Lane, placement: Placement, new_values: KvArrays) -> None:
        """Write `new_values` [rows, heads, width, any] at the end of each row."""
        for row, begin, end in placement.moves:
            self.copy(row, row, begin, end)
        if placement.uniform:
            self.put(placement.in_buffer, placement.starts[0], new_values)
        else:
            index = lane.write_index(placement, self.rows)
            self.parts = [
                _scatter(part, new, placement, index) for part, new in zip(self.parts, new_values, strict=True)
            ]

    def put(self, rows: slice, first: int, new_values: KvArrays) -> None:
        """Write `new_values` [rows, heads, n, any] at the positions from `first` on."""
        for part, new in zip(self.parts, new_values, strict=True):
            part[rows, :, first : first + new.shape[2]] = new

    def resize(self, like: KvArrays, rows: int, positions: int) -> None:
        """Resize to `rows` and at least `positions`; heads, dimension and type of each array are those of `like`."""
        size = (rows, -(-positions // GROWTH_STEP_TOKENS) * GROWTH_STEP_TOKENS)
        if size != (self.rows, self.positions):
            old_parts = [None] * len(like) if self.empty else self.parts
            self.parts = [_resized(old, new, size) for old, new in zip(old_parts, like, strict=True)]
            self.rows, self.positions = size

    def read(self, row: slice, span: slice) -> KvArrays:
        """Return views of some positions of some rows."""
        return [part[row, :, span] for part in self.parts]

    def copy(self, source: int, destination: int, begin: int, end: int) -> None:
        """Copy positions `begin` to `end` of row `source` to the front of row `destination`."""
        self.put(slice(destination, destination + 1), 0, self.read(slice(source, source + 1), slice(begin, end)))

    @property
    def empty(self) -> bool:
        return not self.rows * self.positions


def _scatter(buffer: mx.array, new_values: mx.array, placement: Placement, index: mx.array) -> mx.array:
    """Write all rows in one operation, by index; the buffer is donated, so it is not copied."""
    rows, first, last = buffer.shape[0], placement.in_buffer.start, placement.in_buffer.stop
    if first > 0 or last < rows:
        before = mx.zeros((first, *new_values.shape[1:]), new_values.dtype)
        after = mx.zeros((rows - last, *new_values.shape[1:]), new_values.dtype)
        new_values = mx.concatenate([before, new_values, after])
    return mx.put_along_axis(buffer, mx.broadcast_to(index, new_values.shape), new_values, axis=2)


class SlotKV:
    """Keys and values of one attention layer: short rows in one rectangle, each long row in a buffer of its own."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.shared = Buffer()
        self.row_buffers: dict[str, Buffer] = {}
        self.latent_reader: Any = None
        """Latent attention layer that last used this cache; None if the cache has keys and values."""

    @property
    def offset(self) -> int | mx.array:
        return self.lane.table.selection.offset

    @property
    def keys(self) -> mx.array:
        """Keys of the rectangle. Some models add dependencies (`mx.depends`) to them, which changes no key."""
        return self.shared.parts[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.shared.parts[0] = keys

    @property
    def values(self) -> mx.array:
        """Values of the rectangle."""
        return self.shared.parts[1]

    @values.setter
    def values(self, _: mx.array) -> None:
        """Zero the values: a model assigns them only if it never reads them, and zeros keep its graph from growing."""
        for buffer in (self.shared, *self.row_buffers.values()):
            buffer.parts[1] = mx.zeros_like(buffer.parts[0])

    @property
    def attend(self) -> Attend:
        return self.lane.table.attend

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: FBT001, FBT002, N803  mlx-lm's signature
        return self.lane.mask(N, return_array=return_array, window_size=window_size)

    def make_block_mask(self, width: int) -> mx.array | None:
        """Return the mask for a block whose tokens see one another in both directions."""
        return self.lane.block_mask(width)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [rows, heads, width, dimension]; return each buffer's keys and values up to its longest row."""
        placements = self.lane.begin()
        for placement in placements:
            row_parts = (keys, values) if len(placements) == 1 else (keys[placement.rows], values[placement.rows])
            stored = quantised(*row_parts, placement.bits)
            buffer = self._ensure_buffer(
                placement.name, stored, placement.in_buffer.stop, placement.room, placement.reserved
            )
            buffer.write(self.lane, placement, stored)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the keys and values that the forward in progress reads, also for layers that share this cache."""
        placements, table = self.lane.begin(), self.lane.table
        if len(placements) == 1:
            return self._read_buffer(placements[0])
        pairs = [self._read_buffer(placement) for placement in placements]
        keys, values = (
            PerBuffer(tuple(placement.rows for placement in placements), parts) for parts in zip(*pairs, strict=True)
        )
        rows = len(table.selection.lengths)
        return (keys, values) if table.attends_per_buffer else (keys.padded(rows), values.padded(rows))

    def _read_buffer(self, placement: Placement) -> tuple[Any, Any]:
        """Return one buffer's keys and values for attention; quantised ones stay packed if attention allows it."""
        table = self.lane.table
        parts = (self.row_buffers[placement.name] if placement.name else self.shared).read(
            placement.in_buffer, slice(placement.extent)
        )
        if len(parts) == 2:
            return parts[0], parts[1]
        keys, values = (Packed(tuple(arrays), placement.bits) for arrays in (parts[:3], parts[3:]))
        if table.attends_per_buffer and placement.width <= table.packed_queries:
            return keys, values
        return keys.dequantised(), values.dequantised()

    def _ensure_buffer(self, name: str, like: KvArrays, rows: int, positions: int, reserved: int) -> Buffer:
        """Return the buffer, enlarged if needed: rows to a power of two, positions to `reserved` or `grown_capacity`.
        The reservation avoids copies while a prompt is prefilled."""
        buffer = self.row_buffers.setdefault(name, Buffer()) if name else self.shared
        if rows > buffer.rows or positions > buffer.positions or reserved > buffer.positions:
            rows = 1 << (max(rows, len(self.lane.table.slots_of(name))) - 1).bit_length()
            longest = max(positions, self.lane.longest(name))
            buffer.resize(like, rows, reserved if longest <= reserved else grown_capacity(longest))
        return buffer

    def separate(self, sequence_id: str, slot: int) -> None:
        """Move a row of the rectangle, with its contents, to a buffer of its own."""
        occupied = self.lane.occupied(slot)
        if occupied > 0 and not self.shared.empty:
            row_parts = self.shared.read(slice(slot, slot + 1), slice(occupied))
            self._ensure_buffer(sequence_id, row_parts, 1, occupied + 1, self.lane.reserved(sequence_id)).put(
                slice(1), 0, row_parts
            )

    def reorder(self, order: Sequence[int]) -> None:
        """Reorder the rectangle: row i gets the contents of row `order[i]`. Free the rectangle if it has no rows."""
        for slot, source in enumerate(order[: self.lane.table.shared]):
            if slot != source and not self.shared.empty and (occupied := self.lane.occupied(slot)) > 0:
                self.shared.copy(source, slot, 0, occupied)
        if not self.lane.table.shared:
            self.shared = Buffer()

    def shrink(self) -> None:
        """Shrink the rectangle if at least half of it is unused."""
        longest = max(self.lane.longest(""), self.lane.reserved(""))
        rows, positions = 1 << max(0, self.lane.table.shared - 1).bit_length(), grown_capacity(longest)
        if 2 * rows * max(positions, GROWTH_STEP_TOKENS) <= self.shared.rows * self.shared.positions:
            self.shared.resize(self.shared.parts, rows, positions)

    def write_row(self, slot: int, parts: KvArrays, first: int = 0) -> None:
        """Write [1, heads, n, any] at the row's buffer positions from `first` on."""
        if size := parts[0].shape[2]:
            name, row = self._buffer_row(slot)
            buffer = self._ensure_buffer(name, parts, row + 1, first + size, self.lane.reserved(name))
            buffer.put(slice(row, row + 1), first, parts)

    def read_span(self, slot: int, start: int, stop: int) -> KvArrays:
        """Return views [1, heads, n, any] of the positions `start` to `stop` that are still cached: the last n."""
        base, (name, row) = self.lane.base(slot), self._buffer_row(slot)
        span = slice(max(0, start - base), max(0, stop - base))
        return (self.row_buffers.get(name, Buffer()) if name else self.shared).read(slice(row, row + 1), span)

    def _buffer_row(self, slot: int) -> tuple[str, int]:
        """Return the owner of a row's buffer ("" for the rectangle), and the row's index in the buffer."""
        table = self.lane.table
        return ("", slot) if slot < table.shared else (table.names[slot], 0)

    def size(self) -> int:
        return max(placement.extent for placement in self.lane.begin())

    def empty(self) -> bool:
        return not self.arrays()

    def arrays(self) -> list[mx.array]:
        buffers = [self.shared, *self.row_buffers.values()]
        return [array for buffer in buffers if not buffer.empty for array in buffer.parts]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def _resized(buffer: mx.array | None, like: mx.array, size: tuple[int, int]) -> mx.array:
    rows, positions = size
    _, heads, _, dimension = like.shape
    grown = mx.zeros((rows, heads, positions, dimension), like.dtype)
    if buffer is not None:
        copied_part = buffer[:rows, :, :positions]
        grown[: copied_part.shape[0], :, : copied_part.shape[2]] = copied_part
    return grown


class ChunkedSlotKV(SlotKV):
    """Cache of a layer that attends within chunks: a window of chunk size covers any chunk; the model masks the rest.

    The model makes one mask for all rows from plain numbers, so each row has to run separately.
    """

    @property
    def start_position(self) -> int:
        """Position of the first token in the selected row's buffer."""
        self.lane.begin()
        return self.lane.base(self.lane.table.selection.first)

    def maybe_trim_front(self) -> None:
        """Do nothing: the lane drops old positions."""


class SlotState(mlx_cache.ArraysCache):
    """Recurrent states of one layer: arrays [rows, …] that are never modified, so a reference is a snapshot.

    `store` is empty before the first forward and may have fewer rows than there are slots: missing rows are zero.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size
        self.store: tuple[mx.array, ...] = ()

    def begin(self, selection: Selection, widths: Sequence[int]) -> None:
        """Show the model the selected rows; `widths` are their real token counts inside the padded rectangle."""
        self.store = tuple(_grown(rows, selection.stop) for rows in self.store)
        has_started = any(selection.lengths)  # some models treat a missing state and a zero state differently
        visible = [rows[selection.first : selection.stop] for rows in self.store] if has_started else []
        self.cache: list[Any] = visible or [None] * self.size
        is_ragged = any(width != selection.width for width in widths)
        self.lengths = mx.array(list(widths), dtype=mx.int32) if is_ragged else None

    def after(self) -> tuple[mx.array, ...]:
        """Return the states that the forward in progress leaves if everything is committed."""
        return tuple(array for array in self.cache if array is not None)

    def commit(self, selection: Selection, live: Sequence[bool], states: Sequence[mx.array]) -> None:
        """Store `states` of the live rows; inert rows keep theirs."""
        if not all(live):
            is_live = mx.array(list(live))
            old_states = [rows[selection.first : selection.stop] for rows in self.store] or map(mx.zeros_like, states)
            pairs = zip(states, old_states, strict=True)
            states = [mx.where(is_live.reshape(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs]
        self.write_row(selection.first, states)
        self.cache = list(self.store)

    def read_row(self, slot: int) -> tuple[mx.array, ...]:
        """Return copies of the row's arrays, [1, …] each; none if the row has not run yet."""
        return tuple(copied(rows[slot : slot + 1]) for rows in self.store if slot < len(rows))

    def write_row(self, slot: int, arrays: Sequence[mx.array]) -> None:
        """Replace the rows from `slot` on with `arrays` [n, …]."""
        stop = slot + max(map(len, arrays), default=0)
        if slot > 0 or any(len(old) > stop for old in self.store):
            rows = zip(self.store or [new_values[:0] for new_values in arrays], arrays, strict=True)
            pairs = [_padded_alike(old, new_values) for old, new_values in rows]
            arrays = [mx.concatenate([_grown(old, slot)[:slot], new_values, old[stop:]]) for old, new_values in pairs]
        self.store = tuple(arrays)

    def reorder(self, order: Sequence[int]) -> None:
        """Reorder the states: row i gets those of row `order[i]`."""
        have = len(self.store[0]) if self.store else 0
        if list(order[:have]) != list(range(have)):
            index = mx.array(list(order), dtype=mx.int32)
            self.store = tuple(_grown(rows, max([*order, have - 1]) + 1)[index] for rows in self.store)
            self.cache = list(self.store) or self.cache


def _grown(rows: mx.array, count: int) -> mx.array:
    """Pad `rows` [any, …] with zeros to `count` rows."""
    missing = count - len(rows)
    return rows if missing <= 0 else mx.concatenate([rows, mx.zeros((missing, *rows.shape[1:]), rows.dtype)])


def _padded_alike(first: mx.array, second: mx.array) -> tuple[mx.array, mx.array]:
    """Pad both to the same row shape: a state that is still growing gets zeros in front."""
    if first.shape[1:] == second.shape[1:]:
        return first, second
    sizes = [max(pair) for pair in zip(first.shape[1:], second.shape[1:], strict=True)]
    pads = (
        [(0, 0), *((most - size, 0) for most, size in zip(sizes, state.shape[1:], strict=True))]
        for state in (first, second)
    )
    return mx.pad(first, next(pads)), mx.pad(second, next(pads))


@dataclass
class Caches:
    """All caches of one model, as the model expects them (`layers`) and by family."""

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
        groups = [*(cache.arrays() for cache in self.kv), *(state.store for state in self.states)]
        return [array for arrays in groups for array in arrays]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def read_span(self, sequence_id: str, start: int, stop: int) -> tuple[KvArrays, ...]:
        """Return the positions `start` to `stop` that are still cached, by KV layer: the last n, [1, heads, n, any].

        n = 0 where a window has moved past. These are lazy views: copy (`copied`) and evaluate them before the next
        forward, or its write copies the buffers.
        """
        slot = self.table.slots[sequence_id]
        return tuple(cache.read_span(slot, start, stop) for cache in self.kv)

    def write_span(self, sequence_id: str, start: int, spans: Sequence[KvArrays], *, stop: int | None = None) -> None:
        """Write back what `read_span` returned, in ascending order of positions; the row then has `stop` tokens.

        All spans end at `stop`, by default `start` plus the longest span; pass it if no layer has the whole range.
        A layer with a shorter span drops what precedes the gap: its window has moved past that.
        """
        slot, length = self.table.slots[sequence_id], self.table.length(sequence_id)
        sizes = [span[0].shape[2] for span in spans]
        stop = start + max(sizes, default=0) if stop is None else stop
        for cache, size, span in zip(self.kv, sizes, spans, strict=True):
            if stop - size > length and len(span[0]):  # a layer that never writes has no rows but shares its lane
                cache.lane.set_base(slot, stop - size)
        for cache, size, span in zip(self.kv, sizes, spans, strict=True):
            cache.write_row(slot, span, stop - size - cache.lane.base(slot))
        self.table.set_length(sequence_id, stop)

    def claim(self, sequence_id: str, reserve_tokens: int = 0, bits: int = 0) -> None:
        """Take a row, without copying keys or values."""
        self._reorder(self.table.claim(sequence_id, reserve_tokens, bits))

    def release(self, sequence_id: str) -> None:
        """Free the row; if it was in the rectangle, the last row there moves into its place."""
        self._reorder(self.table.release(sequence_id))
        for cache in self.kv:
            cache.row_buffers.pop(sequence_id, None)
            cache.shrink()

    def separate(self, sequence_id: str) -> None:
        """Move a row of the rectangle to buffers of its own."""
        for cache in self.kv:
            cache.separate(sequence_id, self.table.slots[sequence_id])
        self._reorder(self.table.separate(sequence_id))
        for cache in self.kv:
            cache.shrink()

    def _reorder(self, order: Sequence[int]) -> None:
        ordered: list[Lane | SlotKV | SlotState] = [*self.lanes.values(), *self.kv, *self.states]
        for cache in ordered:
            cache.reorder(order)


class UnknownCacheError(Exception):
    """The model uses a cache class that no family covers."""


def make_caches(
    model: Any,
    *,
    margin_tokens: int = MARGIN_TOKENS,
    chunk_tokens: int = 512,
    shared_tokens: int = SHARED_TOKENS,
) -> Caches:
    """Make slot caches, structured like those of the model's own `make_cache`. Raises UnknownCacheError."""
    caches = Caches(table=SlotTable(shared_tokens), layers=[])

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
