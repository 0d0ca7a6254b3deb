"""Cache families, chosen once at load from what the model's own `make_cache` answers.

trim      KVCache                     rewind = lower the row's length
slice     RotatingKVCache             a lane with a window; a margin of older tokens stays, so rewinding is exact
snapshot  ArraysCache (recurrent)     keep references; on partial acceptance run the recorded scan again, or carry over
list      CacheList                   recurse
alone     anything else               mlx-lm's own cache: one row, no drafts, and it says so
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from app.engine.lanes import Lane, Selection, SlotTable
from app.engine.recording import Recording, replay
from app.engine.slot_cache import SlotKV

MARGIN_TOKENS = 96
"""Tokens kept behind a sliding window: more than the longest rewind (64 drafts and a carry-over)."""


class SlotState(mlx_cache.ArraysCache):
    """Recurrent states of one layer: arrays [rows, …] that the model rebinds, so a reference is a snapshot."""

    def __init__(self, table: SlotTable, size: int) -> None:
        super().__init__(size)
        self.table = table
        self.store: list[mx.array | None] = [None] * size

    def begin(self, selection: Selection, widths: Sequence[int]) -> None:
        """Show the model the selected rows; `widths` are their real token counts inside the padded rectangle."""
        span = slice(selection.first, selection.stop)
        arrays = enumerate(self.store)
        self.cache = [None if old is None else self._reserved(at, selection.stop, old)[span] for at, old in arrays]
        ragged = any(width != selection.width for width in widths)
        self.lengths = mx.array(list(widths), dtype=mx.int32) if ragged else None
        self.left_padding = None

    def commit(self, selection: Selection, live: Sequence[bool], states: Sequence[mx.array]) -> None:
        """Keep `states` of the live rows; an inert row keeps what it had."""
        for index, state in enumerate(states):
            old = self._reserved(index, selection.stop, state)[selection.first : selection.stop]
            wanted = mx.array(list(live)).reshape(-1, *([1] * (state.ndim - 1)))
            self._replace(index, selection.first, state if all(live) else mx.where(wanted, state, old))
        self.cache = list(self.store)
        self.lengths = None

    def _reserved(self, index: int, rows: int, like: mx.array) -> mx.array:
        """The array of that number with `rows` rows or more; new ones are zero."""
        old = self.store[index]
        have = 0 if old is None else old.shape[0]
        if old is None or have < rows:
            more = mx.zeros((rows - have, *like.shape[1:]), like.dtype)
            old = self.store[index] = more if old is None else mx.concatenate([old, more])
        return old

    def _replace(self, index: int, first: int, fresh: mx.array) -> None:
        """Rows from `first` on become `fresh` [n, …]."""
        stop = first + fresh.shape[0]
        old = self._reserved(index, stop, fresh)
        whole = first == 0 and stop == old.shape[0]
        self.store[index] = fresh if whole else mx.concatenate([old[:first], fresh, old[stop:]])

    def read_row(self, slot: int) -> tuple[mx.array, ...] | None:
        if any(array is None or array.shape[0] <= slot for array in self.store):
            return None
        return tuple(mx.contiguous(array[slot : slot + 1]) for array in self.arrays())

    def write_row(self, slot: int, arrays: Sequence[mx.array]) -> None:
        for index, fresh in enumerate(arrays):
            self._replace(index, slot, fresh)

    def reset_row(self, slot: int) -> None:
        """A new sequence starts from nothing."""
        for index, array in enumerate(self.store):
            if array is not None and slot < array.shape[0]:
                self._replace(index, slot, mx.zeros((1, *array.shape[1:]), array.dtype))

    def move(self, source: int, destination: int) -> None:
        row = self.read_row(source)
        if row is None:  # it was admitted and has not run yet
            self.reset_row(destination)
        else:
            self.write_row(destination, row)

    def clear(self) -> None:
        self.store = [None] * len(self.store)
        self.cache = list(self.store)

    def arrays(self) -> list[mx.array]:
        return [array for array in self.store if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


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
        return [array for cache in self.kv for array in cache.arrays()] + [
            array for state in self.states for array in state.arrays()
        ]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def claim(self, sequence_id: str) -> int:
        slot = self.table.claim(sequence_id)
        for lane in self.lanes.values():
            lane.set_base(slot, 0)
        for state in self.states:
            state.reset_row(slot)
        return slot

    def release(self, sequence_id: str) -> None:
        """Free the row; the last row moves into the hole, and the last one to leave frees the buffers."""
        last = len(self.table.slots) - 1
        length = self.table.lengths[last]
        moved = self.table.release(sequence_id)
        if moved is not None:
            source, destination = moved
            for cache in self.kv:
                cache.move(source, destination, length)
            for state in self.states:
                state.move(source, destination)
            for lane in self.lanes.values():
                lane.set_base(destination, lane.base(source))
        self.table.lengths[last] = 0
        for lane in self.lanes.values():
            lane.set_base(last, 0)
        if not self.table.slots:
            self.clear()

    def clear(self) -> None:
        for cache in self.kv:
            cache.clear()
        for state in self.states:
            state.clear()

    def commit_states(self, selection: Selection, live: Sequence[bool], keep: Sequence[int], record: Recording) -> bool:
        """Leave every recurrent state as after `keep[row]` tokens. False: no recording fits, nothing was changed."""
        if len(record.scans) != len(self.states) or len(record.convolutions) != len(self.states):
            return False
        for layer, state in enumerate(self.states):
            state.commit(selection, live, replay(record, layer, keep))
        return True


class UnknownCacheError(Exception):
    """The model keeps a cache class that no family covers."""


def make_caches(model: Any, *, margin_tokens: int = MARGIN_TOKENS, chunk_tokens: int = 512) -> Caches:
    """Slot caches in the shape that the model's own `make_cache` has. Raises UnknownCacheError."""
    table = SlotTable()
    caches = Caches(table=table, layers=[])

    def lane(window: int | None) -> Lane:
        if window not in caches.lanes:
            caches.lanes[window] = Lane(table, window, margin_tokens=margin_tokens, chunk_tokens=chunk_tokens)
        return caches.lanes[window]

    def convert(original: Any) -> Any:
        kind = type(original)
        if kind is mlx_cache.KVCache:
            caches.kv.append(SlotKV(lane(None)))
            return caches.kv[-1]
        if kind is mlx_cache.RotatingKVCache and original.keep == 0:
            caches.kv.append(SlotKV(lane(original.max_size)))
            return caches.kv[-1]
        if kind is mlx_cache.ArraysCache:
            caches.states.append(SlotState(table, len(original.cache)))
            return caches.states[-1]
        if kind is mlx_cache.CacheList:
            return mlx_cache.CacheList(*(convert(member) for member in original.caches))
        raise UnknownCacheError(kind.__name__)

    caches.layers = [convert(original) for original in mlx_cache.make_prompt_cache(model)]
    return caches
