"""`/admin/downloads`: the queue, what was downloaded, what the hub has and would cost, the token. Topic: `downloads`.

The token is written here and never read back.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from app.admin.templating import PagesOf
from app.core.download import Download
from app.core.errors import HubProblem, ModelNotFound, PacelineError, StoreUnavailable
from app.hub.downloads import Configuration, Downloads
from app.hub.hub_files import Hub, HubToken, checked_repository, checked_revision
from app.hub.hub_search import Pair, Sort, inspect_repository, recommended, search
from app.hub.partial_folder import read_marker, remove_model
from app.serving.context import Context
from app.serving.errors import Rejected
from app.serving.gate import read_json
from app.store.rows import DownloadRows
from app.store.store import Store

ANSWER_SECONDS = 25.0
CONVERSATIONS = 4
"""With the hub at the same time."""
ROOM_SHARE = 1.15
"""Weights with what else a model needs at the least."""

Verb = Literal["pause", "resume", "cancel", "retry", "up", "down"]

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class DownloadTools:
    """The queue, the hub and its token, and the folder that downloads go to.

    Over one server's settings and store; `arrived` hears of each download once its model is listed.
    """

    def __init__(self, context: Context, store: Store, arrived: Callable[[Download], None]) -> None:
        self.context = context
        self.token = HubToken(context.settings.home)

        def list_and_tell(download: Download) -> None:
            context.resolver.refresh()
            arrived(download)

        configuration = Configuration(
            folder=self.folder,
            parallel=lambda: context.settings.parallel_downloads,
            token=lambda: self.token.read(self.endpoint()),
            endpoint=self.endpoint,
        )
        self.queue = Downloads(DownloadRows(store), configuration, arrived=list_and_tell)
        self._threads = ThreadPoolExecutor(CONVERSATIONS, "hub")
        """For the hub alone: one that does not answer must not take the threads that every request needs."""

    def folder(self) -> Path:
        """Where downloads go."""
        return self.context.settings.downloads_path

    def endpoint(self) -> str:
        """The address of the hub; empty: the public one, or what HF_ENDPOINT says."""
        return self.context.settings.hub_endpoint

    async def start(self) -> None:
        """Go on with what ran when the server ended."""
        try:
            await self.queue.start()
        except StoreUnavailable as error:
            logger.warning("Earlier downloads are not known: %s", error.message)

    async def stop(self) -> None:
        """The server ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.queue.stop()

    async def ask(self, call: Callable[[Hub], Answer]) -> Answer:
        """One conversation with the hub, in a thread, for as long as a person waits. Raises `HubProblem`."""
        endpoint = self.endpoint()
        token = await asyncio.to_thread(self.token.read, endpoint)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await loop.run_in_executor(self._threads, call, Hub(endpoint or None, token))
        except TimeoutError:
            raise HubProblem("offline") from None

    async def snapshot(self) -> dict[str, Any]:
        """The queue and the disk, as the page and the topic `downloads` show them."""
        free_bytes = await asyncio.to_thread(self.free_bytes)
        return {"downloads": self.queue.views(), "free_bytes": free_bytes, "folder": str(self.folder())}

    def free_bytes(self) -> int:
        """Room on the disk of the downloads folder, which need not be there yet; a disk may take long to answer."""
        folder = self.folder()
        there = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
        try:
            return shutil.disk_usage(there).free
        except OSError:
            return 0

    def commit_here(self, repository: str) -> str:
        """The commit of a repository that was downloaded; empty when it was not."""
        marker = read_marker(self.folder() / repository)
        return marker.commit if marker is not None else ""

    def remove_files(self, model_id: str) -> None:
        """Delete a downloaded model. Raises `ModelNotFound`, or `Rejected` for what is in use or not ours."""
        model = self.context.resolver.find(model_id)
        for loaded in self.context.worker.snapshot.models:
            if model.id == loaded.id or model.id in loaded.draft_ids:
                raise Rejected(409, f"{model.id} is loaded: unload {loaded.id} first.", "model_in_use")
        try:
            is_ours = remove_model(self.folder(), model.path)
        except OSError as error:
            raise Rejected(409, f"The folder cannot be removed ({error.strerror}).", "unwritable") from None
        if not is_ours:
            raise Rejected(
                409, f"{model.id} was not downloaded by Paceline: remove its folder yourself.", "not_downloaded"
            )
        self.context.resolver.refresh()

    def is_here(self, model_id: str) -> bool:
        """Whether a model is on this computer and sound."""
        try:
            return not self.context.resolver.find(model_id).problem
        except ModelNotFound:
            return False
        except PacelineError:
            return True


class DownloadBody(BaseModel):
    """What to download; `drafts_for` is the main model that it is to draft for once it is here."""

    repository: str = Field(min_length=1, max_length=300)
    revision: str = Field("", max_length=128)
    drafts_for: str = Field("", max_length=300)


class TokenBody(BaseModel):
    """A token for the hub; an empty one removes the stored one."""

    token: str = Field(max_length=300)


async def tools_of(request: Request) -> DownloadTools:
    """Those of the application that serves `request`."""
    tools: DownloadTools = request.app.state.admin.downloads
    return tools


Tools = Annotated[DownloadTools, Depends(tools_of)]

router = APIRouter()


