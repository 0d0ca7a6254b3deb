"""The official client against a real server: what most programs will use."""

import openai
import pytest

from app.core.errors import QueueFull, WorkerGone, context_overflow
from tests.api.fakes import Site, failing, make_site, served

pytestmark = pytest.mark.anyio


async def test_the_official_client() -> None:
    site: Site = make_site(api_key="sk-test")
    async with served(site) as (port, _):
        base = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="sk-test", max_retries=0) as client:
            await check_models(client)
            await check_chat(client)
            await check_completions(client)
            await check_errors(client, site)
        async with openai.AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def check_models(client: openai.AsyncOpenAI) -> None:
    assert "demo-main" in [each.id async for each in client.models.list()]
    assert (await client.models.retrieve("org/other")).id == "org/other"


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
