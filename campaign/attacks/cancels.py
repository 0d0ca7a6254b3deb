"""Requests abandoned at any moment, and answers that are never read: the server keeps nothing of either."""

import asyncio
import json
import socket
import struct
import time

import httpx2

from campaign.attack import TurnContext
from campaign.chats import CHAT, long_chat
from campaign.honest import MODELS
from campaign.sockets import connections, request_head, send
from campaign.streams import wait_until_idle

CLIENTS, SECONDS = 16, 10.0
MAX_DELAY_SECONDS = 0.4
HONEST_REQUESTS = len(MODELS)
"""Number of open requests that are not leaks: the honest streams'."""
NON_READERS, HELD_SECONDS = 30, 10.0
RECEIVE_BYTES = 4096
MAX_BYTES = 100 << 20
"""Bytes of the server's memory that unread answers may take."""
RESET = struct.pack("ii", 1, 0)


async def cancel(context: TurnContext) -> None:
    """Abandon requests in every way for some seconds."""
    ends_at = time.monotonic() + SECONDS

    async def abandon_requests(client: httpx2.AsyncClient) -> None:
        while time.monotonic() < ends_at:
            await context.rng.choice((hang_up, reset))(context, client)

    async with context.client() as client:
        await asyncio.gather(*(abandon_requests(client) for _ in range(CLIENTS)))
    await expect_no_open_requests(context)


def body(context: TurnContext) -> dict[str, object]:
    """Return a random request that takes a while."""
    rng = context.rng
    return long_chat("Tell a story.", rng.choice((1, 50, 1000)), n=rng.choice((1, 1, 4))) | {
        "stream": rng.random() < 0.8
    }


async def hang_up(context: TurnContext, client: httpx2.AsyncClient) -> None:
    """Close the connection at a random moment; an answer that arrives before that is judged."""
    task = asyncio.create_task(client.post(CHAT, json=body(context)))
    try:
        answer = await asyncio.wait_for(task, context.rng.uniform(0, MAX_DELAY_SECONDS))
    except (httpx2.TransportError, TimeoutError):
        context.findings.tried += 1
    else:
        context.findings.count_response(
            answer.status_code, answer.headers, answer.content, "a request that was not given up"
        )


async def reset(context: TurnContext, _client: httpx2.AsyncClient) -> None:
    """Reset the connection like a crashing client, sometimes in the middle of the request."""
    context.findings.tried += 1
    async with connections(context.server.address, 1) as (connection,):
        content = json.dumps(body(context)).encode()
        request = request_head("POST", CHAT, context.key, f"Content-Length: {len(content)}") + content
        await send(connection, [request[: context.rng.choice((len(request), len(request) - 5, 40))]])
        await asyncio.sleep(context.rng.uniform(0, MAX_DELAY_SECONDS))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


async def never_read(context: TurnContext) -> None:
    """Request long answers and read nothing of them."""
    before = server_bytes(context)
    content = json.dumps(long_chat("Tell a story.", 3000, n=4, logprobs=True, top_logprobs=20)).encode()
    request = request_head("POST", CHAT, context.key, f"Content-Length: {len(content)}") + content
    async with connections(context.server.address, NON_READERS, RECEIVE_BYTES) as sockets:
        for connection in sockets:
            await send(connection, [request])
        peak, ends_at = before, time.monotonic() + HELD_SECONDS
        while time.monotonic() < ends_at:
            await asyncio.sleep(0.5)
            peak = max(peak, server_bytes(context))
    context.findings.tried += NON_READERS
    grown = (peak - before) >> 20
    context.findings.expect(peak - before <= MAX_BYTES, f"answers that nobody reads took {grown} MB of the server")
    await expect_no_open_requests(context)


def server_bytes(context: TurnContext) -> int:
    """Return the memory of the server's own process, in bytes."""
    return context.server.memory()["server"].resident_bytes


async def expect_no_open_requests(context: TurnContext) -> None:
    """Expect that no request is open except the honest ones."""
    async with context.server.client(context.server.admin_key) as admin:
        open_count = await wait_until_idle(admin, HONEST_REQUESTS)
    context.findings.expect(
        open_count <= HONEST_REQUESTS, f"{open_count - HONEST_REQUESTS} requests are open that everybody has left"
    )
