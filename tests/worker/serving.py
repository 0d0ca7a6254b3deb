"""A client of the fake worker, for tests of the server's side."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.core.messages import Event, Generate
from app.core.unit import ModelSpecification
from app.supervision.client import WorkerClient
from app.supervision.recovery import Timing
from app.supervision.stream import StreamEvent

DEADLINE_SECONDS = 60.0
QUICK = Timing(
    poll_seconds=0.1,
    abort_seconds=0.1,
    first_pause_seconds=0.02,
    longest_pause_seconds=0.05,
    stop_seconds=0.4,
    reap_seconds=0.4,
)


def fake_command(*flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.worker.fake_worker", *flags)


def ask(text: str, *, request_id: str = "r", model_id: str = "m", n: int = 1) -> Generate:
    model = ModelSpecification(id=model_id, path=f"/models/{model_id}")
    return Generate(id=request_id, model=model, text=text, n=n)


async def collect(client: WorkerClient, command: Generate) -> list[StreamEvent]:
    return [event async for event in client.generate(command)]


async def until(client: WorkerClient, wanted: Callable[[Event], bool]) -> Event:
    """Return the worker's next event that `wanted` accepts."""
    future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

    def on_event(event: Event) -> None:
        if wanted(event) and not future.done():
            future.set_result(event)

    unsubscribe = client.subscribe(on_event)
    try:
        return await asyncio.wait_for(future, DEADLINE_SECONDS)
    finally:
        unsubscribe()


@asynccontextmanager
async def serving(
    *flags: str, timing: Timing = QUICK, buffer_events: int = 4096, ready_seconds: float = DEADLINE_SECONDS
) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(
        command=fake_command(*flags), timing=timing, buffer_events=buffer_events, ready_seconds=ready_seconds
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


class Stopwatch:
    """Wall-clock seconds since it was created."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began
