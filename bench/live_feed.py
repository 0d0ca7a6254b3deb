"""Measures the live feed: the server's CPU use with no tab and with three, idle and while a model generates.

`python bench/live_feed.py [SECONDS]` starts a server of its own with the embedded demo model; needs no network.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import psutil

TABS = 3
TOPICS_OF_A_PAGE = ("worker", "state", "pace", "requests")
KEY = "bench"
MODEL = "demo-assistant"
DEFAULT_SECONDS = 20.0
REPLY_TOKENS = 200
PAUSE_SECONDS = 0.3


@contextlib.contextmanager
def server(prepare: Callable[[Path], None] = lambda _home: None) -> Iterator[tuple[str, psutil.Process]]:
    """Run a separate server; yield its address and process. `prepare` gets the server's folder before it starts."""
    with tempfile.TemporaryDirectory() as home:
        prepare(Path(home))
        environment = os.environ | {"PACELINE_HOME": home, "PACELINE_API_KEY": KEY, "PACELINE_PORT": "0"}
        command = [sys.executable, "-m", "app.cli", "serve"]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                line = next(line for line in process.stdout or () if "/v1" in line)
                address = next(word for word in line.split() if word.endswith("/v1")).removesuffix("/v1")
                yield address, psutil.Process(process.pid)
            finally:
                process.terminate()
                process.wait(30)


async def read_feed(client: httpx2.AsyncClient, topics: str, sizes: list[int]) -> None:
    """Act as one tab: read until cancelled, and count bytes."""
    async with client.stream("GET", f"/admin/api/live?topics={topics}", timeout=None) as response:
        async for chunk in response.aiter_bytes():
            sizes.append(len(chunk))  # noqa: PERF401 - read by the other task as it grows


async def generate(client: httpx2.AsyncClient) -> None:
    """Request one reply after another until cancelled, so that the numbers on a page keep changing."""
    message = {"role": "user", "content": "Count from 1 to 20."}
    body = {"model": MODEL, "messages": [message], "max_tokens": REPLY_TOKENS}
    while True:
        await client.post("/v1/chat/completions", json=body)
        await asyncio.sleep(PAUSE_SECONDS)


async def measure(
    client: httpx2.AsyncClient, process: psutil.Process, tabs: int, seconds: float
) -> tuple[float, float]:
    """Return the share of one core that the server used, and the bytes per second for one tab."""
    topics = ",".join(set(TOPICS_OF_A_PAGE) & set((await client.get("/admin/api/live/topics")).json()["topics"]))
    sizes: list[int] = []
    readers = [asyncio.create_task(read_feed(client, topics, sizes)) for _ in range(tabs)]
    await asyncio.sleep(2)
    sizes.clear()
    before, started_at = process.cpu_times(), time.perf_counter()
    await asyncio.sleep(seconds)
    after, elapsed = process.cpu_times(), time.perf_counter() - started_at
    for task in readers:
        task.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    used = (after.user + after.system) - (before.user + before.system)
    return used / elapsed, sum(sizes) / max(tabs, 1) / elapsed


async def main(seconds: float) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with server() as (address, process):
        async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=120) as client:
            await client.post("/api/load", json={"model": MODEL})
            rows = await compare(client, process, seconds)
    print(json.dumps(rows))


async def compare(client: httpx2.AsyncClient, process: psutil.Process, seconds: float) -> list[dict[str, float]]:
    """Measure idle and busy, with and without tabs."""
    rows = []
    for busy in (False, True):
        working = asyncio.create_task(generate(client)) if busy else None
        for tabs in (0, TABS):
            share, rate = await measure(client, process, tabs, seconds)
            rows.append({"busy": busy, "tabs": tabs, "core_percent": 100 * share, "bytes_per_second": rate})
            print(f"{'busy' if busy else 'idle'}, {tabs} tabs: {100 * share:.2f} % of a core, {rate:.0f} B/s a tab")
        if working is not None:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    return rows


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_SECONDS))
