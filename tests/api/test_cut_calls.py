"""A call that was cut off is never returned as complete, and unreadable arguments are never replaced (F04, F15)."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.core.messages import Accepted, Finished, Generate
from app.core.request import Notice
from tests.api.calls import calling
from tests.api.fakes import USAGE, Site, frames

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "Hi"}]
BODY = {"model": "demo-main", "max_tokens": 9, "messages": USER, "input": "Hi", "stream": False}
WHOLE, HALF = ("look", ['{"city": ', '"Oslo"}']), ("look", ['{"city": "Pa'])


async def whole(site: Site, path: str) -> dict[str, Any]:
    answer = await site.client.post(path, json=BODY)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def events(site: Site, path: str) -> list[dict[str, Any]]:
    text = (await site.client.post(path, json=BODY | {"stream": True})).text
    lines = text.splitlines() if path.startswith("/api") else frames(text)
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_a_whole_chat_leaves_the_cut_call_out(site: Site, reason: str) -> None:
    site.worker.script = calling(WHOLE, HALF, text="I look.", reason=reason, unfinished=1)
    [choice] = (await whole(site, "/v1/chat/completions"))["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (json.loads(call["function"]["arguments"]), choice["finish_reason"]) == ({"city": "Oslo"}, reason)
    site.worker.script = calling(HALF, reason=reason, unfinished=0)
    [choice] = (await whole(site, "/v1/chat/completions"))["choices"]
    assert ("tool_calls" in choice["message"], choice["message"]["content"]) == (False, "")


async def test_a_streamed_chat_says_that_it_was_cut(site: Site) -> None:
    site.worker.script = calling(HALF, reason="length", unfinished=0)
    assert (await events(site, "/v1/chat/completions"))[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_custom_call_that_was_cut_streams_no_more_than_was_written(site: Site) -> None:
    site.worker.script = calling(("patch", ['{"te']), reason="length", unfinished=0)
    tool = {"type": "custom", "custom": {"name": "patch"}}
    text = (await site.chat(tools=[tool], stream=True)).text
    assert '{\\"te' not in text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_message_has_whole_calls_only(site: Site, stream: bool) -> None:
    site.worker.script = calling(WHOLE, HALF, text="I look.", reason="length", unfinished=1)
    if not stream:
        message = await whole(site, "/v1/messages")
        assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
        assert (message["content"][1]["input"], message["stop_reason"]) == ({"city": "Oslo"}, "max_tokens")
        return
    told_of = await events(site, "/v1/messages")
    starts = [event["content_block"] for event in told_of if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["text", "tool_use"]
    parts = [event["delta"].get("partial_json") for event in told_of if event["type"] == "content_block_delta"]
    assert [json.loads(part) for part in parts if part] == [{"city": "Oslo"}]
    assert told_of[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_message_that_was_cut_in_its_only_call_calls_nothing(site: Site, stream: bool) -> None:
    site.worker.script = calling(HALF, reason="length", unfinished=0)
    if stream:
        assert "tool_use" not in json.dumps(await events(site, "/v1/messages"))
    else:
        assert (await whole(site, "/v1/messages"))["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("stream", [True, False])
async def test_ollamas_chat_has_whole_calls_only(site: Site, stream: bool) -> None:
    site.worker.script = calling(WHOLE, HALF, reason="length", unfinished=1)
    lines = await events(site, "/api/chat") if stream else [await whole(site, "/api/chat")]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [{"name": "look", "arguments": {"city": "Oslo"}}]
    assert lines[-1]["done_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_item_that_was_cut_says_incomplete(site: Site, stream: bool) -> None:
    site.worker.script = calling(WHOLE, HALF, reason="length", unfinished=1)
    told_of = await events(site, "/v1/responses") if stream else []
    response = told_of[-1]["response"] if stream else await whole(site, "/v1/responses")
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert (response["status"], response["output"][1]["arguments"]) == ("incomplete", '{"city": "Pa')
    done = [event for event in told_of if event["type"] == "response.function_call_arguments.done"]
    assert [json.loads(event["arguments"]) for event in done] == [{"city": "Oslo"}] * stream
    closed = [event["item"]["status"] for event in told_of if event["type"] == "response.output_item.done"]
    assert closed == ["completed", "incomplete"] * stream


async def test_a_call_that_is_whole_when_the_limit_comes_is_whole(site: Site) -> None:
    site.worker.script = calling(WHOLE, reason="length")
    assert [item["status"] for item in (await whole(site, "/v1/responses"))["output"]] == ["completed"]


async def test_a_text_that_was_cut_says_incomplete(site: Site) -> None:
    site.worker.script = calling(text="I look", reason="length")
    [item] = (await whole(site, "/v1/responses"))["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "I look")


async def test_a_conversation_goes_on_without_the_call_that_was_cut(site: Site) -> None:
    site.worker.script = calling(WHOLE, HALF, reason="length", unfinished=1)
    first = await whole(site, "/v1/responses")
    result = {"type": "function_call_output", "call_id": "call0", "output": "rain"}
    body = {"model": "demo-main", "input": [result], "previous_response_id": first["id"]}
    assert (await site.client.post("/v1/responses", json=body)).status_code == 200
    messages = site.worker.commands[-1].messages or []
    assert [call["id"] for message in messages for call in message.get("tool_calls", ())] == ["call0"]


UNREADABLE = ("look", ['{"city": "Paris",}'])


@pytest.mark.parametrize("arguments", ['{"city": "Paris",}', "5", '"x"', "[1]", '{"x": 1e999}'])
@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_what_is_no_object_is_an_error_and_never_an_empty_one(site: Site, path: str, arguments: str) -> None:
    site.worker.script = calling(("look", [arguments]))
    answer = await site.client.post(path, json=BODY)
    assert answer.status_code == 500
    assert "not a JSON object" in answer.text
    text = json.dumps(await events(site, path))
    assert ("not a JSON object" in text, "tool_use" in text, '"done": true' in text) == (True, False, False)


async def test_a_number_that_a_client_is_given_may_be_sent_back(site: Site) -> None:
    site.worker.script = calling(("look", ['{"n": 123456789012345678901234567890, "m": 18446744073709551615}']))
    answer = await whole(site, "/v1/messages")
    (used,) = (block for block in answer["content"] if block["type"] == "tool_use")
    assert used["input"] == {"n": 123456789012345678901234567890.0, "m": 18446744073709551615}
    turns = [{"role": "assistant", "content": [used]}]
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": used["id"], "content": "rain"}]})
    again = BODY | {"messages": [*BODY["messages"], *turns]}
    assert (await site.client.post("/v1/messages", json=again)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_control_characters_in_arguments_are_read(site: Site, path: str) -> None:
    site.worker.script = calling(("look", ['{"city": "a\tb\nc"}']))
    text = json.dumps(await whole(site, path))
    assert "a\\tb\\nc" in text


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_a_call_without_arguments_has_none(site: Site, path: str) -> None:
    for pieces in ([], ["{}"]):
        site.worker.script = calling(("look", pieces))
        assert '": {}' in json.dumps(await whole(site, path))


async def test_what_one_of_several_choices_lacks_is_told(site: Site) -> None:
    cut = Notice(code="unfinished_call", message="A call was cut.")

    async def script(command: Generate) -> AsyncIterator[Accepted | Finished]:
        yield Accepted(id=command.id, prompt_tokens=5)
        for index, notices in enumerate([(), (cut,), (cut,)]):
            yield Finished(id=command.id, index=index, finish_reason="stop", usage=USAGE, notices=notices)

    site.worker.script = script
    warnings = (await site.chat(n=3)).json()["warnings"]
    assert [warning["code"] for warning in warnings] == ["unfinished_call"]
