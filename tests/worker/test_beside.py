"""A stream of the embedded model beside requests that cost too much: the real worker, its real text processes."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest

from app.core.errors import InvalidRequest, ModelUnavailable, PacelineError
from app.core.messages import Delta, Generate, ModelSpecification
from app.worker.client import WorkerClient
from tests.worker.hostile import write_hostile_template, write_hostile_tokenizer
from tests.worker.serving import collect
from tests.worker.test_process import working

DEMO = Path(__file__).parents[2] / "app" / "demo_models" / "demo-assistant"
HELLO = [{"role": "user", "content": "hello"}]


class Stream:
    """Answers one after the other, and notes when each piece came."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self._told_at = [time.monotonic()]
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for number in range(10_000):
            command = ask(DEMO, f"stream {number}", text="Once upon a time", max_tokens=1000, ignore_end=True)
            async for event in self._client.generate(command):
                if isinstance(event, Delta):
                    self._told_at.append(time.monotonic())

    async def longest_pause(self, during: "asyncio.Future[object] | None" = None) -> float:
        """In seconds, while something is done, or for a while."""
        begin = len(self._told_at) - 1
        await asyncio.wait({during} if during else {asyncio.create_task(asyncio.sleep(2))})
        told = [*self._told_at[begin:], time.monotonic()]
        return max(after - before for before, after in pairwise(told))

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


def ask(folder: Path, request_id: str = "r", **changes: object) -> Generate:
    model = ModelSpecification(id=folder.name, path=str(folder))
    return Generate(id=request_id, model=model, **changes)  # type: ignore[arg-type]


@pytest.mark.timeout(400)  # three times over where the machine is busy
@pytest.mark.parametrize("kind", ["long prompts", "hostile folders"])
def test_a_stream_goes_on_beside(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working() as client:
            await collect(client, ask(DEMO, text="hi", max_tokens=1))
            stream = Stream(client)
            usual = max([await stream.longest_pause() for _ in range(3)])
            pauses: list[float] = []  # what the requests cause comes again, what a busy machine causes does not
            while not pauses or (pauses[-1] > 0.3 + 3 * usual and len(pauses) < 3):
                pauses.append(await longest_pause_beside(stream, client, kind, tmp_path / str(len(pauses))))
            assert min(pauses) <= 0.3 + 3 * usual
            await stream.stop()
            assert client.restarts == 0
            assert client.quarantined == {}

    asyncio.run(scenario())


async def longest_pause_beside(stream: Stream, client: WorkerClient, kind: str, folder: Path) -> float:
    """Of the stream, in seconds, while each of the requests is refused."""
    pauses = []
    for command, error in requests(kind, folder):
        refused = asyncio.ensure_future(refusal(client, command))
        pauses.append(await stream.longest_pause(refused))
        assert isinstance(await refused, error)
    return max(pauses)


def requests(kind: str, folder: Path) -> list[tuple[Generate, type[PacelineError]]]:
    """What is refused, and how."""
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
