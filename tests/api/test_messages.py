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
