"""Loading and unloading of models on request: a load continues even if the page that asked for it is closed.

Attaching a drafter chooses it, loads the model with it, and measures the gain; a downloaded drafter is attached if its
download names a main model. Call every method on the event loop; disk reads run in threads.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, Literal

from app.admin.measuring import MeasurementRequest, Measuring
from app.admin.model_view import ModelView
from app.core.download import Download
from app.core.errors import ModelInUse, ModelUnavailable, PacelineError
from app.core.messages import Event, Heartbeat, ModelLoaded, Snapshot
from app.serving.auth import SESSION
from app.serving.context import Context

ReloadOutcome = Literal["loaded", "in_use", "not_loaded"]
"""Outcome of a reload: done; pending until no request uses the model; not needed before the next load."""

logger = logging.getLogger("paceline.loading")


class Loading:
    """Loads, unloads and attaches models of one server."""

    def __init__(self, context: Context, models: ModelView, measuring: Measuring) -> None:
        self._settings = context.live
        self._worker = context.worker
        self._resolver = context.resolver
        self._activity = context.activity
        self._models = models
        self._measuring = measuring
        self._tasks: dict[str, asyncio.Task[ModelLoaded]] = {}
        self._pending_reloads: set[str] = set()
        """Ids of models to reload once no request uses them."""
        self._background: set[asyncio.Task[None]] = set()

    def on_event(self, event: Event) -> None:
        """Handle one event of the worker, on the event loop: start a pending reload once its model is idle."""
        if isinstance(event, Heartbeat) and event.snapshot is not None:
            self._reload_idle(event.snapshot)

    def _reload_idle(self, snapshot: Snapshot) -> None:
        idle = {model.id for model in snapshot.models if not model.leases}
        for model_id in self._pending_reloads & idle:
            self._pending_reloads.discard(model_id)
            failure_message = f"what changed for {model_id} could not be loaded"
            self._run_in_background(self._reload_unmeasured(model_id), failure_message)

    async def _reload_unmeasured(self, model_id: str) -> None:
        """Wait for any measurement of a model, then reload it: the measurement restores the earlier drafters first."""
        while self._measuring.active == model_id:
            await self._measuring.wait()
        await self.reload(model_id)

    def on_download_done(self, download: Download) -> None:
        """List a completed download, and attach it if it was requested as a drafter."""
        self._resolver.refresh()
        if download.drafts_for:
            failure_message = f"{download.repository} was not attached to {download.drafts_for}"
            self._run_in_background(self._attach_downloaded(download), failure_message)

    async def close(self) -> None:
        """Cancel background work when the server ends."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def load(self, model_id: str) -> dict[str, Any]:
        """Load a model with the drafters that are chosen for it; a second call waits for the same load."""
        self._activity.check_open()
        unit = await asyncio.to_thread(self._resolver.resolve, model_id)
        task = self._tasks.get(unit.id)
        if task is None:
            task = self._tasks[unit.id] = asyncio.get_running_loop().create_task(self._worker.load(unit))
            task.add_done_callback(lambda done: self._load_ended(unit.id, done))
        try:
            loaded = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise ModelUnavailable(f"The load of {unit.id} was stopped.", code="load_cancelled") from None
        return {"model": unit.id, "state": "loaded", "seconds": round(loaded.seconds, 3)}

    async def unload(self, model_id: str) -> dict[str, Any]:
        """Unload a model, or stop its load. Raises ModelInUse while requests use it."""
        model = await asyncio.to_thread(self._resolver.id_of, model_id)
        task = self._tasks.get(model)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await self._worker.unload(model)
        return {"model": model, "state": "available"}

    async def reload(self, model_id: str) -> ReloadOutcome:
        """Reload a loaded model whose choices have changed, now or once no request uses it.

        Until then requests use the unit that is in memory.
        """
        self._pending_reloads.discard(model_id)
        if self._worker.unit(model_id) is None:  # also one that a new worker is about to load
            return "not_loaded"
        unit = await asyncio.to_thread(lambda: self._resolver.planned(self._resolver.usable(model_id)))
        before = self._worker.book.snapshot
        try:
            await self._worker.load(unit)
        except ModelInUse:
            self._pending_reloads.add(model_id)
            if self._worker.book.snapshot is not before:  # it arrived before this reload was pending
                self._reload_idle(self._worker.book.snapshot)
            return "in_use"
        self._resolver.end_measurement(model_id)  # also if a measurement had left this very unit in memory
        return "loaded"

    async def attach(self, model_id: str, draft_id: str, *, measure: bool = True) -> dict[str, Any]:
        """Attach a drafter that is on this computer; `measuring`: whether its measurement has begun.

        Raises ModelNotFound, SpeculationUnavailable, InsufficientMemory, and what a load raises.
        """
        drafts = await asyncio.to_thread(self._choose, model_id, draft_id)
        outcome = await self.reload(model_id)
        if outcome == "not_loaded":
            await self.load(model_id)
        measures = measure and not self._measuring.active
        if measures:
            self._measuring.begin(MeasurementRequest(model=model_id, drafts=drafts, grid="one", minutes=1.0))
        return {"model": model_id, "drafts": drafts, "became": outcome, "measuring": measures}

    async def _attach_downloaded(self, download: Download) -> None:
        while self._measuring.active:
            await self._measuring.wait()
        await self.attach(download.drafts_for, download.repository)

    def _choose(self, model_id: str, draft_id: str) -> list[str]:
        """Store the choice: the new drafter, and the stored drafters of other methods."""
        main = self._resolver.main(model_id)
        candidates = self._models.candidates(main)
        (chosen,) = self._models.candidates_named(main, candidates, [draft_id], parameter="draft")
        self._models.check_room(main, [chosen])
        stored = self._settings.model(main.id)
        retained = {
            candidate.id for candidate in candidates if candidate.id != draft_id and candidate.method != chosen.method
        }
        drafts = [draft_id, *(name for name in stored.drafts or () if name in retained)]
        changes: dict[str, Any] = {"drafts": tuple(drafts)}
        if stored.policy == "off":
            changes["policy"] = None
        if stored.methods is not None and chosen.method not in stored.methods:
            changes |= {"methods": None, "num_draft_tokens": None}
        self._settings.change_model(main.id, changes, SESSION.name)
        return drafts

    def _run_in_background(self, work: Coroutine[Any, Any, Any], failure_message: str) -> None:
        """Run `work` in the background; a failure is logged."""

        async def run() -> None:
            try:
                await work
            except PacelineError as error:
                logger.warning("%s: %s", failure_message, error.message)
            except Exception:
                logger.exception(failure_message)

        task = asyncio.get_running_loop().create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _load_ended(self, model_id: str, task: asyncio.Task[ModelLoaded]) -> None:
        self._tasks.pop(model_id, None)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # mark the error as retrieved: the caller may be gone
