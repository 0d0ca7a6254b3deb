"""`/admin/`: what the server does right now, and what may be done about it; `/` leads there.

Topics: `worker` for the frame of every page, `state`, `pace` and `minutes` for this one.
"""

import asyncio
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel, Field

from app.admin.context import AdminContext
from app.admin.request_routes import RequestDesk
from app.admin.templating import Pages
from app.core.messages import DraftSpecification, LoadedModel
from app.core.reason import reason_object
from app.serving.body import read_json
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


DRAIN_SECONDS = 600.0
"""What running requests get to finish before the worker is replaced, when the caller does not say."""
STARTER = "demo-assistant"
"""The embedded model that anybody can try at once."""


class RestartBody(BaseModel):
    """How a worker is to be replaced."""


class DrainBody(BaseModel):
    """How long running requests may take."""

    seconds: float = Field(DRAIN_SECONDS, ge=0, le=86_400)


class ReleaseBody(BaseModel):
    """Which model may run again."""

    model: str = Field(min_length=1, max_length=500)


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its JSON routes."""
    view = StateView(context.serving)
    context.live.topic("worker", view.worker)
    context.live.topic("state", view.state)
    context.live.topic("pace", lambda: asdict(context.pace.course()))
    context.live.topic("minutes", context.pace.minutes)
    router = APIRouter()
    _add_pages(router, context, pages, view)
    _add_actions(router, context)
    return router


def _add_pages(router: APIRouter, context: AdminContext, pages: Pages, view: StateView) -> None:
    desk = RequestDesk(context)

    async def now() -> dict[str, Any]:
        pace = context.pace
        return {"state": await view.state(), "pace": asdict(pace.course()), "minutes": pace.minutes()}

    @router.get("/")
    async def get_root() -> RedirectResponse:
        """The dashboard is what a browser finds here."""
        return RedirectResponse("/admin/", 303)

    @router.get("/admin")
    async def get_without_slash() -> RedirectResponse:
        """What people type."""
        return RedirectResponse("/admin/", 303)

    @router.get("/admin/", response_class=HTMLResponse)
    async def get_overview(request: Request) -> HTMLResponse:
        """The page."""
        data = {**await now(), "requests": desk.now(), "starter": STARTER, "topics": context.live.topics}
        base_url = f"{request.url.scheme}://{request.headers['host']}/v1"
        return pages.render("overview.html", request, area="overview", data=data, base_url=base_url)

    @router.get("/admin/api/state")
    async def get_state() -> dict[str, Any]:
        """What the page shows, once: the topics `state`, `pace` and `minutes`."""
        return await now()


def _add_actions(router: APIRouter, context: AdminContext) -> None:
    worker = context.serving.worker

    @router.post("/admin/api/worker/restart")
    async def restart_worker(request: Request) -> dict[str, Any]:
        """Replace the worker now; running requests end with an error."""
        await read_json(request, RestartBody)
        worker.renew()
        return {"renewing": True}

    @router.post("/admin/api/worker/drain")
    async def drain_worker(request: Request) -> dict[str, Any]:
        """Replace the worker once its running requests have finished, or after so many seconds."""
        body = await read_json(request, DrainBody)
        worker.renew(body.seconds)
        return {"renewing": True, "seconds": body.seconds}

    @router.post("/admin/api/quarantine/release")
    async def release_model(request: Request) -> dict[str, Any]:
        """Let a model run again that kept ending its worker."""
        body = await read_json(request, ReleaseBody)
        worker.release_quarantine(body.model)
        return {"model": body.model, "released": True}
