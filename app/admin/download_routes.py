"""`/admin/downloads`: the queue, what was downloaded, what the hub has and would cost, the token. Topic: `downloads`.

The token is written here and never read back.
"""

import asyncio
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from app.admin.context import AdminContext
from app.admin.download_tools import is_listed
from app.admin.templating import Pages
from app.core.errors import HubProblem
from app.hub.hub_files import checked_repository, checked_revision
from app.hub.hub_search import Sort, inspect_repository, search
from app.hub.published import Pair, recommended
from app.serving.body import read_json
from app.serving.errors import Rejected

ROOM_SHARE = 1.15
"""Weights with what else a model needs at the least."""

Verb = Literal["pause", "resume", "cancel", "retry", "up", "down"]


class DownloadBody(BaseModel):
    """What to download; `drafts_for` is the main model that it is to draft for once it is here."""

    repository: str = Field(min_length=1, max_length=300)
    revision: str = Field("", max_length=128)
    drafts_for: str = Field("", max_length=300)


class TokenBody(BaseModel):
    """A token for the hub; an empty one removes the stored one."""

    token: str = Field(max_length=300)


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its JSON routes."""
    router = APIRouter()
    context.live.topic("downloads", context.downloads.snapshot)
    _add_queue(router, context)
    _add_changes(router, context)
    _add_search(router, context)
    _add_token(router, context)

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


def _add_search(router: APIRouter, context: AdminContext) -> None:
    tools = context.downloads

    @router.get("/admin/api/hub/search")
    async def search_hub(q: str = "", sort: Sort = "downloads", author: str = "") -> dict[str, Any]:
        """Repositories by the words of their names, MLX ones first."""
        found = await tools.ask(lambda hub: search(hub, q, sort=sort, author=author))
        here = await asyncio.to_thread(lambda: {each.repository: tools.commit_here(each.repository) for each in found})
        return {"results": [{**asdict(each), "is_here": bool(here[each.repository])} for each in found]}

    @router.get("/admin/api/hub")
    async def get_hub() -> dict[str, Any]:
        """Whether the hub answers: the code of the problem, empty where there is none."""
        try:
            await tools.ask(lambda hub: hub.listing({"limit": 1}))
        except HubProblem as error:
            return {"problem": error.reason}
        return {"problem": ""}

    @router.get("/admin/api/hub/repository")
    async def get_repository(id: str, revision: str = "") -> dict[str, Any]:  # noqa: A002 - as the hub calls it
        """What would be fetched, how large it is, and whether disk and memory have room for it."""
        repository, wanted = checked_repository(id), checked_revision(revision)
        details = await tools.ask(lambda hub: inspect_repository(hub, repository, wanted))
        ceiling = context.models.footprints.room.ceiling_bytes
        return {
            **asdict(details),
            "files": [{"name": name, "size_bytes": size} for name, size in details.files],
            "free_bytes": await asyncio.to_thread(tools.free_bytes) - tools.queue.promised_bytes,
            "memory_ceiling_bytes": ceiling,
            "fits_memory": details.weights_bytes * ROOM_SHARE <= ceiling if ceiling else None,
            "is_here": await asyncio.to_thread(tools.commit_here, repository) == details.commit,
        }

    @router.get("/admin/api/hub/recommended")
    async def get_recommended() -> dict[str, Any]:
        """Pairs of main model and drafter for the memory of this computer, the largest first; sizes are rough."""
        ceiling = context.models.footprints.room.ceiling_bytes
        pairs = await asyncio.to_thread(lambda: [_pair_object(context, pair) for pair in recommended(ceiling)])
        return {"pairs": pairs, "memory_ceiling_bytes": ceiling}


def _add_token(router: APIRouter, context: AdminContext) -> None:
    tools = context.downloads

    @router.get("/admin/api/hub/token")
    async def get_token() -> dict[str, Any]:
        """Where the token comes from: `paceline`, `hugging_face` or `none`."""
        return {"origin": await asyncio.to_thread(tools.token.origin, tools.endpoint())}

    @router.put("/admin/api/hub/token")
    async def put_token(request: Request) -> dict[str, Any]:
        """Store a token, or remove the stored one."""
        body = await read_json(request, TokenBody)
        await asyncio.to_thread(tools.token.write, body.token, tools.endpoint())
        return {"origin": await asyncio.to_thread(tools.token.origin, tools.endpoint())}


def _pair_object(context: AdminContext, pair: Pair) -> dict[str, Any]:
    draft = pair.draft
    return {
        "main": pair.main,
        "main_bytes": pair.main_bytes,
        "main_is_here": is_listed(context.serving, pair.main),
        "draft": draft.repository if draft is not None else "",
        "draft_bytes": draft.size_bytes if draft is not None else 0,
        "draft_is_here": draft is not None and is_listed(context.serving, draft.repository),
        "method": draft.method if draft is not None else "",
    }
