"""Chats that fail or wait long: statuses before a stream begins, error frames within it, keep-alives, limits."""

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.errors import (
    InsufficientMemory,
    InvalidRequest,
    ModelUnavailable,
    PacelineError,
    QueueFull,
    WorkerGone,
    context_overflow,
)
from app.core.messages import Accepted, Delta, Finished, Generate, LoadProgress, error_of, failed_frame
from tests.api.fakes import MODELS, USAGE, Site, chat_body, failing, frames, make_site, model
from tests.models.folders import CONFIG, write_model

pytestmark = pytest.mark.anyio

ERRORS = [
    (InvalidRequest("the prompt is empty", code="empty_prompt", parameter="messages"), 400),
    (QueueFull("the queue is full", retry_after_seconds=3), 429),
    (ModelUnavailable("quarantined", code="model_quarantined"), 503),
    (InsufficientMemory("needs 9 GB", retry_after_seconds=5), 503),
    (WorkerGone("the worker ended", retry_after_seconds=2), 503),
    (PacelineError("surprise"), 500),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: getattr(value, "code", value))
async def test_an_error_before_the_first_token_has_its_status(
    error: PacelineError, status: int, streamed: bool
) -> None:
    site = make_site()
    site.worker.script = failing(error)
    response = await site.chat(stream=streamed)
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": error.message,
        "type": error.kind,
        "param": error.parameter,
        "code": error.code,
    }
    wait = error.retry_after_seconds
    assert response.headers.get("retry-after") == (None if wait is None else str(wait))
    assert len(site.context.activity) == 0


async def test_a_prompt_beyond_the_context_is_told_in_the_words_that_gateways_look_for(site: Site) -> None:
    site.worker.script = failing(context_overflow(9000, 4096))
    for answered, parameter in (
        (site.chat(), "messages"),
        (site.chat(stream=True), "messages"),
        (site.complete(), "prompt"),
        (site.client.post("/v1/responses", json={"model": "demo-main", "input": "Hi"}), "input"),
        (site.client.post("/v1/embeddings", json={"model": "demo-main", "input": "Hi"}), "input"),
    ):
        response = await answered
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert (error["code"], error["param"]) == ("context_length_exceeded", parameter)
        assert "This model's maximum context length is 4096 tokens" in error["message"]
        assert "9000 tokens" in error["message"]


