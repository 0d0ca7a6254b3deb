"""Anthropic's messages as clients other than Claude Code send them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.api.messages import CountBody
from app.core.messages import Accepted, Delta, Finished, Generate, ToolCallDelta
from tests.api.fakes import USAGE, Site, frames

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields: Any) -> dict[str, Any]:
    return CountBody.model_validate({"messages": [{"role": "user", "content": "Hi"}]} | fields).as_chat()


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_holds_by_its_name_and_by_that_of_the_beta(field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    asked = chat(**{field: {"format": form} if field == "output_config" else form})
    assert asked["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("", "Error"),
        ([], "Error"),
        ("no such file", "Error: no such file"),
        (
            [{"type": "text", "text": "<tool_use_error>no such file</tool_use_error>"}],
            "<tool_use_error>no such file</tool_use_error>",
        ),
    ],
)
def test_a_model_reads_that_a_tool_failed(content: Any, read: str) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": content}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert chat(messages=turns)["messages"][-1]["content"] == read
    succeeded = [turns[0], {"role": "user", "content": [result | {"is_error": False, "content": "done"}]}]
    assert chat(messages=succeeded)["messages"][-1]["content"] == "done"


async def stopped_behind_a_call(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
    yield Accepted(id=command.id, prompt_tokens=5)
    call = ToolCallDelta(index=0, id="t1", name="f", arguments="{}")
    yield Delta(id=command.id, index=0, text="", tokens=1, tool_calls=(call,))
    yield Finished(id=command.id, index=0, finish_reason="tool_calls", stop="END", usage=USAGE)


@pytest.mark.anyio
async def test_a_call_is_to_be_run_even_if_a_stop_string_follows_it(site: Site) -> None:
    site.worker.script = stopped_behind_a_call
    body = {"model": "demo-main", "max_tokens": 9, "stop_sequences": ["END"]}
    body |= {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "f", "input_schema": {}}]}
    assert (await site.client.post("/v1/messages", json=body)).json()["stop_reason"] == "tool_use"
    text = (await site.client.post("/v1/messages", json=body | {"stream": True})).text
    events = [event for event in map(json.loads, frames(text)) if event["type"] == "message_delta"]
    assert events[-1]["delta"]["stop_reason"] == "tool_use"


def definition(name: str) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "input_schema": SCHEMA}


def addition(name: str) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition(name)}}


def reference(change: str, name: str) -> dict[str, Any]:
    return {"type": change, "tool": {"type": "tool_reference", "name": name}}


TOOL_CHANGES: list[tuple[list[dict[str, Any]], list[str]]] = [
    ([addition("b")], ["a", "b"]),
    ([reference("tool_removal", "a")], []),
    ([addition("b"), reference("tool_removal", "a")], ["b"]),
    ([reference("tool_removal", "a"), reference("tool_addition", "a")], ["a"]),
    ([addition("b"), reference("tool_removal", "b"), reference("tool_addition", "b")], ["a", "b"]),
    ([reference("tool_addition", "a"), reference("tool_addition", "nobody's")], ["a"]),
    ([{"type": "compaction", "content": "So far.", "tool_changes": [addition("b")]}], ["a", "b"]),
]


@pytest.mark.parametrize(("changes", "offered"), TOOL_CHANGES, ids=[str(offered) for _, offered in TOOL_CHANGES])
@pytest.mark.anyio
async def test_tools_come_and_go_in_the_middle_of_a_conversation(
    site: Site, changes: list[dict[str, Any]], offered: list[str]
) -> None:
    turns = [{"role": "user", "content": "Hi"}, *({"role": "system", "content": [change]} for change in changes)]
    body = {"model": "demo-main", "max_tokens": 9, "messages": turns, "tools": [definition("a")]}
    answer = await site.client.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json().get("warnings")) == (200, None)
    assert [tool["function"]["name"] for tool in site.worker.commands[-1].tools or ()] == offered
    assert [message["content"] for message in site.worker.commands[-1].messages or ()] in (["Hi"], ["Hi", "So far."])


def test_a_tool_that_is_defined_again_replaces_the_first() -> None:
    again = {"type": "tool_definition", "definition": definition("a") | {"description": "Newer."}}
    turn = {"role": "system", "content": [{"type": "tool_addition", "tool": again}]}
    [tool] = chat(messages=[turn], tools=[definition("a")])["tools"]
    assert tool["function"]["description"] == "Newer."


@pytest.mark.anyio
async def test_a_tool_of_an_mcp_server_at_anthropic_does_not_come_and_go_here(site: Site) -> None:
    elsewhere = {"type": "mcp_tool_reference", "server_name": "x", "name": "a"}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "tool_removal", "tool": elsewhere}]},
    ]
    body = {"model": "demo-main", "max_tokens": 9, "messages": turns, "tools": [definition("a")]}
    [warning] = (await site.client.post("/v1/messages", json=body)).json()["warnings"]
    assert (warning["code"], "tool_removal" in warning["message"]) == ("left_out_block", True)
    assert len(site.worker.commands[-1].tools or ()) == 1


@pytest.mark.parametrize("text", ["Summary: the file is a.py", None])
@pytest.mark.anyio
async def test_the_summary_of_a_compacted_conversation_is_read(site: Site, text: str | None) -> None:
    turns = [
        {"role": "assistant", "content": [{"type": "compaction", "content": text}]},
        {"role": "user", "content": "Go on"},
    ]
    answer = await site.client.post("/v1/messages", json={"model": "demo-main", "max_tokens": 9, "messages": turns})
    assert (answer.status_code, answer.json().get("warnings")) == (200, None)
    contents = [message["content"] for message in site.worker.commands[-1].messages or ()]
    assert contents == [*filter(None, [text]), "Go on"]


EFFORT = {"role": "system", "output_config": {"effort": "low"}}


def test_a_system_turn_sets_the_effort_from_there_on() -> None:
    turns = [{"role": "user", "content": "Hi"}, EFFORT, {"role": "system", "output_config": {"effort": "high"}}]
    asked = chat(messages=turns, output_config={"effort": "medium"})
    assert (asked["reasoning_effort"], len(asked["messages"])) == ("high", 1)


def test_a_system_turn_for_one_question_is_gone_at_the_next() -> None:
    short = {"role": "system", "content": "Only now.", "clear_at": "next_user_message"}
    kept = {"role": "system", "content": "Always.", "clear_at": "never"}
    turns = [{"role": "user", "content": "One"}, short, kept, {"role": "assistant", "content": "1"}]
    contents = [[message["content"] for message in chat(messages=sent)["messages"]]
                for sent in (turns, [*turns, {"role": "user", "content": "Two"}])]  # fmt: skip
    assert contents == [["One", "Only now.", "Always.", "1"], ["One", "Always.", "1", "Two"]]


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.anyio
async def test_a_turn_of_nothing_is_refused(site: Site, role: str) -> None:
    body = {"model": "demo-main", "max_tokens": 9, "messages": [{"role": role, "text": "Hi"}]}
    answer = await site.client.post("/v1/messages", json=body)
    assert (answer.status_code, "messages.0" in answer.text) == (400, True)


def test_arguments_that_were_cut_off_are_told_as_they_were_written() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": '{"a": 1'}
    [message] = chat(messages=[{"role": "assistant", "content": [call]}])["messages"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1'


def test_a_model_reads_examples_of_a_tools_input() -> None:
    [tool] = chat(tools=[definition("a") | {"input_examples": [{"a": 1}, {"a": 2}]}])["tools"]
    assert tool["function"]["description"] == 'Does a.\n\nExamples of its input:\n{"a": 1}\n{"a": 2}'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.anyio
async def test_a_prompt_may_be_read_without_an_answer(site: Site, stream: bool) -> None:
    site.worker.script = reading
    body = {"model": "demo-main", "max_tokens": 0, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    answer = await site.client.post("/v1/messages", json=body)
    assert (answer.status_code, site.worker.commands[-1].max_tokens) == (200, 0)
    if stream:
        events = [json.loads(frame) for frame in frames(answer.text)]
        assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
        assert events[1]["delta"]["stop_reason"] == "max_tokens"
    else:
        assert (answer.json()["content"], answer.json()["stop_reason"]) == ([], "max_tokens")


async def reading(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
    yield Accepted(id=command.id, prompt_tokens=5)
    yield Finished(id=command.id, index=0, finish_reason="length", usage=USAGE)


async def thinking(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
    yield Accepted(id=command.id, prompt_tokens=5)
    yield Delta(id=command.id, index=0, text="", reasoning="Hm.", tokens=1)
    yield Delta(id=command.id, index=0, text="Yes.", tokens=1)
    yield Finished(id=command.id, index=0, finish_reason="stop", usage=USAGE)


@pytest.mark.anyio
async def test_thoughts_are_signed_so_that_clients_send_them_back(site: Site) -> None:
    site.worker.script = thinking
    body = {"model": "demo-main", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    whole = (await site.client.post("/v1/messages", json=body)).json()["content"]
    assert (whole[0]["thinking"], bool(whole[0]["signature"])) == ("Hm.", True)
    text = (await site.client.post("/v1/messages", json=body | {"stream": True})).text
    events = [event for event in map(json.loads, frames(text)) if event.get("index") == 0]
    assert [event["delta"]["type"] for event in events[1:-1]] == ["thinking_delta", "signature_delta"]
    assert events[-2]["delta"]["signature"] == whole[0]["signature"]
    assert events[-1]["type"] == "content_block_stop"
