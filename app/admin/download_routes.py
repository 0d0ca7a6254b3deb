"""`/admin/downloads`: the queue of downloads and what was downloaded. Topic: `downloads`."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from app.admin.context import AdminContext
from app.admin.templating import Pages
from app.serving.body import read_json
from app.serving.errors import Rejected

Verb = Literal["pause", "resume", "cancel", "retry", "up", "down"]


class DownloadBody(BaseModel):
    """What to download; `drafts_for` is the main model that it is to draft for once it is here."""

    repository: str = Field(min_length=1, max_length=300)
    revision: str = Field("", max_length=128)
    drafts_for: str = Field("", max_length=300)


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its JSON routes."""
    router = APIRouter()
    context.live.topic("downloads", context.downloads.snapshot)
    _add_queue(router, context)
    _add_changes(router, context)

    @router.get("/admin/downloads", response_class=HTMLResponse)
    async def get_downloads_page(request: Request, q: str = "") -> HTMLResponse:
        """Search, recommended pairs and the queue; `q` is searched for at once."""
        return pages.render("downloads.html", request, area="downloads", data={"query": q[:200]})

    return router


def _add_queue(router: APIRouter, context: AdminContext) -> None:
    tools = context.downloads

    @router.get("/admin/api/downloads")
    async def list_downloads() -> dict[str, Any]:
        """Every download, and the room on the disk."""
        return await tools.snapshot()

    @router.post("/admin/api/downloads", status_code=202)
    async def add_download(request: Request) -> dict[str, Any]:
        """Queue a repository; one that is queued, paused or done already is gone on with."""
        body = await read_json(request, DownloadBody)
        return await tools.queue.add(body.repository, body.revision, body.drafts_for)


def _add_changes(router: APIRouter, context: AdminContext) -> None:
    tools = context.downloads

    @router.post("/admin/api/downloads/{download_id}/{verb}")
    async def change_download(download_id: int, verb: Verb) -> dict[str, Any]:
        """Pause, resume, cancel, retry, or move up or down the queue."""
        _check(context, download_id)
        queue = tools.queue
        if verb in {"up", "down"}:
            return await queue.move(download_id, up=verb == "up")
        verbs = {"pause": queue.pause, "cancel": queue.cancel}
        return await verbs.get(verb, queue.resume)(download_id)

    @router.delete("/admin/api/downloads/{download_id}")
    async def remove_download(download_id: int) -> dict[str, Any]:
        """Forget a finished download; its files stay."""
        _check(context, download_id)
        await tools.queue.remove(download_id)
        return {"removed": download_id}

    @router.delete("/admin/api/files/{model_id:path}")
    async def remove_files(model_id: str) -> dict[str, Any]:
        """Delete a downloaded model that is not loaded from the disk."""
        await asyncio.to_thread(tools.remove_files, context.serving, model_id)
        return {"removed": model_id}


def _check(context: AdminContext, download_id: int) -> None:
    if download_id not in context.downloads.queue:
        raise Rejected(404, f"There is no download {download_id}.", "no_download")
