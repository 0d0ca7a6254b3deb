"""Legal HTTP that costs the server more than the client, and connections that never send a whole request."""

import asyncio
import itertools
import socket
import time
from collections.abc import Iterable

from campaign.attack import TurnContext
from campaign.chats import CHAT
from campaign.sockets import connections, is_closed, request_head, send, status

CONNECTIONS, SECONDS = 8, 12.0
ANSWER_SECONDS = 90.0
CHUNKS = 100_000
IDLE, HALF_HEADERS, SLOW_BODIES = 1000, 500, 100
CLOSED_SECONDS = 45.0
"""Seconds after which the server must have hung up on a client that does not complete its request."""
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS_PER_WRITE = 1000
"""Number of chunks sent together."""


def chunked(key: str, chunk: bytes) -> Iterable[bytes]:
    """Yield a request whose body repeats `chunk` many times."""
    yield request_head("POST", CHAT, key, CHUNKED)
    yield from itertools.repeat(chunk * CHUNKS_PER_WRITE, CHUNKS // CHUNKS_PER_WRITE)
    yield b"0\r\n\r\n"


def one_byte_chunks(key: str) -> Iterable[bytes]:
    """Return chunks as small as they may be."""
    return chunked(key, b"1\r\n \r\n")


def padded_chunks(key: str) -> Iterable[bytes]:
    """Return chunks of one byte, with padded sizes."""
    return chunked(key, b"0001\r\n \r\n")


def extended_chunks(key: str) -> Iterable[bytes]:
    """Return chunks of one byte, each with an extension."""
    return chunked(key, b"1;extension=" + b"x" * 64 + b"\r\n \r\n")


def one_byte_writes(key: str) -> Iterable[bytes]:
    """Yield a request whose body is sent byte by byte."""
    yield request_head("POST", CHAT, key, "Content-Length: 20000")
    yield from itertools.repeat(b" ", 20_000)


def trailers(key: str) -> Iterable[bytes]:
    """Yield more trailer fields than a head may have."""
    yield request_head("POST", CHAT, key, CHUNKED) + b"2\r\n{}\r\n0\r\n"
    yield from itertools.repeat(b"a: b\r\n" * CHUNKS_PER_WRITE, CHUNKS // CHUNKS_PER_WRITE)
    yield b"\r\n"


def pipelined(key: str) -> Iterable[bytes]:
    """Yield thousands of requests before the first answer is read."""
    yield from itertools.repeat(request_head("GET", "/v1/models/nothing", key) * 100, 30)


def many_fields(key: str) -> Iterable[bytes]:
    """Yield a head of many fields."""
    yield request_head("GET", "/health", key)[:-2] + b"a: b\r\n" * 5000 + b"\r\n"


EXPENSIVE = (
    one_byte_chunks,
    padded_chunks,
    extended_chunks,
    one_byte_writes,
    trailers,
    pipelined,
    many_fields,
)


async def expensive_requests(context: TurnContext) -> None:
    """Send random kinds of such requests for some seconds, over several connections, with or without a key."""
    ends_at = time.monotonic() + SECONDS
    while time.monotonic() < ends_at:
        make, key = context.rng.choice(EXPENSIVE), context.rng.choice((context.key, ""))
        name = f"{make.__name__} {'with' if key else 'without'} a key"
        context.begin(name)
        async with connections(context.server.address, CONNECTIONS) as sockets:
            statuses = await asyncio.gather(*(send_and_read_status(connection, make(key)) for connection in sockets))
        context.findings.tried += len(statuses)
        context.findings.expect(max(statuses) < 500, f"{name}: {max(statuses)}")


async def send_and_read_status(connection: socket.socket, chunks: Iterable[bytes]) -> int:
    """Send a request, and return the status of its answer; 0 if there is none."""
    sending = asyncio.create_task(send(connection, chunks))
    code = await status(connection, ANSWER_SECONDS)
    sending.cancel()
    return code


async def half_requests(context: TurnContext) -> None:
    """Open 1,000 silent connections, half heads and half bodies: other clients are answered, half requests closed."""
    host = context.server.address
    async with (
        connections(host, IDLE),
        connections(host, HALF_HEADERS) as halves,
        connections(host, SLOW_BODIES) as bodies,
        context.client() as client,
    ):
        context.begin("half heads and bodies")
        for connection in halves:
            await send(connection, [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA: "])
        for connection in bodies:
            await send(connection, [request_head("POST", CHAT, context.key, "Content-Length: 100") + b"{"])
        context.begin("a request beside half ones")
        began = time.monotonic()
        answer = await client.get("/v1/models")
        context.findings.count_response(
            answer.status_code, answer.headers, answer.content, "a request beside half ones"
        )
        context.findings.expect(answer.is_success, f"a request beside half ones: {answer.status_code}")
        context.findings.record_time("answer beside", time.monotonic() - began)
        context.begin("half requests end")
        closed = await asyncio.gather(*(is_closed(half, CLOSED_SECONDS) for half in [*halves, *bodies]))
    context.findings.tried += IDLE + len(closed)
    context.findings.expect(all(closed), f"{closed.count(False)} of {len(closed)} half requests were left open")
