"""Prefix cache: computed prompts and answers, cached in blocks (`index.py`) for later requests of the same owner.

There are two tiers, memory and disk (`disk.py`, which survives restarts), and two verbs, `restore` and `store`.
Attention layers keep every token, so a row can be restored to any length that two texts share. Recurrent states and
sliding windows can be restored only where a state block was stored: at a prompt's checkpoints, where prefill stops, and
at the end of an output. Each drafter with a model of its own has its own chains.

Owners never share entries: the number of cached tokens and the response time would leak what another owner sent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from app.core.request import Request
from app.core.unit import ModelSpecification, PrefixState
from app.engine.caches.lanes import reservation
from app.engine.caches.rollback import copied
from app.engine.drafters.drafter import Drafter
from app.engine.memory import buffer_share_bytes, on_cpu
from app.engine.prefix.disk import NO_DISK, Disk, FileContent, ReadAhead, identity_of
from app.engine.prefix.index import (
    BLOCK_OVERHEAD_BYTES,
    BLOCK_TOKENS,
    ROWS,
    SHORTEST_TOKENS,
    STATE,
    BlockStore,
    CacheBlock,
    PrefixMatch,
    chain_key,
    match_prefix,
    root_key,
    states_in,
)
from app.engine.runner import Runner
from app.machine.prefix_files import model_folder_name

MEMORY_SHARE = 0.5
"""Share of the memory that models leave, used by the cache if no size was set; the rest is for future rows."""
NEAR_TOKENS = 16
"""Distance from the last checkpoint, in tokens, within which a prompt's end is not copied: rereading is cheaper."""
FETCH_SECONDS = 0.005
"""Longest wait of a `fetch`, in seconds, for files that are read ahead; other requests step between two calls."""
CLOSE_SECONDS = 0.2
"""Longest wait, in seconds, for pending writes when a model leaves memory: waiting frees their memory, but
stalls other models."""
BlockArrays = dict[str, mx.array]


@dataclass(frozen=True)
class Chain:
    """One model's chain of cached blocks for a prompt; `root` is its root key."""

    runner: Runner
    root: bytes
    match: PrefixMatch


