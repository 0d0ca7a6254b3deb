"""An honest stream of another key, in a process of its own so that no attacker's work delays what it hears:
`python -m campaign.honest ADDRESS`, with the key on its standard input.

It asks for one long answer after another and tells the moment of everything that it hears, a line each.
"""

import asyncio
import contextlib
import http.client
import json
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from campaign.chats import CHAT, long_chat
from campaign.judgement import longest_silence

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 3500
"""Tokens of an answer: almost all that the demo model's context holds, more than a minute of them."""
OPENING = b'"content":""'
"""What a chunk says that comes before the first token."""
PAUSE_SECONDS = 0.1
BEGIN_SECONDS = 120.0


def ask(connection: http.client.HTTPConnection, key: str) -> str:
    """One answer, told as it comes; the word for its end."""
    body = long_chat("Count from 1 to 4000.", TOKENS, temperature=0, speculation={"method": "off"})
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
            tell("chunk")
    return "cut"


def tell(what: str) -> None:
    print(time.monotonic(), what, flush=True)


def main(address: str) -> None:
    """Ask until the process is ended."""
    key, host = sys.stdin.readline().strip(), address.removeprefix("http://")
    while True:
        with contextlib.closing(http.client.HTTPConnection(host, timeout=BEGIN_SECONDS)) as connection:
            tell("begin")
            try:
                end = ask(connection, key)
            except (OSError, http.client.HTTPException) as error:
                end = f"cut {error!r}"
        tell(end)
        if end != "done":
            time.sleep(PAUSE_SECONDS)


class HonestStream:
    """What such a process heard until now; moments are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._heard: list[tuple[float, str]] = []
        self._speaks = asyncio.Event()

    def note(self, line: bytes) -> None:
        """Keep one line of what it tells."""
        moment, _, what = line.decode().strip().partition(" ")
        self._heard.append((float(moment), what))
        if what == "chunk":
            self._speaks.set()

    async def speaks(self) -> bool:
        """Whether its first chunk came in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._speaks.wait(), BEGIN_SECONDS)
        return self._speaks.is_set()

    def silence(self, since: float, until: float) -> tuple[float, float]:
        """The longest silence between two chunks, and the moment at which it began."""
        return longest_silence(self._heard, since, until)

    def ends(self, since: float) -> list[str]:
        """How its answers ended, other than well."""
        return [what for moment, what in self._heard if moment >= since and what not in {"begin", "chunk", "done"}]

    @property
    def last(self) -> str:
        """What it heard last."""
        return self._heard[-1][1] if self._heard else "nothing"


@contextlib.asynccontextmanager
async def honest_stream(address: str, key: str) -> AsyncGenerator[HonestStream, None]:
    """One that listens until the block ends."""
    command, pipe = (sys.executable, "-m", "campaign.honest", address), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a pipe that was asked for is missing")
    heard, lines = HonestStream(), process.stdout

    async def listen() -> None:
        async for line in lines:
            heard.note(line)

    listening = asyncio.create_task(listen())
    process.stdin.write(key.encode() + b"\n")
    try:
        yield heard
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await asyncio.wait({listening})


if __name__ == "__main__":
    main(*sys.argv[1:])
