"""One connection: deadlines for slow clients, bounded reads, errors as objects, and a graceful close.

uvicorn has no timer for request headers, answers broken HTTP in plain text, and disconnects clients that half-close
their connection.
"""

import asyncio
import contextlib
import http

import h11
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.serving.errors import Rejected, error_object
from app.serving.sse import COMMENT
from app.serving.wire import MAX_INCOMPLETE_BYTES, Connection

READ_BYTES = 64 * 1024
"""Bytes of one connection that are parsed before others get a turn; asyncio's default is 256 KiB."""
SMALL_READ_BYTES = 256
FREE_SMALL_READS = 64
"""Reads below `SMALL_READ_BYTES` that a request may take before further ones are throttled."""
GATHER_SECONDS = 0.01
"""Seconds between throttled reads of a request that arrives in small pieces: a read of any size costs 30 µs."""


class DeadlineProtocol(H11Protocol):
    """One connection. The first headers must be complete `header_seconds` after the accept, others after their start.

    The base class is not a public API of uvicorn; the tests over a real socket fail if it changes.
    """

    header_seconds = 15.0
    probe_seconds = (0.0, 0.1, 1.0)
    """Seconds after a half-close at which a probe is written: if the client is gone, the second write fails."""
    waiting_since = 0.0
    """Event loop time since which the server has been waiting for this client."""
    refusal: Rejected | None = None
    """Error that stopped the parsing of the body; reading the body raises it."""
    _deadline: asyncio.TimerHandle | None = None
    _small_reads = 0

    @property
    def is_idle(self) -> bool:
        """Whether every request was answered and no further one has begun."""
        return self.cycle is not None and self.cycle.response_complete and not self.conn.trailing_data[0]

    @property
    def awaits_client(self) -> bool:
        """Whether it is the client's turn: to send a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or bool(self.cycle.more_body)

    @property
    def is_answered_early(self) -> bool:
        """Whether the response began before the request was complete: the application does not read the rest."""
        return self.cycle is not None and self.cycle.response_started and self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header deadline."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self.conn = Connection(h11.SERVER, MAX_INCOMPLETE_BYTES)
        self.app = LingeringClose(self.app, self)
        self.waiting_since = self.loop.time()
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the header deadline."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the deadline at the first byte of a request, stop it at the end of its headers."""
        if self.is_idle:
            self.waiting_since, self._small_reads = self.loop.time(), 0
        self._small_reads += len(data) < SMALL_READ_BYTES
        if self._small_reads > FREE_SMALL_READS:
            self.transport.pause_reading()
            self.loop.call_later(GATHER_SECONDS, self._resume_reading)
        if self.refusal is not None or self.is_answered_early:
            self._pass_unparsed(data)
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._arm()
        else:
            self._disarm()

    def _resume_reading(self) -> None:
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def handle_events(self) -> None:
        """Parse the buffered bytes. Refused headers are answered here, a refused body by the application."""
        try:
            super().handle_events()
        except Rejected as error:
            if self.cycle is None or self.cycle.response_complete:
                self._refuse(error)
            else:
                self.refusal = error
                self.cycle.message_event.set()

    def _pass_unparsed(self, data: bytes) -> None:
        """Hand `LingeringClose` the unparsed bytes of a body that the application does not read."""
        self.cycle.body += data
        self.cycle.message_event.set()
        if len(self.cycle.body) > READ_BYTES:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        """Start the deadline if the beginning of the next request is already buffered."""
        self.waiting_since = self.loop.time()
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._arm()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection open while a response is due, and probe whether the client still reads."""
        if self.cycle is None or self.cycle.response_complete or (self.cycle.more_body and self.refusal is None):
            return False
        self.cycle.keep_alive = False
        for seconds in self.probe_seconds:
            self.loop.call_later(seconds, self._probe)
        return True

    def _probe(self) -> None:
        """Write something that clients ignore: only a failing write shows that the client is gone."""
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

    def evict(self) -> None:
        """Close an idle connection or refuse an incomplete request, to make room for another client."""
        if self.is_idle:
            self.transport.close()
        else:
            self._refuse(Rejected(408, "The request did not arrive in time.", "request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """Answer broken HTTP with an error object."""
        self._refuse(Rejected(400, msg, "invalid_http"))

    def _refuse(self, error: Rejected) -> None:
        """Answer in the application's place and close; if a response is under way, only close."""
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
            self.cycle.disconnected = True  # what the application still sends is discarded
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


class LingeringClose:
    """ASGI middleware: closes the connection after a response that began before the request body was complete. First,
    it reads the rest of the body unparsed, within limits.

    The response is sent meanwhile. Closing with unread bytes would reset the connection, and the client might not
    see the response.
    """

    linger_seconds = 0.5
    bytes_per_second = 128 * 1024
    """Rate at which received bytes extend `linger_seconds`."""
    max_bytes = 64 * 1024 * 1024

    def __init__(self, app: ASGIApp, connection: DeadlineProtocol) -> None:
        self._app = app
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. Reading a refused body raises; an early response ends once the rest was read."""
        connection, cycle = self._connection, self._connection.cycle

        async def receive_or_raise() -> Message:
            message = await receive()
            if connection.refusal is not None and not cycle.response_started:
                raise connection.refusal
            return message

        async def send_and_linger(message: Message) -> None:
            if cycle.more_body and message["type"] == "http.response.start":
                others = (header for header in message.get("headers", ()) if header != CLOSE_HEADER)
                message = {**message, "headers": [*others, CLOSE_HEADER]}
            elif cycle.more_body and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await self._discard_body(receive)
                message = {**message, "body": b""}
            await send(message)

        await self._app(scope, receive_or_raise, send_and_linger)

    async def _discard_body(self, receive: Receive) -> None:
        received_bytes, began = 0, asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.linger_seconds) as deadline:
                more = True
                while more and received_bytes < self.max_bytes:
                    message = await receive()
                    received_bytes += len(message.get("body", b""))
                    more = message.get("more_body", False)
                    deadline.reschedule(began + self.linger_seconds + received_bytes / self.bytes_per_second)
