"""Measures the time that HTTP adds to streamed chats of a scripted engine: `python -m bench.http_overhead [requests]`.

Each of 32 clients sends one request after another; the engine answers each in 20 steps of 25 ms, with the request's own
number as text. Overhead is the time from the request to the end of its answer, minus the steps. Every answer must be
complete and belong to its request."""

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator

from app.core.messages import Accepted, Delta, Finished, Generate
from tests.api.fakes import USAGE, make_site, served

HOST = "127.0.0.1"
CLIENTS, STEPS, STEP_SECONDS = 32, 20, 0.025
BOUND_SECONDS = 0.050


async def script(command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
    """Yield the request's number again and again, at the pace of a model."""
    yield Accepted(id=command.id, prompt_tokens=1)
    number = str((command.messages or [])[0]["content"])
    clock = asyncio.get_running_loop().time
    started_at = clock()
    for step in range(1, STEPS + 1):
        await asyncio.sleep(started_at + step * STEP_SECONDS - clock())
        yield Delta(id=command.id, index=0, text=f"{number} ", tokens=1)
    yield Finished(id=command.id, index=0, finish_reason="stop", usage=USAGE)


async def serve() -> None:
    """Run the server until its input ends."""
    site = make_site()
    site.worker.script = script
    async with served(site) as (port, _):
        gc.freeze()  # as `paceline serve` does
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def request_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> float:
    """Make a request and return the seconds added. Raises ValueError unless the reply is complete and its own."""
    message = {"role": "user", "content": str(number)}
    body = json.dumps({"model": "demo-main", "messages": [message], "stream": True})
    started_at = time.perf_counter()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    reply = (await reader.readuntil(b"0\r\n\r\n")).decode()
    seconds = time.perf_counter() - started_at
    if reply.count(f'"content":"{number} "') != STEPS or "data: [DONE]" not in reply:
        raise ValueError(f"request {number} got {reply[:300]}")
    return seconds - STEPS * STEP_SECONDS


async def measure(port: int, requests: int) -> list[float]:
    """Return the seconds added to each request; raw sockets, so that no client library's work is counted."""
    numbers, added = iter(range(requests)), []

    async def client() -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        added.extend([await request_answer(reader, writer, number) for number in numbers])
        writer.close()

    gc.disable()
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    return added


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    command = [sys.executable, "-m", "bench.http_overhead", "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        added = sorted(asyncio.run(measure(int(server.stdout.readline()), requests)))  # type: ignore[union-attr]
        server.communicate()
    p99 = added[int(0.99 * len(added))]
    figures = {"median": statistics.median(added), "p99": p99, "worst": added[-1]}
    timings = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in figures.items())
    print(f"{len(added)} requests of {CLIENTS} clients, {STEPS} tokens each, all whole: added {timings}")
    sys.exit(p99 > BOUND_SECONDS)


if __name__ == "__main__":
    asyncio.run(serve()) if sys.argv[1:] == ["serve"] else main()
