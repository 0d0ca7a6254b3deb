"""Prompts already computed, kept for the next request: least recently used, bounded by bytes.

An entry is a compact copy of one row. Attention layers can be cut to any shared prefix that their window still
covers; recurrent states only exist at the checkpoints where they were taken (end of prompt, end of output).
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import mlx.core as mx

from app.engine.rollback import Caches
from app.engine.runner import Runner, StateRow

SHORTEST_TOKENS = 8


@dataclass(frozen=True)
class RowCopy:
    """One row of one model's caches: K/V per attention layer with the window base, states per checkpoint."""

    length: int
    kv: tuple[tuple[mx.array, mx.array], ...]
    bases: Mapping[int | None, int]
    states: Mapping[int, StateRow]

    def arrays(self) -> list[mx.array]:
        return [array for pair in self.kv for array in pair] + [
            array for row in self.states.values() for layer in row for array in layer
        ]

    def usable(self, caches: Caches, shared: int) -> int:
        """How much of the first `shared` positions can be put back."""
        shared = min(shared, self.length)
        if caches.states:
            return max((point for point in self.states if point <= shared), default=0)
        for lane in caches.lanes.values():
            base = self.bases[lane.window]
            if base and (lane.window is None or shared - lane.window + 1 < base):
                return 0
        return shared

    def write(self, caches: Caches, slot: int, length: int) -> None:
        for lane in caches.lanes.values():
            lane.set_base(slot, self.bases[lane.window])
        for cache, (keys, values) in zip(caches.kv, self.kv, strict=True):
            size = length - self.bases[cache.lane.window]
            cache.write_row(slot, keys[:, :, :size], values[:, :, :size])
        for state, arrays in zip(caches.states, self.states.get(length, ()), strict=False):
            state.write_row(slot, arrays)
        caches.table.lengths[slot] = length


def copy_row(caches: Caches, slot: int, length: int, states: Mapping[int, StateRow]) -> RowCopy | None:
    """The row's first `length` positions; None when its buffers were never written."""
    rows = [cache.read_row(slot, length) for cache in caches.kv]
    kv = tuple(row for row in rows if row is not None)
    bases = {window: lane.base(slot) for window, lane in caches.lanes.items()}
    return RowCopy(length, kv, bases, dict(states)) if len(kv) == len(caches.kv) else None


@dataclass(frozen=True)
class Entry:
    """One stored row: its tokens, the target's copy, and those of the drafters that followed it, by name; None: one has
    kept nothing of it yet."""

    tokens: tuple[int, ...]
    target: RowCopy
    drafters: Mapping[str, RowCopy | None]
    nbytes: int


class PrefixCache:
    """Finds the longest usable prefix of a prompt. A hit gives the same tokens as a miss, and drafts as well."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.entries: OrderedDict[tuple[int, ...], Entry] = OrderedDict()
        self.nbytes = 0

    def restore(
        self,
        request_id: str,
        prompt: Sequence[int],
        target: Runner,
        drafters: Mapping[str, Runner],
        needed: AbstractSet[str],
    ) -> int:
        """Put the longest usable prefix into the request's rows; the answer is its length, always < len(prompt).

        What a `needed` drafter did not follow is no hit: it could never read what it missed, and would draft badly.
        """
        best, length = None, 0
        for entry in self.entries.values():
            if not entry.drafters.keys() >= needed:
                continue
            usable = entry.target.usable(target.caches, _shared_length(entry.tokens, prompt))
            if usable > length:
                best, length = entry, usable
        if best is None or length < SHORTEST_TOKENS:
            return 0
        self.entries.move_to_end(best.tokens)
        best.target.write(target.caches, target.caches.table.slots[request_id], length)
        for name, runner in drafters.items():
            copy = best.drafters.get(name)
            usable = copy.usable(runner.caches, length) if copy else 0
            if copy and usable:
                runner.claim_once(request_id)
                copy.write(runner.caches, runner.caches.table.slots[request_id], usable)
        return length

    def store(
        self,
        request_id: str,
        tokens: Sequence[int],
        checkpoints: Mapping[int, StateRow],
        target: Runner,
        drafters: Mapping[str, Runner],
    ) -> None:
        """Copy the first `len(tokens)` positions of the request's rows. Entries that are prefixes of it are dropped."""
        length, caches = len(tokens), target.caches
        if length < SHORTEST_TOKENS or (caches.states and not checkpoints):
            return
        if caches.nbytes * length // max(1, sum(caches.table.lengths)) > 2 * self.limit_bytes:
            return
        copy = copy_row(caches, caches.table.slots[request_id], length, checkpoints)
        if copy is None:
            return
        followed = {
            name: _drafter_copy(runner, request_id, length)
            for name, runner in drafters.items()
            if request_id in runner.caches.table.slots
        }
        arrays = [array for row in (copy, *followed.values()) if row for array in row.arrays()]
        mx.eval(arrays)
        self._add(Entry(tuple(tokens), copy, followed, sum(array.nbytes for array in arrays)), bool(caches.states))

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


def _drafter_copy(runner: Runner, request_id: str, length: int) -> RowCopy | None:
    """What a drafter's row holds of the first `length` positions; recurrent ones only know their own end."""
    slot, have = runner.caches.table.slots[request_id], runner.length(request_id)
    if not have or (runner.caches.states and have > length):
        return None
    states = {have: runner.state_row(request_id)} if runner.caches.states else {}
    return copy_row(runner.caches, slot, min(have, length), states)


def _shared_length(known: Sequence[int], prompt: Sequence[int]) -> int:
    limit = min(len(known), len(prompt) - 1)
    if tuple(known[:limit]) == tuple(prompt[:limit]):
        return limit
    return next(index for index in range(limit) if known[index] != prompt[index])
