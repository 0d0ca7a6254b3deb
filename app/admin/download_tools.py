"""What the pages about downloads work with: the queue, the hub and its token, the folder that downloads go to."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from app.core.download import Download
from app.core.errors import HubProblem, ModelNotFound, PacelineError, StoreUnavailable
from app.hub.downloads import Configuration, Downloads
from app.hub.hub_files import Hub, HubToken
from app.hub.partial_folder import read_marker, remove_model
from app.serving.context import Context
from app.serving.errors import Rejected
from app.store.rows import DownloadRows
from app.store.store import Store

ANSWER_SECONDS = 25.0
CONVERSATIONS = 4
"""With the hub at the same time."""

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadTools:
    """For one server. An empty endpoint is the public hub, or what HF_ENDPOINT says."""

    queue: Downloads
    token: HubToken
    folder: Callable[[], Path]
    endpoint: Callable[[], str]
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(CONVERSATIONS, "hub"))
    """For the hub alone: one that does not answer must not take the threads that every request needs."""

    @classmethod
    def of(cls, context: Context, store: Store, arrived: Callable[[Download], None]) -> "DownloadTools":
        """Over one server's settings and store; `arrived` hears of each download once its model is listed."""
        live, token = context.live, HubToken(context.settings.home)

        def list_and_tell(download: Download) -> None:
            context.resolver.refresh()
            arrived(download)

        configuration = Configuration(
            folder=lambda: live.current.downloads_path,
            parallel=lambda: live.current.parallel_downloads,
            token=lambda: token.read(live.current.hub_endpoint),
            endpoint=lambda: live.current.hub_endpoint,
        )
        queue = Downloads(DownloadRows(store), configuration, arrived=list_and_tell)
        return cls(queue=queue, token=token, folder=configuration.folder, endpoint=configuration.endpoint)

    async def start(self) -> None:
        """Go on with what ran when the server ended."""
        try:
            await self.queue.start()
        except StoreUnavailable as error:
            logger.warning("Earlier downloads are not known: %s", error.message)

    async def stop(self) -> None:
        """The server ends."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        await self.queue.stop()

    async def ask(self, call: Callable[[Hub], Answer]) -> Answer:
        """One conversation with the hub, in a thread, for as long as a person waits. Raises `HubProblem`."""
        endpoint = self.endpoint()
        token = await asyncio.to_thread(self.token.read, endpoint)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await loop.run_in_executor(self.threads, call, Hub(endpoint or None, token))
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

    def remove_files(self, context: Context, model_id: str) -> None:
        """Delete a downloaded model. Raises `ModelNotFound`, or `Rejected` for what is in use or not ours."""
        model = context.resolver.find(model_id)
        for loaded in context.worker.snapshot.models:
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
        context.resolver.refresh()


def is_listed(context: Context, model_id: str) -> bool:
    """Whether a model is on this computer and sound."""
    try:
        return not context.resolver.find(model_id).problem
    except ModelNotFound:
        return False
    except PacelineError:
        return True
