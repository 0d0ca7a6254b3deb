"""Anthropic's own client against a real server: streams in order, tools, thinking, counting, errors."""

import json
from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from tests.serving.conftest import Server

MODEL = "demo-assistant"
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
COLD: Any = {"temperature": 0}
"""Sampling that is sent as `extra_body`, because this client has no parameter for it any more."""
QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_a_message_whole_and_streamed_with_and_without_drafts(client: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 40,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Count from 1 to 5."}]}],
    }
    texts = set()
    for method in ("off", "auto"):
        extra = COLD | {"speculation": {"method": method}}
        whole = client.messages.create(**asked, extra_body=extra)
        assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
        [block] = whole.content
        assert isinstance(block, anthropic.types.TextBlock)
        texts.add(block.text)
        with client.messages.stream(**asked, extra_body=extra) as stream:
            texts.add("".join(stream.text_stream))
            final = stream.get_final_message()
        assert final.usage.output_tokens == whole.usage.output_tokens
        read = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
        assert read == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert len(texts) == 1


def test_events_come_in_anthropics_order(server: Server) -> None:
    body = {"model": MODEL, "max_tokens": 60, "messages": QUESTION, "tools": TOOLS, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    assert [name for name in names if name != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[1]["content_block"]["type"] == "tool_use"
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called_and_its_result_read(client: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 80, "tools": TOOLS, "extra_body": COLD}
    with client.messages.stream(**asked, messages=QUESTION, tool_choice=choice) as stream:
        called = stream.get_final_message()
    [block] = called.content
    assert isinstance(block, anthropic.types.ToolUseBlock)
    assert (called.stop_reason, block.name, block.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain, 4 degrees"}]}
    turns: Any = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**asked, messages=turns)
    assert "4 degrees" in answer.content[0].text  # type: ignore[union-attr]


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "Count from 1 to 9."}]
    answer = client.messages.create(model=MODEL, max_tokens=60, messages=turns, stop_sequences=["4"], extra_body=COLD)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "4")
    short = client.messages.create(model=MODEL, max_tokens=2, messages=turns, extra_body=COLD)
    assert short.stop_reason == "max_tokens"


def test_thinking_comes_in_blocks_of_its_own(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "What is 7 + 5?"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body=COLD,
    )
    assert [block.type for block in answer.content][-1] == "text"
    assert all(block.type in {"thinking", "text"} for block in answer.content)
    assert all(block.signature for block in answer.content if block.type == "thinking")


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS)
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=QUESTION, tools=TOOLS)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_errors_have_anthropics_shape(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude-nothing", max_tokens=9, messages=QUESTION)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": [picture]}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=MODEL, max_tokens=-1, messages=QUESTION)
