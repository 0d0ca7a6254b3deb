"""Requests abandoned at any moment, and answers that are never read: nothing of them is left."""

import asyncio
import json
import socket
import struct
import time

import httpx2

from campaign.attack import Arena
from campaign.chats import CHAT, long_chat
from campaign.sockets import connections, head, send
from campaign.streams import settled

CLIENTS, SECONDS = 16, 10.0
LATEST_SECONDS = 0.4
HONEST = 1
"""Number of open requests that are not leaks: the honest stream's."""
NON_READERS, HELD_SECONDS = 30, 10.0
RECEIVE_BYTES = 4096
MOST_BYTES = 100 << 20
"""Bytes of the server's memory that unread answers may take."""
RESET = struct.pack("ii", 1, 0)


async def cancel(arena: Arena) -> None:
    """Abandon requests in every way for some seconds."""
    ends_at = time.monotonic() + SECONDS

    async def leave_often(client: httpx2.AsyncClient) -> None:
        while time.monotonic() < ends_at:
            await arena.chance.choice((hang_up, reset))(arena, client)

    async with arena.client() as client:
        await asyncio.gather(*(leave_often(client) for _ in range(CLIENTS)))
    await nothing_is_left(arena)


def body(arena: Arena) -> dict[str, object]:
    """Return a random request that takes a while."""
    chance = arena.chance
    return long_chat("Tell a story.", chance.choice((1, 50, 1000)), n=chance.choice((1, 1, 4))) | {
        "stream": chance.random() < 0.8
    }


async def hang_up(arena: Arena, client: httpx2.AsyncClient) -> None:
    """Close the connection at a random moment; an answer that came before is judged."""
    asking = asyncio.create_task(client.post(CHAT, json=body(arena)))
    try:
        answer = await asyncio.wait_for(asking, arena.chance.uniform(0, LATEST_SECONDS))
    except (httpx2.TransportError, TimeoutError):
        arena.findings.tried += 1
    else:
        arena.findings.answered(answer.status_code, answer.headers, answer.content, "a request that was not given up")


async def reset(arena: Arena, _client: httpx2.AsyncClient) -> None:
    """Reset the connection like a crashing client, sometimes in the middle of the request."""
    arena.findings.tried += 1
    async with connections(arena.server.address, 1) as (connection,):
        content = json.dumps(body(arena)).encode()
        whole = head("POST", CHAT, arena.key, f"Content-Length: {len(content)}") + content
        await send(connection, [whole[: arena.chance.choice((len(whole), len(whole) - 5, 40))]])
        await asyncio.sleep(arena.chance.uniform(0, LATEST_SECONDS))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


async def never_read(arena: Arena) -> None:
    """Request long answers and read nothing of them."""
    before = server_bytes(arena)
    content = json.dumps(long_chat("Tell a story.", 3000, n=4, logprobs=True, top_logprobs=20)).encode()
    whole = head("POST", CHAT, arena.key, f"Content-Length: {len(content)}") + content
    async with connections(arena.server.address, NON_READERS, RECEIVE_BYTES) as opened:
        for connection in opened:
            await send(connection, [whole])
        most, ends_at = before, time.monotonic() + HELD_SECONDS
        while time.monotonic() < ends_at:
            await asyncio.sleep(0.5)
            most = max(most, server_bytes(arena))
    arena.findings.tried += NON_READERS
    grown = (most - before) >> 20
    arena.findings.expect(most - before <= MOST_BYTES, f"answers that nobody reads took {grown} MB of the server")
    await nothing_is_left(arena)


def server_bytes(arena: Arena) -> int:
    """Return the memory of the server's own process, in bytes."""
    return arena.server.memory()["server"].resident_bytes


async def nothing_is_left(arena: Arena) -> None:
    """Expect that no request is open except the honest one."""
    async with arena.server.client(arena.server.admin_key) as admin:
        left = await settled(admin, HONEST)
    arena.findings.expect(left <= HONEST, f"{left - HONEST} requests are open that everybody has left")
