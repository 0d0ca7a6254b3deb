"""Workers killed, stopped, or suspended with the whole server while they stream."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, Iterable, Sequence

import httpx2
import psutil

from campaign.attack import Arena, released
from campaign.chats import long_chat
from campaign.judgement import BACK
from campaign.streams import first_token_seconds, listen

STREAMS, FEW_STREAMS, LONG_TOKENS = 8, 3, 600
LATEST_KILL_SECONDS = 2.0
BACK_SECONDS = 120.0
STOP_SECONDS = 120.0
"""Limit on the time until a stopped worker's streams end, in seconds: its watchdog waits for 30."""
SUSPENDED_SECONDS = (3.0, 15.0)


@contextlib.asynccontextmanager
async def streams(
    arena: Arena, client: httpx2.AsyncClient, count: int, asked: str
) -> AsyncGenerator[asyncio.Future[list[Sequence[str]]]]:
    """Start long streams and enter the block at a random moment; wait for their ends behind it."""
    listening = [
        listen(client, long_chat(f"Tell story {row}.", LONG_TOKENS), arena.findings, asked) for row in range(count)
    ]
    together = asyncio.gather(*listening)
    try:
        await asyncio.sleep(arena.chance.uniform(0, LATEST_KILL_SECONDS))
        yield together
        async with asyncio.timeout(STOP_SECONDS):
            await together
    except TimeoutError:
        arena.findings.failures.append(f"{asked}: streams without an end after {STOP_SECONDS:.0f} s")
    finally:
        together.cancel()


async def came_back(arena: Arena, client: httpx2.AsyncClient, since: float) -> None:
    """Time the first token of a request that waits for the new worker."""
    await released(arena.server)  # the only model in the worker is rightly quarantined after three ends in five minutes
    try:
        arena.findings.took(BACK, await first_token_seconds(client, since, BACK_SECONDS))
    except TimeoutError:
        arena.findings.failures.append(f"no token {BACK_SECONDS:.0f} s after the worker's end")


async def kill_worker(arena: Arena) -> None:
    """SIGKILL the worker under streams: each has one end, and a waiting request is soon answered."""
    async with arena.client() as client, streams(arena, client, STREAMS, "a stream of a killed worker"):
        worker = arena.server.worker()
        if worker is None:
            arena.findings.failures.append("there is no worker to kill")
            return
        killed_at = time.monotonic()
        worker.kill()
        await came_back(arena, client, killed_at)


async def stop_worker(arena: Arena) -> None:
    """SIGSTOP the worker under streams: the watchdog ends each once, and another worker takes over."""
    async with arena.client() as client:
        async with streams(arena, client, FEW_STREAMS, "a stream of a stopped worker"):
            worker = arena.server.worker()
            if worker is not None:
                worker.suspend()
        since = time.monotonic()
        await came_back(arena, client, since)


async def suspend_all(arena: Arena) -> None:
    """SIGSTOP and SIGCONT every process of the server, as when a computer sleeps: everything continues."""
    before = arena.server.worker()
    async with (
        arena.client() as client,
        streams(arena, client, FEW_STREAMS, "a stream of a suspended server") as all_of_them,
    ):
        family = arena.server.family()
        send(family, signal.SIGSTOP)
        try:
            await asyncio.sleep(arena.chance.uniform(*SUSPENDED_SECONDS))
        finally:
            send(reversed(family), signal.SIGCONT)
        for ends in await all_of_them:
            arena.findings.expect(ends == ["done"], f"a stream of a suspended server ended with {ends}")
    after = arena.server.worker()
    arena.findings.expect(before == after, "a suspended worker was replaced")


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
