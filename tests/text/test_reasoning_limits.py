"""Reasoning is limited, and allowed before an answer that is held to a grammar, however a model spells its marks."""

import json
from collections.abc import Sequence
from functools import cache

import pytest
from numpy import full, int32, unpackbits

from app.core.messages import Generate
from app.core.request import Grammar, Reasoning
from app.core.unit import ModelSpecification
from app.text.detokenizer import TokenTable
from app.text.dialect import NO_DIALECT
from app.text.grammar.constraint import AnswerConstraint, Vocabulary
from app.text.grammar.request_grammar import answer_grammar

MARKS = [b"<think>", b"</think>", b"<|channel>", b"thought", b"<channel|>", b"\n", b"\n\n", b'{"']
PIECES = [*(bytes([letter]) for letter in range(32, 127)), *MARKS, b"<end>"]
END = len(PIECES) - 1
OPENINGS = [
    ("<think>", "<think>", "</think>"),
    ("<think>", "\n<think>", "</think>"),
    ("<|channel>thought", "<|channel>thought", "<channel|>"),
    ("[THINK]", "[THINK]", "[/THINK]"),
    ("[THINK]", "\n\n[THINK]", "[/THINK]"),
]
"""The opening mark, the beginning of an answer that has it, and the closing mark."""


@cache
def vocabulary() -> Vocabulary:
    stops = frozenset({END})
    return Vocabulary(
        TokenTable(pieces=PIECES, stop_token_ids=stops, hidden_token_ids=stops, vocabulary_size=len(PIECES))
    )


def tokens(text: str) -> list[int]:
    return vocabulary()(text.encode())


def text(written: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in written).decode()


def constraint(opening: str, closing: str, *, schema: object = None, most_tokens: int | None = 3) -> AnswerConstraint:
    grammar = None
    if schema is not None:
        asked = Grammar(kind="json_schema", text=json.dumps(schema))
        command = Generate(id="", model=ModelSpecification(id="", path=""), text="x", grammar=asked)
        built = answer_grammar(command, NO_DIALECT)
        assert built is not None
        grammar = vocabulary().compile_grammar(built.text)
    return AnswerConstraint(vocabulary(), grammar, Reasoning(opening=opening, closing=closing, most_tokens=most_tokens))


def allowed(held: AnswerConstraint, output: Sequence[int]) -> set[str]:
    masks = full((1, (len(PIECES) + 31) // 32), -1, int32)
    held.allow(output, [], masks)
    bits = unpackbits(masks.view("uint8"), bitorder="little")[: len(PIECES)]
    return {text([token]) for token, bit in enumerate(bits) if bit}


@pytest.mark.parametrize(("opening", "begun", "closing"), OPENINGS)
def test_reasoning_is_closed_at_its_budget_however_it_is_opened(opening: str, begun: str, closing: str) -> None:
    begins, thought, ends = tokens(begun), tokens("abc"), tokens(closing)
    for cut in range(len(begins) + len(thought)):
        held, written = constraint(opening, closing), [*begins, *thought]
        drafts = [*written[cut:], *tokens("more")]
        masks = full((1 + len(drafts), (len(PIECES) + 31) // 32), -1, int32)
        assert held.binds(written[:cut], 1 + len(drafts))
        assert held.allow(written[:cut], drafts, masks) == len(written) - cut
        assert held.forced(written) == tuple((token,) for token in ends)
        assert allowed(held, written) == {text(ends[:1])}
        assert not held.binds([*written, *ends, *tokens("Hi")], 9)


@pytest.mark.parametrize(("opening", "begun", "closing"), OPENINGS)
def test_an_answer_without_reasoning_has_no_budget(opening: str, begun: str, closing: str) -> None:
    for answer in ("Hi", f"a{begun}", f"{begun[:-2]}! and more"):
        held = constraint(opening, closing)
        written = [tokens(letter)[0] for letter in answer if letter != "\n"]
        assert not held.binds(written, 9)
        assert held.forced([*written, *tokens("more")]) == ()


@pytest.mark.parametrize(("opening", "begun", "closing"), OPENINGS)
def test_an_answer_held_to_a_schema_may_begin_with_reasoning_however_it_is_opened(
    opening: str, begun: str, closing: str
) -> None:
    begins = tokens(begun)
    held = constraint(opening, closing, schema={"const": True}, most_tokens=None)
    assert begins[0] in held.openings([])
    assert allowed(held, []) == {"t"}, "unless the model itself begins to think"
    for count in range(1, len(begins)):
        assert allowed(held, begins[:count]) == {text(begins[count : count + 1])}
        assert not held.openings(begins[:count])
    thought = [*begins, *tokens("Hm")]
    assert allowed(held, thought) > {"H", "t", "\n"}
    assert "<end>" not in allowed(held, thought)
    assert allowed(held, [*thought, *tokens(closing)]) == {"t", "\n", "\n\n"}
    assert allowed(held.begin(), tokens("tr")) == {"u"}


def test_what_the_answer_itself_may_begin_with_opens_no_reasoning() -> None:
    held = constraint("[THINK]", "[/THINK]", schema={"type": "array", "items": {"type": "integer"}})
    assert [text([token]) for token in held.openings([])] == ["\n", "\n\n"]
    assert allowed(held, tokens("[")) > {"1", "]"}
