"""Streams that attackers request: how each ended, and when its first token came."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from campaign.chats import CHAT, chat
from campaign.judgement import Findings, ends_of

RETRY_SECONDS = 0.1
SETTLE_SECONDS = 30.0


async def listen(client: httpx2.AsyncClient, body: dict[str, Any], findings: Findings, asked: str) -> Sequence[str]:
    """Read one stream to its end, count it, and return its ends. A refusal counts as its end."""
    try:
        async with client.stream("POST", CHAT, json=body) as answer:
            if not answer.is_success:
                findings.answered(answer.status_code, answer.headers, await answer.aread(), asked)
                return ["refused"]
            lines: list[str] = []
            with contextlib.suppress(httpx2.TransportError):
                async for line in answer.aiter_lines():
                    lines.append(line)  # noqa: PERF401 - keeps the lines before a cut connection
    except httpx2.TransportError as error:
        findings.tried += 1
        findings.failures.append(f"{asked}: no answer ({type(error).__name__})")
        return []
    ends = ends_of(lines)
    findings.ended(ends, asked)
    return ends


async def first_token_seconds(client: httpx2.AsyncClient, since: float, most_seconds: float) -> float:
    """Return the seconds from `since` to a first token, sending the request again whenever it is refused. Raises
    TimeoutError."""
    async with asyncio.timeout(most_seconds):
        while True:
            with contextlib.suppress(httpx2.TransportError):
                async with client.stream("POST", CHAT, json=chat("Hello", max_tokens=8)) as answer:
                    async for line in answer.aiter_lines():
                        if '"content":"' in line and '"content":""' not in line:
                            return time.monotonic() - since
            await asyncio.sleep(RETRY_SECONDS)


async def settled(admin: httpx2.AsyncClient, most_open: int) -> int:
    """Wait until at most `most_open` requests are open, or `SETTLE_SECONDS` pass; return the number of open ones."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        still_open = int((await admin.get("/api/status")).json()["open_requests"])
        if still_open <= most_open or time.monotonic() > deadline:
            return still_open
        await asyncio.sleep(RETRY_SECONDS)
