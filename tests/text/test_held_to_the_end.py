"""An answer constrained by a schema ends valid, or with an error that says why not; drafts never change its text."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from numpy import full, int32, unpackbits

from app.core.messages import Generate
from app.core.request import Grammar
from app.core.unit import ModelSpecification
from app.text.detokenizer import TokenTable
from app.text.dialect import HARMONY, HARMONY_MARKERS, NO_DIALECT, Dialect
from app.text.grammar.constraint import FORCED_BYTES, AnswerConstraint, Vocabulary
from app.text.grammar.request_grammar import answer_grammar, reasoning_of
from app.text.grammar.schema import with_guidance

WORDS = [b'{"', b'": ', b'", "', b'"}', b", ", b', "', b"score", b"true", b"null", b"}", b" ", b"\xc3\xa9"]
PIECES = [*(bytes([letter]) for letter in range(32, 127)), *WORDS, b"<end>"]
END = len(PIECES) - 1
TABLE = TokenTable(
    pieces=PIECES, stop_token_ids=frozenset({END}), hidden_token_ids=frozenset({END}), vocabulary_size=len(PIECES)
)
MOST_TOKENS = 120
INTEGER, TEXT = {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "string", "maxLength": 3}
CLOSED = {"type": "object", "additionalProperties": False}


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(TABLE)


def constraint_for(schema: Any) -> AnswerConstraint:
    """Return the constraint of a request that has the schema as its `response_format`."""
    grammar = answer_grammar(held_to(Grammar(kind="json_schema", text=json.dumps(schema))), NO_DIALECT)
    assert grammar is not None
    return constraint_for_grammar(grammar.text)


def held_to(grammar: Grammar) -> Generate:
    return Generate(id="", model=ModelSpecification(id="", path=""), text="x", grammar=grammar)


def constraint_for_grammar(grammar: str) -> AnswerConstraint:
    enforced = vocabulary().compile_grammar(grammar)
    assert not enforced.matcher.is_error(), enforced.matcher.get_error()
    return AnswerConstraint(vocabulary(), enforced, None)


@dataclass
class Walk:
    """A target model that draws from the allowed tokens by seed and position, with or without drafts."""

    constraint: AnswerConstraint
    seed: int
    drafts: Callable[[Sequence[int]], list[int]] = lambda _output: []

    def __post_init__(self) -> None:
        self.output: list[int] = []
        self.failure = ""
        self.constraint = self.constraint.begin()

    def run(self) -> "Walk":
        while not self.failure and END not in self.output and len(self.output) < MOST_TOKENS:
            emitted = self.step(self.drafts(self.output))
            self.failure = self.constraint.failure([*self.output, *emitted])
            self.output += [] if self.failure else emitted
        self.output = self.output[: self.output.index(END) + 1] if END in self.output else self.output[:MOST_TOKENS]
        return self

    def step(self, drafts: list[int]) -> list[int]:
        masks = full((1 + len(drafts), (len(PIECES) + 31) // 32), -1, int32)
        standing = self.constraint.allow(self.output, drafts, masks)
        emitted: list[int] = []
        for slot in range(standing + 1):
            emitted.append(self.drawn(masks[slot], len(self.output) + slot))
            if slot == standing or emitted[-1] != drafts[slot] or emitted[-1] == END:
                break
        return emitted

    def drawn(self, mask: Any, position: int) -> int:
        bits = unpackbits(mask.view("uint8"), bitorder="little")[: len(PIECES)]
        allowed = [token for token, bit in enumerate(bits) if bit]
        chance = random.Random(self.seed * 10_007 + position)
        ends = [token for token in allowed if PIECES[token] in {b'"', b"}", b'"}', b'": ', b'", "', b", "}]
        return chance.choice(ends if ends and chance.random() < 0.4 else allowed)

    @property
    def text(self) -> str:
        return b"".join(PIECES[token] for token in self.output if token != END).decode()


def drafted(constraint: AnswerConstraint, seed: int, plain: Walk) -> Walk:
    """Run a second walk; it drafts up to 5 tokens of the plain walk's output, and random tokens past its end."""

    def drafts(output: Sequence[int]) -> list[int]:
        chance = random.Random(seed + len(output))
        right = [*plain.output, *chance.choices(range(len(PIECES)), k=3)][len(output) : len(output) + 5]
        return right[: chance.randint(0, 5)]

    return Walk(constraint, seed, drafts).run()


def check(constraint: AnswerConstraint, schema: Any, seed: int) -> Walk:
    plain = Walk(constraint, seed).run()
    other = drafted(constraint, seed, plain)
    assert (other.output, other.failure) == (plain.output, plain.failure)
    if END in plain.output:
        jsonschema.validate(json.loads(plain.text), schema)
    return plain


