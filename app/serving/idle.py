"""`PACELINE_IDLE_SECONDS` for models that load because a request came: told to the worker when the load is done.

A model that was loaded with a `ttl` of its own keeps that one.
"""

import asyncio
import contextlib

from app.core.errors import PacelineError
from app.core.messages import Event, LoadProgress
from app.serving.ports import Worker
from app.serving.resolver import Resolver

LOADED = "ready"


class IdleLimit:
    """Listens to the worker; `seconds` None leaves the worker's own default."""

    def __init__(self, worker: Worker, resolver: Resolver, seconds: float | None) -> None:
        self._worker = worker
        self._resolver = resolver
        self._seconds = seconds
        self._own: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def keep_own(self, model_id: str) -> None:
        """The model got a limit of its own: leave it alone from now on."""
        self._own.add(model_id)

    def hear(self, event: Event) -> None:
        """One event of the worker, on the event loop."""
        if self._seconds is None or not isinstance(event, LoadProgress):
            return
        if event.phase != LOADED or event.model_id in self._own:
            return
        task = asyncio.get_running_loop().create_task(self._apply(event.model_id, self._seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _apply(self, model_id: str, seconds: float) -> None:
        specification = self._resolver.last(model_id)
        if specification is not None:
            with contextlib.suppress(PacelineError):  # the model is gone again, and its limit with it
                await self._worker.load(specification, idle_seconds=seconds)
