"""Workers killed, stopped, or suspended with the whole server while they stream."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, Iterable, Sequence

import httpx2
import psutil

from campaign.attack import TurnContext, release_quarantined
from campaign.chats import long_chat
from campaign.judgement import FIRST_TOKEN
from campaign.streams import first_token_seconds, read_stream

STREAMS, FEW_STREAMS, LONG_TOKENS = 6, 3, 600
"""Numbers of streams during a kill and during a stop, and tokens of each stream. Two of the engine's eight rows stay
free: for the honest stream, and for the request whose first token is timed."""
MAX_KILL_DELAY_SECONDS = 2.0
RECOVERY_SECONDS = 120.0
STOP_SECONDS = 120.0
"""Limit on the time until the streams of a stopped worker end, in seconds; its watchdog alone waits 30 s."""
SUSPENDED_SECONDS = (3.0, 15.0)


@contextlib.asynccontextmanager
async def streams(
    context: TurnContext, client: httpx2.AsyncClient, count: int, description: str
) -> AsyncGenerator[asyncio.Future[list[Sequence[str]]]]:
    """Start long streams and enter the block at a random moment; wait for their ends after it."""
    readers = [
        read_stream(client, long_chat(f"Tell story {row}.", LONG_TOKENS), context.findings, description)
        for row in range(count)
    ]
    all_ends = asyncio.gather(*readers)
    try:
        await asyncio.sleep(context.rng.uniform(0, MAX_KILL_DELAY_SECONDS))
        yield all_ends
        async with asyncio.timeout(STOP_SECONDS):
            await all_ends
    except TimeoutError:
        context.findings.failures.append(f"{description}: streams without an end after {STOP_SECONDS:.0f} s")
    finally:
        all_ends.cancel()


async def time_recovery(context: TurnContext, client: httpx2.AsyncClient, since: float) -> None:
    """Record the time until a request that waits for the new worker gets its first token."""
    # The only model in the worker is rightly quarantined after three ends in five minutes.
    await release_quarantined(context.server)
    try:
        context.findings.record_time(FIRST_TOKEN, await first_token_seconds(client, since, RECOVERY_SECONDS))
    except TimeoutError:
        context.findings.failures.append(f"no token {RECOVERY_SECONDS:.0f} s after the worker's end")


async def kill_worker(context: TurnContext) -> None:
    """SIGKILL the worker under streams: each has one end, and a waiting request is soon answered."""
    async with context.client() as client, streams(context, client, STREAMS, "a stream of a killed worker"):
        worker = context.server.worker()
        if worker is None:
            context.findings.failures.append("there is no worker to kill")
            return
        killed_at = time.monotonic()
        worker.kill()
        await time_recovery(context, client, killed_at)


async def stop_worker(context: TurnContext) -> None:
    """SIGSTOP the worker under streams: the watchdog ends each once, and another worker takes over."""
    async with context.client() as client:
        async with streams(context, client, FEW_STREAMS, "a stream of a stopped worker"):
            worker = context.server.worker()
            if worker is not None:
                worker.suspend()
        since = time.monotonic()
        await time_recovery(context, client, since)


async def suspend_all(context: TurnContext) -> None:
    """SIGSTOP and SIGCONT every process of the server, as when a computer sleeps: everything continues."""
    before = context.server.worker()
    async with (
        context.client() as client,
        streams(context, client, FEW_STREAMS, "a stream of a suspended server") as all_of_them,
    ):
        process_tree = context.server.process_tree()
        send(process_tree, signal.SIGSTOP)
        try:
            await asyncio.sleep(context.rng.uniform(*SUSPENDED_SECONDS))
        finally:
            send(reversed(process_tree), signal.SIGCONT)
        for ends in await all_of_them:
            context.findings.expect(ends == ["done"], f"a stream of a suspended server ended with {ends}")
    after = context.server.worker()
    context.findings.expect(before == after, "a suspended worker was replaced")


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
