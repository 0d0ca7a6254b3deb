"""Thinking efforts and tools that clients ask for, end to end, with templates of published models (F11, F18)."""

import json
from typing import Any

import pytest

from tests.scripted.server import ScriptedServer
from tests.scripted.surfaces import SURFACES, ask

EFFORTS: dict[str, Any] = {
    "chat": {"reasoning_effort": "{}"},
    "responses": {"reasoning": {"effort": "{}"}},
    "messages": {"output_config": {"effort": "{}"}},
    "ollama": {"think": "{}"},
}
"""Field of each surface that sets the thinking effort."""
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
MCP = {"type": "namespace", "name": "mcp__files__", "tools": [LOOK]}


def wish(surface: str, effort: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(EFFORTS[surface]).replace("{}", effort))
    return fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("surface", SURFACES)
def test_an_effort_that_a_template_does_not_know_is_told(scripted: ScriptedServer, surface: str, stream: bool) -> None:
    client, model, prompt = scripted.client, scripted.model("openai-gpt-oss-120b"), scripted.play("Hello.")
    known, other = (
        ask(client, surface, model, prompt, stream=stream, **wish(surface, effort)) for effort in ("high", "max")
    )
    assert (known.error, known.warnings) == ("", [])
    assert (other.error, other.warnings) == ("", ["other_effort"])


@pytest.mark.parametrize(
    ("template", "fields", "prompt"),
    [
        ("openai-gpt-oss-120b", {"reasoning": {"effort": "high"}}, "Reasoning: high"),
        ("openai-gpt-oss-120b", {"think": "max"}, "Reasoning: high"),
        ("openai-gpt-oss-120b", {"enable_thinking": False}, "Reasoning: low"),
        ("Qwen3.5-4B", {"reasoning": {"enabled": False}}, "<think>\n\n</think>"),
        ("Qwen3.5-4B", {"think": False}, "<think>\n\n</think>"),
        ("deepseek-ai-DeepSeek-V3.1", {"think": True}, "<｜Assistant｜><think>"),
        ("MiniMax-M3", {"thinking": {"type": "disabled"}}, "</mm:think>"),
    ],
)
def test_a_switch_reaches_the_prompt(
    scripted: ScriptedServer, template: str, fields: dict[str, Any], prompt: str
) -> None:
    body = {"model": scripted.model(template), "messages": [{"role": "user", "content": "Hi"}]} | fields
    answer = scripted.client.post("/apply-template", json=body).json()
    assert prompt in answer["prompt"], answer


@pytest.mark.parametrize("surface", SURFACES)
def test_thinking_that_cannot_be_switched_off_is_told(scripted: ScriptedServer, surface: str) -> None:
    model, prompt = scripted.model("MiniMax-M2"), scripted.play("Hm.</think>Hello.")
    said = ask(scripted.client, surface, model, prompt, enable_thinking=False)
    assert (said.text.strip(), said.warnings) == ("Hello.", ["no_thinking_switch"])


def respond(scripted: ScriptedServer, template: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": scripted.model(template), "input": scripted.play(text), "tools": [PATCH, MCP]} | fields
    answer = scripted.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


PATCHES = {
    "demo": '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n*** End"}}\n</tool_call>',
    "Qwen3-Coder": (
        "<tool_call>\n<function=apply_patch>\n<parameter=input>\n*** Begin\n*** End\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "openai-gpt-oss-120b": (
        '<|channel|>commentary to=functions.apply_patch<|message|>{"input": "*** Begin\\n*** End"}<|call|>'
    ),
}


@pytest.mark.parametrize("template", PATCHES)
def test_codex_is_told_a_patch_as_text(scripted: ScriptedServer, template: str) -> None:
    response = respond(scripted, template, PATCHES[template])
    [call] = [item for item in response["output"] if item["type"] == "custom_tool_call"]
    assert (call["name"], call["input"]) == ("apply_patch", "*** Begin\n*** End")
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    after = respond(scripted, template, "It is done.", input=[
        {"role": "user", "content": "Edit it."}, call, result, {"role": "user", "content": scripted.play("It is done.")}
    ])  # fmt: skip
    assert after["output"][-1]["content"][0]["text"] == "It is done."


def test_a_tool_of_an_mcp_server_is_called_by_its_own_name(scripted: ScriptedServer) -> None:
    response = respond(
        scripted, "demo", '<tool_call>\n{"name": "mcp__files__look", "arguments": {"at": "a"}}\n</tool_call>'
    )
    [call] = response["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("mcp__files__", "look", '{"at": "a"}')
