"""Bytes that a grammar forces are found exactly, at the cost of about one mask for each byte."""

import json
import random
import time
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from app.text.grammar.constraint import FORCED_BYTES, LIMITS
from app.text.grammar.forced_text import FORCED_SECONDS, ForcedText, byte_tokenizer
from app.text.grammar.request_grammar import ANY_SPELLING
from app.text.grammar.schema import ONE_LINE
from tests.text.test_held_to_the_end import objects

LETTERS = "".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
LONG = {
    "a constant of 20,000 letters": {"json_schema": {"const": LETTERS}},
    "a constant object of 2,500 names": {
        "json_schema": {"x-guidance": ONE_LINE, "const": {f"name_{n}": "value" for n in range(2500)}}
    },
    "a million letters by repetition": {"lark_grammar": "start: /(a{1000}){1000}/"},
    "a text without end": {"lark_grammar": 'start: "ab" start'},
    "an array of equal values": {
        "json_schema": {"x-guidance": ONE_LINE, "type": "array", "minItems": 50_000, "items": {"const": "x"}}
    },
}


def matcher_of(grammar: Any) -> llguidance.LLMatcher:
    start = {"lark_grammar": f"{ANY_SPELLING}\nstart: @answer"}
    text = json.dumps({"grammars": [start, {"name": "answer", **grammar}]})
    return llguidance.LLMatcher(byte_tokenizer(), text, log_level=0, limits=LIMITS)


class CountingMatcher:
    """A matcher that counts the masks that it makes."""

    def __init__(self, grammar: Any) -> None:
        self.matcher = matcher_of(grammar)
        self.masks = 0

    def compute_bitmask(self) -> bytes:
        self.masks += 1
        return self.matcher.compute_bitmask()

    def consume_token(self, token: int) -> bool:
        return self.matcher.consume_token(token)

    def consume_tokens(self, tokens: list[int]) -> bool:
        return self.matcher.consume_tokens(tokens)


AMBIGUOUS = {
    "lark_grammar": "start: r0\n"
    + "\n".join(f'r{n}: "x" r{n} "y" | "x" r{(n + 1) % 150} "y" | "x" r{(n + 7) % 150}' for n in range(150))
}


def test_an_ambiguous_grammar_takes_a_few_milliseconds_once_and_forces_nothing_more() -> None:
    matcher: Any = CountingMatcher(AMBIGUOUS)
    text = ForcedText(matcher)
    began = time.thread_time()
    assert text.next(FORCED_BYTES) == b""
    assert time.thread_time() - began < 10 * FORCED_SECONDS, "it would take half a second"
    assert text.is_slow
    masks = matcher.masks
    text.consume(b"xx")
    assert text.next(FORCED_BYTES) == b""
    assert matcher.masks == masks


def test_a_copy_repeats_no_work() -> None:
    matcher: Any = CountingMatcher({"lark_grammar": 'start: "abc" ("d" | "e")'})
    matcher.deep_copy = lambda: matcher
    text = ForcedText(matcher)
    assert text.next(FORCED_BYTES) == b"abc"
    masks = matcher.masks
    assert text.copy().next(FORCED_BYTES) == b"abc"
    assert matcher.masks == masks


@pytest.mark.parametrize("kind", LONG)
def test_a_long_forced_text_is_found_in_parts_and_each_byte_once(kind: str) -> None:
    matcher: Any = CountingMatcher(LONG[kind])
    text = ForcedText(matcher)
    begun = text.next(FORCED_BYTES)
    assert len(begun) == FORCED_BYTES
    assert matcher.masks <= FORCED_BYTES + 1
    for position in range(0, 30, 3):
        text.consume(begun[position : position + 3])
        begun += text.next(FORCED_BYTES)[len(begun) - position - 3 :]
    assert matcher.masks <= len(begun) + 11


def test_a_choice_is_looked_at_once_until_it_is_made() -> None:
    matcher: Any = CountingMatcher({"lark_grammar": 'start: "ab" ("c" | "d") "e" ("f" | "g")'})
    text = ForcedText(matcher)
    assert [text.next(9), text.next(9)] == [b"ab", b"ab"]
    text.consume(b"a")
    assert (text.next(9), matcher.masks) == (b"b", 3)
    text.consume(b"bd")
    assert [text.next(9), text.next(9), matcher.masks] == [b"e", b"e", 5]


def test_nothing_is_forced_behind_what_the_grammar_forbids() -> None:
    text = ForcedText(matcher_of({"lark_grammar": 'start: "abc" | "abd"'}))
    assert text.next(9) == b"ab"
    other = text.copy()
    other.consume(b"abc")
    text.consume(b"ax")
    assert (text.next(9), text.copy().next(9)) == (b"", b"")
    assert other.next(9) == b"", "the text has ended"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=objects, seed=some.integers(0, 1000))
def test_the_bytes_are_those_that_llguidance_would_force(schema: Any, seed: int) -> None:
    chance, grammar = random.Random(seed), {"json_schema": schema}
    right, text = matcher_of(grammar), ForcedText(matcher_of(grammar))
    for _ in range(80):
        if right.is_error() or right.is_stopped():
            break
        forced = right.deep_copy().compute_ff_bytes()
        assert text.next(16) == forced[:16]
        bits = int.from_bytes(right.deep_copy().compute_bitmask(), "little") & (1 << 256) - 1
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        if not allowed:
            break
        byte = chance.choice(allowed)
        data = forced[: chance.randint(1, 20)] or bytes([byte])
        right.consume_tokens(list(data))
        text.consume(data)