def scored(patterns: Any, **more: Any) -> Any:
    properties = {"score": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}, "tags": TEXT}
    return {**CLOSED, "properties": properties, "required": ["score"], "patternProperties": patterns, **more}


PATTERNED = {
    "a pattern that only a listed name matches": scored({"^score$": {"type": "integer", "minimum": 10}}),
    "a pattern that only listed names match": scored({"^(score|tags)$": {}}),
    "a pattern that a listed name and others match": scored({"^s": {"type": "integer", "maximum": 40}}),
    "a pattern of a name that is only required": {**CLOSED, "patternProperties": {"^y$": INTEGER}, "required": ["y"]},
    "a pattern that a required name and others match": {
        **CLOSED,
        "patternProperties": {"^y": INTEGER},
        "required": ["y"],
    },
    "a pattern that no name can match": scored({"^[^\\s\\S]$": INTEGER}),
    "a pattern that nothing may match": scored({"^s": {"type": "integer"}, "^t": False}),
    "inside an array": {"type": "array", "minItems": 1, "maxItems": 2, "items": scored({"^score$": INTEGER})},
    "inside what others refer to": {
        **CLOSED,
        "properties": {"a": {"$ref": "#/$defs/scored"}},
        "required": ["a"],
        "$defs": {"scored": scored({"^score$": INTEGER})},
    },
    "two patterns, of which one is spent": scored({"^score$": INTEGER, "^x[ab]$": INTEGER}),
    "names that are said to be strings": scored({}, propertyNames={"type": "string"}),
    "other names besides": scored({"^score$": INTEGER}, additionalProperties=INTEGER),
    "a name with marks of JSON": {
        **CLOSED,
        "properties": {'a"/\\é': INTEGER},
        "patternProperties": {'^a"/\\\\é$': {"minimum": 7}},
        "required": ['a"/\\é'],
    },
}


@pytest.mark.parametrize("kind", PATTERNED)
def test_patterns_of_names_are_enforced(kind: str) -> None:
    schema = PATTERNED[kind]
    constraint, ended = constraint_for(schema), 0
    for seed in range(20):
        walk = check(constraint, schema, seed)
        assert walk.failure == ""
        ended += END in walk.output
    assert ended >= 5


DEAD_ENDS = {
    "a name that cannot go on": scored({"^score$": {}}),
    "names in two parts": {
        "allOf": [
            {"type": "object", "properties": {"score": INTEGER}, "required": ["score"]},
            {"patternProperties": {"^score$": {}}, "additionalProperties": False},
        ]
    },
}


@pytest.mark.parametrize("kind", DEAD_ENDS)
def test_an_answer_that_cannot_go_on_ends_in_an_error_and_never_with_half_an_object(kind: str) -> None:
    """The schemas go to llguidance without the rewriting of their patterns, so it runs into the dead end."""
    schema = DEAD_ENDS[kind]
    constraint = constraint_for_grammar(json.dumps({"grammars": [{"json_schema": with_guidance(schema)}]}))
    walks = [check(constraint, schema, seed) for seed in range(40)]
    failed = [walk for walk in walks if walk.failure]
    assert failed
    assert all("simplify the schema" in walk.failure and walk.text.endswith(", ") for walk in failed)


LONG = {
    "a constant of 20,000 letters": {"const": "".join(random.Random(7).choices("abcdefghijklmnop", k=20_000))},
    "a constant object of 2,500 names": {"const": {f"name_{n}": "value" for n in range(2500)}},
    "an object of 2,000 optional names": {
        **CLOSED,
        "type": "object",
        "properties": {f"name_{n}": TEXT for n in range(2000)},
    },
    "an expression that repeats a million letters": {"type": "string", "pattern": "^(a{1000}){1000}$"},
}


@pytest.mark.parametrize("kind", LONG)
def test_an_answer_goes_on_however_much_its_schema_forces_or_leaves_open(kind: str) -> None:
    walk = check(constraint_for(LONG[kind]), LONG[kind], seed=1)
    assert walk.failure == ""
    assert END in walk.output or len(walk.output) == MOST_TOKENS
    forced_tokens = constraint_for(LONG[kind]).forced(())
    assert len(forced_tokens) <= FORCED_BYTES


