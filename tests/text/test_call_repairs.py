"""Calls and tools that templates refuse or leave out, as agents send them: F02, F05 and F25 of public bug reports."""

import re
from typing import Any

import pytest

from tests.text.agent_words import (
    HARMONY,
    LLAMA,
    MINIMAX,
    MISTRAL,
    NEMO,
    PARIS,
    QWEN35,
    R1,
    called,
    in_order,
    once,
    result,
)
from tests.text.dialogues import TOOLS, said, user
from tests.text.published_models import TEMPLATES, codes, prompt

# --- ids of calls (F02) ---------------------------------------------------------------------------------------------

IDS = ("call_0b5e9121a760ae4ff4cce38e", "toolu_01A09q90qw90lq917835lq9", "functions.weather:0", "call_1_0", "", None)


@pytest.mark.parametrize("name", [MISTRAL, NEMO])
@pytest.mark.parametrize("identifier", IDS)
def test_ids_that_a_template_refuses_are_replaced_the_same_in_call_and_result(
    name: str, identifier: str | None
) -> None:
    rendered = prompt(name, once(identifier), TOOLS)
    longer = prompt(name, [*once(identifier), said("Sunny."), user("Thanks")], TOOLS)
    assert codes(rendered) == codes(longer) == ["tool_call_ids_fitted"]
    called_as, answered_as = re.findall(r"\b(?=[a-z]*\d)[a-z\d]{9}\b", rendered.text)
    assert called_as == answered_as
    assert longer.text.count(called_as) == 2, "it stays the same while the conversation grows"


@pytest.mark.parametrize("name", [MISTRAL, NEMO])
def test_results_of_two_calls_keep_theirs_when_ids_are_replaced(name: str) -> None:
    calls = called(("call_a", PARIS), ("call_b", '{"city": "Rome"}'))
    messages = [user("Both?"), calls, result("rain in Rome", "call_b"), result("sun in Paris", "call_a")]
    text = prompt(name, messages, TOOLS).text
    assert in_order(text, "Paris", "Rome", "sun in Paris", "rain in Rome")


@pytest.mark.parametrize("name", ["Kimi-K3", "unsloth-mistral-Devstral-Small-2507", "GLM-4.6", "unsloth-Apriel-1.5"])
@pytest.mark.parametrize("identifier", IDS[:4])
def test_ids_that_a_template_takes_are_kept(name: str, identifier: str) -> None:
    assert codes(prompt(name, once(identifier), TOOLS)) == []


@pytest.mark.parametrize("identifier", IDS)
def test_results_of_kimi_name_the_call_that_its_template_shows(identifier: str | None) -> None:
    rendered = prompt("moonshotai-Kimi-K2", once(identifier), TOOLS)
    assert "<|tool_call_begin|>functions.weather:0<" in rendered.text
    assert "## Return of functions.weather:0\\nsunny" in rendered.text
    assert codes(rendered) == ([] if identifier == "functions.weather:0" else ["tool_call_ids_fitted"])


# --- several calls in one message (F02b) ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [LLAMA, "meta-llama-Llama-3.1-8B-Instruct", HARMONY, "GigaChat3-10B-A1.8B"])
def test_calls_at_once_are_told_in_turns_where_a_template_takes_one(name: str) -> None:
    calls = called(("a", PARIS), ("b", '{"city": "Rome"}'), ("c", '{"city": "Oslo"}'))
    results = [result("icy", "c"), result("sunny", "a"), result("rainy", "b")]
    rendered = prompt(name, [user("All?"), calls, *results], TOOLS)
    assert codes(rendered) == ["tool_calls_split"]
    assert in_order(rendered.text, "Paris", "sunny", "Rome", "rainy", "Oslo", "icy")


def test_calls_without_arguments_or_ids_are_split_as_well() -> None:
    messages = [user("Both?"), called(("a", "{}"), ("b", "{}")), result("x", "a"), result("y", "b")]
    unnamed = [user("Both?"), called((None, PARIS), (None, "{}")), result("first result"), result("second result")]
    assert codes(prompt(LLAMA, messages, TOOLS)) == ["tool_calls_split"]
    assert in_order(prompt(LLAMA, unnamed, TOOLS).text, "Paris", "first result", '"parameters": {}', "second result")


def test_a_template_that_takes_several_calls_gets_them_together() -> None:
    calls = called(("abcdefgh1", PARIS), ("abcdefgh2", '{"city": "Rome"}'))
    messages = [user("Both?"), calls, result("sun", "abcdefgh1"), result("rain", "abcdefgh2")]
    for name in (QWEN35, MISTRAL, "GLM-4.6", "Qwen-Qwen3-0.6B"):
        assert codes(prompt(name, messages, TOOLS)) == []


# --- arguments in the history (F05) ---------------------------------------------------------------------------------

