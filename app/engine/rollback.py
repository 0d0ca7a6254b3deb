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
from app.engine.slot_cache import SlotKV

MARGIN_TOKENS = 96
"""Tokens kept behind a sliding window: more than the longest rewind (64 drafts and a carry-over)."""


class SlotState(mlx_cache.ArraysCache):
    """Recurrent states of one layer: arrays [rows, …] that nobody changes, so a reference is a snapshot.

    `store` has none before the first forward, and never a row behind the last sequence: what is missing is zero.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.store: tuple[mx.array, ...] = ()

    def begin(self, selection: Selection, widths: Sequence[int]) -> None:
        """Show the model the selected rows; `widths` are their real token counts inside the padded rectangle."""
        self.store = tuple(_grown(rows, selection.stop) for rows in self.store)
        if self.store:
            self.cache = [rows[selection.first : selection.stop] for rows in self.store]
        ragged = any(width != selection.width for width in widths)
        self.lengths = mx.array(list(widths), dtype=mx.int32) if ragged else None

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
            arrays = [mx.concatenate([_grown(old, slot)[:slot], fresh, old[stop:]]) for old, fresh in rows]
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
        sliding = kind is mlx_cache.RotatingKVCache and original.keep == 0
        if not sliding and kind is not mlx_cache.KVCache:
            raise UnknownCacheError(kind.__name__)
        window = original.max_size if sliding else None
        lane = Lane(caches.table, window, margin_tokens=margin_tokens, chunk_tokens=chunk_tokens)
        caches.kv.append(SlotKV(caches.lanes.setdefault(window, lane)))
        return caches.kv[-1]

    caches.layers = [convert(original) for original in mlx_cache.make_prompt_cache(model)]
    return caches
