"""OpenAI's Python client, which most programs use, against a real server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from app.core.errors import ModelUnavailable, PacelineError, QueueFull, WorkerGone, context_overflow
from app.core.messages import Accepted, Delta, Finished, Generate
from tests.api.fakes import Site, failing, make_site, say_hello, served

pytestmark = pytest.mark.anyio
HASTE = openai.Timeout(60, read=2)
"""Timeouts of an impatient client: 2 s without data, enough for a request to arrive even on a busy machine."""


async def test_the_official_client() -> None:
    site: Site = make_site(api_key="sk-test")
    async with served(site) as (port, _):
        base = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="sk-test", max_retries=0) as client:
            await check_models(client)
            await check_chat(client)
            await check_completions(client)
            await check_responses(client, site)
            await check_errors(client, site)
        async with openai.AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def check_models(client: openai.AsyncOpenAI) -> None:
    assert "demo-main" in [model.id async for model in client.models.list()]
    assert (await client.models.retrieve("org/other")).id == "org/other"


async def check_responses(client: openai.AsyncOpenAI, site: Site) -> None:
    counted = await client.responses.input_tokens.count(model="demo-main", input="Hi", instructions="Be brief.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 3)
    first = await client.responses.create(model="demo-main", input="Hi")
    again = await client.responses.create(model="demo-main", previous_response_id=first.id)
    assert again.output_text == "Hello, world"
    said = [message["content"] for message in site.worker.commands[-1].messages or ()]
    assert said == ["Hi", "Hello, world"]
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="demo-main")


async def check_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo-main",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
        extra_body={"speculation": {"method": "auto"}, "draft_model": "demo-draft"},
    )
    text, reasons, usage = "", [], None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
        usage = chunk.usage or usage
    assert text == "Hello, world"
    assert [reason for reason in reasons if reason] == ["stop"]
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 2
    whole = await client.chat.completions.create(model="demo-main", messages=[{"role": "user", "content": "Hi"}], n=2)
    assert [choice.message.content for choice in whole.choices] == ["Hello, world"] * 2
    assert whole.usage is not None
    assert whole.usage.total_tokens == 11


async def check_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="demo-main", prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello, world"] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 5, 7]


async def check_errors(client: openai.AsyncOpenAI, site: Site) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-nothing", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="demo-main", messages=messages, temperature=9)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="text only"):
        await client.chat.completions.create(model="demo-main", messages=[{"role": "user", "content": [picture]}])
    site.worker.script = failing(context_overflow(9000, 4096))
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.chat.completions.create(model="demo-main", messages=messages)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
    site.worker.script = failing(QueueFull("full", retry_after_seconds=1))
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="demo-main", messages=messages, stream=True)
    site.worker.script = failing(WorkerGone("the worker ended"), after_tokens=True)
    stream = await client.chat.completions.create(model="demo-main", messages=messages, stream=True)
    with pytest.raises(openai.APIError, match="the worker ended"):
        async for _ in stream:
            pass


ASKED: Any = {"model": "demo-main", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("error", "status"),
    [(PacelineError("it broke"), 500), (ModelUnavailable("broken"), 503), (WorkerGone("the worker ended"), 503)],
)
async def test_what_goes_wrong_in_the_server_is_an_internal_server_error(error: PacelineError, status: int) -> None:
    site = make_site()
    site.worker.script = failing(error)
    async with served(site) as (port, _), openai.AsyncOpenAI(**at(port)) as client:
        with pytest.raises(openai.InternalServerError, match=error.message) as raised:
            await client.chat.completions.create(**ASKED)
    assert (raised.value.status_code, raised.value.code, raised.value.type) == (status, error.code, "server_error")


async def test_what_other_web_pages_ask_is_a_permission_denied_error() -> None:
    elsewhere = {"default_headers": {"Origin": "https://elsewhere.example"}}
    async with served(make_site()) as (port, _), openai.AsyncOpenAI(**at(port), **elsewhere) as client:
        with pytest.raises(openai.PermissionDeniedError) as raised:
            await client.chat.completions.create(**ASKED)
    assert (raised.value.code, raised.value.type) == ("cross_origin", "permission_error")


async def test_a_client_that_waits_no_longer_has_a_timeout_error_and_its_row_is_free() -> None:
    site = make_site()

    async def silent(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        yield Accepted(id=command.id, prompt_tokens=5)
        await asyncio.Event().wait()

    site.worker.script = silent
    async with served(site) as (port, _), openai.AsyncOpenAI(**at(port), timeout=HASTE) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**ASKED)
        await site.worker.wait_cancelled()
    assert len(site.worker.commands) == 1


async def test_where_nobody_listens_is_a_connection_error() -> None:
    async with served(make_site()) as (port, _):
        pass
    async with openai.AsyncOpenAI(**at(port)) as client:
        with pytest.raises(openai.APIConnectionError):
            await client.chat.completions.create(**ASKED)


@pytest.mark.parametrize(
    ("error", "waits"),
    [(QueueFull("full", retry_after_seconds=3), [3.0]), (WorkerGone("gone", retry_after_seconds=2), [2.0])],
)
async def test_the_client_asks_again_after_as_long_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch, error: PacelineError, waits: list[float]
) -> None:
    site, pauses = make_site(), list[float]()

    async def pause(client: Any, *, retries_taken: int, max_retries: int, options: Any, response: Any) -> None:
        pauses.append(client._calculate_retry_timeout(max_retries - retries_taken, options, response.headers))
        site.worker.script = say_hello

    monkeypatch.setattr(openai.AsyncOpenAI, "_sleep_for_retry", pause)
    site.worker.script = failing(error)
    async with served(site) as (port, _), openai.AsyncOpenAI(**at(port) | {"max_retries": 2}) as client:
        answer = await client.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content == "Hello, world"
    assert (pauses, len(site.worker.commands)) == (waits, 2)


async def test_what_the_client_did_wrong_is_not_asked_again() -> None:
    site = make_site()
    site.worker.script = failing(context_overflow(9000, 4096))
    async with served(site) as (port, _), openai.AsyncOpenAI(**at(port) | {"max_retries": 2}) as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**ASKED)
    assert len(site.worker.commands) == 1


def at(port: int) -> dict[str, Any]:
    """Return the arguments of a client of that port that never retries."""
    return {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "none", "max_retries": 0}
