"""The listening side: a socket that says why it cannot be had, deadlines for slow clients, and an orderly end.

uvicorn has no timer for request headers, answers broken HTTP in plain text, hangs up on clients that closed their half,
and accepts more connections than the process can open files: `DeadlineProtocol` and `Acceptor` mend that. The first
signal drains: open requests finish, new ones get 503. The second one ends at once.
"""

import asyncio
import contextlib
import errno
import functools
import http
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Collection, Generator
from typing import cast

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.core import descriptors
from app.serving.context import Activity
from app.serving.errors import Rejected, error_object
from app.serving.sse import COMMENT
from app.serving.wire import MAX_INCOMPLETE_BYTES, Connection

SPARE_DESCRIPTORS = 96
"""Open files that are no connections: the store, models on disk, the log, the worker, downloads."""
SPARE_CONNECTIONS = 32
"""Connections beyond the generation requests that may be open: for the dashboard, and to tell others to wait."""
LISTEN_QUEUE = 1024
READ_BYTES = 64 * 1024
"""Bytes of one connection that are parsed before others have their turn; asyncio would read 256 KiB."""
CLOSE_SECONDS = 3
"""What connections get to send their last bytes after the drain."""

logger = logging.getLogger(__name__)


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


def max_connections() -> int:
    """How many connections may be open, so that files can be opened besides."""
    return max(2 * SPARE_CONNECTIONS, descriptors.limit() - SPARE_DESCRIPTORS)


def max_open_requests() -> int:
    """How many generation requests may be open, so that others can still be answered."""
    return max_connections() - SPARE_CONNECTIONS


class DeadlineProtocol(H11Protocol):
    """One connection; its request headers must be complete `header_seconds` after their first byte, or the accept.

    uvicorn promises nothing about this class; the tests over a real socket fail when it changes.
    """

    header_seconds = 15.0
    probe_seconds = (0.0, 0.1, 1.0)
    """When whoever closed a half of the connection is written to: one who is gone makes the second write fail."""
    waits_since = 0.0
    """When we began to wait for this client, in the loop's time."""
    refusal: Rejected | None = None
    """The reason why the rest of the body is not parsed; reading it raises this."""
    _deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether every request was answered, and no next one has begun."""
        return self.cycle is not None and self.cycle.response_complete and not self.conn.trailing_data[0]

    @property
    def is_waited_for(self) -> bool:
        """Whether it is the client's turn: to send a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or bool(self.cycle.more_body)

    @property
    def is_answered_early(self) -> bool:
        """Whether the answer began before the whole request was here: nobody reads the rest."""
        return self.cycle is not None and self.cycle.response_started and self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self.conn = Connection(h11.SERVER, MAX_INCOMPLETE_BYTES)
        self.app = PoliteEnd(self.app, self)
        self.waits_since = self.loop.time()
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the clock with the first byte of a request, stop it with the last one of its headers."""
        if self.is_idle:
            self.waits_since = self.loop.time()
        if self.refusal is not None or self.is_answered_early:
            self._pass_by(data)
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._arm()
        else:
            self._disarm()

    def handle_events(self) -> None:
        """Parse what is here. A body that is refused is answered by the application, a head here."""
        try:
            super().handle_events()
        except Rejected as error:
            if self.cycle is None or self.cycle.response_complete:
                self._refuse(error)
            else:
                self.refusal = error
                self.cycle.message_event.set()

    def _pass_by(self, data: bytes) -> None:
        """Hand `PoliteEnd` the bytes of a body that nobody reads, unparsed."""
        self.cycle.body += data
        self.cycle.message_event.set()
        if len(self.cycle.body) > READ_BYTES:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        """Start the clock when the beginning of a next request is already here."""
        self.waits_since = self.loop.time()
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._arm()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more: whoever asked for something gets it, if it still listens."""
        if self.cycle is None or self.cycle.response_complete or (self.cycle.more_body and self.refusal is None):
            return False
        self.cycle.keep_alive = False
        for seconds in self.probe_seconds:
            self.loop.call_later(seconds, self._probe)
        return True

    def _probe(self) -> None:
        """Write something that clients ignore: it has to fail for us to learn that a client left."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        scope = self.cycle.scope
        event: h11.Event | None = None
        if self.cycle.response_started:
            event = h11.Data(data=scope["state"].get(COMMENT, b""))
        elif scope["http_version"] != "1.0":
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        if event is not None:
            self.transport.write(self.conn.send(event) or b"")

    def give_way(self) -> None:
        """Leave room for somebody else: an idle connection closes, an incomplete request is refused."""
        if self.is_idle:
            self.transport.close()
        else:
            self._refuse(Rejected(408, "The request did not arrive in time.", "request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """Answer broken HTTP with an error object."""
        self._refuse(Rejected(400, msg, "invalid_http"))

    def _refuse(self, error: Rejected) -> None:
        """Answer before the application does, and hang up; when an answer is under way, just hang up."""
        body = msgspec.json.encode(error_object(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        reason = http.HTTPStatus(error.status).phrase.encode()
        response = h11.Response(status_code=error.status, headers=headers, reason=reason)
        with contextlib.suppress(h11.LocalProtocolError):
            events = (response, h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # from here on the application speaks to nobody
            self.cycle.message_event.set()
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


class PoliteEnd:
    """ASGI middleware: an answer that begins before the whole body is here closes the connection, and takes the rest of
    the body first, unparsed, for a while.

    The answer itself is sent at once. Closing with bytes unread would reset the connection, and the client might never
    see why.
    """

    patience_seconds = 0.5
    bytes_per_second = 128 * 1024
    """What arrives buys time at this rate."""
    most_bytes = 64 * 1024 * 1024

    def __init__(self, app: ASGIApp, connection: DeadlineProtocol) -> None:
        self._app = app
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; reading a body that is refused raises, the last message of an early answer waits for the
        rest of the body."""
        connection, cycle = self._connection, self._connection.cycle

        async def receive_or_raise() -> Message:
            message = await receive()
            if connection.refusal is not None and not cycle.response_started:
                raise connection.refusal
            return message

        async def send_politely(message: Message) -> None:
            if cycle.more_body and message["type"] == "http.response.start":
                others = (each for each in message.get("headers", ()) if each != CLOSE_HEADER)
                message = {**message, "headers": [*others, CLOSE_HEADER]}
            elif cycle.more_body and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await self._take(receive)
                message = {**message, "body": b""}
            await send(message)

        await self._app(scope, receive_or_raise, send_politely)

    async def _take(self, receive: Receive) -> None:
        taken, began = 0, asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.patience_seconds) as deadline:
                more = True
                while more and taken < self.most_bytes:
                    message = await receive()
                    taken += len(message.get("body", b""))
                    more = message.get("more_body", False)
                    deadline.reschedule(began + self.patience_seconds + taken / self.bytes_per_second)


