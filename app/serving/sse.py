"""Server-sent events: frames, a response that ends when its client leaves, and frames that survive a page reload.

A frame is one `data:` line of JSON. A comment (`: waiting`) keeps a silent stream open. A stream that fails ends with
one error frame and without `[DONE]`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.core.clock import Alarm

DONE = b"data: [DONE]\n\n"
COMMENT = "paceline.comment"
"""Key in the `state` of an ASGI scope for a comment, in bytes, that may be written between the frames of its stream."""


def frame(value: Any) -> bytes:
    """Return one event with a JSON value; JSON has no raw line breaks, so one line is enough."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def comment(text: str) -> bytes:
    """Return a line that clients ignore; `text` must not contain line breaks."""
    return f": {text}\n\n".encode()


KEEP_ALIVE_FRAME = comment("are you there?")


class EventStream(StreamingResponse):
    """Streams frames; calls `on_close` when the response is over, whichever side ended it.

    A client that reads nothing for `write_timeout_seconds` is dropped.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        write_timeout_seconds: float,
        media_type: str = "text/event-stream",
        keep_alive_frame: bytes = KEEP_ALIVE_FRAME,
    ) -> None:
        super().__init__(
            frames,
            media_type=media_type,
            headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"},
        )
        self._frames = frames
        self._on_close = on_close
        self._write_timeout_seconds = write_timeout_seconds
        self._keep_alive_frame = keep_alive_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the frames end, the client leaves or a write times out."""
        scope.setdefault("state", {})[COMMENT] = self._keep_alive_frame
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:
            return  # the client stalled; uvicorn closes the incomplete response
        finally:
            self._on_close()

    async def stream_response(self, send: Send) -> None:
        """Send every frame, each within the write timeout."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with asyncio.timeout(None) as deadline:
            alarm = Alarm(lambda: deadline.reschedule(0))
            try:
                async for chunk in self._frames:
                    alarm.set(self._write_timeout_seconds)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    alarm.disarm()
            finally:
                alarm.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ReplayableFrames:
    """Frames of a stream that runs with or without a reader; each reader gets all of them from the first.

    `on_close` is called when the frames end, by themselves or after `grace_seconds` without a reader. `on_expired` is
    called when the grace period ends; no reader may join after that.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        on_expired: Callable[[], object],
        grace_seconds: float,
    ) -> None:
        self._frames: list[bytes] = []
        self._ended = False
        self._changed = asyncio.Event()
        self._readers = 0
        self._on_expired = on_expired
        self._grace_seconds = grace_seconds
        self._producer = asyncio.get_running_loop().create_task(self._produce(frames, on_close))
        self._expiry: asyncio.TimerHandle | None = None

    def response(self, write_timeout_seconds: float) -> EventStream:
        """Return a response with all frames for one more reader."""
        self._readers += 1
        if self._expiry is not None:
            self._expiry.cancel()
        return EventStream(self._read(), on_close=self._on_reader_left, write_timeout_seconds=write_timeout_seconds)

    async def _produce(self, frames: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        try:
            async for encoded in frames:
                self._frames.append(encoded)
                self._notify()
        finally:
            on_close()
            self._ended = True
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _read(self) -> AsyncGenerator[bytes, None]:
        position = 0
        while True:
            changed = self._changed
            while position < len(self._frames):
                yield self._frames[position]
                position += 1
            if self._ended:
                await asyncio.shield(self._producer)  # raises an unexpected error of the producer here, too
                return
            await changed.wait()

    def _on_reader_left(self) -> None:
        self._readers -= 1
        if not self._readers:
            self._expiry = asyncio.get_running_loop().call_later(self._grace_seconds, self._expire)

    def _expire(self) -> None:
        self._producer.cancel()
        self._on_expired()