MAPPINGS = [
    QWEN35,
    "Qwen3-Coder",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    MINIMAX,
    "GLM-4.6",
    "deepseek-ai-DeepSeek-V3.2",
]


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("arguments", ["", "  ", "{}"])
def test_no_arguments_are_an_empty_object(name: str, arguments: str) -> None:
    rendered = prompt(name, once(arguments=arguments), TOOLS)
    assert rendered.text == prompt(name, once(arguments="{}"), TOOLS).text
    assert codes(rendered) == []


@pytest.mark.parametrize("name", MAPPINGS)
def test_control_characters_in_arguments_are_read(name: str) -> None:
    rendered = prompt(name, once(arguments='{"city": "Par\tis\n"}'), TOOLS)
    assert codes(rendered) == []
    assert "Par\tis" in rendered.text or "Par\\tis" in rendered.text


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("arguments", [PARIS[:-4], '["Paris"]', "Paris please", '"Paris"', None])
def test_arguments_that_cannot_be_read_are_told_as_they_are(name: str, arguments: str | None) -> None:
    rendered = prompt(name, once(arguments=arguments), TOOLS)
    assert "sunny" in rendered.text
    assert arguments is None or "Par" in rendered.text
    assert set(codes(rendered)) <= {"tool_arguments_repaired"}


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_comma_too_many_spoils_no_arguments(name: str) -> None:
    rendered = prompt(name, once(arguments='{"city": "a,}b", "more": [1, ], }'), TOOLS)
    assert rendered.text == prompt(name, once(arguments='{"city": "a,}b", "more": [1]}'), TOOLS).text
    assert codes(rendered) == ["tool_arguments_repaired"]


# --- tools (F25) ------------------------------------------------------------------------------------------------------


def tool(**described: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look_up", **described}}]


@pytest.mark.parametrize(
    "tools",
    [
        tool(),
        tool(parameters={"type": "object", "properties": {}}),
        tool(description=None, parameters=None),
        tool(description="Looks."),
        tool(description="Looks.", parameters={}),
        tool(parameters={"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {}, "c": True}}),
        tool(parameters={"type": "object", "properties": {"items": {"type": "array", "items": {"enum": [1, "x"]}}}}),
    ],
)
def test_a_tool_that_is_hardly_described_can_be_offered(tools: list[dict[str, Any]]) -> None:
    for name in TEMPLATES:
        if name == "fireworks-ai-llama-3-firefunction-v2":
            continue
        rendered = prompt(name, [user("Hi")], tools)
        assert "look_up" in rendered.text, name
        assert set(codes(rendered)) <= {
            "tool_description_added",
            "tool_parameters_detailed",
            "tools_in_words",
            "system_folded_into_user",
        }


def test_a_tool_without_a_description_stays_as_it_is_where_that_is_fine() -> None:
    assert codes(prompt(QWEN35, [user("Hi")], tool())) == []
    assert codes(prompt(HARMONY, [user("Hi")], tool())) == ["tool_description_added"]


@pytest.mark.parametrize("name", [R1, "deepseek-ai-DeepSeek-V3.1", "tokenizer deepseek_v3"])
def test_tools_that_a_template_never_shows_are_told_in_words(name: str) -> None:
    rendered = prompt(name, once(), TOOLS)
    assert in_order(rendered.text, "You may call these functions", "The weather in a city.", "Weather?", "Paris")
    assert "<tool_call>" not in rendered.text, "it writes calls in its own way"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("LFM2-8B-A1B", '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>'),
        ("LFM2.5-Instruct", '{"name": "weather", "arguments": {"city": "Paris"}}'),
        ("HuggingFaceTB-SmolLM3-3B", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'),
    ],
)
def test_calls_that_a_template_never_shows_are_told_as_its_model_writes_them(name: str, call: str) -> None:
    rendered = prompt(name, once(), TOOLS)
    assert in_order(rendered.text, call, "sunny")
    assert "tool_calls_in_words" in codes(rendered)


@pytest.mark.parametrize("name", [LLAMA, HARMONY, MISTRAL, NEMO, MINIMAX, QWEN35])
def test_an_empty_list_of_calls_is_no_call(name: str) -> None:
    rendered = prompt(name, [user("Hi"), {**said("Hello"), "tool_calls": []}, user("Bye")])
    assert rendered.text == prompt(name, [user("Hi"), said("Hello"), user("Bye")]).text


@pytest.mark.parametrize("name", ["deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "meetkai-functionary-medium-v3.2", LLAMA])
def test_arguments_that_a_client_sends_as_an_object_are_those_of_their_text(name: str) -> None:
    texts = [
        prompt(name, once(arguments=arguments), TOOLS).text for arguments in ('{"city": "Zürich"}', {"city": "Zürich"})
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "tokenizer deepseek_v3"])
@pytest.mark.parametrize("content", [None, "", "I look."])
def test_a_call_is_shown_whatever_stands_beside_it(name: str, content: str | None) -> None:
    rendered = prompt(name, once(content=content), TOOLS)
    assert in_order(rendered.text, content or "", "Paris", "sunny")
    assert ("text_before_calls" in codes(rendered)) == bool(content)
