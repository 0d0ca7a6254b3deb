"""What the endpoints share: made once by `create_app`, reached through the application's state."""

import time
from dataclasses import dataclass, field

from fastapi import Request

from app.core.ports import Clock
from app.serving.activity import Activity
from app.serving.journal import Journal
from app.serving.live_settings import LiveSettings
from app.serving.measurements import Measurements
from app.serving.resolver import IdleLimit, Resolver
from app.serving.sse import KeptFrames
from app.settings import Settings
from app.worker.client import WorkerClient


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


def context_of(request: Request) -> Context:
    """The context of the application that serves `request`."""
    context: Context = request.app.state.context
    return context
