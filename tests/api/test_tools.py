"""Tools of every kind: calls of a text tool come back as text, tools that run elsewhere are named (F11, F23)."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.tools import CustomInput, custom_arguments, custom_input
from tests.api.calls import calling
from tests.api.fakes import Site, frames

pytestmark = pytest.mark.anyio

FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/s"}}
USER = [{"role": "user", "content": "Hi"}]


def names(site: Site) -> list[str]:
    """Return the names of the tools that the model sees."""
    return [tool["function"]["name"] for tool in site.worker.commands[-1].tools or ()]


async def test_a_custom_tool_is_a_function_with_one_text_to_the_model(site: Site) -> None:
    tool = {"type": "custom", "custom": PATCH["custom"] | {"format": GRAMMAR}}  # type: ignore[operator]
    assert (await site.chat(tools=[tool, FUNCTION])).status_code == 200
    [shown, other] = site.worker.commands[-1].tools or ()
    assert shown["function"]["parameters"]["required"] == ["input"]
    assert shown["function"]["description"] == "Edits files.\n\nIts input matches this grammar (lark):\nstart: /.+/s"
    assert other == FUNCTION


async def test_a_call_of_it_is_told_with_its_text(site: Site) -> None:
    site.worker.script = calling(("patch", ['{"inp', 'ut": "a\\n', '\\u00e9"}']), ("look", ["{}"]))
    answer = (await site.chat(tools=[PATCH, FUNCTION])).json()
    custom, function = answer["choices"][0]["message"]["tool_calls"]
    assert custom == {"id": "call0", "type": "custom", "custom": {"name": "patch", "input": "a\né"}}
    assert function["function"] == {"name": "look", "arguments": "{}"}


async def test_it_streams_as_text(site: Site) -> None:
    site.worker.script = calling(("patch", ['{"input": "ab', 'c"', "}"]), ("patch", ['{"text": "other"}']))
    chunks = [json.loads(frame) for frame in frames((await site.chat(tools=[PATCH], stream=True)).text)[:-1]]
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    texts = ["".join(piece["custom"]["input"] for piece in pieces if piece["index"] == place) for place in (0, 1)]
    assert texts == ["abc", "other"], "where it wrote another object with one text, that text"
    assert [piece["id"] for piece in pieces if "id" in piece] == ["call0", "call1"]


async def test_calls_of_it_in_the_history_are_those_of_a_function(site: Site) -> None:
    call = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": 'say "x"'}}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "a"},
    ]
    assert (await site.chat(messages=history, tools=[PATCH])).status_code == 200
    [plain] = (site.worker.commands[-1].messages or [])[1]["tool_calls"]
    assert json.loads(plain["function"]["arguments"]) == {"input": 'say "x"'}


ALLOWED: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}}
CHOICES: list[tuple[Any, list[str], str]] = [
    (None, ["patch", "look"], "auto"),
    ({"type": "custom", "custom": {"name": "patch"}}, ["patch", "look"], "function:patch"),
    (ALLOWED, ["look"], "auto"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PATCH]}}, ["patch"], "required"),
    ("none", [], "auto"),
    ("any", ["patch", "look"], "required"),
    ({"type": "any"}, ["patch", "look"], "required"),
    ({"type": "required"}, ["patch", "look"], "required"),
    ({"type": "none"}, [], "auto"),
]


@pytest.mark.parametrize(("choice", "shown", "mode"), CHOICES, ids=[str(case[0])[:60] for case in CHOICES])
async def test_a_choice_is_honoured(site: Site, choice: Any, shown: list[str], mode: str) -> None:
    answer = await site.chat(tools=[PATCH, FUNCTION], tool_choice=choice)
    assert (answer.status_code, answer.json().get("warnings")) == (200, None)
    assert (names(site), site.worker.commands[-1].tool_choice) == (shown, mode)


HOSTED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"type": "web_search"}, "web_search"),
    ("/v1/responses", {"type": "web_search", "external_web_access": True}, "web_search"),
    ("/v1/responses", {"type": "image_generation", "output_format": "png"}, "image_generation"),
    ("/v1/responses", {"type": "mcp", "server_label": "x", "server_url": "http://x"}, "mcp"),
    ("/v1/responses", {"type": "local_shell"}, "local_shell"),
    ("/v1/messages", {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, "web_search_20250305"),
    ("/v1/messages", {"type": "bash_20250124", "name": "bash"}, "bash_20250124"),
    ("/v1/messages", {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}, "text_editor_20250728"),
    ("/v1/messages", {"type": "computer_20250124", "name": "computer", "display_width_px": 1}, "computer_20250124"),
    ("/api/chat", {"type": "web_search"}, "web_search"),
]
OWN: dict[str, dict[str, Any]] = {
    "/v1/responses": {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}},
    "/v1/messages": {"name": "look", "input_schema": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("path", "tool", "kind"), HOSTED, ids=[f"{path} {kind}" for path, _, kind in HOSTED])
async def test_a_tool_that_somebody_else_runs_is_left_out_and_named(
    site: Site, path: str, tool: dict[str, Any], kind: str, alone: bool
) -> None:
    body = {"model": "demo-main", "max_tokens": 9, "stream": False, "messages": USER, "input": "Hi"}
    tools = [tool] if alone else [OWN.get(path, FUNCTION), tool]
    answer = await site.client.post(path, json=body | {"tools": tools})
    assert answer.status_code == 200, answer.text
    assert names(site) == ([] if alone else ["look"])
    [warning] = [entry for entry in answer.json()["warnings"] if entry["parameter"] == "tools"]
    assert (warning["code"], kind in warning["message"]) == ("left_out_tool", True)


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        ("/v1/responses", {"type": "web_search"}),
        ("/v1/responses", "required"),
        ("/v1/messages", {"type": "tool", "name": "web_search"}),
        ("/v1/messages", {"type": "any"}),
    ],
)
async def test_a_call_of_it_cannot_be_demanded_and_that_is_told(site: Site, path: str, choice: Any) -> None:
    tool = {"type": "web_search", "name": "web_search"}
    body = {"model": "demo-main", "max_tokens": 9, "messages": USER, "input": "Hi", "tools": [tool]}
    answer = await site.client.post(path, json=body | {"tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert site.worker.commands[-1].tool_choice == "auto"
    assert "ignored_tool_choice" in [warning["code"] for warning in answer.json()["warnings"]]


TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("choice", "is_right"),
    [
        (None, True),
        ("auto", True),
        ("any", True),
        ({"type": "auto"}, True),
        (7, False),
        ("allowed_tools", False),
        ({"type": "function", "function": {"name": "look"}}, True),
        ({"type": "function"}, False),
        ({"type": "custom", "custom": {"name": "patch"}}, True),
        ({"type": "custom", "custom": {"name": 7}}, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": None, "tools": TOOLS}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": TOOLS}}, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "", "tools": TOOLS}}, False),
        ({"type": "allowed_tools"}, False),
        ({"type": "web_search"}, True),
        ({"type": 7}, False),
        ({}, False),
    ],
)
async def test_what_may_be_chosen_is_what_the_document_says(site: Site, choice: Any, is_right: bool) -> None:
    document = (await site.client.get("/openapi.json")).json()
    described = document["components"]["schemas"]["ChatBody"]["properties"]["tool_choice"]
    assert jsonschema.Draft202012Validator(described).is_valid(choice) == is_right
    answer = await site.chat(tools=[FUNCTION, PATCH], tool_choice=choice)
    assert answer.status_code == (200 if is_right else 400), answer.text


async def test_a_tool_of_anthropics_that_a_client_describes_needs_its_schema(site: Site) -> None:
    for tool in ({"name": "f"}, {"type": "custom", "name": "f"}, {"input_schema": {}}):
        body = {"model": "demo-main", "max_tokens": 9, "messages": USER, "tools": [tool]}
        assert (await site.client.post("/v1/messages", json=body)).status_code == 400


async def test_only_a_schema_that_is_enforced_must_be_small(site: Site) -> None:
    large = {"type": "object", "description": "x" * 70_000}
    function: dict[str, Any] = {"name": "large", "parameters": large}
    tool = {"type": "function", "function": function}
    by_name = {"type": "function", "function": {"name": "look"}}
    strict = {"type": "function", "function": function | {"strict": True}}
    for fields in ({}, {"tool_choice": by_name}, {"tool_choice": "none", "response_format": {"type": "json_object"}}):
        answer = await site.chat(tools=[tool, FUNCTION], **fields)
        assert answer.status_code == 200, answer.text
    for refused in ({"tools": [tool], "tool_choice": "required"}, {"tools": [strict]}):
        answer = await site.chat(**refused)
        assert (answer.status_code, "parameters of large" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
async def test_hundreds_of_tools_are_taken(site: Site, path: str) -> None:
    own = OWN.get(path, FUNCTION)
    tools = [json.loads(json.dumps(own).replace("look", f"look_{number}")) for number in range(400)]
    body = {"model": "demo-main", "max_tokens": 9, "stream": False, "messages": USER, "input": "Hi", "tools": tools}
    assert (await site.client.post(path, json=body)).status_code == 200
    assert len(names(site)) == 400


async def test_two_calls_of_one_id_are_both_shown_to_an_ollama_model(site: Site) -> None:
    calls = [{"id": "x", "function": {"name": "look", "arguments": {"city": city}}} for city in ("Oslo", "Paris")]
    history = [*USER, {"role": "assistant", "content": "", "tool_calls": calls}, *USER]
    body = {"model": "demo-main", "options": {"num_predict": 9}, "stream": False, "messages": history}
    assert (await site.client.post("/api/chat", json=body)).status_code == 200
    shown = (site.worker.commands[-1].messages or [])[1]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["city"] for call in shown] == ["Oslo", "Paris"]


@given(st.text(), st.lists(st.integers(1, 9), max_size=30), st.booleans())
async def test_the_text_of_a_call_comes_out_however_it_is_cut(text: str, cuts: list[int], ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}) if ascii_only else custom_arguments(text)
    stream, rest, streamed = CustomInput(), arguments, ""
    for size in cuts:
        streamed += stream.feed(rest[:size])
        rest = rest[size:]
        assert text.startswith(streamed)
    streamed += stream.feed(rest)
    assert streamed + stream.finish() == text == custom_input(arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", ""),
        ("", ""),
        ("not json", "not json"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
    ],
)
async def test_what_is_no_text_is_told_as_it_was_written(arguments: str, text: str) -> None:
    stream = CustomInput()
    assert stream.feed(arguments) + stream.finish() == custom_input(arguments) == text
