"""`/admin/api/hub`: what the hub has, what a repository would cost, which pairs suit this computer, and the token.

The token is written here and never read back.
"""

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from app.admin.context import AdminContext
from app.admin.download_tools import is_listed
from app.admin.templating import Pages
from app.core.errors import HubProblem
from app.hub.hub_search import Sort, inspect_repository, search
from app.hub.published import Pair, recommended
from app.hub.repository import checked_repository, checked_revision
from app.serving.body import read_json

ROOM_SHARE = 1.15
"""Weights with what else a model needs at the least."""


class TokenBody(BaseModel):
    """A token for the hub; an empty one removes the stored one."""

    token: str = Field(max_length=300)


def make_router(context: AdminContext, pages: Pages) -> APIRouter:  # noqa: ARG001 - every area has this signature
    """The JSON routes; their page is that of the downloads."""
    router = APIRouter()
    _add_search(router, context)
    _add_token(router, context)
    return router


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
