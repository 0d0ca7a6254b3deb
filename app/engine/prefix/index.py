"""Index of cached prefixes: blocks of at most `BLOCK_TOKENS` tokens, keyed by a hash of all tokens up to their end.

Nothing here knows what a block contains. Keys are chained from a root derived from the owner, so owners never share
entries. Using a block touches its whole chain, so the least recently used block is always a leaf, and a block with
successors is never dropped before them.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, NamedTuple, TypeVar

BLOCK_TOKENS = 256
SHORTEST_TOKENS = 8
"""Shortest prefix worth restoring, in tokens."""
ROWS, STATE = "rows", "state"
"""Kinds of blocks: `ROWS` has what layers keep of every token, `STATE` what they have only after its last token."""
BLOCK_OVERHEAD_BYTES = 1024
"""Overhead of a block on top of its contents, in bytes."""

Content = TypeVar("Content")
Name = tuple[str, bytes]


def root_key(*words: str) -> bytes:
    """Return the root key of the chains identified by `words`. Other words give unrelated keys."""
    return sha256(b"".join(sha256(word.encode()).digest() for word in words)).digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the block of `tokens` that follows `parent`."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class CacheBlock:
    """A block of 1 to `BLOCK_TOKENS` tokens that follow the block, or the root, with the key `parent`."""

    kind: str
    parent: bytes
    tokens: tuple[int, ...]
    key: bytes

    @classmethod
    def of(cls, kind: str, parent: bytes, tokens: Sequence[int]) -> "CacheBlock":
        return cls(kind, parent, tuple(tokens), chain_key(parent, tokens))

    @property
    def name(self) -> Name:
        return self.kind, self.key


@dataclass(slots=True)
class _StoredBlock(Generic[Content]):
    block: CacheBlock
    content: Content
    nbytes: int


class BlockStore(Generic[Content]):
    """Blocks and their contents in LRU order, at most `limit_bytes`; `on_removed` is called for each one removed."""

    def __init__(
        self, limit_bytes: int, on_removed: Callable[[CacheBlock, Content], None] = lambda _block, _content: None
    ):
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._on_removed = on_removed
        self._entries: dict[Name, _StoredBlock[Content]] = {}
        self._children: dict[tuple[str, bytes, int], dict[Name, None]] = {}
        """Names of the blocks by kind, parent and first token."""
        self._child_counts: dict[bytes, int] = {}
        """Number of blocks that follow each key."""

    def __contains__(self, name: Name) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CacheBlock]:
        return (entry.block for entry in self._entries.values())

    def get(self, name: Name) -> Content | None:
        return self._entries[name].content if name in self._entries else None

    def children(self, kind: str, parent: bytes, first_token: int) -> list[CacheBlock]:
        """Return the blocks that follow `parent` and begin with `first_token`."""
        return [self._entries[name].block for name in self._children.get((kind, parent, first_token), ())]

    def touch(self, name: Name) -> None:
        """Mark a block as most recently used. For a chain, call it on the last block first."""
        if name in self._entries:
            self._entries[name] = self._entries.pop(name)

    def add(self, block: CacheBlock, content: Content, nbytes: int) -> None:
        """Add a block, replacing shorter ones whose tokens it begins with. The caller must have made room."""
        self.remove(block.name)
        for other in self.children(block.kind, block.parent, block.tokens[0]) if block.kind == ROWS else ():
            if len(other.tokens) < len(block.tokens) and block.tokens[: len(other.tokens)] == other.tokens:
                self.remove(other.name)
        self._entries[block.name] = _StoredBlock(block, content, nbytes)
        self._children.setdefault((block.kind, block.parent, block.tokens[0]), {})[block.name] = None
        self._child_counts[block.parent] = self._child_counts.get(block.parent, 0) + 1
        self.nbytes += nbytes

    def remove(self, name: Name) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        block, group = entry.block, (entry.block.kind, entry.block.parent, entry.block.tokens[0])
        del self._children[group][name]
        if not self._children[group]:
            del self._children[group]
        self._child_counts[block.parent] -= 1
        if not self._child_counts[block.parent]:
            del self._child_counts[block.parent]
        self.nbytes -= entry.nbytes
        self._on_removed(block, entry.content)

    def make_room(self, needed_bytes: int) -> None:
        """Drop leaves, least recently used first, until `needed_bytes` fit."""
        while self.nbytes + needed_bytes > self.limit_bytes and self._entries:
            leaves = (name for name in self._entries if name[0] == STATE or name[1] not in self._child_counts)
            self.remove(next(leaves))

    def clear(self) -> None:
        for name in list(self._entries):
            self.remove(name)

    def oldest(self) -> tuple[CacheBlock, Content] | None:
        """Return the least recently used block and its content; None if there is none."""
        entry = next(iter(self._entries.values()), None)
        return (entry.block, entry.content) if entry is not None else None


class PrefixMatch(NamedTuple):
    """Cached prefix of a text: the `blocks` of its rows, which cover its first `length` tokens."""

    blocks: tuple[CacheBlock, ...]
    length: int


def match_prefix(stores: Sequence[BlockStore[Any]], start: bytes, tokens: tuple[int, ...]) -> PrefixMatch:
    """Return the longest prefix of `tokens`, after the key `start`, that the `stores` together have."""
    blocks: list[CacheBlock] = []
    length = 0
    while length + BLOCK_TOKENS <= len(tokens):
        block = CacheBlock.of(ROWS, start, tokens[length : length + BLOCK_TOKENS])
        if not any(block.name in store for store in stores):
            break
        blocks.append(block)
        start, length = block.key, length + BLOCK_TOKENS
    rest = tokens[length : length + BLOCK_TOKENS]
    others = [block for store in stores for block in (store.children(ROWS, start, rest[0]) if rest else ())]
    if others:
        best = max(others, key=lambda block: shared_prefix_length(block.tokens, rest))
        blocks.append(best)
        length += shared_prefix_length(best.tokens, rest)
    return PrefixMatch(tuple(blocks), length)


def states_in(
    stores: Sequence[BlockStore[Any]], match: PrefixMatch, start: bytes, limit: int
) -> Iterator[tuple[int, CacheBlock]]:
    """Yield (prefix length, block) for each state block in a match, up to `limit` tokens, longest prefix first."""
    for index in reversed(range(len(match.blocks))):
        parent, begin = (match.blocks[index - 1].key if index else start), index * BLOCK_TOKENS
        tokens = match.blocks[index].tokens[: max(0, min(match.length, limit) - begin)]
        states = {
            block.name: block
            for store in stores
            for block in (store.children(STATE, parent, tokens[0]) if tokens else ())
            if block.tokens == tokens[: len(block.tokens)]
        }
        for block in sorted(states.values(), key=lambda state: -len(state.tokens)):
            yield begin + len(block.tokens), block


def shared_prefix_length(stored: Sequence[int], requested: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    stop = min(len(stored), len(requested))
    if stored[:stop] == requested[:stop]:
        return stop
    return next(index for index in range(stop) if stored[index] != requested[index])
