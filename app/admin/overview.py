"""`/admin/`: what the server does right now; `/` leads there. Topics: `worker` for every page, `state` for this one."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from app.admin.context import AdminContext
from app.admin.templating import Pages


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its JSON routes."""
    router = APIRouter()
    context.live.topic("worker", lambda: worker_state(context))

    @router.get("/")
    async def get_root() -> RedirectResponse:
        """The dashboard is what a browser finds here."""
        return RedirectResponse("/admin/", 303)

    @router.get("/admin/", response_class=HTMLResponse)
    async def get_overview(request: Request) -> HTMLResponse:
        """The page."""
        return pages.render("overview.html", request, area="overview", data={})

    return router


def worker_state(context: AdminContext) -> dict[str, Any]:
    """The worker in a few words: the frame of every page shows it."""
    worker = context.serving.worker
    info = worker.ready_info
    return {
        "ready": worker.ready,
        "restarts": worker.restarts,
        "draining": context.serving.activity.draining,
        "device": info.device if info is not None else "",
    }
