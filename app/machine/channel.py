"""Communication of server and worker: frames over the inherited socketpair, and the crash note.

A frame is four bytes of length (big endian), then one msgpack struct. No pickle. `FrameDecoder` does no I/O;
`ServerChannel` is the asyncio end (commands out, events in), `WorkerChannel` the blocking end (events out under a lock,
commands in on a reader thread). A frame over `MAX_FRAME_BYTES`, or one that is no known message, closes the channel,
and the supervisor restarts the worker.
"""

import asyncio
import logging
import mmap
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, cast

import msgspec

from app.core.errors import InvalidRequest, QueueFull
from app.core.messages import MAX_FRAME_BYTES, Command, Event, Failed, Generate, ReadPrompt

MAX_BACKLOG_BYTES: Final = 2 * MAX_FRAME_BYTES
"""Limit, in bytes, on commands that the worker has not read yet; above it new requests are refused."""
READ_BYTES: Final = 256 * 1024
NOTE_BYTES: Final = mmap.PAGESIZE
EXIT_DEVICE_LOST: Final = 75
"""Exit code of a worker whose GPU accepts no more work."""

_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_NOT_A_MESSAGE = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError)
logger = logging.getLogger("paceline.channel")


class FrameError(Exception):
    """The bytes are not a valid frame: too long, or not a known message."""


class _RequestId(msgspec.Struct):
    """Id of an undecodable command, to which the error is reported."""

    id: str


def pack(message: Command | Event) -> bytes:
    """Return `message` as a frame. Raises FrameError if it cannot be encoded or is over `MAX_FRAME_BYTES`."""
    try:
        payload = _ENCODER.encode(message)
    except (TypeError, UnicodeError, OverflowError, RecursionError, ValueError) as error:
        raise FrameError(f"the message cannot be encoded: {error}") from error
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def unpack_event(payload: bytes) -> Event:
    """Return the event in one frame. Raises FrameError."""
    try:
        return _EVENTS.decode(payload)
    except _NOT_A_MESSAGE as error:
        raise FrameError(f"not an event: {error}") from error


def unpack_command(payload: bytes) -> Command:
    """Return the command in one frame. Raises FrameError."""
    try:
        return _COMMANDS.decode(payload)
    except _NOT_A_MESSAGE as error:
        raise FrameError(f"not a command: {error}") from error


class FrameDecoder:
    """Cuts a byte stream into payloads, however the bytes were split in transit."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that `data` completes; must be exhausted. Raises FrameError at a length over the limit."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._limit_bytes:
                raise FrameError(f"a frame of {length} bytes is over the limit of {self._limit_bytes}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload


class ServerChannel(asyncio.Protocol):
    """The server's end. `on_event` gets every event in order; `on_close` is called once, with the reason."""

    def __init__(self, on_event: Callable[[Event], None], on_close: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._on_close = on_close
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._reason = ""

    @classmethod
    async def open(
        cls, end: socket.socket, on_event: Callable[[Event], None], on_close: Callable[[str], None]
    ) -> "ServerChannel":
        """Open a channel over `end`, which the channel then owns."""
        channel = cls(on_event, on_close)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=end)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass on every event; a bad frame closes the channel, after the events before it."""
        if self._reason:
            return
        try:
            for payload in self._decoder.feed(data):
                self._on_event(unpack_event(payload))
        except FrameError as error:
            self._reason = f"it sent a frame that is not understood ({error})"
            logger.exception("closing the channel")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report why the channel closed."""
        self._transport = None
        self._on_close(self._reason or (str(exc) if exc else ""))

    def send(self, command: Command) -> None:
        """Queue one command; never blocks. On a closed channel the command is dropped: `on_close` reports the close.

        Raises InvalidRequest if the command cannot be encoded as a frame, QueueFull for a new request above the limit.
        """
        try:
            frame = pack(command)
        except FrameError as error:
            raise InvalidRequest(f"The request cannot be sent to the model: {error}.") from error
        if self._transport is None or self._transport.is_closing():
            return
        is_full = self._transport.get_write_buffer_size() + len(frame) > MAX_BACKLOG_BYTES
        if is_full and isinstance(command, Generate | ReadPrompt):
            raise QueueFull("Too many requests wait for the worker; try again.", retry_after_seconds=2)
        self._transport.write(frame)

    def close(self) -> None:
        """Close the channel now, without waiting for pending writes; safe to call twice."""
        if self._transport is not None:
            self._transport.abort()


class WorkerChannel:
    """The worker's end: `send` from any thread, commands on one reader thread."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        self._end = end
        self._lock = threading.Lock()

    def send(self, event: Event) -> None:
        """Write one event; blocks while the server does not read, which is the only backpressure on the worker.

        Once the server is gone, events are dropped: the reader's `on_close` ends the process.
        """
        frame = pack(event)
        try:
            with self._lock:
                self._end.sendall(frame)
        except OSError as error:
            logger.debug("dropped an event: %s", error)

    def start(self, on_command: Callable[[Command, int], None], on_close: Callable[[], None]) -> threading.Thread:
        """Read commands, with their size in bytes, on a daemon thread until the server's end closes; then call
        `on_close`."""
        thread = threading.Thread(target=self._read, args=(on_command, on_close), name="reader", daemon=True)
        thread.start()
        return thread

    def _read(self, on_command: Callable[[Command, int], None], on_close: Callable[[], None]) -> None:
        decoder = FrameDecoder()
        try:
            while data := self._end.recv(READ_BYTES):
                for payload in decoder.feed(data):
                    self._dispatch(payload, on_command)
        except (OSError, FrameError) as error:
            logger.warning("the channel to the server ended: %s", error)
        on_close()

    def _dispatch(self, payload: bytes, on_command: Callable[[Command, int], None]) -> None:
        """Pass on a command. A malformed one fails its request, or raises FrameError if its id cannot be read."""
        try:
            command = unpack_command(payload)
        except FrameError as error:
            try:
                request_id = msgspec.msgpack.decode(payload, type=_RequestId).id
            except _NOT_A_MESSAGE:
                raise error from None
            self.send(Failed(id=request_id, error="InvalidRequest", message=str(error), code="invalid_request"))
        else:
            on_command(command, len(payload))


class CrashNote:
    """The model that the worker's MLX thread is working on, in a page of a file that both processes map.

    The worker writes the note, and the server reads it once the worker has ended or hangs. A frame would not do: it
    could still be in transit when the worker dies. Without a descriptor, the page is private to this process.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self._page = mmap.mmap(descriptor, NOTE_BYTES)

    @property
    def model_id(self) -> str:
        """Id of the model; empty if the worker is working on none."""
        (length,) = _LENGTH.unpack_from(self._page)
        return self._page[_LENGTH.size : _LENGTH.size + length].decode("utf-8", "replace")

    @contextmanager
    def on(self, model_id: str) -> Iterator[None]:
        """Name `model_id` in the note within this block: the server blames it if the worker ends or hangs there."""
        self._write(model_id)
        try:
            yield
        finally:
            self._write("")

    def _write(self, model_id: str) -> None:
        name = model_id.encode()[: NOTE_BYTES - _LENGTH.size]
        self._page[_LENGTH.size : _LENGTH.size + len(name)] = name
        self._page[: _LENGTH.size] = _LENGTH.pack(len(name))  # the length last: a half-written name is never read
