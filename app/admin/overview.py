"""`/admin/`: what the server does right now, and what may be done about it; `/` leads there.

Topics: `worker` for the frame of every page, `state`, `pace` and `minutes` for this one.
"""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BaseModel, Field

from app.admin.context import AdminContext
from app.admin.request_routes import RequestDesk
from app.admin.state import StateView
from app.admin.templating import Pages
from app.serving.body import read_json

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