@pytest.mark.parametrize(
    ("expression", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/b", "\\/b"), ("[/x]/", "//"), (r"\d\/", "7/"), (r"/\\", "/\\")],
)
def test_a_slash_in_an_expression_is_a_slash_escaped_or_not(expression: str, text: str) -> None:
    assert re.fullmatch(expression, text)
    grammar = answer_grammar(held_to(Grammar(kind="regex", text=expression)), NO_DIALECT)
    assert grammar is not None
    tokens = [PIECES.index(letter.encode()) for letter in text]
    constraint = constraint_for_grammar(grammar.text).begin()
    assert not constraint.failure([*tokens, END])
    assert constraint_for_grammar(grammar.text).begin().failure([*tokens[:-1], END])


def test_an_end_that_the_grammar_does_not_allow_is_an_error() -> None:
    constraint = constraint_for(scored({})).begin()
    begun = [PIECES.index(piece) for piece in (b'{"', b"score", b'": ', b"5")]
    assert constraint.failure(begun) == ""
    assert constraint.failure([*begun, END]) != ""
    whole = constraint_for(scored({})).begin()
    assert whole.failure([*begun, PIECES.index(b"}"), END]) == ""


CALLING = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"


@pytest.mark.parametrize(
    ("choice", "written", "ends"),
    [
        ("auto", f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{CALLING}", True),
        ("required", "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{", True),
        ("function:f", CALLING, False),
        ("auto", CALLING.replace("functions.f", "browser.search"), False),
        ("auto", CALLING.partition("<|message|>")[0], False),
        ("auto", f"{CALLING}}}<|end|><|start|>assistant<|channel|>analysis<|message|>to=functions.f", False),
    ],
)
def test_only_a_call_of_gpt_oss_may_end_what_stands_before_the_answer(choice: str, written: str, ends: bool) -> None:
    allowed = allowed_after(written, choice)
    assert ["<|call|>" in allowed, "(end)" in allowed] == [ends, ends]


@pytest.mark.parametrize("header", ["final", "final <|constrain|>json", "final json", "final<|constrain|>answer"])
def test_the_grammar_holds_whatever_format_the_header_of_gpt_oss_names(header: str) -> None:
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    allowed = allowed_after(f"{thought}<|channel|>{header}<|message|>", "auto")
    assert "{" in allowed
    assert "H" not in allowed


def allowed_after(written: str, choice: str) -> set[str]:
    """Return the pieces that gpt-oss may write after `written`, held to any JSON object, with a tool `f`."""
    marks = [mark.encode() for mark in (*HARMONY_MARKERS, "<|return|>")]
    pieces = [*PIECES, *dict.fromkeys(marks)]
    stops = frozenset({END, pieces.index(b"<|call|>")})
    table = TokenTable(
        pieces=pieces,
        stop_token_ids=stops,
        hidden_token_ids=stops,
        vocabulary_size=len(pieces),
        spelling=TABLE.spelling,
    )
    speaks = Dialect(opening="<|channel|>analysis", closing="<|channel|>final<|message|>", parser=HARMONY)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    command = msgspec.structs.replace(
        held_to(Grammar(kind="json_schema", text="{}")), messages=[], text=None, tools=[tool], tool_choice=choice
    )
    grammar, known = answer_grammar(command, speaks), Vocabulary(table)
    assert grammar is not None
    constraint = AnswerConstraint(known, known.compile_grammar(grammar.text), reasoning_of(command, speaks, ""))
    parts = [part for part in re.split(r"(<\|\w+\|>)", written) if part]
    output = [
        token
        for part in parts
        for token in ([pieces.index(part.encode())] if "<|" in part else [pieces.index(c.encode()) for c in part])
    ]
    masks = full((1, (len(pieces) + 31) // 32), -1, int32)
    constraint.allow(output, [], masks)
    bits = unpackbits(masks.view("uint8"), bitorder="little")
    names = {END: "(end)"}
    return {names.get(token, piece.decode("latin-1")) for token, piece in enumerate(pieces) if bits[token]}


names = some.sampled_from(["a", "ab", "b", "x_1", "é"])
patterns = some.sampled_from(["^a$", "^a", "b$", "^(a|b)$", "^x_", "^é$", "^[ab]{2}$", "a"])
values = some.sampled_from([INTEGER, TEXT, {"type": "boolean"}, {"enum": [1, "z"]}, True, {}])
objects = some.builds(
    lambda listed, wanted, matched, more, closed: {
        "type": "object",
        "properties": listed,
        "required": sorted(wanted),
        "patternProperties": matched,
        "additionalProperties": False if closed else more,
    },
    some.dictionaries(names, values, max_size=3),
    some.sets(names, max_size=2),
    some.dictionaries(patterns, values, min_size=1, max_size=1),
    values,
    some.booleans(),
)


def hold(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schema=objects, seed=some.integers(0, 1000))
    def check_example(schema: Any, seed: int) -> None:
        response_format = Grammar(kind="json_schema", text=json.dumps(schema))
        command = Generate(id="", model=ModelSpecification(id="", path=""), text="x", grammar=response_format)
        grammar = answer_grammar(command, NO_DIALECT)
        assert grammar is not None
        if vocabulary().compile_grammar(grammar.text).matcher.is_error():
            return  # the request is refused with a reason
        assert check(constraint_for_grammar(grammar.text), schema, seed).failure == ""

    check_example()


def test_any_patterns_of_names_are_enforced_or_refused() -> None:
    hold(50)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_thousand_patterns_of_names_are_enforced_or_refused() -> None:
    hold(2000)
