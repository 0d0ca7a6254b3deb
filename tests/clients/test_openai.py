"""OpenAI's own Python client: all its functions for text, with drafts and without."""

import json
import threading
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.conftest import METHODS, MODEL, Both
from tests.serving.conftest import Server

QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
COUNT: Any = [{"role": "user", "content": "Count from 1 to 5."}]
SAMPLED: Any = [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}]


class GetWeather(pydantic.BaseModel):
    """Get the current weather for a city"""

    city: str


class Person(pydantic.BaseModel):
    first_name: str = pydantic.Field(max_length=12)
    age_in_years: int = pydantic.Field(ge=0, le=150)


def client_of(url: str, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", **{"max_retries": 0} | settings)


@pytest.mark.parametrize("sampling", SAMPLED)
def test_a_chat_whole_and_streamed(both: Both[str], sampling: Any) -> None:
    def talk(url: str) -> str:
        client = client_of(url)
        asked = {"model": MODEL, "messages": COUNT, "max_tokens": 40} | sampling
        whole = client.chat.completions.create(**asked).choices[0].message.content
        with client.chat.completions.stream(**asked) as stream:
            assert stream.get_final_completion().choices[0].message.content == whole
        return str(whole)

    assert both(talk)


def test_what_a_schema_asks_for_is_parsed(both: Both[Person]) -> None:
    def talk(url: str) -> Person:
        asked: Any = {"model": MODEL, "messages": COUNT, "temperature": 0, "max_tokens": 80}
        chat = client_of(url).chat.completions.parse(**asked, response_format=Person)
        response = client_of(url).responses.parse(model=MODEL, input="A person.", text_format=Person, temperature=0)
        assert isinstance(response.output_parsed, Person)
        assert chat.choices[0].message.parsed is not None
        return chat.choices[0].message.parsed

    assert both(talk)


@pytest.mark.parametrize("sampling", SAMPLED)
def test_every_drafter_writes_the_schema_that_none_writes(servers: tuple[Server, Server], sampling: Any) -> None:
    drafts, plain = (client_of(server.url).chat.completions for server in servers)
    asked: Any = {"model": MODEL, "messages": COUNT, "max_tokens": 80, "response_format": Person} | sampling
    expected = plain.parse(**asked).choices[0].message.content
    for method in METHODS:
        chosen = {"speculation": {"method": method, "num_draft_tokens": 4}}
        chat = drafts.parse(**asked, extra_body=chosen)
        assert chat.choices[0].message.content == expected
        assert (chat.model_extra or {})["speculation"]["drafted"] > 0, method


def test_a_strict_tool_is_called_and_its_arguments_streamed(both: Both[list[str]]) -> None:
    def talk(url: str) -> list[str]:
        asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 80}
        asked["tools"] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
        events = []
        with client_of(url).chat.completions.stream(**asked) as stream:
            events = [event for event in stream if event.type.startswith("tool_calls")]
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        [call] = final.message.tool_calls or []
        assert call.function.parsed_arguments == GetWeather(city="Oslo")
        assert events[-1].type == "tool_calls.function.arguments.done"
        return [call.function.name, call.function.arguments]

    assert both(talk)


def test_logprobs_add_up_to_the_text(both: Both[list[str]]) -> None:
    def talk(url: str) -> list[str]:
        chat = client_of(url).chat.completions.create(
            model=MODEL, messages=COUNT, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
        )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        content = logprobs.content or []
        assert "".join(token.token for token in content).startswith(str(chat.choices[0].message.content))
        assert all(token.top_logprobs[0].logprob >= token.logprob for token in content)
        legacy = client_of(url).completions.create(model=MODEL, prompt="one two", max_tokens=0, echo=True, logprobs=1)
        legacy_logprobs = legacy.choices[0].logprobs
        assert legacy_logprobs is not None
        assert "".join(legacy_logprobs.tokens or []) == "one two"
        return [token.token for token in content] + [
            f"{logprob:.3f}" for logprob in (legacy_logprobs.token_logprobs or [])[1:]
        ]

    assert both(talk)


def test_completions_take_lists_and_choices(both: Both[list[str]]) -> None:
    def talk(url: str) -> list[str]:
        several = client_of(url).completions.create(
            model=MODEL, prompt=["one two three", "a b c"], n=2, seed=3, temperature=0.8, max_tokens=8
        )
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        return [choice.text for choice in several.choices]

    assert both(talk)


def test_a_response_and_the_next_one(both: Both[list[str]]) -> None:
    def talk(url: str) -> list[str]:
        responses = client_of(url).responses
        asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
        first = responses.create(input="Count from 1 to 5.", **asked)
        with responses.stream(input="Count from 2 to 6.", previous_response_id=first.id, **asked) as stream:
            second = stream.get_final_response()
        assert responses.retrieve(second.id).output_text == second.output_text
        responses.delete(first.id)
        return [first.output_text, second.output_text]

    assert both(talk)


def test_embeddings_are_equal_as_numbers_and_as_base64(both: Both[list[list[str]]]) -> None:
    def talk(url: str) -> list[list[str]]:
        embeddings = client_of(url).embeddings
        packed = embeddings.create(model=MODEL, input=["one", "two"])  # this client asks for base64 by default
        plain = embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
        assert [item.embedding for item in packed.data] == [pytest.approx(item.embedding) for item in plain.data]
        return [[f"{number:.4f}" for number in item.embedding] for item in plain.data]

    assert both(talk)


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (openai.NotFoundError, {"model": "nothing"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 40_000}]}),
    ],
)
def test_errors_are_of_the_clients_own_classes(servers: tuple[Server, Server], error: Any, changes: Any) -> None:
    with pytest.raises(error) as raised:
        client_of(servers[0].url).chat.completions.create(**{"model": MODEL, "messages": COUNT} | changes)
    assert raised.value.code
    assert raised.value.type == "invalid_request_error"


def test_a_stream_that_is_left_frees_its_row(servers: tuple[Server, Server]) -> None:
    server, gate = servers[0], threading.Event()

    def settles(running: int) -> bool:
        return any(server.metric("paceline_requests_running") == running or gate.wait(0.05) for _ in range(1200))

    stream = client_of(server.url).chat.completions.create(
        model=MODEL, messages=COUNT, max_tokens=100_000, stream=True, extra_body={"guided_regex": "[ab]{3000}"}
    )
    next(iter(stream))
    assert settles(1)
    stream.close()
    assert settles(0)


def test_async_clients_share_one_connection(both: Both[list[str]]) -> None:
    import anyio

    async def ask(url: str) -> list[str]:
        texts = [""] * 6
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def chat_once(place: int) -> None:
                chat = await client.chat.completions.create(
                    model=MODEL, messages=COUNT, seed=place, temperature=0.9, max_tokens=16
                )
                texts[place] = json.dumps(chat.choices[0].message.content)

            async with anyio.create_task_group() as group:
                for place in range(6):
                    group.start_soon(chat_once, place)
        return texts

    assert both(lambda url: anyio.run(ask, url))
