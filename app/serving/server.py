"""The listening side: a socket with clear bind errors, a connection limit, and a graceful shutdown.

uvicorn accepts more connections than the process can open files; `Acceptor` does not. `connection.py` adds what uvicorn
lacks per connection. The first signal drains: open requests finish, new ones get 503. The second signal ends them all.
"""

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Collection, Generator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from app.machine import descriptors
from app.serving.connection import DeadlineProtocol
from app.serving.context import Activity

SPARE_DESCRIPTORS = 96
"""File descriptors reserved for everything but connections: store, models on disk, log, worker, downloads."""
SPARE_CONNECTIONS = 32
"""Connections reserved beyond those of generation requests: for the dashboard, and to refuse further requests."""
LISTEN_QUEUE = 1024
CLOSE_SECONDS = 3
"""Seconds that connections get to send their last bytes after the drain."""

logger = logging.getLogger("paceline.server")


class AddressError(OSError):
    """The server cannot listen on the address; the message is one line and says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises `AddressError`."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name their protocol; else small writes wait up to 40 ms for an ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise AddressError(_bind_error(error, host, port)) from error
    listener.setblocking(False)  # noqa: FBT003 - the socket module takes it by position only
    return listener


def _bind_error(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken (by another Paceline? see `paceline ps`): stop it or set PACELINE_PORT"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"port {port} is not allowed for this user: set PACELINE_PORT to 1024 or above"
    return f"{host} is not an address of this machine: set PACELINE_HOST, for example to 127.0.0.1"


def max_connections() -> int:
    """Return the maximum number of open connections, leaving descriptors for other files."""
    return max(2 * SPARE_CONNECTIONS, descriptors.limit() - SPARE_DESCRIPTORS)


def max_open_requests() -> int:
    """Return the maximum number of open generation requests, so that other requests can still be answered."""
    return max_connections() - SPARE_CONNECTIONS


class Acceptor:
    """Accepts connections while there is room; further ones wait in the system's queue.

    Without room, the connection that has kept the server waiting longest is closed, idle ones first. Replaces asyncio's
    server object.
    """

    poll_seconds = 0.02
    idle_seconds, sending_seconds = 0.2, 2.0
    """Seconds for which a connection is not evicted while idle, and while it sends a request."""
    error_seconds, warning_interval_seconds = 0.5, 60.0

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], DeadlineProtocol],
        connections: Collection[DeadlineProtocol],
        limit: int,
    ) -> None:
        self._listener = listener
        self._connect = connect
        self._connections = connections
        self._limit = limit
        self._warned_at = -self.warning_interval_seconds
        self._loop = asyncio.get_running_loop()
        listener.listen(LISTEN_QUEUE)
        self._task = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Return once accepting has stopped."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            while len(self._connections) >= self._limit:
                self._evict_connection()
                await asyncio.sleep(self.poll_seconds)
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
                await self._loop.connect_accepted_socket(self._connect, connection)
            except ConnectionError:
                continue  # the client left before the accept
            except Exception as error:  # noqa: BLE001 - ending this loop would take the server down
                self._warn(error)
                await asyncio.sleep(self.error_seconds)

    def _evict_connection(self) -> None:
        now = self._loop.time()
        candidates = [
            (not connection.is_idle, connection.waiting_since, connection)
            for connection in self._connections
            if connection.awaits_client
            and not connection.transport.is_closing()
            and now - connection.waiting_since > (self.idle_seconds if connection.is_idle else self.sending_seconds)
        ]
        if candidates:
            min(candidates, key=lambda candidate: candidate[:2])[2].evict()

    def _warn(self, error: Exception) -> None:
        if self._loop.time() - self._warned_at >= self.warning_interval_seconds:
            self._warned_at = self._loop.time()
            why = getattr(error, "strerror", None) or repr(error)
            logger.warning("no connection can be accepted (%s): new connections wait", why)


def serve_config(app: ASGIApp, *, protocol: type[DeadlineProtocol] = DeadlineProtocol) -> uvicorn.Config:
    """Return uvicorn's configuration: h11, no websockets, no proxy headers, no access log, no changes to logging."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,  # the gate sends it
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


class DrainingServer(uvicorn.Server):
    """Serves until a signal or `stop`, then drains for `drain_seconds`."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        activity: Activity,
        drain_seconds: float,
        on_started: Callable[[], None] = lambda: None,
        connections: int | None = None,
    ) -> None:
        super().__init__(config)
        self._connections = max_connections() if connections is None else connections
        self._activity = activity
        self._drain_seconds = drain_seconds
        self._on_started = on_started
        self._draining: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `on_started`."""
        await super().startup([])
        connect = functools.partial(
            cast("type[DeadlineProtocol]", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        connected = cast("set[DeadlineProtocol]", self.server_state.connections)
        self.servers = [
            cast("asyncio.Server", Acceptor(listener, connect, connected, self._connections))
            for listener in sockets or ()
        ]
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let SIGINT and SIGTERM call `stop`; the process then exits normally, with its own exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for signal_number in signals:
            loop.add_signal_handler(signal_number, self.stop)
        try:
            yield
        finally:
            for signal_number in signals:
                loop.remove_signal_handler(signal_number)

    async def main_loop(self) -> None:
        """Sleep until stopped: uvicorn's own loop wakes ten times a second."""
        await self._stopped.wait()

    def stop(self) -> None:
        """Start draining; if called a second time, end immediately."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._draining.cancel()
            self.force_exit = True
            self._stopped.set()

    async def _drain(self) -> None:
        await self._activity.drain(self._drain_seconds)
        self._stopped.set()
