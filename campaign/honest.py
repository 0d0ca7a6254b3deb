"""An honest stream with another key: `python -m campaign.honest ADDRESS MODEL`, with the key on its standard input.

It runs in its own process and session, so that the attackers' work does not delay it: Linux schedules a session as a
whole, and the attackers' session uses up its share. It requests one long answer after another and prints a line with
the time of each event.
"""

import asyncio
import contextlib
import http.client
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from campaign.chats import CHAT, MODEL, long_chat
from campaign.judgement import Event, longest_silence

MODELS = (MODEL, "demo-hybrid")
"""The models of the honest streams: the attackers' own, and another one, which no work for the first may hold up."""
ROOT = Path(__file__).resolve().parents[1]
TOKENS = 3500
"""Tokens of an answer: almost the demo model's whole context, and more than a minute of streaming."""
OPENING = b'"content":""'
"""Content of a chunk that comes before the first token."""
PAUSE_SECONDS = 0.1
BEGIN_SECONDS = 120.0
SCHEDULING = Path("/proc/thread-self/schedstat")
"""File of Linux about this thread; its second number is the nanoseconds that the thread has waited for a processor."""
LISTEN_SECONDS = 5.0
"""Seconds to wait for the next event at the end of a turn."""


def request_answer(connection: http.client.HTTPConnection, key: str, model: str) -> str:
    """Request one answer and print its chunks as they arrive; return a text that says how it ended."""
    body = long_chat("Count from 1 to 4000.", TOKENS, model=model, temperature=0, speculation={"method": "off"})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", CHAT, json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != http.client.OK:
        return f"refused {response.status} {response.read()[:300]!r}"
    while line := response.readline():
        if line.startswith(b"data: [DONE]"):
            return "done"
        if line.startswith(b'data: {"error"'):
            return f"error {line[:300]!r}"
        if line.startswith(b"data: ") and OPENING not in line:
            print_event("chunk")
    return "cut"


def print_event(what: str) -> None:
    """Print the time, the seconds that this thread has waited for a processor so far, and an event."""
    waited = int(SCHEDULING.read_text().split()[1]) / 1e9 if SCHEDULING.exists() else 0.0
    print(time.monotonic(), waited, what, flush=True)


def main(address: str, model: str) -> None:
    """Request answers until the process is killed."""
    key, host = sys.stdin.readline().strip(), address.removeprefix("http://")
    while True:
        with contextlib.closing(http.client.HTTPConnection(host, timeout=BEGIN_SECONDS)) as connection:
            print_event("begin")
            try:
                end = request_answer(connection, key, model)
            except (OSError, http.client.HTTPException) as error:
                end = f"cut {error!r}"
        print_event(end)
        if end != "done":
            time.sleep(PAUSE_SECONDS)


class HonestStream:
    """Events of an honest stream's process so far, timed by `time.monotonic`."""

    def __init__(self, model: str = MODEL) -> None:
        self.model = model
        self._events: list[Event] = []
        self._recorded = asyncio.Event()

    def record(self, line: bytes) -> None:
        """Record one line of the process's output."""
        moment, waited, what = line.decode().strip().split(" ", 2)
        self._events.append(Event(float(moment), what, float(waited)))
        self._recorded.set()

    async def wait_for_start(self) -> bool:
        """Wait for the first chunk, and return whether it came within `BEGIN_SECONDS`."""
        return await self._wait_for(lambda: any(event.what == "chunk" for event in self._events), BEGIN_SECONDS)

    async def silence(self, since: float, listen_seconds: float = LISTEN_SECONDS) -> tuple[float, float]:
        """Return the longest silence between two chunks from `since` until now, and the moment at which it began.

        Waits up to `listen_seconds` for an event that is later than now: the earlier ones may still be in the pipe, and
        a silence that has not ended is longer than it seems.
        """
        now = time.monotonic()
        is_heard = await self._wait_for(lambda: self._events[-1].moment >= now, listen_seconds)
        return longest_silence(self._events, since, self._events[-1].moment if is_heard else time.monotonic())

    async def _wait_for(self, holds: Callable[[], bool], max_seconds: float) -> bool:
        """Wait until the events meet a condition, for up to `max_seconds`; return whether they do."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max_seconds):
                while not holds():
                    self._recorded.clear()
                    await self._recorded.wait()
        return holds()

    def ends(self, since: float) -> list[str]:
        """Return the ends of answers since `since`, except `done`."""
        usual = {"begin", "chunk", "done"}
        return [event.what for event in self._events if event.moment >= since and event.what not in usual]

    @property
    def last(self) -> str:
        """Last event."""
        return self._events[-1].what if self._events else "nothing"


@contextlib.asynccontextmanager
async def honest_stream(address: str, key: str, model: str) -> AsyncGenerator[HonestStream, None]:
    """Run an honest stream until the block ends."""
    command, pipe = (sys.executable, "-m", "campaign.honest", address, model), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe, start_new_session=True)
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a pipe that was asked for is missing")
    stream, lines = HonestStream(model), process.stdout

    async def listen() -> None:
        async for line in lines:
            stream.record(line)

    listening = asyncio.create_task(listen())
    process.stdin.write(key.encode() + b"\n")
    try:
        yield stream
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.wait({listening})


if __name__ == "__main__":
    main(*sys.argv[1:])
