"""Prompts already computed, kept for the next request: least recently used, bounded by bytes.

An entry is a compact copy of one row. Attention layers can be cut to any shared prefix that their window still
covers; recurrent states only exist at the checkpoints where they were taken (end of prompt, end of output).
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.engine.rollback import Caches

SHORTEST_TOKENS = 8

StateRow = tuple[tuple[mx.array, ...], ...]


@dataclass(frozen=True)
class Entry:
    """One stored row: its tokens, K/V per attention layer with the window base, states per checkpoint."""

    tokens: tuple[int, ...]
    kv: tuple[tuple[mx.array, mx.array], ...]
    bases: Mapping[int | None, int]
    states: Mapping[int, StateRow]
    nbytes: int


class PrefixCache:
    """Finds the longest usable prefix of a prompt. A hit gives the same tokens as a miss."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.entries: OrderedDict[tuple[int, ...], Entry] = OrderedDict()
        self.nbytes = 0

    def restore(self, caches: Caches, slot: int, prompt: Sequence[int]) -> int:
        """Put the longest usable prefix into the row; the answer is its length, always < len(prompt)."""
        best, length = None, 0
        for entry in self.entries.values():
            usable = _usable(entry, caches, prompt)
            if usable > length:
                best, length = entry, usable
        if best is None or length < SHORTEST_TOKENS:
            return 0
        self.entries.move_to_end(best.tokens)
        for lane in caches.lanes.values():
            lane.set_base(slot, best.bases[lane.window])
        for cache, (keys, values) in zip(caches.kv, best.kv, strict=True):
            size = length - best.bases[cache.lane.window]
            cache.write_row(slot, keys[:, :, :size], values[:, :, :size])
        for state, arrays in zip(caches.states, best.states.get(length, ()), strict=False):
            state.write_row(slot, arrays)
        caches.table.lengths[slot] = length
        return length

    def store(self, caches: Caches, slot: int, tokens: Sequence[int], checkpoints: Mapping[int, StateRow]) -> None:
        """Copy the row's first `len(tokens)` positions. Entries that are prefixes of it are dropped."""
        length = len(tokens)
        if length < SHORTEST_TOKENS or (caches.states and not checkpoints):
            return
        estimate = caches.nbytes * length // max(1, sum(caches.table.lengths))
        if estimate > 2 * self.limit_bytes:
            return
        rows = [cache.read_row(slot, length) for cache in caches.kv]
        kv = tuple(row for row in rows if row is not None)
        if len(kv) != len(caches.kv):
            return
        states = dict(checkpoints)
        arrays = [array for pair in kv for array in pair]
        arrays += [array for row in states.values() for layer in row for array in layer]
        mx.eval(arrays)
        bases = {window: lane.base(slot) for window, lane in caches.lanes.items()}
        self._add(Entry(tuple(tokens), kv, bases, states, sum(array.nbytes for array in arrays)), bool(caches.states))

    def _add(self, entry: Entry, exact: bool) -> None:  # noqa: FBT001
        if not exact:
            for tokens in [known for known in self.entries if entry.tokens[: len(known)] == known]:
                self._drop(tokens)
        elif entry.tokens in self.entries:
            self._drop(entry.tokens)
        self.entries[entry.tokens] = entry
        self.nbytes += entry.nbytes
        while self.nbytes > self.limit_bytes and self.entries:
            self._drop(next(iter(self.entries)))

    def _drop(self, tokens: tuple[int, ...]) -> None:
        self.nbytes -= self.entries.pop(tokens).nbytes

    def clear(self) -> None:
        self.entries.clear()
        self.nbytes = 0


def _usable(entry: Entry, caches: Caches, prompt: Sequence[int]) -> int:
    shared = _shared_length(entry.tokens, prompt)
    if caches.states:
        return max((point for point in entry.states if point <= shared), default=0)
    for lane in caches.lanes.values():
        base = entry.bases[lane.window]
        if base and (lane.window is None or shared - lane.window + 1 < base):
            return 0
    return shared


def _shared_length(known: Sequence[int], prompt: Sequence[int]) -> int:
    limit = min(len(known), len(prompt) - 1)
    if tuple(known[:limit]) == tuple(prompt[:limit]):
        return limit
    return next(index for index in range(limit) if known[index] != prompt[index])