@router.get("/admin/downloads", response_class=HTMLResponse)
async def get_downloads_page(request: Request, pages: PagesOf, q: str = "") -> HTMLResponse:
    """Search, recommended pairs and the queue; `q` is searched for at once."""
    return pages.render("downloads.html", request, area="downloads", data={"query": q[:200]})


@router.get("/admin/api/downloads")
async def list_downloads(tools: Tools) -> dict[str, Any]:
    """Every download, and the room on the disk."""
    return await tools.snapshot()


@router.post("/admin/api/downloads", status_code=202)
async def add_download(request: Request, tools: Tools) -> dict[str, Any]:
    """Queue a repository; one that is queued, paused or done already is gone on with."""
    body = await read_json(request, DownloadBody)
    return await tools.queue.add(body.repository, body.revision, body.drafts_for)


@router.post("/admin/api/downloads/{download_id}/{verb}")
async def change_download(tools: Tools, download_id: int, verb: Verb) -> dict[str, Any]:
    """Pause, resume, cancel, retry, or move up or down the queue."""
    queue = _queue_with(tools, download_id)
    if verb in {"up", "down"}:
        return await queue.move(download_id, up=verb == "up")
    verbs = {"pause": queue.pause, "cancel": queue.cancel}
    return await verbs.get(verb, queue.resume)(download_id)


@router.delete("/admin/api/downloads/{download_id}")
async def remove_download(tools: Tools, download_id: int) -> dict[str, Any]:
    """Forget a finished download; its files stay."""
    await _queue_with(tools, download_id).remove(download_id)
    return {"removed": download_id}


def _queue_with(tools: DownloadTools, download_id: int) -> Downloads:
    if download_id not in tools.queue:
        raise Rejected(404, f"There is no download {download_id}.", "no_download")
    return tools.queue


@router.delete("/admin/api/files/{model_id:path}")
async def remove_files(tools: Tools, model_id: str) -> dict[str, Any]:
    """Delete a downloaded model that is not loaded from the disk."""
    await asyncio.to_thread(tools.remove_files, model_id)
    return {"removed": model_id}


@router.get("/admin/api/hub/search")
async def search_hub(tools: Tools, q: str = "", sort: Sort = "downloads", author: str = "") -> dict[str, Any]:
    """Repositories by the words of their names, MLX ones first."""
    offers = await tools.ask(lambda hub: search(hub, q, sort=sort, author=author))
    here = await asyncio.to_thread(lambda: {each.repository: tools.commit_here(each.repository) for each in offers})
    return {"results": [{**asdict(each), "is_here": bool(here[each.repository])} for each in offers]}


@router.get("/admin/api/hub")
async def get_hub(tools: Tools) -> dict[str, Any]:
    """Whether the hub answers: the code of the problem, empty where there is none."""
    try:
        await tools.ask(lambda hub: hub.listing({"limit": 1}))
    except HubProblem as error:
        return {"problem": error.reason}
    return {"problem": ""}


@router.get("/admin/api/hub/repository")
async def get_repository(tools: Tools, id: str, revision: str = "") -> dict[str, Any]:  # noqa: A002 - as the hub calls it
    """What would be fetched, how large it is, and whether disk and memory have room for it."""
    ceiling = tools.context.memory_ceiling_bytes
    repository, wanted = checked_repository(id), checked_revision(revision)
    details = await tools.ask(lambda hub: inspect_repository(hub, repository, wanted))
    return {
        **asdict(details),
        "files": [{"name": name, "size_bytes": size} for name, size in details.files],
        "free_bytes": await asyncio.to_thread(tools.free_bytes) - tools.queue.promised_bytes,
        "memory_ceiling_bytes": ceiling,
        "fits_memory": details.weights_bytes * ROOM_SHARE <= ceiling if ceiling else None,
        "is_here": await asyncio.to_thread(tools.commit_here, repository) == details.commit,
    }


@router.get("/admin/api/hub/recommended")
def get_recommended(tools: Tools) -> dict[str, Any]:
    """Pairs of main model and drafter for the memory of this computer, the largest first; sizes are rough."""
    ceiling = tools.context.memory_ceiling_bytes
    pairs = [_pair_object(tools, pair) for pair in recommended(ceiling)]
    return {"pairs": pairs, "memory_ceiling_bytes": ceiling}


def _pair_object(tools: DownloadTools, pair: Pair) -> dict[str, Any]:
    draft = pair.draft
    return {
        "main": pair.main,
        "main_bytes": pair.main_bytes,
        "main_is_here": tools.is_here(pair.main),
        "draft": draft.repository if draft is not None else "",
        "draft_bytes": draft.size_bytes if draft is not None else 0,
        "draft_is_here": draft is not None and tools.is_here(draft.repository),
        "method": draft.method if draft is not None else "",
    }


@router.get("/admin/api/hub/token")
def get_token(tools: Tools) -> dict[str, Any]:
    """Where the token comes from: `paceline`, `hugging_face` or `none`."""
    return {"origin": tools.token.origin(tools.endpoint())}


@router.put("/admin/api/hub/token")
async def put_token(request: Request, tools: Tools) -> dict[str, Any]:
    """Store a token, or remove the stored one."""
    body = await read_json(request, TokenBody)
    await asyncio.to_thread(tools.token.write, body.token, tools.endpoint())
    return await asyncio.to_thread(get_token, tools)


TOPICS = {"downloads": lambda admin: admin.downloads.snapshot()}
