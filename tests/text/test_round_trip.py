"""Calls and text that a template writes as history are read as the same when they are the model's output.

Templates that lose information are named with what they lose.
"""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some

from app.text.answer.call_patterns import patterns
from app.text.answer.splitter import AnswerSplitter
from app.text.dialect import FORMS, Dialect, read_dialect
from tests.text.published_models import TEMPLATES, rendering

PROPERTIES: dict[str, Any] = {
    "code": {"type": "string"},
    "from": {"type": "string"},
    "days": {"type": "integer"},
    "rate": {"type": "number"},
    "deep": {"type": "boolean"},
    "where": {"type": "object"},
    "tags": {"type": "array"},
    "note": {"type": "string", "nullable": True},
}
TOOL_NAMES = ("get_weather", "run", "mcp__fs__read-file")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "It works.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in TOOL_NAMES
]
END_OF_TURN = re.compile(
    r"<\|im_end\|>|</s>|<\|eot_id\|>|<\|eom_id\|>|<｜end▁of▁sentence｜>|<\|END_OF_TURN_TOKEN\|>|\[e~\[|<seed:eos>|\n\n<sep>"
    r"|<\|end_of_text\|>|<end_of_sentence>|<SPECIAL_12>|<\|role_end\|>|\n?</assistant>|<turn\|>|<\|tool_response>|<\|eot\|>$"
    r"|<｜hy_eos:opensource｜>|<\|end_of_msg\|>|<\|message_sep\|>\n\n$|<\|call\|>$|\n<\|end\|>\n(?=</s>)"
)
SHOWS_NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B": "calls of the history are not written",
    "LFM2-8B-A1B": "calls of the history are not written",
    "LFM2.5-Instruct": "calls of the history are not written",
    "ibm-granite-granite-3.3-2B-Instruct": "calls of the history are not written",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "calls beside text are not written",
    "tokenizer deepseek_v3": "calls beside text are not written",
    "Kimi-K2-Instruct": "it appends to a list, which no sandbox lets it",
    "Kimi-K2-Thinking": "it appends to a list, which no sandbox lets it",
    "llama-cpp-deepseek-r1": "it writes a generator as JSON, which fails",
    "fireworks-ai-llama-3-firefunction-v2": "it wants a variable `functions`",
    "CohereForAI-c4ai-command-r-plus-tool_use": "it wants `additionalProperties` of every object",
}
"""Templates that allow no round trip, with the reason."""
LOSES_TEXT = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "the text beside calls is not written",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "the text beside calls is not written",
    "MiniMax-M1": "the text beside calls is not written",
    "Cohere2MoE": "the text beside calls is not written",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "the text beside calls is not written",
    "NVIDIA-Nemotron-Nano-v2": "the text is a turn of its own",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "the text is a turn of its own",
    "Mistral-Small-3.2-24B-Instruct-2506": "the text beside calls is not written",
    "mistralai-Mistral-Nemo-Instruct-2407": "the text beside calls is not written",
    "meta-llama-Llama-3.1-8B-Instruct": "the text beside calls is not written",
    "meta-llama-Llama-3.2-3B-Instruct": "the text beside calls is not written",
    "meta-llama-Llama-3.3-70B-Instruct": "the text beside calls is not written",
    "tokenizer llama3_1": "the text beside calls is not written",
    "muse-glimmer": "the text beside calls is not written",
    "openai-gpt-oss-120b": "the text beside calls is written as reasoning",
    "tokenizer gptoss": "the text beside calls is written as reasoning",
    "upstage-Solar-Open-100B": "the text beside calls is not written",
    "google-gemma-4-31B-it": "the text is written behind the calls",
    "google-gemma-4-31B-it-interleaved": "the text is written behind the calls",
}
TAKES_ONE_CALL = {
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "tokenizer llama3_1",
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "openai-gpt-oss-120b",
    "tokenizer gptoss",
}
LOSES_VALUES: dict[str, Callable[[Any], bool]] = {
    "pythonic": lambda value: isinstance(value, str) and re.search(r"[\\]|'\s*[,)]", value) is not None,
    "minicpm5": lambda value: isinstance(value, str) and ("]]>" in value or value != value.strip()),
    "gemma4": lambda value: '<|"|>' in json.dumps(value, ensure_ascii=False).replace('\\"', '"'),
    "minimax_m3": lambda value: isinstance(value, dict | list | None) or "]<]minimax[>[" in str(value),
}
"""Tests by form for values that cannot be read back: strings have no escapes, and MiniMax-M3 writes no types."""


