"""Which beginnings are found, and what goes when there is no room: the index alone, without tensors."""

import random

import pytest

from app.engine.prefix.index import BLOCK_TOKENS, ROWS, STATE, Piece, Shelf, chained, root, states_within, walk


def keep(shelf: Shelf[str], start: bytes, tokens: tuple[int, ...], nbytes: int = 1) -> list[Piece]:
    """Rows of a text, as many as fit, added and used as the cache does it: afterwards the end is the oldest."""
    pieces: list[Piece] = []
    for begin in range(0, len(tokens), BLOCK_TOKENS)[: shelf.limit_bytes // nbytes]:
        pieces.append(Piece.of(ROWS, start, tokens[begin : begin + BLOCK_TOKENS]))
        if pieces[-1].name not in shelf:
            shelf.make_room(nbytes)
            shelf.add(pieces[-1], "", nbytes)
        shelf.use(pieces[-1].name)
        start = pieces[-1].key
    for piece in reversed(pieces):
        shelf.use(piece.name)
    return pieces


def random_text(chance: random.Random, said: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Often one that goes on from somewhere in an earlier one."""
    fresh = tuple(chance.choice([1, 2]) for _ in range(chance.randint(1, 3 * BLOCK_TOKENS)))
    if not said or chance.random() < 0.2:
        return fresh
    known = chance.choice(said)
    return known[: chance.randint(0, len(known))] + fresh[: chance.randint(1, BLOCK_TOKENS)]


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (n for n, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_text_is_found_as_far_as_any_earlier_one_of_the_same_root_goes(seed: int) -> None:
    chance, shelf = random.Random(seed), Shelf[str](10**6)
    said: list[tuple[int, ...]] = []
    for _ in range(60):
        text = random_text(chance, said)
        path = walk([shelf], root("me"), text)
        assert path.shared == max((common(known, text) for known in said), default=0)
        assert walk([shelf], root("you"), text).shared == 0
        said.append(text)
        keep(shelf, root("me"), text)
    assert shelf.nbytes == len(shelf) < sum(-(-len(text) // BLOCK_TOKENS) for text in said), "beginnings are shared"


@pytest.mark.parametrize("seed", range(3))
def test_without_room_ends_go_before_what_leads_to_them_and_the_longest_unused_first(seed: int) -> None:
    chance, shelf = random.Random(seed), Shelf[str](12)
    said: list[tuple[int, ...]] = []
    for _ in range(80):
        text = random_text(chance, said)
        said.append(text)
        keep(shelf, root("me"), text)
        assert shelf.nbytes <= 12
        keys = {piece.key for piece in shelf} | {root("me")}
        assert all(piece.parent in keys for piece in shelf), "whatever is there can be reached"
        assert walk([shelf], root("me"), text).shared == min(len(text), 12 * BLOCK_TOKENS), "the newest one is whole"


def test_two_shelves_are_searched_as_if_they_were_one() -> None:
    memory, disk, text = Shelf[str](10), Shelf[str](10), tuple(range(600))
    first, second, tail = keep(Shelf[str](10), b"start", text)
    disk.add(first, "", 1)
    memory.add(second, "", 1)
    disk.add(tail, "", 1)
    assert walk([memory, disk], b"start", text).shared == 600
    assert walk([memory], b"start", text).shared == 0


def test_states_are_found_where_they_were_taken_and_only_on_the_own_path() -> None:
    shelf, text = Shelf[str](100), tuple(range(600))
    first, second, tail = keep(shelf, b"start", text)
    other = (*tuple(range(300)), 7, 8, 9)
    keep(shelf, b"start", other)
    for parent, tokens in (
        (b"start", text[:40]),
        (b"start", text[:BLOCK_TOKENS]),
        (first.key, text[256:300]),
        (first.key, other[256:303]),
        (second.key, tail.tokens),
    ):
        shelf.add(Piece.of(STATE, parent, tokens), "", 1)
    path = walk([shelf], b"start", text)
    assert [length for length, _ in states_within([shelf], path, b"start", 600)] == [600, 300, 256, 40]
    assert [length for length, _ in states_within([shelf], path, b"start", 299)] == [256, 40]
    assert [length for length, _ in states_within([shelf], path, b"start", 39)] == []


def test_a_longer_piece_takes_the_place_of_those_that_it_begins_with() -> None:
    gone: list[int] = []
    shelf = Shelf[str](100, lambda piece, _content: gone.append(len(piece.tokens)))
    for size in (5, 9, 7, 256):
        shelf.add(Piece.of(ROWS, b"start", range(size)), "", size)
    shelf.add(Piece.of(ROWS, b"start", (0, 1, 5)), "", 3)
    assert gone == [5, 9, 7]
    assert (len(shelf), shelf.nbytes) == (2, 259)


def test_a_key_names_its_owner_and_everything_before_it() -> None:
    assert root("a", "b") != root("ab", "") != root("ab")
    assert chained(root("a"), (1, 2)) != chained(root("a"), (2, 1)) != chained(root("b"), (2, 1))
    assert chained(chained(root("a"), (1,)), (2,)) != chained(root("a"), (1, 2))