@pytest.mark.parametrize(("tokens", "size"), [(9000, ""), (4096, ""), (5000, "more than 4096"), (17500, "70000 bytes")])
async def test_claude_code_reads_of_an_overflow_what_makes_it_compact(site: Site, tokens: int, size: str) -> None:
    site.worker.script = failing(error_of(failed_frame("r", context_overflow(tokens, 4096, size))))
    body = {"model": "demo-main", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    for stream in (False, True):
        response = await site.client.post("/v1/messages", json=body | {"stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        match = re.fullmatch(r"prompt is too long: (\d+) tokens > 4096 maximum", error["message"])
        assert match
        assert int(match[1]) > 4096


async def test_codex_reads_of_an_overflow_in_the_stream(site: Site) -> None:
    """Codex ends the turn on an error status; on the event `response.failed` it shortens the conversation."""
    site.worker.script = failing(context_overflow(9000, 4096))
    whole = await site.client.post("/v1/responses", json={"model": "demo-main", "input": "Hi"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")
    streamed = await site.client.post("/v1/responses", json={"model": "demo-main", "input": "Hi", "stream": True})
    assert streamed.status_code == 200
    last = json.loads(streamed.text.strip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "context_length_exceeded"
    assert len(site.context.activity) == 0


async def test_a_prompt_that_no_tokens_could_make_fit_is_refused_without_asking_the_worker(tmp_path: Path) -> None:
    """The longest token has 8 bytes, and a normalizer may turn 4 bytes into 1: up to 4096 * 32 bytes may fit."""
    fits, tools = 4096 * 8 * 4, [{"type": "function", "function": {"name": "f", "description": "ab" * 70_000}}]
    folder = write_model(tmp_path / "m", added={"<|end8|>": 8})
    site = make_site(models=(*MODELS, replace(model("m", config=CONFIG), path=folder)))
    for answered, parameter, size in (
        (site.complete(model="m", prompt="7" * (fits + 1)), "prompt", f"{fits + 1} bytes"),
        (site.complete(model="m", prompt="한" * (fits // 3 + 1)), "prompt", f"{fits + 1} bytes"),
        (site.complete(model="m", prompt=["7", "7" * 900_000]), "prompt", "900000 bytes"),
        (site.complete(model="m", prompt=[1] * 4096), "prompt", "4096 tokens"),
        (site.chat(model="m", messages=[{"role": "user", "content": "7" * fits}]), "messages", f"{fits + 15} bytes"),
        (site.chat(model="m", stream=True, tools=tools), "messages", "140053 bytes"),
    ):
        response = await answered
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", parameter)
        assert "maximum context length is 4096 tokens" in error["message"]
        assert f"resulted in {size}" in error["message"]
    assert {command.text for command in site.worker.commands} <= {"7"}
    assert (await site.complete(model="m", prompt="7" * fits)).status_code == 200
    assert (await site.complete(model="m", prompt=[1] * 4095)).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_no_prompt_is_kept_once_it_was_answered(site: Site, streamed: bool, fails: bool) -> None:
    """Reference counts alone must free it: Python may look for cycles only after many more prompts."""
    if fails:
        site.worker.script = failing(context_overflow(9000, 4096))
    gc.collect()
    gc.disable()
    try:
        await site.chat(stream=streamed)
        asked = [site.worker.commands.pop().id]
        assert [item.id for item in gc.get_objects() if isinstance(item, Generate) and item.id in asked] == []
    finally:
        gc.enable()


async def test_an_error_in_the_stream_is_one_frame_and_the_end(site: Site) -> None:
    site.worker.script = failing(WorkerGone("the worker ended"), after_tokens=True)
    response = await site.chat(stream=True)
    assert response.status_code == 200
    *_, text, error = [json.loads(payload) for payload in frames(response.text)]
    assert text["choices"][0]["delta"] == {"content": "Hel"}
    assert error == {
        "error": {"message": "the worker ended", "type": "server_error", "param": None, "code": "worker_restarted"}
    }
    assert (await site.chat()).status_code == 503, "not streamed, the same failure has its status"


async def test_a_surprise_in_the_server_is_a_generic_500(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object, **_options: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(site.worker, "open", stumble)
    response = await site.client.post("/v1/chat/completions", json=chat_body())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-content-type-options"] == "nosniff"
    counted = 'paceline_requests_total{endpoint="/v1/chat/completions",method="POST",status="500"} 1.0'
    assert counted in (await site.client.get("/metrics")).text


class WatchedProgress(dict[str, LoadProgress]):
    """Load progress that notices when a keep-alive comment asked for it."""

    def __init__(self, *known: LoadProgress) -> None:
        super().__init__({progress.model_id: progress for progress in known})
        self.asked = asyncio.Event()

    def get(self, key: str, default: LoadProgress | None = None) -> LoadProgress | None:  # type: ignore[override]
        self.asked.set()
        return super().get(key, default)


async def test_a_long_wait_starts_the_stream_and_keeps_it_alive() -> None:
    site = make_site(context={"keep_alive_seconds": 0.02})
    progress = WatchedProgress(LoadProgress(model_id="demo-main", phase="weights", fraction=0.42))
    site.worker.book.progress = progress

    async def load_for_long(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        progress.asked.clear()
        await asyncio.wait_for(progress.asked.wait(), 60)
        yield Accepted(id=command.id, prompt_tokens=1)
        yield Finished(id=command.id, index=0, finish_reason="length", usage=USAGE)

    site.worker.script = load_for_long
    response = await site.chat(stream=True)
    assert response.status_code == 200
    assert ": loading 42%\n\n" in response.text
    assert frames(response.text)[-1] == "[DONE]"


async def test_an_error_after_the_stream_began_waiting_is_a_frame() -> None:
    site = make_site(context={"keep_alive_seconds": 0.02})
    progress = WatchedProgress()
    site.worker.book.progress = progress

    async def refuse_late(command: Generate) -> AsyncIterator[Accepted]:
        progress.asked.clear()
        await asyncio.wait_for(progress.asked.wait(), 60)
        raise InsufficientMemory("does not fit")
        yield Accepted(id=command.id, prompt_tokens=1)

    site.worker.script = refuse_late
    response = await site.chat(stream=True)
    assert response.status_code == 200
    assert ": waiting\n\n" in response.text
    assert json.loads(frames(response.text)[-1])["error"]["code"] == "insufficient_memory"


async def test_too_many_open_requests_are_refused_at_once() -> None:
    site = make_site(max_requests=1)
    released = asyncio.Event()

    async def hold(command: Generate) -> AsyncIterator[Accepted | Finished]:
        yield Accepted(id=command.id, prompt_tokens=1)
        await released.wait()
        yield Finished(id=command.id, index=0, finish_reason="stop", usage=USAGE)

    site.worker.script = hold
    first = asyncio.create_task(site.chat())
    await site.worker.wait_asked()
    second = await site.chat()
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    released.set()
    assert (await first).status_code == 200
