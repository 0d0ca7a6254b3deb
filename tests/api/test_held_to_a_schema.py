"""Parts of a schema that cannot be enforced: refused with tool and place, or left to the model with a warning."""

import json
from itertools import product
from typing import Any

import pytest

from tests.scripted.server import ScriptedServer
from tests.scripted.surfaces import ask

ZOD_EMAIL = "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"
CALL = '<tool_call>\n{"name": "send_email", "arguments": {"to": "a@b.org"}}\n</tool_call>'


def tool(to: Any, *, strict: bool = False, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"subject": {"type": "string"}, "to": to}, "required": ["to"], **more}
    return {"type": "function", "function": {"name": "send_email", "parameters": parameters, "strict": strict}}


def refusal(scripted: ScriptedServer, **fields: Any) -> dict[str, Any]:
    body = {"model": scripted.model(), "messages": [{"role": "user", "content": "Call it."}], **fields}
    answer = scripted.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == "unsupported_grammar"
    return error


UNENFORCEABLE = {
    "lookaround": (
        {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
        "/properties/to/pattern",
        "look-around",
    ),
    "no expression": ({"type": "string", "pattern": "(["}, "/properties/to/pattern", "unclosed character class"),
    "inside others": (
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "string", "pattern": "(?<=a)b"}}]},
        "/properties/to/anyOf/1/items/pattern",
        "look-around",
    ),
    "a name's": (
        {"type": "object", "patternProperties": {"^(?!x)": {}}},
        "/properties/to/patternProperties/^(?!x)",
        "look-around",
    ),
    "remote": ({"$ref": "https://example.org/schema.json"}, "/properties/to", "https://example.org/schema.json"),
    "nowhere": ({"$ref": "#/$defs/missing"}, "/properties/to", "/$defs/missing"),
}


@pytest.mark.parametrize("kind", UNENFORCEABLE)
def test_what_cannot_be_enforced_is_named_with_its_tool_and_its_place(scripted: ScriptedServer, kind: str) -> None:
    to, pointer, reason = UNENFORCEABLE[kind]
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    error = refusal(scripted, tools=[other, tool(to, strict=True)], tool_choice="required")
    assert error["param"] == "tools"
    assert f'the parameters of "send_email" at {pointer}: ' in error["message"]
    assert reason in error["message"]
    schema = tool(to)["function"]["parameters"]
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = refusal(scripted, response_format=wanted)
    assert error["param"] == "response_format"
    assert f"response_format cannot be enforced: {pointer}: " in error["message"]


WORDS = ["".join(letters) for letters in product("abcdefghij", repeat=4)][:4500]
NO_ANSWER = {
    "a schema that is itself": {"$ref": "#"},
    "a circle of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a schema that is itself in other words": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
}


@pytest.mark.parametrize("kind", NO_ANSWER)
def test_a_schema_that_lets_no_answer_begin_is_refused_before_anything_starts(
    scripted: ScriptedServer, kind: str
) -> None:
    error = refusal(scripted, structured_outputs={"json": NO_ANSWER[kind]})
    assert "cannot be enforced: " in error["message"]


def test_thousands_of_choices_are_a_choice(scripted: ScriptedServer) -> None:
    prompt, asked = f"Choose. {scripted.play(WORDS[-1])}", {"structured_outputs": {"choice": WORDS}}
    assert ask(scripted.client, "chat", scripted.model(), prompt, **asked).text == WORDS[-1]


def test_a_pattern_that_others_refer_to_is_named_where_it_stands(scripted: ScriptedServer) -> None:
    shared = {"$defs": {"mail": {"type": "string", "pattern": ZOD_EMAIL}}}
    error = refusal(scripted, tools=[tool({"$ref": "#/$defs/mail"}, strict=True, **shared)], tool_choice="required")
    assert '"send_email" at /$defs/mail/pattern: ' in error["message"]


@pytest.mark.parametrize("surface", ["chat", "messages"])
@pytest.mark.parametrize("kind", ["lookaround", "no expression", "inside others"])
def test_a_tool_that_is_not_strict_is_called_without_the_pattern_and_a_warning_says_so(
    scripted: ScriptedServer, kind: str, surface: str
) -> None:
    required: dict[str, Any] = {"chat": {"tool_choice": "required"}, "messages": {"tool_choice": {"type": "any"}}}
    to, pointer, _ = UNENFORCEABLE[kind]
    prompt = f"Call it. {scripted.play(CALL)}"
    said = ask(scripted.client, surface, scripted.model(), prompt, [tool(to)], **required[surface])
    assert said.objects == [("send_email", {"to": "a@b.org"})]
    assert said.warnings == ["pattern_not_enforced"]
    body = {"model": scripted.model(), "messages": [{"role": "user", "content": prompt}], "tools": [tool(to)]}
    answer = scripted.client.post("/v1/chat/completions", json=body | {"tool_choice": "required"}).json()
    assert f'"send_email" at {pointer}: ' in json.dumps(answer["warnings"]).replace('\\"', '"')


def test_without_a_demand_nothing_is_enforced_and_nothing_warned_of(scripted: ScriptedServer) -> None:
    to, _, _ = UNENFORCEABLE["lookaround"]
    said = ask(scripted.client, "chat", scripted.model(), f"Call it. {scripted.play(CALL)}", [tool(to)])
    assert (said.objects, said.warnings) == ([("send_email", {"to": "a@b.org"})], [])


def test_patterns_of_names_that_no_one_can_keep_apart_are_refused_with_their_place(scripted: ScriptedServer) -> None:
    to = {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "z$": {"type": "string"}}}
    error = refusal(scripted, tools=[tool(to)], tool_choice="required")
    assert '"send_email" at /properties/to: ' in error["message"]
    assert "/^a/ and /z$/" in error["message"]
