"""Prefixes that are found, and blocks that are evicted: the index alone, without tensors."""

import random

import pytest

from app.engine.prefix.index import (
    BLOCK_TOKENS,
    ROWS,
    STATE,
    BlockStore,
    CacheBlock,
    chain_key,
    match_prefix,
    root_key,
    states_in,
)


def keep(store: BlockStore[str], start: bytes, tokens: tuple[int, ...], nbytes: int = 1) -> list[CacheBlock]:
    """Add as many blocks of a text as fit, and touch them as the cache does: the last block becomes the oldest."""
    blocks: list[CacheBlock] = []
    for begin in range(0, len(tokens), BLOCK_TOKENS)[: store.limit_bytes // nbytes]:
        blocks.append(CacheBlock.of(ROWS, start, tokens[begin : begin + BLOCK_TOKENS]))
        if blocks[-1].name not in store:
            store.make_room(nbytes)
            store.add(blocks[-1], "", nbytes)
        store.touch(blocks[-1].name)
        start = blocks[-1].key
    for block in reversed(blocks):
        store.touch(block.name)
    return blocks


def random_text(chance: random.Random, said: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return a random text that often continues a prefix of an earlier one."""
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
    chance, store = random.Random(seed), BlockStore[str](10**6)
    said: list[tuple[int, ...]] = []
    for _ in range(60):
        text = random_text(chance, said)
        match = match_prefix([store], root_key("me"), text)
        assert match.length == max((common(known, text) for known in said), default=0)
        assert match_prefix([store], root_key("you"), text).length == 0
        said.append(text)
        keep(store, root_key("me"), text)
    assert store.nbytes == len(store) < sum(-(-len(text) // BLOCK_TOKENS) for text in said), "beginnings are shared"


@pytest.mark.parametrize("seed", range(3))
def test_without_room_ends_go_before_what_leads_to_them_and_the_longest_unused_first(seed: int) -> None:
    chance, store = random.Random(seed), BlockStore[str](12)
    said: list[tuple[int, ...]] = []
    for _ in range(80):
        text = random_text(chance, said)
        said.append(text)
        keep(store, root_key("me"), text)
        assert store.nbytes <= 12
        keys = {block.key for block in store} | {root_key("me")}
        assert all(block.parent in keys for block in store), "whatever is there can be reached"
        assert match_prefix([store], root_key("me"), text).length == min(len(text), 12 * BLOCK_TOKENS), (
            "the newest one is whole"
        )


def test_two_shelves_are_searched_as_if_they_were_one() -> None:
    memory, disk, text = BlockStore[str](10), BlockStore[str](10), tuple(range(600))
    first, second, tail = keep(BlockStore[str](10), b"start", text)
    disk.add(first, "", 1)
    memory.add(second, "", 1)
    disk.add(tail, "", 1)
    assert match_prefix([memory, disk], b"start", text).length == 600
    assert match_prefix([memory], b"start", text).length == 0


def test_states_are_found_where_they_were_taken_and_only_on_the_own_path() -> None:
    store, text = BlockStore[str](100), tuple(range(600))
    first, second, tail = keep(store, b"start", text)
    other = (*tuple(range(300)), 7, 8, 9)
    keep(store, b"start", other)
    for parent, tokens in (
        (b"start", text[:40]),
        (b"start", text[:BLOCK_TOKENS]),
        (first.key, text[256:300]),
        (first.key, other[256:303]),
        (second.key, tail.tokens),
    ):
        store.add(CacheBlock.of(STATE, parent, tokens), "", 1)
    match = match_prefix([store], b"start", text)
    assert [length for length, _ in states_in([store], match, b"start", 600)] == [600, 300, 256, 40]
    assert [length for length, _ in states_in([store], match, b"start", 299)] == [256, 40]
    assert [length for length, _ in states_in([store], match, b"start", 39)] == []


def test_a_longer_piece_takes_the_place_of_those_that_it_begins_with() -> None:
    gone: list[int] = []
    store = BlockStore[str](100, lambda block, _content: gone.append(len(block.tokens)))
    for size in (5, 9, 7, 256):
        store.add(CacheBlock.of(ROWS, b"start", range(size)), "", size)
    store.add(CacheBlock.of(ROWS, b"start", (0, 1, 5)), "", 3)
    assert gone == [5, 9, 7]
    assert (len(store), store.nbytes) == (2, 259)


def test_a_key_names_its_owner_and_everything_before_it() -> None:
    assert root_key("a", "b") != root_key("ab", "") != root_key("ab")
    assert chain_key(root_key("a"), (1, 2)) != chain_key(root_key("a"), (2, 1)) != chain_key(root_key("b"), (2, 1))
    assert chain_key(chain_key(root_key("a"), (1,)), (2,)) != chain_key(root_key("a"), (1, 2))
