"""The listening side: a socket that says why it cannot be had, deadlines for slow clients, and an orderly end.

uvicorn has no timer for request headers and answers broken HTTP in plain text; `DeadlineProtocol` adds the one and
mends the other. The first signal drains: open requests finish, new ones get 503. The second one ends at once.
"""

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Generator

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.serving.activity import Activity
from app.serving.errors import Rejected, error_object

MAX_INCOMPLETE_BYTES = 64 * 1024
"""Headers beyond this are refused by h11, before the gate could."""
CLOSE_SECONDS = 3
"""What connections get to send their last bytes after the drain."""


class AddressError(OSError):
    """The address cannot be listened on; the message is one line and says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet. Raises `AddressError`."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    # asyncio sends small writes at once only on sockets that name their protocol; others wait up to 40 ms for an ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise AddressError(_why(error, host, port)) from error
    listener.setblocking(False)  # noqa: FBT003 - the socket module takes it by position only
    return listener


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken (by another Paceline? see `paceline ps`): stop it or set PACELINE_PORT"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"port {port} is not allowed for this user: set PACELINE_PORT to 1024 or above"
    return f"{host} is not an address of this machine: set PACELINE_HOST, for example to 127.0.0.1"


class DeadlineProtocol(H11Protocol):
    """One connection; its request headers must be complete `header_seconds` after their first byte, or the accept."""

    header_seconds = 15.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the clock with the first byte of a request, stop it with the last one of its headers."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._arm()
        else:
            self._disarm()

    def on_response_complete(self) -> None:
        """Start the clock when the beginning of a next request is already here."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._arm()

    def send_400_response(self, msg: str) -> None:
        """Answer broken HTTP with an error object; when an answer is under way, just hang up."""
        body = msgspec.json.encode(error_object(Rejected(400, msg, "invalid_http")))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):
            self.transport.write(
                b"".join(
                    self.conn.send(event) or b""
                    for event in (
                        h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                        h11.Data(data=body),
                        h11.EndOfMessage(),
                    )
                )
            )
        self.transport.close()

    def _arm(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.header_seconds, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        self.transport.close()


def serve_config(app: ASGIApp, *, protocol: type[DeadlineProtocol] = DeadlineProtocol) -> uvicorn.Config:
    """How uvicorn serves `app`: h11, no websockets, no proxy headers, no access log, logging left alone."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_INCOMPLETE_BYTES,
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
    ) -> None:
        super().__init__(config)
        self._activity = activity
        self._drain_seconds = drain_seconds
        self._on_started = on_started
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell."""
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let SIGINT and SIGTERM call `stop`; the process then ends by itself, with its own exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for each in signals:
            loop.add_signal_handler(each, self.stop)
        try:
            yield
        finally:
            for each in signals:
                loop.remove_signal_handler(each)

    def stop(self) -> None:
        """Begin to drain; called a second time, end at once."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._draining.cancel()
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._activity.drain(self._drain_seconds)
        self.should_exit = True
