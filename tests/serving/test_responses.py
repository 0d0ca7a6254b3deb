"""OpenAI's Responses API through its own client: events in order, tools, schemas, and conversations that are kept."""

from typing import Any

import openai
import pydantic
import pytest

from tests.serving.conftest import Server

MODEL = "demo-assistant"
TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]


class Person(pydantic.BaseModel):
    first_name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_response_whole_and_streamed_with_and_without_drafts(client: openai.OpenAI) -> None:
    texts = set()
    for method in ("off", "auto"):
        asked: Any = {
            "model": MODEL,
            "input": "Count from 1 to 5.",
            "instructions": "Be brief.",
            "temperature": 0,
            "max_output_tokens": 40,
            "extra_body": {"speculation": {"method": method}},
        }
        whole = client.responses.create(**asked)
        assert (whole.object, whole.status) == ("response", "completed")
        assert whole.usage is not None
        assert whole.usage.output_tokens > 0
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events if not event.type.endswith("delta")] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        texts |= {whole.output_text, final.output_text}
    assert len(texts) == 1


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "get_weather"}])
def test_a_tool_is_called_and_the_conversation_goes_on(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_output_tokens": 80}
    with client.responses.stream(**asked, input="What is the weather in Oslo?", tool_choice=choice) as stream:
        called = stream.get_final_response()
    [call] = called.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Oslo"}')
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain, 4 degrees"}]
    after = client.responses.create(**asked, previous_response_id=called.id, input=result)
    assert "4 degrees" in after.output_text
    question: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is the weather in Oslo?"}]}]
    stateless = client.responses.create(**asked, input=[*question, call.model_dump(), *result], store=False)
    assert stateless.output_text == after.output_text


def test_a_schema_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="Describe a person.", text_format=Person, temperature=0)
    assert isinstance(parsed.output_parsed, Person)


def test_what_is_kept_can_be_read_and_forgotten(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello", max_output_tokens=3, temperature=0)
    assert (made.status, made.incomplete_details and made.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as refused:  # VS Code sends the whole conversation at this code
        client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    unkept = client.responses.create(model=MODEL, input="Hello", max_output_tokens=3, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_what_cannot_be_read_is_refused_by_name(client: openai.OpenAI) -> None:
    picture: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]
    with pytest.raises(openai.BadRequestError, match="text only"):
        client.responses.create(model=MODEL, input=picture)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(model=MODEL, input="x", background=True)
    with pytest.raises(openai.BadRequestError, match="items of type computer_call are left out"):
        client.responses.create(model=MODEL, input=[{"type": "computer_call"}])  # type: ignore[list-item]


def test_a_custom_tool_is_called_with_its_text(client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "shout", "description": "Says one short word."}
    asked: Any = {"model": MODEL, "tools": [tool], "input": "Say hello.", "temperature": 0, "max_output_tokens": 200}
    with client.responses.stream(**asked, tool_choice={"type": "custom", "name": "shout"}) as stream:
        events = list(stream)
        called = stream.get_final_response()
    [call] = called.output
    assert (call.type, call.status) == ("custom_tool_call", "completed")  # type: ignore[union-attr]
    assert call.name == "shout"
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(event.delta for event in deltas) == call.input
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "said"}
    assert client.responses.create(**asked | {"input": [result]}, previous_response_id=called.id).output


def test_what_is_ignored_is_told_to_its_client(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hi", top_logprobs=3, truncation="auto", max_output_tokens=3)
    assert [warning["parameter"] for warning in response.model_dump()["warnings"]] == ["top_logprobs", "truncation"]
