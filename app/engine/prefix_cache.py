"""Prompts already computed, kept for the next request of the same owner: least recently used, bounded by bytes.

An entry is a compact copy of one row. Attention layers can be cut to any shared prefix that their window still
covers; recurrent states only exist at the checkpoints where they were taken (end of prompt, end of output).

Nobody hits what somebody else said: how many tokens were cached, and how fast an answer comes, would tell it.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import mlx.core as mx

from app.core.request import Request
from app.engine.rollback import Caches
from app.engine.runner import Runner, StateRow

SHORTEST_TOKENS = 8
BLOCK_TOKENS = 32
"""Entries are found by the blocks that they begin with; only within the last one are tokens compared."""


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


@dataclass(frozen=True, eq=False)
class Entry:
    """One stored row: whose it is, its tokens, the target's copy, and those of the drafters that followed it, by name;
    None: one has kept nothing of it yet."""

    owner: str
    tokens: tuple[int, ...]
    target: RowCopy
    drafters: Mapping[str, RowCopy | None]
    nbytes: int


class PrefixCache:
    """Finds the longest usable prefix of a prompt. A hit gives the same tokens as a miss, and drafts as well."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = self.limit_bytes = most_bytes
        self.nbytes = 0
        self._entries: dict[Entry, None] = {}
        """The least recently used first."""
        self._through: dict[int, dict[Entry, None]] = {}
        """By each key of their chain: the entries that begin with these blocks."""
        self._ending: dict[int, dict[Entry, None]] = {}
        """By the last key of their chain."""

    def restore(
        self, request: Request, target: Runner, drafters: Mapping[str, Runner], needed: AbstractSet[str]
    ) -> int:
        """Put the longest usable prefix into the request's rows; the answer is its length, always < that of the prompt.

        What a `needed` drafter did not follow is no hit: it could never read what it missed, and would draft badly.
        """
        best, length = self._longest(request, target.caches, needed)
        if best is None:
            return 0
        self._entries[best] = self._entries.pop(best)
        best.target.write(target.caches, target.caches.table.slots[request.id], length)
        for name, runner in drafters.items():
            copy = best.drafters.get(name)
            usable = copy.usable(runner.caches, length) if copy else 0
            if copy and usable:
                runner.claim_once(request.id)
                copy.write(runner.caches, runner.caches.table.slots[request.id], usable)
        return length

    def _longest(self, request: Request, caches: Caches, needed: AbstractSet[str]) -> tuple[Entry | None, int]:
        """The entry that serves the prompt best, and how much of it; from the most shared blocks to the fewest."""
        prompt = request.prompt_tokens[:-1]
        keys = []
        for key in _chain(request.owner, prompt):
            if key not in self._through:
                break
            keys.append(key)
        best, length = None, SHORTEST_TOKENS - 1
        seen: set[Entry] = set()
        for depth in reversed(range(len(keys))):
            if length >= _chained(depth + 2) - 1:
                break  # whoever shares fewer blocks than those before cannot serve longer
            for entry in self._through[keys[depth]].keys() - seen:
                seen.add(entry)
                if entry.drafters.keys() >= needed:
                    shared = _shared_length(entry.tokens, prompt, _chained(depth + 1))
                    usable = entry.target.usable(caches, shared)
                    if usable > length:
                        best, length = entry, usable
        if best is None or best.owner != request.owner or best.tokens[:length] != prompt[:length]:
            return None, 0  # keys are hashes: what they found is only believed after a look
        return best, length

    def store(
        self,
        request: Request,
        tokens: tuple[int, ...],
        checkpoints: Mapping[int, StateRow],
        target: Runner,
        drafters: Mapping[str, Runner],
    ) -> None:
        """Copy the first `len(tokens)` positions of the request's rows. Entries that are prefixes of it are dropped."""
        length, caches = len(tokens), target.caches
        if length < SHORTEST_TOKENS or (caches.states and not checkpoints):
            return
        runners = [target, *drafters.values()]
        expected = sum(each.caches.row_nbytes(length) for each in runners if request.id in each.caches.table.slots)
        if not 0 < expected <= self.limit_bytes:
            return
        self._shrink(self.limit_bytes - expected)
        copy = copy_row(caches, caches.table.slots[request.id], length, checkpoints)
        if copy is None:
            return
        followed = {
            name: _drafter_copy(runner, request.id, length)
            for name, runner in drafters.items()
            if request.id in runner.caches.table.slots
        }
        arrays = [array for row in (copy, *followed.values()) if row for array in row.arrays()]
        mx.eval(arrays)
        nbytes = sum(array.nbytes for array in arrays)
        self._add(Entry(request.owner, tokens, copy, followed, nbytes), exact=bool(caches.states))

    def _add(self, entry: Entry, *, exact: bool) -> None:
        """With `exact`, a prefix is worth keeping beside what goes on from it: states cannot be cut."""
        keys = list(_chain(entry.owner, entry.tokens))
        known = [other for key in keys for other in self._ending.get(key, ())]
        for other in known:
            size = len(other.tokens)
            if (size == len(entry.tokens) or not exact) and entry.tokens[:size] == other.tokens:
                self._drop(other)
        self._entries[entry] = None
        for key in keys:
            self._through.setdefault(key, {})[entry] = None
        self._ending.setdefault(keys[-1], {})[entry] = None
        self.nbytes += entry.nbytes
        self._shrink(self.limit_bytes)

    def bound(self, limit_bytes: int) -> None:
        """Hold at most `limit_bytes` from now on, and never more than `most_bytes`."""
        self.limit_bytes = min(limit_bytes, self.most_bytes)
        self._shrink(self.limit_bytes)

    def _shrink(self, limit_bytes: int) -> None:
        while self.nbytes > limit_bytes and self._entries:
            self._drop(next(iter(self._entries)))

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry]
        self.nbytes -= entry.nbytes
        for key in _chain(entry.owner, entry.tokens):
            for index in (self._through, self._ending):
                if key in index:
                    index[key].pop(entry, None)
                    if not index[key]:
                        del index[key]

    def clear(self) -> None:
        for index in (self._entries, self._through, self._ending):
            index.clear()
        self.nbytes = 0


def _chain(owner: str, tokens: tuple[int, ...]) -> Iterator[int]:
    """One key for each whole block, made of the owner and everything up to the block's end."""
    key, start = hash(owner), 0
    for stop in range(SHORTEST_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        key = hash((key, tokens[start:stop]))
        start = stop
        yield key


def _chained(blocks: int) -> int:
    """How many tokens so many blocks of a chain hold."""
    return SHORTEST_TOKENS + (blocks - 1) * BLOCK_TOKENS


def _drafter_copy(runner: Runner, request_id: str, length: int) -> RowCopy | None:
    """What a drafter's row holds of the first `length` positions; recurrent ones only know their own end."""
    slot, have = runner.caches.table.slots[request_id], runner.length(request_id)
    if not have or (runner.caches.states and have > length):
        return None
    states = {have: runner.state_row(request_id)} if runner.caches.states else {}
    return copy_row(runner.caches, slot, min(have, length), states)


def _shared_length(known: tuple[int, ...], prompt: tuple[int, ...], start: int) -> int:
    """How many tokens both begin with, when the first `start` are known to be the same."""
    stop = min(len(known), len(prompt))
    return next((place for place in range(start, stop) if known[place] != prompt[place]), stop)
