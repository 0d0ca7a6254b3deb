"""A stream of a demo model beside requests that cost too much, with the real worker and its real text processes."""

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from app.core.errors import InvalidRequest, ModelUnavailable, PacelineError
from app.core.messages import Delta, Generate
from app.core.unit import ModelSpecification
from app.supervision.client import WorkerClient
from tests.shares import LANDING
from tests.worker.hostile import write_hostile_template, write_hostile_tokenizer
from tests.worker.serving import collect
from tests.worker.test_process import working

DEMO = Path(__file__).parents[2] / "app" / "demo_models" / "demo-assistant"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Burst:
    """Deltas that arrived together, as they do after this process waited for a CPU, and the CPU seconds that the worker
    and its text processes had used by then: these exclude the time for which a busy machine makes them wait."""

    worker: float
    texts: float
    pieces: int = 1


def burst_of(client: WorkerClient) -> Burst:
    worker = psutil.Process(client.process_id)
    while True:
        own = worker.cpu_times()
        with contextlib.suppress(psutil.NoSuchProcess):  # a child just ended; the next try counts it as ended
            times = [child.cpu_times() for child in worker.children(recursive=True)]
            after = worker.cpu_times()
            if (own.children_user, own.children_system) == (after.children_user, after.children_system):
                running = sum(usage.user + usage.system for usage in times)
                return Burst(own.user + own.system, running + own.children_user + own.children_system)


@dataclass
class Pauses:
    """Maximum CPU seconds per delta of the `worker` and of its `texts` processes; `all_texts` is the sum for these."""

    worker: float
    texts: float
    all_texts: float


class Stream:
    """Requests one answer after the other, and records the CPU time used by each burst of deltas."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self._bursts = [burst_of(client)]
        self._lasts = False
        self._has_come = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for number in range(10_000):
            command = ask(DEMO, f"stream {number}", text="Once upon a time", max_tokens=1000, ignore_end=True)
            async for event in self._client.generate(command):
                if isinstance(event, Delta):
                    self._note()

    def _note(self) -> None:
        if self._lasts:
            self._bursts[-1].pieces += 1
            return
        self._bursts.append(burst_of(self._client))
        self._lasts = True
        asyncio.get_running_loop().call_soon(self._end_burst)
        self._has_come.set()

    def _end_burst(self) -> None:
        self._lasts = False

    async def bursts(self, count: int) -> None:
        """Wait for `count` more bursts."""
        wanted = len(self._bursts) + count
        while len(self._bursts) < wanted:
            self._has_come.clear()
            await self._has_come.wait()

    async def pauses(self, during: Awaitable[object]) -> Pauses:
        """Return the pauses between bursts until `during` is done."""
        begin = len(self._bursts) - 1
        await asyncio.wait({asyncio.ensure_future(during)})
        await self.bursts(1)
        seen = self._bursts[begin:]
        own = max((burst.worker - before.worker) / burst.pieces for before, burst in pairwise(seen))
        texts = max((burst.texts - before.texts) / burst.pieces for before, burst in pairwise(seen))
        return Pauses(own, texts, seen[-1].texts - seen[0].texts)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


def ask(folder: Path, request_id: str = "r", **changes: object) -> Generate:
    model = ModelSpecification(id=folder.name, path=str(folder))
    return Generate(id=request_id, model=model, **changes)  # type: ignore[arg-type]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["long prompts", pytest.param("hostile folders", marks=LANDING)])
def test_a_stream_goes_on_beside(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working() as client:
            await collect(client, ask(DEMO, text="hi", max_tokens=1))
            stream = Stream(client)
            await stream.bursts(1)
            usual = await stream.pauses(stream.bursts(60))
            most = 0.3 + 3 * usual.worker
            for command, error in requests(kind, tmp_path):
                refused = asyncio.ensure_future(refusal(client, command))
                seen = await stream.pauses(refused)
                assert isinstance(await refused, error)
                assert seen.worker <= most, "the worker itself does nothing for long"
                assert seen.texts <= max(most, 0.8 * seen.all_texts), "it waits for no text"
            await stream.stop()
            assert client.restarts == 0
            assert client.quarantined == {}

    asyncio.run(scenario())


def requests(kind: str, folder: Path) -> list[tuple[Generate, type[PacelineError]]]:
    """Return requests that must be refused, each with the class of its error."""
    if kind == "long prompts":
        tools = [{"type": "function", "function": {"name": f"f{n}", "description": "x" * 60_000}} for n in range(128)]
        return [
            (ask(DEMO, text="7" * 31_000_000), InvalidRequest),
            (ask(DEMO, text="a" * 31_000_000), InvalidRequest),
            (ask(DEMO, messages=[{"role": "user", "content": "7" * 15_900_000}]), InvalidRequest),
            (ask(DEMO, messages=HELLO, tools=tools), InvalidRequest),
        ]
    bombs = [{"role": "user", "content": "bomb"}]
    templates = [write_hostile_template(folder / f"t{n}", name) for n, name in enumerate(("batch", "endless loops"))]
    tokenizer = write_hostile_tokenizer(folder / "tokenizer", "exploding normalizers")
    return [
        *((ask(template, messages=bombs), InvalidRequest) for template in templates),
        (ask(tokenizer, messages=HELLO), ModelUnavailable),
    ]


async def refusal(client: WorkerClient, command: Generate) -> PacelineError:
    try:
        await collect(client, command)
    except PacelineError as error:
        return error
    raise AssertionError("it was answered")
