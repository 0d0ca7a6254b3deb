"""The slot cache: left-aligned rows, a length per row, masks from lengths; to rewind is to lower the length.

A sequence sits in one slot for its life. A forward covers the contiguous slots from the first to the last row that
takes part; a row between them that does not (`inert`) only writes behind its own length, where nothing is read.
Joining copies nothing, leaving moves at most one row, a ragged rollback is host arithmetic.

The classes speak mlx-lm's cache protocol (`update_and_fetch`, `make_mask`, `offset`), so its models run unchanged.
"""

from typing import Any

import mlx.core as mx

from app.core.footprint import GROWTH_STEP_TOKENS
from app.engine.lanes import Lane, Selection


class SlotKV:
    """Keys and values of one attention layer: two buffers [rows, heads, positions, head dimension]."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

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
        self._reserve(keys, values, selection.stop, self.lane.room)
        if self.keys is None or self.values is None:
            raise AssertionError("buffers are reserved before they are written")
        for slot, begin, end in self.lane.moves:
            size = end - begin
            self.keys[slot : slot + 1, :, :size] = self.keys[slot : slot + 1, :, begin:end]
            self.values[slot : slot + 1, :, :size] = self.values[slot : slot + 1, :, begin:end]
        if self.lane.uniform:
            rows = slice(selection.first, selection.stop)
            span = slice(starts[0], starts[0] + selection.width)
            self.keys[rows, :, span] = keys
            self.values[rows, :, span] = values
        else:
            self.keys = self._scatter(self.keys, keys, selection)
            self.values = self._scatter(self.values, values, selection)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        selection = self.lane.table.selection
        if self.keys is None or self.values is None:
            raise AssertionError("an empty cache has no keys")
        rows, span = slice(selection.first, selection.stop), slice(0, self.lane.extent)
        return self.keys[rows, :, span], self.values[rows, :, span]

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
        """Grow by rows to the next power of two and by positions to a quarter more, so that copies amortise.

        What grows is as large as the rows of now need it: room that was for others is given back.
        """
        have_rows, have = (0, 0) if self.keys is None else (self.keys.shape[0], self.keys.shape[2])
        if rows <= have_rows and positions <= have:
            return
        rows = 1 << (max(rows, len(self.lane.table.lengths)) - 1).bit_length()
        positions = max(positions, self.lane.longest)
        size = (rows, -(-(positions + positions // 4) // GROWTH_STEP_TOKENS) * GROWTH_STEP_TOKENS)
        self.keys = _lengthened(self.keys, keys, size)
        self.values = _lengthened(self.values, values, size)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the row `source` over the row `destination`: the one cost of leaving."""
        size = length - self.lane.base(source)
        if self.keys is not None and self.values is not None and size > 0:
            self.keys[destination : destination + 1, :, :size] = self.keys[source : source + 1, :, :size]
            self.values[destination : destination + 1, :, :size] = self.values[source : source + 1, :, :size]

    def read_row(self, slot: int, length: int) -> tuple[mx.array, mx.array] | None:
        """A compact copy [1, heads, positions, dimension] of the row; None when nothing was ever written."""
        size = length - self.lane.base(slot)
        if self.keys is None or self.values is None:
            return None
        return (
            mx.contiguous(self.keys[slot : slot + 1, :, :size]),
            mx.contiguous(self.values[slot : slot + 1, :, :size]),
        )

    def write_row(self, slot: int, keys: mx.array, values: mx.array) -> None:
        """Put a compact copy back at the front of the row."""
        size = keys.shape[2]
        self._reserve(keys, values, slot + 1, size)
        if self.keys is None or self.values is None:
            raise AssertionError("buffers are reserved before they are written")
        self.keys[slot : slot + 1, :, :size] = keys
        self.values[slot : slot + 1, :, :size] = values

    def clear(self) -> None:
        self.keys = self.values = None

    def size(self) -> int:
        return self.lane.extent

    def empty(self) -> bool:
        return self.keys is None

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.keys, self.values) if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def position_nbytes(self) -> int:
        """Of one position of one row; 0 before the first write."""
        return sum(array.nbytes // (array.shape[0] * array.shape[2]) for array in self.arrays())


def _lengthened(buffer: mx.array | None, like: mx.array, size: tuple[int, int]) -> mx.array:
    rows, positions = size
    _, heads, _, dimension = like.shape
    grown = mx.zeros((rows, heads, positions, dimension), like.dtype)
    if buffer is not None:
        kept = buffer[:rows, :, :positions]
        grown[: kept.shape[0], :, : kept.shape[2]] = kept
    return grown
