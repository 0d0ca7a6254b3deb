"""The answer continues a last message of the assistant, whichever field a client asks for that with (F13)."""

from typing import Any

import pytest

from tests.api.fakes import Site

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "What is it?"}
BEGUN = {"role": "assistant", "content": "The answer is ("}
CALLED = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


async def asked(site: Site, path: str, **fields: Any) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether the worker must continue the last message, and all messages that it got."""
    body = {"model": "demo-main", "max_tokens": 9} | fields
    answer = await site.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    command = site.worker.commands[-1]
    return command.continues, command.messages or []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_a_last_message_of_the_assistant_is_continued(site: Site, path: str) -> None:
    continues, messages = await asked(site, path, messages=[USER, BEGUN])
    assert (continues, messages) == (True, [USER, BEGUN])
    assert (await asked(site, path, messages=[USER]))[0] is False


async def test_a_response_goes_on_with_the_last_item_too(site: Site) -> None:
    assert (await asked(site, "/v1/responses", input=[USER, BEGUN]))[0] is True
    assert (await asked(site, "/v1/responses", input=[USER, BEGUN], add_generation_prompt=True))[0] is False


@pytest.mark.parametrize(
    ("fields", "last", "continues"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, {}, True),
        ({"continue_final_message": True}, {}, True),
        ({}, {"prefix": True}, True),
        ({}, {"partial": True}, True),
        ({}, {"prefix": False}, True),
        ({"add_generation_prompt": True}, {"prefix": True}, True),
        ({"add_generation_prompt": True}, {}, False),
        ({"continue_final_message": False}, {}, False),
        ({"continue_final_message": False, "add_generation_prompt": True}, {}, False),
    ],
)
async def test_each_name_for_it_is_understood(
    site: Site, fields: dict[str, Any], last: dict[str, Any], continues: bool
) -> None:
    messages = [USER, BEGUN | last]
    assert (await asked(site, "/v1/chat/completions", messages=messages, **fields))[0] is continues


async def test_a_message_that_calls_a_tool_is_closed(site: Site) -> None:
    assert (await asked(site, "/v1/chat/completions", messages=[USER, CALLED]))[0] is False
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [USER, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, used]}]
    assert (await asked(site, "/v1/messages", messages=turns))[0] is False
    refused = await site.chat(messages=[USER, CALLED], continue_final_message=True)
    assert refused.status_code == 400
    assert "continue_final_message" in refused.json()["error"]["message"]


@pytest.mark.parametrize("empty", ["", None])
async def test_an_empty_last_message_is_where_the_answer_goes(site: Site, empty: str | None) -> None:
    tools = {"tool_calls": []} if empty is None else {}
    messages = [USER, {"role": "assistant", "content": empty or ""} | tools]
    assert await asked(site, "/v1/chat/completions", messages=messages) == (False, [USER])


async def test_two_messages_of_the_assistant_in_a_row_are_no_mistake(site: Site) -> None:
    messages = [USER, {"role": "assistant", "content": "First."}, BEGUN]
    assert await asked(site, "/v1/chat/completions", messages=messages) == (True, messages)


async def test_a_prompt_without_its_end_cannot_be_asked_for_and_that_is_told(site: Site) -> None:
    answer = (await site.chat(add_generation_prompt=False)).json()
    assert [warning["parameter"] for warning in answer["warnings"]] == ["add_generation_prompt"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_a_last_message_that_only_thinks_is_kept_by_either_name(site: Site, name: str) -> None:
    last = {"role": "assistant", "content": "", name: "Hm."}
    _, messages = await asked(site, "/v1/chat/completions", messages=[USER, last])
    assert [message["role"] for message in messages] == ["user", "assistant"]
