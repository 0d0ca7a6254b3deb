"""Streams that attackers request: how each ended, and when its first token arrived."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from campaign.chats import CHAT, chat
from campaign.judgement import Findings, ends_of

RETRY_SECONDS = 0.1
IDLE_TIMEOUT_SECONDS = 30.0


async def read_stream(
    client: httpx2.AsyncClient, body: dict[str, Any], findings: Findings, description: str
) -> Sequence[str]:
    """Read one stream to its end, count it, and return its ends. A refusal counts as its end."""
    try:
        async with client.stream("POST", CHAT, json=body) as answer:
            if not answer.is_success:
                findings.count_response(answer.status_code, answer.headers, await answer.aread(), description)
                return ["refused"]
            lines: list[str] = []
            with contextlib.suppress(httpx2.TransportError):
                async for line in answer.aiter_lines():
                    lines.append(line)  # noqa: PERF401 - keeps the lines before a cut connection
    except httpx2.TransportError as error:
        findings.tried += 1
        findings.failures.append(f"{description}: no answer ({type(error).__name__})")
        return []
    ends = ends_of(lines)
    findings.count_stream(ends, description)
    return ends


async def first_token_seconds(client: httpx2.AsyncClient, since: float, max_seconds: float) -> float:
    """Return the seconds from `since` to a first token, sending the request again whenever it is refused. Raises
    TimeoutError."""
    async with asyncio.timeout(max_seconds):
        while True:
            with contextlib.suppress(httpx2.TransportError):
                async with client.stream("POST", CHAT, json=chat("Hello", max_tokens=8)) as answer:
                    async for line in answer.aiter_lines():
                        if '"content":"' in line and '"content":""' not in line:
                            return time.monotonic() - since
            await asyncio.sleep(RETRY_SECONDS)


async def wait_until_idle(admin: httpx2.AsyncClient, max_open: int) -> int:
    """Wait until at most `max_open` requests are open, for up to `IDLE_TIMEOUT_SECONDS`; return how many are open."""
    deadline = time.monotonic() + IDLE_TIMEOUT_SECONDS
    while True:
        still_open = int((await admin.get("/api/status")).json()["open_requests"])
        if still_open <= max_open or time.monotonic() > deadline:
            return still_open
        await asyncio.sleep(RETRY_SECONDS)