class Trip:
    """A template, and the calls as it writes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._name = name
        self.dialect = read_dialect(FakeTokenizer(TEMPLATES[name]))
        self.calls = 1 if name in TAKES_ONE_CALL else 2
        user = [{"role": "user", "content": "Question?"}]
        self._prompt, self._before = self._render(user, opens_answer=True), self._render(user, opens_answer=False)
        self._user = user

    def loses(self, value: Any) -> bool:
        """Return whether the value cannot be recovered from what the template writes."""
        return is_lost(self.dialect, value)

    def _render(self, messages: list[dict[str, Any]], *, opens_answer: bool) -> str:
        shown = rendering(self._name, messages, TOOLS)
        rendered = shown.prompt()
        return (
            rendered.text
            if opens_answer
            else shown.render_variant(shown.messages, rendered.repairs, opens_answer=False)
        )

    def output(self, calls: list[tuple[str, dict[str, Any]]], content: str) -> tuple[str, bool]:
        """Return what a model with these calls would have written, and whether it begins inside its reasoning."""
        listed = [
            {
                "id": f"abcdefgh{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
        text = self._render(
            [*self._user, {"role": "assistant", "content": content, "tool_calls": listed}], opens_answer=False
        )
        inside = text.startswith(self._prompt) and self._thinks(self._prompt)
        if text.startswith(self._prompt):
            text = text[len(self._prompt) :]
        else:
            text = text.removeprefix(self._before)
            head = self._prompt.removeprefix(self._before)
            head = head.partition(self.dialect.opening)[0] if self.dialect.opening else head
            head = head.partition("Here are my reasoning steps")[0]  # Apriel's, only in the prompt
            text = text.partition(head.strip())[2] if head.strip() else text
        return END_OF_TURN.split(text)[0], inside

    def _thinks(self, prompt: str) -> bool:
        return bool(self.dialect.opening) and prompt.rstrip().endswith(self.dialect.opening)


class FakeTokenizer:
    """The parts of a tokenizer that the detection of dialects reads; every mark of the template is a token."""

    def __init__(self, template: str) -> None:
        self.chat_template = template
        self.init_kwargs: dict[str, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        marks = re.findall(r"<\|?[^<>\s|]+\|?>|\[/?[A-Z_]+\]", self.chat_template)
        return {mark: index for index, mark in enumerate(dict.fromkeys(marks))}


@cache
def trip(name: str) -> Trip:
    return Trip(name)


def split(dialect: Dialect, pieces: list[str], *, inside: bool) -> tuple[str, list[tuple[str, Any]]]:
    splitter, text, calls = AnswerSplitter(dialect, tools=TOOLS, inside=inside), "", dict[int, tuple[str, str]]()
    for index in range(len(pieces) + 1):
        splitter.feed(pieces[index] if index < len(pieces) else "", final=index == len(pieces))
        for part in splitter.take():
            text += part.text
            for piece in part.calls:
                name, arguments = calls.get(piece.index, (piece.name, ""))
                calls[piece.index] = name, arguments + piece.arguments
    assert splitter.unfinished_call is None
    return text.strip(), [(name, json.loads(arguments)) for name, arguments in calls.values()]


def marks() -> list[str]:
    """Return the marks of all forms as they appear in text, and similar ones of JSON and Python."""
    words = [mark for form in FORMS.values() for mark in (form.start, form.end, form.closes, form.finishes, form.quote)]
    words = [word.replace("\\", "").replace("KEY", "code") for word in words if word]
    return [*dict.fromkeys(words), "<|call|>", "<|end|>", "<think>", "</think>", "```", '"}', "{", "], [", "', ", '")']


LETTERS = some.text(some.characters(codec="utf-8"), max_size=8)
STRINGS = some.lists(
    LETTERS | some.sampled_from([*marks(), "\n", "\t", "\x0b", " ", "'", '"', "\\", "🙂", "\u2028", "é"]), max_size=6
).map("".join)
NUMBERS = some.floats(allow_nan=False, allow_infinity=False)
INTEGERS = some.integers(-(10**20), 10**20)
VALUES = some.recursive(
    some.none() | some.booleans() | INTEGERS | NUMBERS | STRINGS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = some.fixed_dictionaries(
    {},
    optional={
        "code": STRINGS,
        "from": STRINGS,
        "days": INTEGERS,
        "rate": NUMBERS,
        "deep": some.booleans(),
        "where": some.dictionaries(some.sampled_from("abc"), VALUES, max_size=3),
        "tags": some.lists(VALUES, max_size=3),
        "note": some.none() | some.just("noted"),
    },
)
CALLS = some.lists(some.tuples(some.sampled_from(TOOL_NAMES), ARGUMENTS), min_size=1, max_size=2)
CONTENTS = some.sampled_from(["", "I look.", "Two <lines>\n\nof {text}"])


def is_lost(dialect: Dialect, value: Any) -> bool:
    """Return whether the value cannot be recovered from what a template of the dialect writes."""
    if (lost := LOSES_VALUES.get(dialect.parser)) and lost(value):
        return True
    form = FORMS.get(dialect.parser)
    if form is None or not form.opens:
        return False
    if isinstance(value, str) and value[:1] == value[-1:] == "\n" and not form.padded:
        return True  # it may be alone, and models put values on lines of their own
    closes = patterns(dialect.parser).parameters.closes("code", has_start_marker=not form.bare_head or bool(form.start))
    written = [value] if isinstance(value, str) else [json.dumps(value, ensure_ascii=False), str(value)]
    return any(closes.search(text) for text in written)


KNOWING = [name for name, source in TEMPLATES.items() if "tool" in source and name not in SHOWS_NO_CALLS]


def check(name: str, drawn: list[tuple[str, dict[str, Any]]], content: str, seed: int) -> None:
    template_case = trip(name)
    calls = [
        (called, {key: value for key, value in values.items() if not template_case.loses(value)})
        for called, values in drawn[: template_case.calls]
    ]
    content = "" if name in LOSES_TEXT else content
    output, inside = template_case.output(calls, content)
    assert split(template_case.dialect, [output], inside=inside) == (content, calls), name
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(len(output) + 1), min(len(output), 20)))
    pieces = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    assert split(template_case.dialect, pieces, inside=inside) == (content, calls), name


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@example(calls=[("get_weather", {"code": "'#"})], content="", seed=0)
@example(calls=[("get_weather", {"code": "a' 'b"})], content="", seed=0)
@example(calls=[("get_weather", {"code": "", "note": None, "tags": ["'\U0001195a\x9b"]})], content="", seed=0)
@settings(max_examples=50, **QUIET)
@given(calls=CALLS, content=CONTENTS, seed=some.integers(0, 1 << 30))
def test_what_any_template_writes_as_calls_is_read_as_the_same_calls(calls: Any, content: str, seed: int) -> None:
    for name in KNOWING:
        check(name, calls, content, seed)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KNOWING)
@settings(max_examples=2000, **QUIET)
@given(calls=CALLS, content=CONTENTS, seed=some.integers(0, 1 << 30))
def test_thousands_of_calls_are_read_as_they_were_written(name: str, calls: Any, content: str, seed: int) -> None:
    check(name, calls, content, seed)


def test_the_round_trip_is_made_with_forty_templates() -> None:
    assert len(KNOWING) >= 40


@pytest.mark.parametrize("name", KNOWING)
def test_calls_are_the_same_letter_by_letter(name: str) -> None:
    template_case = trip(name)
    values = {"code": "if a < b:\n\tprint('x')\n", "days": -3, "rate": 0.5, "deep": True}
    calls = [(TOOL_NAMES[0], values), (TOOL_NAMES[1], {})][: template_case.calls]
    output, inside = template_case.output(calls, "")
    whole = split(template_case.dialect, [output], inside=inside)
    assert whole == ("", calls)
    assert split(template_case.dialect, list(output), inside=inside) == whole
    for index in range(len(output)):
        assert split(template_case.dialect, [output[:index], output[index:]], inside=inside) == whole
