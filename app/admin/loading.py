"""Models into memory and out of it, on somebody's word: a load goes on when the page that asked for it is left.

Every method belongs to the event loop; what reads the disk runs in a thread.
"""

import asyncio
import contextlib
import logging
from typing import Any, Literal

from app.core.errors import ModelUnavailable, PacelineError
from app.core.messages import Event, Heartbeat, ModelLoaded
from app.serving.activity import Activity
from app.serving.resolver import Resolver
from app.worker.client import WorkerClient

Reloaded = Literal["loaded", "in_use", "not_loaded"]
"""What became of a model whose settings changed: it has them now; as soon as no request uses it; when it is loaded."""

logger = logging.getLogger(__name__)


class Loading:
    """Loads for one server."""

    def __init__(self, worker: WorkerClient, resolver: Resolver, activity: Activity) -> None:
        self._worker = worker
        self._resolver = resolver
        self._activity = activity
        self._tasks: dict[str, asyncio.Task[ModelLoaded]] = {}
        self._waiting: set[str] = set()
        """Models whose change waits for the end of their requests."""
        self._renewals: set[asyncio.Task[None]] = set()

    def hear(self, event: Event) -> None:
        """One event of the worker, on the event loop: a change that waited comes when its model is idle."""
        if not self._waiting or not isinstance(event, Heartbeat) or event.snapshot is None:
            return
        in_use = {model.id for model in event.snapshot.models if model.leases}
        for model_id in self._waiting - in_use:
            self._waiting.discard(model_id)
            task = asyncio.get_running_loop().create_task(self._renew_at_last(model_id))
            self._renewals.add(task)
            task.add_done_callback(self._renewals.discard)

    async def load(self, model_id: str) -> dict[str, Any]:
        """Load a model with the drafters that are chosen for it; a second call waits for the same load."""
        self._activity.check_open()
        unit = await asyncio.to_thread(self._resolver.resolve, model_id)
        task = self._tasks.get(unit.id)
        if task is None:
            task = self._tasks[unit.id] = asyncio.get_running_loop().create_task(self._worker.load(unit))
            task.add_done_callback(lambda done: self._ended(unit.id, done))
        try:
            loaded = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise ModelUnavailable(f"The load of {unit.id} was stopped.", code="load_cancelled") from None
        return {"model": unit.id, "state": "loaded", "seconds": round(loaded.seconds, 3)}

    async def unload(self, model_id: str) -> dict[str, Any]:
        """Take a model out of memory, or stop its load. Raises ModelUnavailable while requests use it."""
        model = model_id
        if model not in self._resolver.loaded():
            model = (await asyncio.to_thread(self._resolver.find, model_id)).id
        task = self._tasks.get(model)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await self._worker.unload(model)
        self._resolver.forget(model)
        return {"model": model, "state": "available"}

    async def renew(self, model_id: str) -> Reloaded:
        """What is chosen for a model has changed: load it anew when it is loaded, now or once nobody uses it.

        Until then requests go on getting the unit that is in memory.
        """
        self._waiting.discard(model_id)
        if model_id not in self._resolver.loaded():
            self._resolver.forget(model_id)
            return "not_loaded"
        unit = await asyncio.to_thread(lambda: self._resolver.planned(self._resolver.main(model_id)))
        try:
            await self._worker.load(unit)
        except PacelineError as error:
            if error.code != "model_in_use":
                raise
            self._waiting.add(model_id)
            return "in_use"
        self._resolver.adopt(unit)
        return "loaded"

    async def _renew_at_last(self, model_id: str) -> None:
        try:
            await self.renew(model_id)
        except PacelineError as error:
            logger.warning("what changed for %s could not be loaded: %s", model_id, error.message)

    def _ended(self, model_id: str, task: asyncio.Task[ModelLoaded]) -> None:
        self._tasks.pop(model_id, None)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # whoever asked may have left