class Acceptor:
    """Takes connections while there is room for them; what comes meanwhile waits in the system's queue.

    Without room, whoever lets us wait the longest gives way. Stands in for the server object of asyncio.
    """

    look_seconds = 0.02
    idle_seconds, sending_seconds = 0.2, 2.0
    """So long nobody has to give way who has no request, or sends one."""
    error_seconds, tell_seconds = 0.5, 60.0

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
        self._told_at = -self.tell_seconds
        self._loop = asyncio.get_running_loop()
        listener.listen(LISTEN_QUEUE)
        self._task = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Take no more connections."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Return once none is taken any more."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            while len(self._connections) >= self._limit:
                self._make_room()
                await asyncio.sleep(self.look_seconds)
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
                await self._loop.connect_accepted_socket(self._connect, connection)
            except ConnectionError:
                continue  # it left before it was taken
            except Exception as error:  # noqa: BLE001 - a server that accepts nothing more would be down
                self._tell(error)
                await asyncio.sleep(self.error_seconds)

    def _make_room(self) -> None:
        now = self._loop.time()
        late = [
            (not each.is_idle, each.waits_since, each)
            for each in self._connections
            if each.is_waited_for
            and not each.transport.is_closing()
            and now - each.waits_since > (self.idle_seconds if each.is_idle else self.sending_seconds)
        ]
        if late:
            min(late, key=lambda each: each[:2])[2].give_way()

    def _tell(self, error: Exception) -> None:
        if self._loop.time() - self._told_at >= self.tell_seconds:
            self._told_at = self._loop.time()
            why = getattr(error, "strerror", None) or repr(error)
            logger.warning("no connection can be accepted (%s): those that come wait", why)


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
        """Listen, then tell."""
        await super().startup([])
        connect = functools.partial(
            cast("type[DeadlineProtocol]", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        connected = cast("set[DeadlineProtocol]", self.server_state.connections)
        self.servers = [
            cast("asyncio.Server", Acceptor(each, connect, connected, self._connections)) for each in sockets or ()
        ]
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

    async def main_loop(self) -> None:
        """Sleep until the end: uvicorn's own loop wakes ten times a second."""
        await self._stopped.wait()

    def stop(self) -> None:
        """Begin to drain; called a second time, end at once."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._draining.cancel()
            self.force_exit = True
            self._stopped.set()

    async def _drain(self) -> None:
        await self._activity.drain(self._drain_seconds)
        self._stopped.set()
