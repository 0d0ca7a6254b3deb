"""`/admin/downloads`: the queue, finished downloads, repositories of the hub and their sizes. Topic: `downloads`.

The hub token is written here and never read back.
"""

import asyncio
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import Field

from app.admin.context import Admin, AdminContext
from app.admin.downloading import Downloads
from app.core.errors import HubProblem, ModelInUse, ModelNotFound, PacelineError
from app.hub.hub_files import checked_repository, checked_revision
from app.hub.hub_search import Pair, Sort, inspect_repository, recommended, search
from app.hub.partial_folder import read_marker, remove_model
from app.machine.host import chip_name
from app.serving.document import HUB, problems
from app.serving.errors import Rejected
from app.serving.gate import Body, JsonBody

MEMORY_PER_WEIGHT_BYTE = 1.15
"""Minimum memory that a model needs, in bytes per byte of its weights."""

Verb = Literal["pause", "resume", "cancel", "retry", "reconnect", "up", "down"]


class DownloadBody(Body):
    """Repository to download; `drafts_for` names the main model to attach it to as a drafter once it has arrived."""

    repository: str = Field(min_length=1, max_length=300)
    revision: str = Field("", max_length=128)
    drafts_for: str = Field("", max_length=300)


class TokenBody(Body):
    """A token for the hub; an empty one removes the stored one."""

    token: str = Field(max_length=300)


router = APIRouter()


@router.get("/admin/downloads", response_class=HTMLResponse)
async def get_downloads_page(request: Request, admin: Admin, q: str = "") -> HTMLResponse:
    """Serve the page: search, recommended pairs and the queue; it opens with a search for `q`."""
    return admin.pages.render("downloads.html", request, area="downloads", data={"query": q[:200]})


@router.get("/admin/api/downloads")
async def list_downloads(admin: Admin) -> dict[str, Any]:
    """List every download, and the free disk space."""
    return await _snapshot(admin)


@router.post("/admin/api/downloads", status_code=202)
async def add_download(admin: Admin, body: JsonBody[DownloadBody]) -> dict[str, Any]:
    """Queue a repository, or continue its existing download."""
    return await admin.downloads.add(body.repository, body.revision, body.drafts_for)


@router.post("/admin/api/downloads/{download_id}/{verb}")
async def change_download(admin: Admin, download_id: int, verb: Verb) -> dict[str, Any]:
    """Pause, resume, cancel, retry or reconnect a download, or move it up or down the queue."""
    queue = _queue_with(admin, download_id)
    if verb in {"up", "down"}:
        return await queue.move(download_id, up=verb == "up")
    verbs = {"pause": queue.pause, "cancel": queue.cancel, "reconnect": queue.reconnect}
    return await verbs.get(verb, queue.resume)(download_id)


@router.delete("/admin/api/downloads/{download_id}")
async def remove_download(admin: Admin, download_id: int) -> dict[str, Any]:
    """Remove a finished download from the list and delete any partial files; a whole model is kept."""
    await _queue_with(admin, download_id).remove(download_id)
    return {"removed": download_id}


def _queue_with(admin: AdminContext, download_id: int) -> Downloads:
    if download_id not in admin.downloads:
        raise Rejected(404, f"There is no download {download_id}.", "no_download")
    return admin.downloads


@router.delete("/admin/api/files/{model_id:path}", responses=problems(409))
def remove_files(admin: Admin, model_id: str) -> dict[str, Any]:
    """Delete a downloaded model from disk; 409 if it is in use, not from Paceline, or not removable."""
    resolver = admin.serving.resolver
    model = resolver.find(model_id)
    for loaded in resolver.loaded().values():
        if model.id == loaded.id or model.id in loaded.draft_ids:
            raise ModelInUse(f"{model.id} is loaded: unload {loaded.id} first.")
    try:
        is_ours = remove_model(admin.serving.settings.model_folders, model.path)
    except OSError as error:
        raise Rejected(409, f"The folder cannot be removed ({error.strerror}).", "unwritable") from None
    if not is_ours:
        raise Rejected(409, f"{model.id} was not downloaded by Paceline: remove its folder yourself.", "not_downloaded")
    resolver.refresh()
    return {"removed": model_id}


