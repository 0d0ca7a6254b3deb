"""What the server does right now, as the pages show it: the worker, its memory, its models and its queue."""

import asyncio
from typing import Any

import msgspec

from app.core.messages import DraftSpecification, LoadedModel
from app.core.reason import reason_object
from app.serving.context import Context

Unit = tuple[str, tuple[str, ...]]


class StateView:
    """Reads the state without touching the disk more than once for each set of drafters."""

    def __init__(self, serving: Context) -> None:
        self._serving = serving
        self._drafts: dict[Unit, list[dict[str, str]]] = {}

    def worker(self) -> dict[str, Any]:
        """The worker in a few words: the frame of every page shows it."""
        worker = self._serving.worker
        info = worker.ready_info
        return {
            "ready": worker.ready,
            "renewing": worker.draining,
            "restarts": worker.restarts,
            "last_exit": reason_object(worker.last_exit),
            "draining": self._serving.activity.draining,
            "device": info.device if info is not None else "",
        }

    async def state(self) -> dict[str, Any]:
        """Everything but the running requests, in bytes and seconds as the names say."""
        worker = self._serving.worker
        info, snapshot = worker.ready_info, worker.snapshot
        return {
            "worker": self.worker(),
            "memory": {
                "ceiling_bytes": info.memory_ceiling_bytes if info is not None else 0,
                "active_bytes": snapshot.active_bytes,
                "cached_bytes": snapshot.cached_bytes,
                "peak_bytes": snapshot.peak_bytes,
            },
            "models": [await self._model(model) for model in snapshot.models],
            "loading": [
                {"id": name, "phase": progress.phase, "fraction": round(progress.fraction, 3)}
                for name, progress in sorted(worker.progress.items())
            ],
            "quarantined": [{"id": name, **reason_object(why)} for name, why in sorted(worker.quarantined.items())],
            "running": sum(model.running for model in snapshot.models),
            "waiting": sum(model.waiting for model in snapshot.models),
            "open_requests": len(self._serving.activity),
        }

    async def _model(self, model: LoadedModel) -> dict[str, Any]:
        unit = (model.id, model.draft_ids)
        if unit not in self._drafts:
            found = await asyncio.to_thread(self._serving.resolver.loaded_drafts, model)
            self._drafts[unit] = [_draft(each) for each in found]
        unavailable = {method: reason_object(why) for method, why in model.unavailable.items()}
        return {**msgspec.to_builtins(model), "drafts": self._drafts[unit], "unavailable": unavailable}


def _draft(draft: DraftSpecification) -> dict[str, str]:
    return {"id": draft.id, "method": draft.method}
