"""The real worker process with tiny random models, under the real supervisor and client."""

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.core.errors import InvalidRequest, ModelUnavailable, WorkerGone
from app.core.messages import Accepted, Delta, Finished, Generate
from app.core.request import SamplingParameters, SpeculationRequest
from app.core.unit import DrafterSpecification, ModelSpecification, Stay
from app.supervision.child import WORKER_COMMAND
from app.supervision.client import WorkerClient
from app.supervision.stream import StreamEvent
from tests.shares import LANDING
from tests.tiny import write_tiny_model
from tests.worker.serving import QUICK, Stopwatch, collect, until

START_SECONDS = 60.0
GREEDY = SamplingParameters(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "main", "qwen3")
    write_tiny_model(root / "draft", "qwen3", noise=0.02)
    (root / "empty").mkdir()
    return root


def generate(folder: Path, request_id: str = "r", *, model: str = "main", **changes: object) -> Generate:
    options: dict[str, object] = {"text": "hello", "max_tokens": 24, "sampling": GREEDY, **changes}
    draft = {"drafters": (DrafterSpecification("draft", str(folder / "draft")),)} if options.pop("draft", False) else {}
    specification = ModelSpecification(id=model, path=str(folder / model), max_context_tokens=2000, **draft)
    return Generate(id=request_id, model=specification, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def working(
    costs_folder: Path | None = None, prefixes: Path | None = None, command: Sequence[str] = WORKER_COMMAND
) -> AsyncIterator[WorkerClient]:
    timing = dataclasses.replace(QUICK, stop_seconds=5.0)
    arguments = [] if costs_folder is None else ["--costs-folder", str(costs_folder)]
    if prefixes is not None:
        arguments += ["--prefixes-folder", str(prefixes), "--prefixes-bytes", str(1 << 30)]
    client = WorkerClient(
        command=[*command, "--wire", "auto", *arguments],
        timing=timing,
        ready_seconds=START_SECONDS,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop(5.0)


async def come_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not condition():  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0)


def with_model_id(command: Generate, model_id: str) -> Generate:
    model = msgspec.structs.replace(command.model, id=model_id)
    return msgspec.structs.replace(command, model=model)


def text_of(events: list[StreamEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and event.index == index)


def finished(events: list[StreamEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


LINGERS = """
import atexit, runpy, threading
atexit.register(threading.Event().wait)
runpy.run_module("app.worker.process", run_name="__main__", alter_sys=True)
"""


def test_nothing_that_a_library_does_at_the_end_keeps_the_worker_alive(folder: Path) -> None:
    async def scenario() -> None:
        async with working(command=(sys.executable, "-c", LINGERS)) as client:
            assert await collect(client, generate(folder))
            await client.stop()
            assert "code 0" in str(client.last_exit)

    asyncio.run(scenario())


LOSES = """
import pathlib, sys
from app.worker import process
from app.engine.engine import Engine
real, lost = Engine.step, pathlib.Path({marker!r})
def step(self, plan):
    if not lost.exists():
        lost.touch()
        raise RuntimeError("Ignored (for causing prior/excessive GPU errors) (00000004:SubmissionsIgnored)")
    return real(self, plan)
Engine.step = step
sys.exit(process.main())
"""


def test_a_worker_that_the_gpu_takes_no_more_work_from_is_replaced_and_nobody_is_blamed(
    folder: Path, tmp_path: Path
) -> None:
    program = LOSES.format(marker=str(tmp_path / "lost"))

    async def scenario() -> None:
        async with working(command=(sys.executable, "-c", program)) as client:
            with pytest.raises(WorkerGone):
                await collect(client, generate(folder))
            watch = Stopwatch()
            assert finished(await collect(client, generate(folder)))
            assert watch.seconds < START_SECONDS
            assert client.quarantined == {}
            assert "GPU" in str(client.last_exit)

    asyncio.run(scenario())


def test_a_life_of_the_worker(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with working() as client:
            await load_and_ask(client, folder)
            await ask_badly(client, folder)
            await ask_together(client, folder)
            await ask_for_scores(client, folder)
            await leave_early(client, folder)
            await terminate(client, folder)

    asyncio.run(scenario())
    log = capfd.readouterr().err
    assert "forged" in log
    assert not [line for line in log.splitlines() if line.startswith("forged")]


async def load_and_ask(client: WorkerClient, folder: Path) -> None:
    plain = await collect(client, generate(folder, "plain"))
    assert plain[0] == Accepted(id="plain", prompt_tokens=5)
    assert finished(plain).finish_reason == "length"
    assert finished(plain).usage.completion_tokens == 24
    assert finished(plain).usage.decision is not None
    assert client.ready_info is not None
    assert "mlx" in client.ready_info.versions
    drafted = generate(
        folder, "drafted", draft=True, speculation=SpeculationRequest(method="draft_model", num_draft_tokens=4)
    )
    loaded = await client.load(drafted.model, Stay(pinned=True))
    assert loaded.model_id == "main"
    events = await collect(client, drafted)
    assert text_of(events) == text_of(plain)
    assert finished(events).usage.methods == ("draft_model",)
    assert finished(events).usage.accepted > 0
    model = next(model for model in client.book.snapshot.models if model.id == "main")
    assert (model.id, model.state, model.stay.pinned) == ("main", "ready", True)
    assert model.unit == client.unit("main") == drafted.model


async def ask_badly(client: WorkerClient, folder: Path) -> None:
    with pytest.raises(InvalidRequest):
        await collect(client, generate(folder, text=None, tokens=[10**6]))
    with pytest.raises(InvalidRequest) as caught:
        await collect(client, generate(folder, text="x" * 3000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ModelUnavailable):
        await collect(client, generate(folder, model="empty"))
    assert finished(await collect(client, with_model_id(generate(folder), "main\nforged"))).finish_reason == "length"


async def ask_for_scores(client: WorkerClient, folder: Path) -> None:
    sampling = SamplingParameters(temperature=0.0, top_logprobs=2)
    text = "a prompt that is longer than what may ride along"
    scored = {"text": text, "echo": True, "sampling": sampling}
    alone, with_token = [
        await collect(client, generate(folder, f"score {tokens}", max_tokens=tokens, **scored)) for tokens in (0, 1)
    ]
    scores = {
        name: [token for event in events if isinstance(event, Delta) for token in event.logprobs]
        for name, events in (("alone", alone), ("one", with_token))
    }
    assert "".join(token.token for token in scores["alone"]) == text_of(alone) == text
    assert [token.logprob is None for token in scores["alone"]] == [True, *[False] * (len(text) - 1)]
    assert all(len(token.top) == 2 for token in scores["alone"][1:])
    assert scores["one"][: len(text)] == scores["alone"]
    assert len(scores["one"]) == len(text) + 1, "the token that was asked for is there whatever it is"
    usage = finished(alone).usage
    assert (finished(alone).finish_reason, usage.completion_tokens, usage.prompt_tokens) == ("length", 0, len(text))
    assert usage.cached_tokens == finished(with_token).usage.cached_tokens == 0


async def ask_together(client: WorkerClient, folder: Path) -> None:
    chat = {"text": None, "messages": [{"role": "user", "content": "hi"}], "n": 2}
    commands = [generate(folder, f"r{number}") for number in range(3)] + [generate(folder, "chat", **chat)]
    answers = await asyncio.gather(*(collect(client, command) for command in commands))
    assert len({text_of(answer) for answer in answers[:3]}) == 1
    assert sorted(event.index for event in answers[3] if isinstance(event, Finished)) == [0, 1]
    assert text_of(answers[3], 0) == text_of(answers[3], 1)
    whole = text_of(answers[0])
    stop = whole[5:8]
    stopped = await collect(client, generate(folder, "stopped", stop=(stop,)))
    assert text_of(stopped) == whole[: whole.index(stop)]
    assert finished(stopped).finish_reason == "stop"
    assert finished(stopped).usage.completion_tokens == whole.index(stop) + len(stop)
    assert sum(method.steps for method in finished(stopped).usage.by_method) == finished(stopped).usage.steps


async def leave_early(client: WorkerClient, folder: Path) -> None:
    gone = asyncio.create_task(until(client, lambda event: isinstance(event, Finished)))
    stream = client.generate(generate(folder, "left", max_tokens=None))
    async for event in stream:
        if isinstance(event, Delta):
            break
    await stream.aclose()
    end = await gone
    assert isinstance(end, Finished)
    assert (end.id, end.finish_reason) == ("left", "cancelled")
    assert not client.in_flight


async def terminate(client: WorkerClient, folder: Path) -> None:
    """Send SIGINT, which the worker ignores, and SIGTERM, after which it finishes running requests and exits."""
    assert client.process_id is not None
    os.kill(client.process_id, signal.SIGINT)
    running = asyncio.create_task(collect(client, generate(folder, "last", max_tokens=300)))
    await until(client, lambda event: isinstance(event, Delta))
    os.kill(client.process_id, signal.SIGTERM)
    assert finished(await running).finish_reason in {"length", "stop"}
    await come_true(lambda: client.restarts == 1)
    assert "code 0" in str(client.last_exit)


def test_a_resting_model_is_warmed_up_and_what_it_measured_is_kept(folder: Path, tmp_path: Path) -> None:
    def kept() -> list[Path]:
        return [path for path in (tmp_path / "costs").glob("*.json") if b'"costs"' in path.read_bytes()]

    async def scenario() -> None:
        async with working(tmp_path / "costs") as client:
            await client.load(generate(folder, draft=True).model)
            await until(client, lambda _event: bool(kept()))
            (costs,) = kept()
            assert b'"draft_model"' in costs.read_bytes()
            short = [
                finished(await collect(client, generate(folder, str(n), draft=True, max_tokens=2))) for n in range(5)
            ]
            reasons = {end.usage.reason.code for end in short}
            assert reasons != {"measuring"}, "a busy machine may spoil a figure, and one is looked at again"
            usage = finished(await collect(client, generate(folder, "r", draft=True, max_tokens=60))).usage
            assert usage.decision is not None
            assert sum(method.steps for method in usage.by_method) == usage.steps

    asyncio.run(scenario())


def test_kill_mid_stream_is_told_and_healed(folder: Path) -> None:
    async def scenario() -> None:
        async with working() as client:
            tasks = [
                asyncio.create_task(collect(client, generate(folder, f"r{number}", max_tokens=None)))
                for number in range(3)
            ]
            await until(client, lambda event: isinstance(event, Delta))
            assert client.process_id is not None
            watch = Stopwatch()
            os.kill(client.process_id, signal.SIGKILL)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert watch.seconds <= 2
            assert all(isinstance(result, WorkerGone) for result in results)
            assert finished(await collect(client, generate(folder))).finish_reason == "length"
            assert watch.seconds <= START_SECONDS
            await client.stop(5.0)
            assert "code 0" in str(client.last_exit)

    asyncio.run(scenario())


@pytest.mark.parametrize("end", [pytest.param(None, marks=LANDING), signal.SIGKILL])
def test_a_conversation_outlives_its_server_and_its_worker(
    folder: Path, tmp_path: Path, end: signal.Signals | None
) -> None:
    """A server that stops shuts its worker down cleanly; a worker that is killed is restarted."""
    prefixes = tmp_path / "prefixes"
    asking: dict[str, Any] = {"text": "a prompt of some length, " * 20, "draft": True, "owner": "key 1"}
    asking["speculation"] = SpeculationRequest(method="draft_model", num_draft_tokens=2)  # even if it does not pay

    async def ask(client: WorkerClient, name: str, **changes: str) -> tuple[str, int]:
        events = await collect(client, generate(folder, name, **{**asking, **changes}))
        return text_of(events), finished(events).usage.cached_tokens

    async def scenario() -> None:
        async with working(prefixes=prefixes) as client:
            said, cached = await ask(client, "first")
            assert cached == 0
            if end is not None:
                # a block of 256 tokens, the rest of the prompt and the answer, each for the model and for its drafter
                await come_true(lambda: len(list(prefixes.rglob("*.safetensors"))) >= 6)
                assert client.process_id is not None
                os.kill(client.process_id, end)
                await come_true(lambda: client.restarts == 1)
                assert await ask(client, "again") == (said, 499)
        async with working(prefixes=prefixes) as client:
            assert await ask(client, "again") == (said, 499)
            assert await ask(client, "stranger", owner="key 2") == (said, 0)
            models = client.book.loaded
            await come_true(lambda: bool(models() and models()["main"].prefixes.restored_tokens["disk"]))
            assert models()["main"].prefixes.disk_bytes > 100_000
            client.clear_prefixes()
            await come_true(lambda: not list(prefixes.rglob("*.safetensors")))
            assert await ask(client, "forgotten") == (said, 0)

    asyncio.run(scenario())
