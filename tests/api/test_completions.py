"""Legacy completions: prompts of every kind, echo, the old shape of log probabilities."""

import json
from collections.abc import AsyncIterator

import pytest

from app.core.errors import InvalidRequest
from app.core.messages import Accepted, Delta, Finished, Generate, TokenText
from tests.api.fakes import USAGE, Site, frames, make_site, token

pytestmark = pytest.mark.anyio


async def test_whole_answer(site: Site) -> None:
    answer = (await site.complete(seed=3)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["total_tokens"] == 8
    assert (answer["seed"], answer["speculation"]["method"], answer["timings"]["draft_n"]) == (3, "draft_model", 4)


async def test_stream_is_the_whole_answer_in_pieces(site: Site) -> None:
    response = await site.complete(stream=True, stream_options={"include_usage": True})
    *payloads, done = frames(response.text)
    assert done == "[DONE]"
    *chunks, usage = [json.loads(payload) for payload in payloads]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in (*chunks, usage)}) == 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert chunks[1]["choices"][0]["accepted_spans"] == [[0, 7]]
    assert chunks[-1]["timings"]["draft_rounds"] == 2
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 8)


@pytest.mark.parametrize(
    ("prompt", "texts", "tokens"),
    [
        ("Once", ["Once"], [None]),
        (["Once", "Twice"], ["Once", "Twice"], [None, None]),
        ([1, 2, 3], [None], [[1, 2, 3]]),
        ([[1, 2], [3]], [None, None], [[1, 2], [3]]),
    ],
)
async def test_prompts(site: Site, prompt: object, texts: list[object], tokens: list[object]) -> None:
    response = await site.complete(prompt=prompt, n=2)
    assert response.status_code == 200
    assert [command.text for command in site.worker.commands] == texts
    assert [command.tokens for command in site.worker.commands] == tokens
    assert len({command.id for command in site.worker.commands}) == len(texts)
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
    assert answer["usage"]["prompt_tokens"] == 5 * len(texts)
    assert answer["usage"]["completion_tokens"] == 3 * 2 * len(texts)


async def test_defaults_and_echo(site: Site) -> None:
    await site.complete()
    await site.complete(echo=True, max_tokens=1, best_of=2, n=2)
    first, second = site.worker.commands
    assert (first.max_tokens, first.echo, first.n) == (16, False, 1)
    assert (second.max_tokens, second.echo, second.n) == (1, True, 2)


async def test_logprobs_in_the_old_shape(site: Site) -> None:
    whole = (await site.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["Hello", ", ", "world"]
    assert whole["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert whole["top_logprobs"][0] == {"t0": -0.5, "t1": -1.5}
    assert whole["text_offset"] == [0, 5, 7]
    response = await site.complete(logprobs=0, stream=True)
    chunks = [json.loads(payload) for payload in frames(response.text)[:-1]]
    offsets = [offset for chunk in chunks for offset in (chunk["choices"][0]["logprobs"] or {}).get("text_offset", [])]
    assert offsets == [0, 5, 7]


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_bad_prompt_refuses_all_and_cancels_the_others(site: Site, streamed: bool) -> None:
    async def script(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        if command.tokens == [999_999]:
            raise InvalidRequest("token 999999 is not in the vocabulary", parameter="prompt")
        yield Accepted(id=command.id, prompt_tokens=1)
        for _ in range(100_000):
            yield Delta(id=command.id, index=0, text="x", tokens=1)
        yield Finished(id=command.id, index=0, finish_reason="length", usage=USAGE)

    site.worker.script = script
    response = await site.complete(prompt=[[1], [999_999]], stream=streamed)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    await site.worker.wait_cancelled()
    assert len(site.context.activity) == 0


async def test_more_choices_of_a_prompt_than_may_ever_wait_are_refused_for_good() -> None:
    site = make_site(queue_limit=4)
    refused = await site.complete(prompt=["a", "b", "c"], n=5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_choices")
    assert "queue holds 4" in refused.json()["error"]["message"]
    assert site.worker.commands == []
    answered = await site.complete(prompt=["a", "b", "c"], n=4)
    assert len(answered.json()["choices"]) == 12, "they wait in turns"


async def score_prompt(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
    """Score the three tokens of `Once upon a` as the worker does, then generate one unless `max_tokens` is 0."""
    yield Accepted(id=command.id, prompt_tokens=3)
    first = TokenText(token="Once", token_bytes=b"Once", logprob=None)  # type: ignore[arg-type]
    yield Delta(id=command.id, index=0, text="Once upon a", tokens=0, logprobs=(first,))
    scores = (token(" upon", -0.25, [(" upon", -0.25)]), token(" a", -1.5, [(" the", -0.5)]))
    yield Delta(id=command.id, index=0, text="", tokens=0, logprobs=scores)
    if command.max_tokens:
        yield Delta(id=command.id, index=0, text=" time", tokens=1, logprobs=(token(" time", -0.1, [(" time", -0.1)]),))
    yield Finished(id=command.id, index=0, finish_reason="length", usage=USAGE)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("streamed", [False, True])
async def test_the_tokens_of_the_prompt_are_scored_with_echo(site: Site, max_tokens: int, streamed: bool) -> None:
    site.worker.script = score_prompt
    asked = {"prompt": "Once upon a", "echo": True, "logprobs": 1, "max_tokens": max_tokens, "stream": streamed}
    response = await site.complete(**asked)
    if streamed:
        choices = [json.loads(payload)["choices"][0] for payload in frames(response.text)[:-1]]
    else:
        choices = response.json()["choices"]
    logprobs: dict[str, list[object]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    count = 3 + max_tokens
    assert "".join(choice["text"] for choice in choices) == "Once upon a time"[: 16 if max_tokens else 11]
    assert logprobs["tokens"] == ["Once", " upon", " a", " time"][:count]
    assert logprobs["token_logprobs"] == [None, -0.25, -1.5, -0.1][:count]
    assert logprobs["top_logprobs"] == [None, {" upon": -0.25}, {" the": -0.5}, {" time": -0.1}][:count]
    assert logprobs["text_offset"] == [0, 4, 9, 11][:count]
    (command,) = site.worker.commands
    assert (command.echo, command.max_tokens, command.sampling.top_logprobs) == (True, max_tokens, 1)


async def test_no_tokens_at_all_are_only_sensible_with_echo(site: Site) -> None:
    refused = await site.complete(max_tokens=0)
    assert (refused.status_code, site.worker.commands) == (400, [])
    assert "echo: true" in refused.json()["error"]["message"]
    assert (await site.complete(max_tokens=0, echo=True)).status_code == 200
