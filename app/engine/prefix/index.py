"""Index of cached prefixes: pieces of at most one block of tokens, keyed by a hash of everything before them.

Nothing here knows what a piece contains. Keys are chained from a root that names the owner, so owners never share
entries. Using a block touches its whole chain, so the least recently used block is always a leaf, and a piece with
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
"""Kinds of pieces: what layers keep of every token, and what they know only after the last one."""
PIECE_BYTES = 1024
"""Overhead of a piece beside its contents, in bytes."""

Content = TypeVar("Content")
Name = tuple[str, bytes]


def root(*words: str) -> bytes:
    """Return the root key of the chains for these words, unrelated to any others."""
    return sha256(b"".join(sha256(word.encode()).digest() for word in words)).digest()


def chained(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key that `tokens` lead to from `parent`."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class Piece:
    """One to `BLOCK_TOKENS` tokens that follow `parent`."""

    kind: str
    parent: bytes
    tokens: tuple[int, ...]
    key: bytes

    @classmethod
    def of(cls, kind: str, parent: bytes, tokens: Sequence[int]) -> "Piece":
        return cls(kind, parent, tuple(tokens), chained(parent, tokens))

    @property
    def name(self) -> Name:
        return self.kind, self.key


@dataclass(slots=True)
class _Held(Generic[Content]):
    piece: Piece
    content: Content
    nbytes: int


class Shelf(Generic[Content]):
    """Pieces and their contents in LRU order, at most `limit_bytes`; `dropped` is called with each one removed."""

    def __init__(self, limit_bytes: int, dropped: Callable[[Piece, Content], None] = lambda _piece, _content: None):
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._dropped = dropped
        self._held: dict[Name, _Held[Content]] = {}
        self._followers: dict[tuple[str, bytes, int], dict[Name, None]] = {}
        """Names of the pieces by kind, parent and first token."""
        self._count: dict[bytes, int] = {}
        """Number of pieces that follow each key."""

    def __contains__(self, name: Name) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Piece]:
        return (held.piece for held in self._held.values())

    def get(self, name: Name) -> Content | None:
        return self._held[name].content if name in self._held else None

    def followers(self, kind: str, parent: bytes, first_token: int) -> list[Piece]:
        """Return the pieces that follow `parent` and begin with that token."""
        return [self._held[name].piece for name in self._followers.get((kind, parent, first_token), ())]

    def use(self, name: Name) -> None:
        """Mark a piece as most recently used. For a chain, call it on the last piece first."""
        if name in self._held:
            self._held[name] = self._held.pop(name)

    def add(self, piece: Piece, content: Content, nbytes: int) -> None:
        """Add a piece, replacing shorter ones that it begins with. The caller has made room for it."""
        self.remove(piece.name)
        for other in self.followers(piece.kind, piece.parent, piece.tokens[0]) if piece.kind == ROWS else ():
            if len(other.tokens) < len(piece.tokens) and piece.tokens[: len(other.tokens)] == other.tokens:
                self.remove(other.name)
        self._held[piece.name] = _Held(piece, content, nbytes)
        self._followers.setdefault((piece.kind, piece.parent, piece.tokens[0]), {})[piece.name] = None
        self._count[piece.parent] = self._count.get(piece.parent, 0) + 1
        self.nbytes += nbytes

    def remove(self, name: Name) -> None:
        held = self._held.pop(name, None)
        if held is None:
            return
        piece, place = held.piece, (held.piece.kind, held.piece.parent, held.piece.tokens[0])
        del self._followers[place][name]
        if not self._followers[place]:
            del self._followers[place]
        self._count[piece.parent] -= 1
        if not self._count[piece.parent]:
            del self._count[piece.parent]
        self.nbytes -= held.nbytes
        self._dropped(piece, held.content)

    def make_room(self, needed_bytes: int) -> None:
        """Drop leaves, least recently used first, until `needed_bytes` fit."""
        while self.nbytes + needed_bytes > self.limit_bytes and self._held:
            ends = (name for name in self._held if name[0] == STATE or name[1] not in self._count)
            self.remove(next(ends))

    def clear(self) -> None:
        for name in list(self._held):
            self.remove(name)

    def oldest(self) -> tuple[Piece, Content] | None:
        """Return the least recently used piece and its content; None if there is none."""
        held = next(iter(self._held.values()), None)
        return (held.piece, held.content) if held is not None else None


class Trail(NamedTuple):
    """The known beginning of a text: the `pieces` of its rows, which cover its first `shared` tokens."""

    pieces: tuple[Piece, ...]
    shared: int


def walk(shelves: Sequence[Shelf[Any]], start: bytes, tokens: tuple[int, ...]) -> Trail:
    """Follow the tokens after `start` as far as the shelves together know them."""
    pieces: list[Piece] = []
    shared = 0
    while shared + BLOCK_TOKENS <= len(tokens):
        piece = Piece.of(ROWS, start, tokens[shared : shared + BLOCK_TOKENS])
        if not any(piece.name in shelf for shelf in shelves):
            break
        pieces.append(piece)
        start, shared = piece.key, shared + BLOCK_TOKENS
    rest = tokens[shared : shared + BLOCK_TOKENS]
    others = [piece for shelf in shelves for piece in (shelf.followers(ROWS, start, rest[0]) if rest else ())]
    if others:
        best = max(others, key=lambda piece: shared_length(piece.tokens, rest))
        pieces.append(best)
        shared += shared_length(best.tokens, rest)
    return Trail(tuple(pieces), shared)


def states_within(shelves: Sequence[Shelf[Any]], path: Trail, start: bytes, limit: int) -> Iterator[tuple[int, Piece]]:
    """Yield the states on a path up to `limit` tokens, longest first: the tokens each covers, and its piece."""
    for place in reversed(range(len(path.pieces))):
        parent, begin = (path.pieces[place - 1].key if place else start), place * BLOCK_TOKENS
        tokens = path.pieces[place].tokens[: max(0, min(path.shared, limit) - begin)]
        known = {
            piece.name: piece
            for shelf in shelves
            for piece in (shelf.followers(STATE, parent, tokens[0]) if tokens else ())
            if piece.tokens == tokens[: len(piece.tokens)]
        }
        for piece in sorted(known.values(), key=lambda state: -len(state.tokens)):
            yield begin + len(piece.tokens), piece


def shared_length(known: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    stop = min(len(known), len(wanted))
    if known[:stop] == wanted[:stop]:
        return stop
    return next(place for place in range(stop) if known[place] != wanted[place])