class PrefixCache:
    """Prefix cache of one model. A hit yields the same tokens as a miss, and its drafts are accepted as often.

    `max_bytes` None means a share of the memory that models leave; nothing is kept in memory before `bound`. An array
    counts at least `least_array_bytes`. `identity` identifies the model's files and all else that its caches depend on;
    `drafters` has such an identity for each drafter, by method. Blocks stored under another identity never match.
    """

    def __init__(
        self,
        max_bytes: int | None,
        *,
        least_array_bytes: int = 0,
        disk: Disk = NO_DISK,
        model_id: str = "",
        identity: str = "",
        drafters: Mapping[str, str] | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.memory: BlockStore[BlockArrays] = BlockStore(max_bytes or 0)
        self.disk = disk
        self.restored_tokens = {"memory": 0, "disk": 0}
        """Tokens restored so far, by tier."""
        self._folder = model_folder_name(model_id, identity)
        self._identity = identity
        self._drafters = drafters or {}
        self._least_array_bytes = least_array_bytes
        self._ahead = ReadAhead("", {})
        self._stores: tuple[BlockStore[Any], ...] = (self.memory, disk.blocks)
        """Tiers that are searched for prefixes: memory alone, while the disk is too slow for the request."""

    @property
    def state(self) -> PrefixState:
        """Bytes on disk for this model, tokens restored by tier, and why nothing is being written."""
        return PrefixState(self.disk.bytes_of(self._folder), dict(self.restored_tokens), self.disk.write_error)

    # --- restoring --------------------------------------------------------------------------------------------

    def restore(self, request: Request, target: Runner, drafters: Mapping[str, Drafter]) -> int:
        """Restore the longest usable prefix into the request's rows; return its length, always less than the prompt's.

        A prefix is usable only if every feature drafter can restore it too: without features, drafts would be bad.
        """
        if not self.memory.limit_bytes:
            return 0
        contents = None
        while contents is None:  # a file may vanish in between: retry without it
            chains, length = self._reusable(request, target, drafters)
            contents = self._contents(chains, length) if length else {}
        self.drop_fetched(request.id)
        if not length:
            return 0
        for name, (count, arrays) in contents.items():
            if count:
                chains[name].runner.claim_once(request.id, reservation(len(request.prompt_tokens), request.max_tokens))
                _restore_row(chains[name].runner, request.id, count, arrays)
        for name, drafter in drafters.items():
            if drafter.taps:
                drafter.resume(request.id, length, contents[""][1][-1].get(f"features {name}"))
        return length

    def fetch(self, request: Request, target: Runner, drafters: Mapping[str, Drafter]) -> bool:
        """Start reading the files that `restore` would use, in other threads; return whether it need not wait for more:
        if the disk is too slow, `restore` uses what was read. Waits for at most `FETCH_SECONDS`."""
        if not self.memory.limit_bytes:
            return True
        if self._ahead.request_id != request.id:
            self.drop_fetched(self._ahead.request_id)
            chains, length = self._reusable(request, target, drafters)
            blocks = [block for name in chains for block in self._blocks_of(chains, name, length)[1]] if length else []
            reads = {block: self.disk.read_ahead(block) for block in blocks if block.name not in self.memory}
            contents = {block: content for block, content in reads.items() if content is not None}
            self._ahead = ReadAhead(request.id, contents)
        if not self._ahead.wait(FETCH_SECONDS):
            return False
        if self._ahead.unread:
            for block, content in self._ahead.take_read().items():
                self._load(block, content)
            self._stores = (self.memory,)
        return True

    def drop_fetched(self, sequence_id: str) -> None:
        """Drop what was read ahead for a request, and stop reading it."""
        if self._ahead.request_id == sequence_id:
            self._ahead.take_read()
            self._ahead, self._stores = ReadAhead("", {}), (self.memory, self.disk.blocks)

    def _reusable(
        self, request: Request, target: Runner, drafters: Mapping[str, Drafter]
    ) -> tuple[dict[str, Chain], int]:
        """Return the chains of a prompt, and the length to restore: 0 if too little is cached to be worth it."""
        self.disk.collect()
        chains = self._chains(request, target, drafters)
        length = self._length_for_all(chains[""], [chains[name] for name, drafter in drafters.items() if drafter.taps])
        return chains, length if length >= SHORTEST_TOKENS else 0

    def _chains(self, request: Request, target: Runner, drafters: Mapping[str, Drafter]) -> dict[str, Chain]:
        """Return the chain of each model by method; the target's has the empty name."""
        tokens = request.prompt_tokens
        models = {"": target} | {
            name: drafter.runner for name, drafter in drafters.items() if drafter.runner is not None
        }
        chains = {}
        for name, runner in models.items():
            shift = int(bool(name and drafters[name].taps))
            root = self._root_key(request, target, name, tokens[:shift])
            chains[name] = Chain(
                runner, root, match_prefix(self._stores, root, tokens[shift : len(tokens) - 1 + shift])
            )
        return chains

    def _root_key(self, request: Request, target: Runner, name: str, first: Sequence[int]) -> bytes:
        """Return the root key of an owner's chains for one model and one quantisation of the target's row.
        A feature drafter's entry for a token depends on the next token too, so its chain is keyed by the tokens shifted
        by one; `first`, the token that drops out, seeds the root."""
        bits = target.quantisation.bits_of(len(request.prompt_tokens))
        form = [f"{bits}-bit"] if bits else []
        root = root_key(self._identity, request.owner, self._drafters.get(name, name), *form)
        return chain_key(root, first) if first else root

    def _restorable_length(self, chain: Chain, limit: int) -> int:
        """Return how many of the first `limit` positions can be restored."""
        if not chain.runner.needs_snapshots:
            return min(limit, chain.match.length)
        states = states_in(self._stores, chain.match, chain.root, limit)
        return next((length for length, _ in states), 0)

    def _length_for_all(self, target: Chain, drafters: Sequence[Chain]) -> int:
        """Return the longest prefix that the target and all feature `drafters` can restore.
        Drafters may lag by one position if the target needs snapshots: its state block has the missing features."""
        length = self._restorable_length(target, target.match.length)
        while length:
            lag = int(target.runner.needs_snapshots)
            restorable = min((self._restorable_length(chain, length) + lag for chain in drafters), default=length)
            if restorable >= length:
                return length
            length = self._restorable_length(target, restorable)
        return 0

    def _contents(self, chains: Mapping[str, Chain], length: int) -> dict[str, tuple[int, list[BlockArrays]]] | None:
        """Return, by chain, the number of positions to restore and the arrays of their blocks; None if a block is gone.
        Marks the blocks as used."""
        contents = {}
        tokens = dict.fromkeys(self.restored_tokens, 0)
        for name in chains:
            count, blocks = self._blocks_of(chains, name, length)
            arrays: list[BlockArrays] = []
            remaining = 0 if name else count  # only the target's rows are counted
            for block in blocks:
                tier = "memory" if block.name in self.memory else "disk"
                content = (
                    self.memory.get(block.name)
                    if tier == "memory"
                    else self._load(block, self._ahead.contents.pop(block, None))
                )
                if content is None:
                    return None
                arrays.append(content)
                restored = min(remaining, len(block.tokens)) if block.kind == ROWS else 0
                tokens[tier], remaining = tokens[tier] + restored, remaining - restored
            contents[name] = count, arrays
            for block in reversed(blocks):
                self.memory.touch(block.name)
            self.disk.used([block.name for block in reversed(blocks)])
        for tier, total in tokens.items():
            self.restored_tokens[tier] += total
        return contents

    def _blocks_of(self, chains: Mapping[str, Chain], name: str, length: int) -> tuple[int, list[CacheBlock]]:
        """Return how many of `length` positions one chain restores, and the blocks that hold them."""
        chain = chains[name]
        count = self._restorable_length(chain, length) if name else length
        blocks = list(chain.match.blocks[: -(-count // BLOCK_TOKENS)])
        if chain.runner.needs_snapshots and count:
            blocks.append(next(states_in(self._stores, chain.match, chain.root, count))[1])
        return count, blocks

    def _load(self, block: CacheBlock, content: FileContent | None) -> BlockArrays | None:
        """Load a block from disk into memory; `content` is its file, if that was read ahead."""
        arrays = self.disk.read(block, content)
        if arrays is not None:
            self._insert(block, arrays)
        return arrays

    # --- storing ----------------------------------------------------------------------------------------------

    def keeps(self, length: int) -> bool:
        """Return whether a prefix of `length` tokens is worth storing, and having drafters catch up for it."""
        return length >= SHORTEST_TOKENS and self.memory.limit_bytes > 0

    def store(
        self, request: Request, tokens: Sequence[int], length: int, target: Runner, drafters: Mapping[str, Drafter]
    ) -> None:
        """Store the first `length` positions of the target's row, and of the drafters' rows as far as they reach.

        `tokens` are the row's known tokens. Stored blocks are not copied again; all new ones together wait once for the
        device. On an error, such as mlx running out of memory, the memory tier is cleared and the error raised.
        """
        tokens = tuple(tokens)
        self.disk.collect()
        extra_state: BlockArrays = {}
        added: dict[CacheBlock, BlockArrays] = {}
        for name, drafter in drafters.items():
            if drafter.runner is not None and request.id in drafter.runner.rows:
                shift = int(bool(drafter.taps))
                read = tokens[shift : min(length, drafter.runner.length(request.id)) + shift]
                root = self._root_key(request, target, name, tokens[:shift])
                self._store(root, read, drafter.runner, request.id, added)
                features = drafter.pending_features(request.id, length)
                extra_state |= {f"features {name}": features} if features is not None else {}
        self._store(self._root_key(request, target, "", ()), tokens[:length], target, request.id, added, extra_state)
        try:
            mx.eval([array for arrays in added.values() for array in arrays.values()])
        except BaseException:
            self.clear()
            raise
        for block, arrays in added.items():
            self.disk.write(self._folder, block, arrays)

    def _store(
        self,
        root: bytes,
        tokens: tuple[int, ...],
        runner: Runner,
        sequence_id: str,
        added: dict[CacheBlock, BlockArrays],
        extra_state: Mapping[str, mx.array] | None = None,
    ) -> None:
        """Store one model's chain from `root`; `extra_state` is added to the state block.
        Its blocks are put into `added`, for the disk tier."""
        if (
            not tokens
            or sequence_id in runner.gapped
            or (runner.needs_snapshots and runner.length(sequence_id) != len(tokens))
        ):
            return
        parent, chain_bytes = root, 0
        blocks: list[CacheBlock] = []
        for begin in range(0, len(tokens), BLOCK_TOKENS):
            blocks.append(CacheBlock.of(ROWS, parent, tokens[begin : begin + BLOCK_TOKENS]))
            span = begin, begin + len(blocks[-1].tokens)
            nbytes = self._add(blocks[-1], partial(_copy_rows, runner, sequence_id, *span), chain_bytes, added)
            if nbytes is None:  # the rest does not fit
                break
            parent, chain_bytes = blocks[-1].key, chain_bytes + nbytes
        else:
            if runner.needs_snapshots:
                state = CacheBlock.of(STATE, blocks[-1].parent, blocks[-1].tokens)
                copy = partial(_copy_state, runner, sequence_id, len(tokens), extra_state or {})
                self._add(state, copy, chain_bytes, added)
        for block in reversed(blocks):
            self.memory.touch(block.name)

    def _add(
        self, block: CacheBlock, copy: Callable[[], BlockArrays], chain_bytes: int, added: dict[CacheBlock, BlockArrays]
    ) -> int | None:
        """Store a block unless present; return its bytes, or None if the chain, `chain_bytes` so far, would not fit."""
        stored = self.memory.get(block.name)
        if stored is None and self._covered(block):
            return 0
        arrays = copy() if stored is None else stored
        nbytes = self._counted_bytes(arrays)
        if chain_bytes + nbytes > self.memory.limit_bytes:
            return None
        if stored is None:
            self._insert(block, arrays)
        self.memory.touch(block.name)
        added[block] = arrays
        return nbytes

    def _covered(self, block: CacheBlock) -> bool:
        """Return whether a longer block in memory begins with the tokens of this one."""
        if block.kind != ROWS or len(block.tokens) == BLOCK_TOKENS:
            return False
        others = self.memory.children(ROWS, block.parent, block.tokens[0])
        return any(other.tokens[: len(block.tokens)] == block.tokens for other in others)

    def _insert(self, block: CacheBlock, arrays: BlockArrays) -> None:
        nbytes = self._counted_bytes(arrays)
        self.memory.make_room(nbytes)
        if nbytes <= self.memory.limit_bytes:
            self.memory.add(block, arrays, nbytes)

    def _counted_bytes(self, arrays: BlockArrays) -> int:
        return BLOCK_OVERHEAD_BYTES + sum(max(array.nbytes, self._least_array_bytes) for array in arrays.values())

    # --- limits -----------------------------------------------------------------------------------------------

    def bound(self, available_bytes: int) -> None:
        """Limit memory to the configured size, or else a share of `available_bytes`; never exceed `available_bytes`."""
        self.disk.collect()  # releases buffers of finished writes, of unloaded models too
        self.memory.limit_bytes = min(
            available_bytes, int(available_bytes * MEMORY_SHARE) if self.max_bytes is None else self.max_bytes
        )
        self.memory.make_room(0)

    def trim(self, retained_share: float) -> None:
        """Evict down to `retained_share` of the memory tier's bytes, or of a quarter of its limit if that is more."""
        memory = self.memory
        memory.make_room(memory.limit_bytes - int(max(memory.nbytes, memory.limit_bytes / 4) * retained_share))

    def clear(self) -> None:
        """Clear the memory tier; the disk tier is untouched."""
        self.memory.clear()
        self.drop_fetched(self._ahead.request_id)

    def close(self) -> None:
        """Clear the memory tier once pending writes to disk are done, or after `CLOSE_SECONDS`."""
        self.disk.flush(CLOSE_SECONDS)
        self.clear()


def checkpoints_of(request: Request) -> set[int]:
    """Return the positions at which rows that cannot be cut are copied: checkpoints and, if none is near, the end."""
    end = len(request.prompt_tokens) - 1
    is_near = any(end - NEAR_TOKENS <= checkpoint <= end for checkpoint in request.checkpoints)
    return {*request.checkpoints} | (set() if is_near else {end})


def open_prefix_cache(spec: ModelSpecification, disk: Disk) -> PrefixCache:
    """Open the prefix cache of a loaded unit."""
    return PrefixCache(
        spec.prefix_cache_bytes,
        least_array_bytes=buffer_share_bytes(),
        disk=disk,
        model_id=spec.id,
        identity=identity_of(Path(spec.path), f"float32={on_cpu()}"),
        drafters={drafter.method: identity_of(Path(drafter.path), drafter.method) for drafter in spec.drafters},
    )


def _copy_rows(runner: Runner, sequence_id: str, begin: int, stop: int) -> BlockArrays:
    """Return copies of these positions from each layer that keeps all positions, by layer and part."""
    caches = runner.caches
    spans = caches.read_span(sequence_id, begin, stop)
    return {
        f"{layer} {part}": copied(array)
        for layer, (cache, span) in enumerate(zip(caches.kv, spans, strict=True))
        if cache.lane.window is None
        for part, array in enumerate(span)
    }


def _copy_state(runner: Runner, sequence_id: str, length: int, extra_state: Mapping[str, mx.array]) -> BlockArrays:
    """Return copies of what exists only at this length: recurrent states, and the windows that the next token sees."""
    caches, arrays = runner.caches, dict(extra_state)
    for layer, cache in enumerate(caches.kv):
        if (window := cache.lane.window) is not None:
            span = caches.read_span(sequence_id, max(0, length - window + 1), length)[layer]
            arrays |= {f"{layer} {part}": copied(array) for part, array in enumerate(span)}
    for layer, state in enumerate(runner.state_row(sequence_id)):
        arrays |= {f"state {layer} {part}": array for part, array in enumerate(state)}
    return arrays


def _restore_row(runner: Runner, sequence_id: str, length: int, blocks: Sequence[BlockArrays]) -> None:
    """Restore the first `length` positions from `blocks` into an empty row."""
    caches = runner.caches
    spans = []
    for layer, cache in enumerate(caches.kv):
        parts = list(_parts(blocks, str(layer)))
        whole = tuple(mx.concatenate(part, axis=2) if len(part) > 1 else part[0] for part in parts)
        spans.append(whole if cache.lane.window is not None else tuple(array[:, :, :length] for array in whole))
    caches.write_span(sequence_id, 0, spans, stop=length)
    for layer, state in enumerate(caches.states):
        state.write_row(caches.table.slots[sequence_id], [part[0] for part in _parts(blocks, f"state {layer}")])


def _parts(blocks: Sequence[BlockArrays], name: str) -> Iterator[list[mx.array]]:
    """Yield the keys, then the values, or each array of a state, as a list with one piece per block that has it."""
    part = 0
    while arrays := [block[f"{name} {part}"] for block in blocks if f"{name} {part}" in block]:
        yield arrays
        part += 1
