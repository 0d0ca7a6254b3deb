"""What the pages about models work with: made once for each application.

A drafter that joins a model is chosen, the model is loaded with it, and what it brings is measured; a download that
names the model it is to draft for does the same by itself once it has arrived. All of it belongs to the event loop.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from app.admin.loading import Loading
from app.admin.measured_unit import UnitChooser, refusal_of
from app.admin.measuring import Measuring, Wish
from app.admin.room import Footprints
from app.core.download import Download
from app.core.errors import PacelineError, SpeculationUnavailable
from app.serving.context import Context
from app.serving.live_settings import LiveSettings
from app.serving.resolver import Resolver
from app.store.rows import KeptMeasurements
from app.store.store import Store

SOURCE = "dashboard"

logger = logging.getLogger(__name__)


class Attaching:
    """For one server."""

    def __init__(
        self,
        settings: LiveSettings,
        resolver: Resolver,
        units: UnitChooser,
        loading: Loading,
        measuring: Measuring,
    ) -> None:
        self._settings = settings
        self._resolver = resolver
        self._units = units
        self._loading = loading
        self._measuring = measuring
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, model_id: str, draft_id: str, *, measure: bool = True) -> dict[str, Any]:
        """Choose a drafter that is here; `measuring` says whether its measurement has begun.

        Raises ModelNotFound, SpeculationUnavailable, InsufficientMemory, and what a load raises.
        """
        drafts = await asyncio.to_thread(self._choose, model_id, draft_id)
        became = await self._loading.renew(model_id)
        if became == "not_loaded":
            await self._loading.load(model_id)
        begins = measure and not self._measuring.active
        if begins:
            self._measuring.begin(Wish(model=model_id, drafts=drafts, grid="one", minutes=1.0))
        return {"model": model_id, "drafts": list(drafts), "became": became, "measuring": begins}

    def arrived(self, download: Download) -> None:
        """A download is done: attach it when it was asked for as a drafter."""
        if download.drafts_for:
            task = asyncio.get_running_loop().create_task(self._attach_arrived(download))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Leave what waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attach_arrived(self, download: Download) -> None:
        while self._measuring.active:
            await self._measuring.wait()
        try:
            await self.attach(download.drafts_for, download.repository)
        except PacelineError as error:
            logger.warning("%s was not attached to %s: %s", download.repository, download.drafts_for, error.message)

    def _choose(self, model_id: str, draft_id: str) -> tuple[str, ...]:
        """Store the choice: the new drafter, and of those chosen before the ones with other methods."""
        main = self._resolver.main(model_id)
        candidates = {each.id: each for each in self._units.candidates(main, {}) if each.id}
        wanted = candidates.get(draft_id)
        if wanted is None or not wanted.fits:
            raise SpeculationUnavailable(refusal_of(main, draft_id, wanted), parameter="draft")
        self._units.check_room(main, wanted)
        stored = self._settings.model(main.id)
        others = [name for name in stored.drafts or () if name in candidates and name != draft_id]
        drafts = (draft_id, *(name for name in others if candidates[name].method != wanted.method))
        changes: dict[str, Any] = {"drafts": drafts}
        if stored.policy == "off":
            changes["policy"] = None
        if stored.methods is not None and wanted.method not in stored.methods:
            changes |= {"methods": None, "num_draft_tokens": None}
        self._settings.change_model(main.id, changes, SOURCE)
        return drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTools:
    """Loads, counts memory, finds drafters, measures and keeps what was measured."""

    loading: Loading
    footprints: Footprints
    units: UnitChooser
    kept: KeptMeasurements
    measuring: Measuring
    attaching: Attaching

    @classmethod
    def of(cls, context: Context, store: Store) -> "ModelTools":
        """Over one server's worker and store."""
        footprints, kept = Footprints(context), KeptMeasurements(store)
        units = UnitChooser(context.resolver, footprints)
        loading = Loading(context.worker, context.resolver, context.activity)
        measuring = Measuring(
            worker=context.worker,
            resolver=context.resolver,
            activity=context.activity,
            units=units,
            kept=kept,
            clock=context.clock,
        )
        return cls(
            loading=loading,
            footprints=footprints,
            units=units,
            kept=kept,
            measuring=measuring,
            attaching=Attaching(context.live, context.resolver, units, loading, measuring),
        )

    async def close(self) -> None:
        """The server ends."""
        await self.attaching.close()
        await self.measuring.close()
