"""One connection: deadlines for slow clients, reads that cost others nothing, errors as objects, and a polite end.

uvicorn has no timer for request headers, answers broken HTTP in plain text and hangs up on clients that closed their
half.
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
"""Bytes of one connection that are parsed before others have their turn; asyncio would read 256 KiB."""
SMALL_READ_BYTES = 256
FREE_SMALL_READS = 64
"""Reads below `SMALL_READ_BYTES` after which the rest of a request is gathered before it is read."""
GATHER_SECONDS = 0.01
"""Seconds between two reads of a request that comes in small pieces: each costs 30 µs, whatever it holds."""


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
    _small_reads = 0

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
            self.waits_since, self._small_reads = self.loop.time(), 0
        self._small_reads += len(data) < SMALL_READ_BYTES
        if self._small_reads > FREE_SMALL_READS:
            self.transport.pause_reading()
            self.loop.call_later(GATHER_SECONDS, self._read_on)
        if self.refusal is not None or self.is_answered_early:
            self._pass_by(data)
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._arm()
        else:
            self._disarm()

    def _read_on(self) -> None:
        if not self.flow.read_paused:
            self.transport.resume_reading()

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
