"""State that all endpoints share: made once by `create_app` in `app/main.py`, kept in the application's state."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from app.core.clock import Clock
from app.core.errors import ModelUnavailable, QueueFull
from app.core.turns import SharedThread
from app.serving.journal import Journal
from app.serving.live_settings import LiveSettings
from app.serving.metrics import Metrics
from app.serving.resolver import Resolver
from app.serving.sse import ReplayableFrames
from app.settings import Settings
from app.supervision.client import WorkerClient
from app.supervision.stream import RequestStream

MAX_REST_SECONDS = 0.5
"""Longest pause of a `PacedThread` after one function, in seconds."""
Result = TypeVar("Result")


class Activity:
    """Tracks open generation requests and whether new ones may begin. Called from the event loop only.

    `limit` returns the maximum number of requests that may be open now.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._open: set[RequestStream] = set()
        self.idle = asyncio.Event()
        """Event that is set while no request is open."""
        self.idle.set()
        self.busy = asyncio.Event()
        """Event that is set while a request is open."""
        self.draining = False

    def __len__(self) -> int:
        return len(self._open)

    def check_open(self) -> None:
        """Raise `ModelUnavailable` while draining, `QueueFull` if too many requests are open."""
        if self.draining:
            raise ModelUnavailable("Paceline is shutting down.", code="shutting_down", retry_after_seconds=5)
        if len(self._open) >= self._limit():
            raise QueueFull("Too many requests are open: try again in a moment.", retry_after_seconds=1)

    def enter(self, request: RequestStream) -> None:
        """Count `request` as open until `leave`. Raises as `check_open` does."""
        self.check_open()
        self._open.add(request)
        self.idle.clear()
        self.busy.set()

    def leave(self, request: RequestStream) -> None:
        """Count `request` as ended; a second call does nothing."""
        self._open.discard(request)
        if not self._open:
            self.idle.set()
            self.busy.clear()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give open ones `seconds` to finish, then end the rest with an error."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self.idle.wait()
        except TimeoutError:
            for request in list(self._open):
                request.fail(
                    ModelUnavailable("Paceline shut down before the answer was complete.", code="shutting_down")
                )


class PacedThread:
    """Runs one function at a time in a thread, and pauses after each for as long as it took.

    Work that holds the interpreter lock thus leaves half of the time to the event loop.
    """

    def __init__(self, rest: Callable[[float], None] = time.sleep) -> None:
        self._thread = SharedThread("paced", after=lambda seconds: rest(min(MAX_REST_SECONDS, seconds)))

    async def run(self, owner: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result of `function`, or raise its error, as soon as it is known. Owners take turns."""
        return await asyncio.wrap_future(self._thread.submit(owner, function, *arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The collaborators of every endpoint. All times are in seconds."""

    live: LiveSettings
    worker: WorkerClient
    resolver: Resolver
    activity: Activity
    metrics: Metrics = field(default_factory=Metrics)
    journal: Journal = field(default_factory=Journal)
    clock: Clock = time.monotonic
    parser: PacedThread = field(default_factory=PacedThread)
    """Thread in which large bodies are parsed."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds; also `created` of every model, because a folder does not record when its model was made."""
    replies: dict[str, ReplayableFrames] = field(default_factory=dict)
    """Streams of the chat page by request id, where a reloaded page finds them again."""
    reply_grace_seconds: float = 60.0
    """Seconds that a reply to the chat page continues without a reader."""
    keep_alive_seconds: float = 10.0
    """Interval of the comments on a silent stream; also the longest wait before a stream starts."""
    write_timeout_seconds: float = 30.0
    """Seconds after which a client that reads nothing counts as gone."""
    body_timeout_seconds: float = 30.0
    """Seconds within which a body must arrive, plus one for every `MIN_BYTES_PER_SECOND` bytes received."""

    @property
    def settings(self) -> Settings:
        """Current settings; read this at each use instead of keeping the value."""
        return self.live.current

    @property
    def memory_ceiling_bytes(self) -> int:
        """Bytes that all models together may take, as reported by the worker; 0 before it has reported."""
        info = self.worker.ready_info
        return info.memory_ceiling_bytes if info is not None else 0


def context_of(request: Request) -> Context:
    """Return the context of the application that serves `request`."""
    context: Context = request.app.state.context
    return context