@router.get("/admin/api/hub/search", responses=HUB)
async def search_hub(admin: Admin, q: str = "", sort: Sort = "downloads", author: str = "") -> dict[str, Any]:
    """Search repositories by words in their names, MLX ones first."""
    offers = await admin.downloads.call_hub(lambda hub: search(hub, q, sort=sort, author=author))
    downloaded_commits = await asyncio.to_thread(
        lambda: {offer.repository: _downloaded_commit(admin, offer.repository) for offer in offers}
    )
    return {"results": [{**asdict(offer), "is_here": bool(downloaded_commits[offer.repository])} for offer in offers]}


@router.get("/admin/api/hub")
async def get_hub(admin: Admin) -> dict[str, Any]:
    """Check that the hub answers; return the code of the problem, empty if there is none."""
    try:
        await admin.downloads.call_hub(lambda hub: hub.list_models({"limit": 1}))
    except HubProblem as error:
        return {"problem": error.reason}
    return {"problem": ""}


@router.get("/admin/api/hub/repository", responses=HUB)
async def get_repository(admin: Admin, id: str, revision: str = "") -> dict[str, Any]:  # noqa: A002 - as the hub calls it
    """Return the files that would be fetched, their sizes, the free disk space, and whether the model fits memory."""
    ceiling = admin.serving.memory_ceiling_bytes
    repository, valid_revision = checked_repository(id), checked_revision(revision)
    details = await admin.downloads.call_hub(lambda hub: inspect_repository(hub, repository, valid_revision))
    return {
        **asdict(details),
        "files": [{"name": name, "size_bytes": size} for name, size in details.files],
        "free_bytes": await asyncio.to_thread(admin.downloads.free_bytes) - admin.downloads.claimed_bytes,
        "memory_ceiling_bytes": ceiling,
        "fits_memory": details.weights_bytes * MEMORY_PER_WEIGHT_BYTE <= ceiling if ceiling else None,
        "is_here": await asyncio.to_thread(_downloaded_commit, admin, repository) == details.commit,
    }


@router.get("/admin/api/hub/recommended")
def get_recommended(admin: Admin) -> dict[str, Any]:
    """List pairs of a main model and drafters for this computer's memory and chip, best first; sizes are estimates."""
    ceiling = admin.serving.memory_ceiling_bytes
    pairs = [_pair_object(admin, pair) for pair in recommended(ceiling, chip_name())]
    return {"pairs": pairs, "memory_ceiling_bytes": ceiling}


def _pair_object(admin: AdminContext, pair: Pair) -> dict[str, Any]:
    drafters = [{**asdict(drafter), "is_here": _is_here(admin, drafter.repository)} for drafter in pair.drafters]
    return {**asdict(pair), "drafters": drafters, "main_is_here": _is_here(admin, pair.main)}


@router.get("/admin/api/hub/token")
def get_token(admin: Admin) -> dict[str, Any]:
    """Return where the token comes from: `paceline`, `hugging_face` or `none`."""
    return {"origin": admin.downloads.token.origin(admin.downloads.endpoint)}


@router.put("/admin/api/hub/token")
async def put_token(admin: Admin, body: JsonBody[TokenBody]) -> dict[str, Any]:
    """Store a token, or remove the stored one."""
    await asyncio.to_thread(admin.downloads.token.write, body.token, admin.downloads.endpoint)
    return await asyncio.to_thread(get_token, admin)


def _downloaded_commit(admin: AdminContext, repository: str) -> str:
    """Return the commit of a downloaded repository; empty if it was not downloaded."""
    markers = (read_marker(folder / repository) for folder in admin.serving.settings.model_folders)
    return next((marker.commit for marker in markers if marker is not None), "")


def _is_here(admin: AdminContext, model_id: str) -> bool:
    """Whether a usable copy of a model is on this computer."""
    try:
        return not admin.serving.resolver.find(model_id).problem
    except ModelNotFound:
        return False
    except PacelineError:
        return True


async def _snapshot(admin: AdminContext) -> dict[str, Any]:
    """Return the queue and the disk space, as the page and the topic `downloads` show them."""
    free_bytes = await asyncio.to_thread(admin.downloads.free_bytes)
    return {"downloads": admin.downloads.views(), "free_bytes": free_bytes, "folder": str(admin.downloads.folder)}


TOPICS = {"downloads": _snapshot}
