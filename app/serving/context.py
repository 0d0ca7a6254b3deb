"""What the endpoints share: made once by `create_app` in `app/main.py`, reached through the application's state."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from app.core.clock import Clock
from app.core.errors import ModelUnavailable, QueueFull
from app.serving.journal import Journal
from app.serving.live_settings import LiveSettings
from app.serving.measurements import Measurements
from app.serving.resolver import IdleLimit, Resolver
from app.serving.sse import KeptFrames
from app.settings import Settings
from app.worker.client import RequestStream, WorkerClient


class Activity:
    """The open generation requests, and whether new ones may begin. Called from the event loop only.

    `limit` tells how many there may be now.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._open: set[RequestStream] = set()
        self.idle = asyncio.Event()
        """No request is open."""
        self.idle.set()
        self.busy = asyncio.Event()
        """One is."""
        self.draining = False

    def __len__(self) -> int:
        return len(self._open)

    def check_open(self) -> None:
        """Raise `ModelUnavailable` while draining, `QueueFull` when too many requests are open."""
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
        """`request` ended; a second call does nothing."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The collaborators of every endpoint. All times are in seconds."""

    live: LiveSettings
    worker: WorkerClient
    resolver: Resolver
    activity: Activity
    idle: IdleLimit
    measurements: Measurements = field(default_factory=Measurements)
    journal: Journal = field(default_factory=Journal)
    clock: Clock = time.monotonic
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds; the `created` of every model, because a folder does not know when its model was made."""
    replies: dict[str, KeptFrames] = field(default_factory=dict)
    """Streams of the chat page by the ids of their requests: a page that is reloaded finds them there."""
    reply_patience_seconds: float = 60.0
    """So long a reply of the chat page goes on without it."""
    keep_alive_seconds: float = 10.0
    """A waiting stream gets a comment this often; a stream starts after this time even when nothing happened."""
    write_timeout_seconds: float = 30.0
    """A client that reads nothing for this long is taken for gone."""
    body_timeout_seconds: float = 30.0
    """A body must be here by then, or faster than the slowest that is taken for honest."""

    @property
    def settings(self) -> Settings:
        """The settings as they are now; ask again rather than keep them."""
        return self.live.current

    @property
    def memory_ceiling_bytes(self) -> int:
        """What models may take together, as the worker told it; 0: no worker has told it yet."""
        info = self.worker.ready_info
        return info.memory_ceiling_bytes if info is not None else 0


def context_of(request: Request) -> Context:
    """The context of the application that serves `request`."""
    context: Context = request.app.state.context
    return context
