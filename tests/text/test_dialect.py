"""Reasoning, tool calls and text of an answer: the same at every cut, in every family's syntax, and nothing is lost."""

import importlib
import json
import pkgutil
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from mlx_lm import tokenizer_utils, tool_parsers

from app.core.messages import Generate
from app.core.unit import ModelSpecification
from app.models import folder
from app.text.answer.parts import ReasoningCount
from app.text.answer.splitter import AnswerSplitter
from app.text.dialect import BARE_JSON, HARMONY, JSON_CALLS, NO_DIALECT, REASONING_MARKERS, Dialect, read_dialect
from app.text.grammar.request_grammar import reasoning_of
from tests.published import chat_templates

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
ARGUMENTS = {"city": 'Zür"ich }{', "days": 3}
CALL = [("get_weather", ARGUMENTS)]
PLAIN = [("get_weather", {"city": "Zürich", "days": 3})]


def of(parser: str) -> Dialect:
    return Dialect(opening="<think>", closing="</think>", parser=parser)


JSON_DIALECT = of(JSON_CALLS)
JSON_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
SYNTAX: list[tuple[Dialect, str, list[tuple[str, Any]]]] = [
    (JSON_DIALECT, JSON_CALL, CALL),
    (JSON_DIALECT, f"{JSON_CALL}\n{JSON_CALL}", CALL * 2),
    (
        JSON_DIALECT,
        '<tool_call>{"arguments": {"days": 1}, "name": "get_weather"}</tool_call>',
        [("get_weather", {"days": 1})],
    ),
    (
        of("qwen3_coder"),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        PLAIN,
    ),
    (
        of("glm47"),
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        PLAIN,
    ),
    (
        of("kimi_k2"),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Zürich", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
        PLAIN,
    ),
    (of("mistral"), '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 3}', PLAIN),
    (
        of("mistral"),
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}]',
        PLAIN,
    ),
    (
        of("pythonic"),
        '<|tool_call_start|>[get_weather(city="Zürich", days=3)]<|tool_call_end|>',
        PLAIN,
    ),
    (
        of("minimax_m2"),
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        PLAIN,
    ),
    (
        of("gemma4"),
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>',
        PLAIN,
    ),
    (
        of("longcat"),
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Zürich</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        PLAIN,
    ),
    (
        of("minicpm5"),
        '<function name="get_weather"><param name="city">Zürich</param><param name="days">3</param></function>',
        PLAIN,
    ),
    (
        of("function_gemma"),
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3}<end_function_call>",
        PLAIN,
    ),
    (
        of("kimi_k3"),
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Zürich<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="get_weather" index="2"<|sep|><|open|>json type="object"<|sep|>{"days": 1}'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        [*PLAIN, ("get_weather", {"days": 1})],
    ),
    (
        of("laguna"),
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        PLAIN,
    ),
    (
        of("muse_spark"),
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Zürich</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        PLAIN,
    ),
    (
        of("deepseek"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Zürich", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        PLAIN,
    ),
    (
        of("deepseek"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Zürich", "days": 3}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"days": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [*PLAIN, ("get_weather", {"days": 1})],
    ),
    (
        Dialect(parser=BARE_JSON),
        '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 3}}',
        PLAIN,
    ),
    (
        Dialect(parser=BARE_JSON),
        '<|python_tag|>{"name": "get_weather", "parameters": {"days": 3}}; {"name": "get_weather", "parameters": {}}',
        [("get_weather", {"days": 3}), ("get_weather", {})],
    ),
]


def split(dialect: Dialect, pieces: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return the text, reasoning and calls that the pieces yield, with the deltas joined as a client joins them."""
    options = {"tools": TOOLS} | options
    splitter, text, reasoning, calls = AnswerSplitter(dialect, **options), "", "", {}
    for index in range(len(pieces) + 1):
        final = index == len(pieces)
        splitter.feed("" if final else pieces[index], final=final)
        parts = splitter.take()
        text += "".join(part.text for part in parts)
        reasoning += "".join(part.reasoning for part in parts)
        assert all(len(part.drafted_flags) == len(part.text) for part in parts)
        for piece in (piece for part in parts for piece in part.calls):
            assert bool(piece.name) == (piece.index not in calls)
            name, arguments = calls.get(piece.index, (piece.name, ""))
            calls[piece.index] = name, arguments + piece.arguments
    return {"text": text, "reasoning": reasoning, "calls": [(name, json.loads(text)) for name, text in calls.values()]}


def cuts(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(0, 9))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


MLX_LM = {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}


def test_no_parser_of_mlx_lm_is_left_out() -> None:
    assert {dialect.parser for dialect, *_ in SYNTAX} >= MLX_LM


@pytest.mark.parametrize(("dialect", "written", "calls"), [case for case in SYNTAX if case[0].parser in MLX_LM])
def test_calls_are_those_that_mlx_lm_reads(dialect: Dialect, written: str, calls: Any) -> None:
    module = importlib.import_module(f"{tool_parsers.__name__}.{dialect.parser}")
    bodies = written.split(module.tool_call_start)[1:]
    parsed = [module.parse_tool_call(body.partition(module.tool_call_end or "\0")[0], TOOLS) for body in bodies]
    theirs = [call for result in parsed for call in (result if isinstance(result, list) else [result])]
    assert [(call["name"], call["arguments"]) for call in theirs] == calls


def test_the_form_of_a_published_template_is_the_one_that_mlx_lm_infers() -> None:
    differing = {}
    for name, path in chat_templates().items():
        tokenizer = FakeTokenizer(path.read_text(encoding="utf-8"))
        theirs, ours = tokenizer_utils._infer_tool_parser(tokenizer), read_dialect(tokenizer).parser
        if theirs is not None and theirs != ours:
            differing[name] = theirs, ours
    assert differing == {"MiniMax-M3": ("json_tools", "minimax_m3")}, "which writes no JSON"


@pytest.mark.parametrize(("dialect", "written", "calls"), SYNTAX)
def test_the_calls_of_every_family_are_found_at_every_cut(dialect: Dialect, written: str, calls: Any) -> None:
    whole = split(dialect, [written])
    assert whole == {"text": "", "reasoning": "", "calls": calls}
    assert split(dialect, list(written)) == whole
    for index in range(len(written)):
        assert split(dialect, [written[:index], written[index:]]) == whole


@pytest.mark.parametrize(
    ("dialect", "written", "calls"), [case for case in SYNTAX if case[0].parser not in {BARE_JSON, "muse_spark"}]
)
def test_reasoning_text_and_calls_come_apart(dialect: Dialect, written: str, calls: Any) -> None:
    answer = f"<think>\nWhat is it?\n</think>\n\nI look.\n\n{written}"
    whole = split(dialect, [answer])
    assert whole == {"text": "I look.", "reasoning": "What is it?", "calls": calls}
    inside = split(dialect, [answer.removeprefix("<think>\n")], inside=True)
    assert inside == whole
    chance = random.Random(5)
    for _ in range(100):
        assert split(dialect, cuts(answer, chance)) == whole


HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Zürich", "days": 3}'
)


def test_channels_of_harmony_come_apart_at_every_cut() -> None:
    harmony = Dialect(opening="<|channel|>analysis", closing="<|channel|>final<|message|>", parser=HARMONY)
    expected = {"text": "I look.", "reasoning": "The user asks.", "calls": PLAIN}
    final = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    for answer, expected_parts in (
        (HARMONY_ANSWER, expected),
        (HARMONY_ANSWER + "<|call|>", expected),
        (final, {"text": "Hello", "reasoning": "Hm", "calls": []}),
        ("<|channel|>final<|message|>Hello<|return|>", {"text": "Hello", "reasoning": "", "calls": []}),
    ):
        assert split(harmony, [answer]) == expected_parts
        for index in range(len(answer)):
            assert split(harmony, [answer[:index], answer[index:]]) == expected_parts
    by_grammar = f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>{JSON_CALL}"
    assert split(harmony, [by_grammar], by_grammar=True) == {"text": "", "reasoning": "Hm", "calls": CALL}


def test_a_call_without_its_last_mark_swallows_nothing_that_follows() -> None:
    open_call = JSON_CALL.removesuffix("\n</tool_call>")
    for written, text, calls in (
        (open_call, "", CALL),
        (f"{open_call}\n{JSON_CALL}", "", CALL * 2),
        (f"{open_call}\nThat is all.", "That is all.", CALL),
    ):
        for pieces in ([written], list(written)):
            assert split(JSON_DIALECT, pieces) == {"text": text, "reasoning": "", "calls": calls}


@pytest.mark.parametrize(
    "malformed",
    [
        "<tool_call>\nget_weather\n</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a\\x", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
        "<tool_call>{",
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_told_as_text(malformed: str) -> None:
    for pieces in ([malformed], list(malformed)):
        assert split(JSON_DIALECT, pieces) == {"text": malformed, "reasoning": "", "calls": []}


def test_without_tools_a_call_is_text_and_arguments_come_as_they_are_written() -> None:
    assert split(JSON_DIALECT, [JSON_CALL], tools=())["text"] == JSON_CALL
    splitter = AnswerSplitter(JSON_DIALECT, tools=TOOLS)
    for text, name, arguments in (
        ('<tool_call>\n{"name": "get_weather", "arguments": ', "", ""),
        ('{"ci', "get_weather", '{"ci'),
        ('ty": "Z', "", 'ty": "Z'),
    ):
        splitter.feed(text)
        pieces = [piece for part in splitter.take() for piece in part.calls]
        assert "".join(piece.name for piece in pieces) == name
        assert "".join(piece.arguments for piece in pieces) == arguments


def test_text_behind_a_call_is_told_behind_it() -> None:
    splitter = AnswerSplitter(JSON_DIALECT, tools=TOOLS)
    splitter.feed(f"I look. {JSON_CALL} And then. {JSON_CALL}", final=True)
    shown = [(part.text, [piece.index for piece in part.calls if piece.name]) for part in splitter.take()]
    assert shown == [("I look.", [0]), ("  And then.", [1])]


@settings(max_examples=300, deadline=None)
@given(
    text=some.text(alphabet='<think>/tool_callé {}"\n[]a', max_size=60),
    inside=some.booleans(),
    seed=some.integers(0, 1 << 30),
    bare=some.booleans(),
)
def test_any_text_says_the_same_at_any_cut(text: str, inside: bool, seed: int, bare: bool) -> None:
    dialect = Dialect(parser=BARE_JSON) if bare else JSON_DIALECT
    outcomes = []
    for pieces in ([text], cuts(text, random.Random(seed))):
        splitter = AnswerSplitter(dialect, inside=inside, tools=TOOLS)
        for piece in pieces:
            splitter.feed(piece)
        splitter.feed("", final=True)
        parts = splitter.take()
        texts = "".join(part.text for part in parts), "".join(part.reasoning for part in parts)
        outcomes.append((*texts, "".join(call.arguments for part in parts for call in part.calls)))
    assert outcomes[0] == outcomes[1]


def test_a_text_without_marks_is_untouched_with_the_spans_of_its_drafts() -> None:
    splitter = AnswerSplitter(NO_DIALECT)
    for text, drafted in (("  ", False), ("Hel", True), ("lo,", False), (" w", True), ("orld \n", False)):
        splitter.feed(text, drafted=drafted)
    (part,) = splitter.take()
    assert (part.text, part.spans) == ("  Hello, world \n", ((2, 5), (8, 10)))
    splitter = AnswerSplitter(JSON_DIALECT, tools=TOOLS)
    splitter.feed("<think>no</think> ")
    splitter.feed("yes", drafted=True, final=True)
    (part,) = splitter.take()
    assert (part.reasoning, part.text, part.spans) == ("no", "yes", ((0, 3),))


class FakeTokenizer:
    """The parts of a tokenizer that the detection of dialects reads."""

    def __init__(self, template: str, *tokens: str) -> None:
        self.chat_template = template
        self.init_kwargs: dict[str, Any] = {}
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}


def test_the_template_says_the_dialect() -> None:
    qwen = read_dialect(FakeTokenizer("<tool_call>{{ tool_call.name }} <think> {{ tools }}", "<think>", "</think>"))
    assert (qwen.parser, qwen.opening) == ("json_tools", "<think>")
    assert read_dialect(FakeTokenizer("{% if tools %}")).parser == BARE_JSON
    assert read_dialect(FakeTokenizer("{{ messages }}")).parser == ""
    olmo = read_dialect(
        FakeTokenizer("Output any function calls within <function_calls></function_calls> XML tags. {{ tools }}")
    )
    assert olmo.parser == "olmo3"
    assert read_dialect(FakeTokenizer("<|channel|>final<|message|>")).parser == HARMONY
    assert read_dialect(FakeTokenizer("<think>{{ content.split('</answer>') }}</think>")).wrapper == "answer"
    assert read_dialect(FakeTokenizer("<think></think><tool_response>{{ x }}</tool_response>")).wrapper == ""


def test_an_answer_reasons_no_more_where_its_prompt_ended_the_reasoning() -> None:
    command = Generate(id="", model=ModelSpecification(id="", path=""), messages=[{"role": "user", "content": "x"}])
    for end, inside in (("assistant\n", False), ("assistant\n<think>\n", True)):
        reasoning = reasoning_of(command, JSON_DIALECT, end)
        assert reasoning is not None
        assert reasoning.inside == inside
    assert reasoning_of(command, JSON_DIALECT, "assistant\n<think>\n\n</think>\n\n") is None


def test_an_answer_that_goes_on_with_a_message_does_not_reason_first() -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is ("}]
    command = Generate(id="", model=ModelSpecification(id="", path=""), messages=said, continues=True)
    harmony = read_dialect(FakeTokenizer("<|channel|>final<|message|>"))
    for dialect in (harmony, JSON_DIALECT):
        assert reasoning_of(command, dialect, "It is (") is None


@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning_is_counted_token_by_token_whoever_drafted(size: int) -> None:
    count = ReasoningCount(JSON_DIALECT)
    tokens = [b"so", b" it", b" is", b"</thi", b"nk>", b" yes", b"</think>"]
    for start in range(0, len(tokens), size):
        count.feed(tokens[start : start + size])
    assert count.tokens == 5


@pytest.mark.parametrize("marks", [*REASONING_MARKERS, ("<think:opensource>", "</think:opensource>")])
def test_a_folder_whose_template_marks_reasoning_says_that_its_model_reasons(marks: tuple[str, str]) -> None:
    assert any(mark in "".join(marks) for mark in folder.REASONING_MARKERS)
