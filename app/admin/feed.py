"""The live feed of the pages: topics that change, read once a second for all tabs together.

Areas register topics. Each topic with listeners is read once a second, encoded once and, if its JSON has changed, sent
to the tabs that listen to it. A tab that reads slowly skips versions, but never the latest.
"""

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import msgspec

from app.core.clock import Clock
from app.serving.sse import comment

PERIOD_SECONDS = 1.0
CHECK_SECONDS = 5.0
"""Interval between comments on a silent stream, and between checks that its browser is still signed in, in seconds."""

logger = logging.getLogger("paceline.live")

Read = Callable[[], Any | Awaitable[Any]]


class Listener:
    """One tab: the newest unsent JSON of each topic."""

    def __init__(self, topics: Iterable[str]) -> None:
        self.topics = frozenset(topics)
        self._pending: dict[str, bytes] = {}
        self._has_pending = asyncio.Event()
        self._ended = False

    def put(self, topic: str, value: bytes) -> None:
        """Queue the JSON of a topic, in place of an older version that is still pending."""
        self._pending[topic] = value
        self._has_pending.set()

    def take_pending(self) -> list[tuple[str, bytes]]:
        """Remove and return what is pending: topics with their JSON."""
        pending, self._pending = list(self._pending.items()), {}
        return pending

    def end(self) -> None:
        """Send what is pending, then end the stream."""
        self._ended = True
        self._has_pending.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield events named after their topic, and comments while there are no events."""
        yield comment("listening")
        while not (self._ended and not self._pending):
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._has_pending.wait()
            except TimeoutError:
                yield comment("waiting")
                continue
            self._has_pending.clear()
            for topic, value in self.take_pending():
                yield b"event: " + topic.encode() + b"\ndata: " + value + b"\n\n"


class LiveFeed:
    """All topics and all tabs of one application. Called from the event loop only."""

    def __init__(self, *, closing: Callable[[], bool] = lambda: False, period_seconds: float = PERIOD_SECONDS) -> None:
        self._closing = closing
        self._period_seconds = period_seconds
        self._reads: dict[str, Read] = {}
        self._last: dict[str, bytes] = {}
        self._listeners: set[Listener] = set()
        self._updates: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def topic(self, name: str, read: Read) -> None:
        """Register a topic; `read` returns its whole value, plain or awaitable, and must be quick."""
        if name in self._reads:
            raise ValueError(f"the topic {name} is registered twice")
        self._reads[name] = read

    @property
    def topics(self) -> tuple[str, ...]:
        """Names of all topics."""
        return tuple(sorted(self._reads))

    def __len__(self) -> int:
        return len(self._listeners)

    def join(self, topics: Iterable[str]) -> Listener:
        """Add a tab; it immediately gets the last known value of each of its topics."""
        listener = Listener(topics)
        self._listeners.add(listener)
        for topic in listener.topics:
            if topic in self._last:
                listener.put(topic, self._last[topic])
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="live feed")
        return listener

    def leave(self, listener: Listener) -> None:
        """Remove a tab; once the last tab has left, nothing is read."""
        self._listeners.discard(listener)
        if not self._listeners and self._task is not None:
            for task in (self._task, *self._updates.values()):
                task.cancel()
            self._task = None
            self._updates.clear()
            self._last.clear()

    async def tick(self) -> None:
        """Read each topic that has listeners, and queue values that have changed; leave slow reads to a later tick."""
        topics = sorted({topic for listener in self._listeners for topic in listener.topics})
        for topic in topics:
            if topic not in self._updates or self._updates[topic].done():
                self._updates[topic] = asyncio.create_task(self._update(topic))
        if topics:
            await asyncio.wait([self._updates[topic] for topic in topics], timeout=self._period_seconds)

    async def _update(self, topic: str) -> None:
        try:
            encoded = await self._encoded(topic)
        except Exception:  # one broken topic must not silence the others
            logger.exception("the topic %s cannot be read", topic)
            return
        if encoded != self._last.get(topic):
            self._last[topic] = encoded
            for listener in self._listeners:
                if topic in listener.topics:
                    listener.put(topic, encoded)

    async def _encoded(self, topic: str) -> bytes:
        value = self._reads[topic]()
        return msgspec.json.encode(await value if inspect.isawaitable(value) else value)

    async def _run(self) -> None:
        while not self._closing():
            await self.tick()
            await asyncio.sleep(self._period_seconds)
        for listener in self._listeners:
            listener.end()


async def while_authorized(
    frames: AsyncGenerator[bytes, None], is_authorized: Callable[[], Awaitable[bool]], clock: Clock = time.monotonic
) -> AsyncGenerator[bytes, None]:
    """Yield frames while the caller is authorized, which is checked every `CHECK_SECONDS`."""
    checked_at = clock()
    async with contextlib.aclosing(frames):
        async for frame in frames:
            if clock() - checked_at >= CHECK_SECONDS:
                if not await is_authorized():
                    return
                checked_at = clock()
            yield frame
