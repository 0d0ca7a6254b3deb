"""Connections that no library offers: raw bytes, sent slowly or in part, and answers that are never read."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Iterable

LINE_END = b"\r\n"


@contextlib.asynccontextmanager
async def connections(address: str, count: int, receive_bytes: int = 0) -> AsyncGenerator[list[socket.socket], None]:
    """Open `count` connections; `receive_bytes` sizes the kernel's buffer for unread answers (0: its default)."""
    host, _, port = address.removeprefix("http://").partition(":")
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.socket()
            sockets.append(connection)
            connection.setblocking(False)  # noqa: FBT003 - the socket module takes it by position only
            if receive_bytes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        yield sockets
    finally:
        for connection in sockets:
            connection.close()


def request_head(method: str, path: str, key: str = "", *more: str) -> bytes:
    """Return the head of a request, without a key if none is given."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, *([f"Authorization: Bearer {key}"] if key else []), "", ""]).encode()


async def send(connection: socket.socket, chunks: Iterable[bytes]) -> bool:
    """Send the pieces, and return whether the server took all of them before it hung up."""
    try:
        for chunk in chunks:
            await asyncio.get_running_loop().sock_sendall(connection, chunk)
    except OSError:
        return False
    return True


async def status(connection: socket.socket, seconds: float) -> int:
    """Return the status of the answer; 0 if the server hung up or did not answer in time."""
    received = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            while LINE_END not in received and (chunk := await asyncio.get_running_loop().sock_recv(connection, 4096)):
                received += chunk
    fields = received.split(maxsplit=2)
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


async def is_closed(connection: socket.socket, seconds: float) -> bool:
    """Read until the server hangs up, and return whether it did so within `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            try:
                while await asyncio.get_running_loop().sock_recv(connection, 4096):
                    pass
            except OSError:
                return True
            return True
    return False
