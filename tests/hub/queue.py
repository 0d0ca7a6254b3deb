"""A queue of downloads from the stand-in hub: real processes, a real store, short pauses."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.admin.downloading import Downloads
from app.core.download import Download
from app.hub.download_run import DownloadTimeouts, Spawn, spawn_child
from app.hub.hub_files import HubToken
from app.models.catalog import FolderCatalog
from app.settings import Settings
from app.store.rows import DownloadRows
from app.store.store import Store
from tests.hub.stand_in import StandInHub
from tests.models.folders import CONFIG, safetensors, tensors_of, tokenizer

SHORT = DownloadTimeouts(pauses_seconds=(0.01, 0.02, 0.05))
WAIT_SECONDS = 60.0


def model_files(rows: int = 20_000) -> dict[str, bytes]:
    """Return the files of a complete small model; its weights have at least `rows` * 8 bytes."""
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": json.dumps(tokenizer(list("abcdefgh"))).encode(),
        "model.safetensors": safetensors(tensors_of(rows, CONFIG)),
    }


class DownloadEnvironment:
    """A folder for downloads with its queue, store and catalog; each `open` is a start of the server."""

    def __init__(self, folder: Path, hub: StandInHub) -> None:
        self.folder = folder / "models"
        self.folder.mkdir(exist_ok=True)
        self.hub = hub
        self.catalog = FolderCatalog([self.folder], refresh_seconds=1e9)
        self.store_file = folder / "home" / "paceline.sqlite3"

    @asynccontextmanager
    async def open(
        self,
        *,
        parallel: int = 1,
        timeouts: DownloadTimeouts = SHORT,
        spawn: Spawn = spawn_child,
        on_done: Callable[[Download], None] | None = None,
        token: str = "",
        reserve_bytes: int = 0,
        **job: Any,
    ) -> AsyncGenerator[Downloads, None]:
        """Run the queue from a start of the server to its stop."""
        store = Store(self.store_file)
        settings = Settings(
            home=self.store_file.parent,
            downloads_folder=self.folder,
            hub_endpoint=self.hub.address,
            parallel_downloads=parallel,
        )
        hub_token = HubToken(settings.home)
        hub_token.write(token, self.hub.address)
        downloads = Downloads(
            lambda: settings,
            DownloadRows(store),
            hub_token,
            on_done=on_done or (lambda _: self.catalog.refresh()),
            spawn=spawn,
            timeouts=timeouts,
            reserve_bytes=reserve_bytes,
            **{"retry_seconds": 0.01, **job},
        )
        await downloads.start()
        try:
            yield downloads
        finally:
            await downloads.stop()
            store.close()

    def listed(self) -> list[str]:
        """Return the ids of the models that the catalog lists."""
        return [model.id for model in self.catalog.models()]

    def partial_bytes(self) -> int:
        """Return the total size of the files in folders of incomplete downloads."""
        return sum(file.stat().st_size for file in self.folder.glob(".partial/*@*/*"))


async def until(downloads: Downloads, holds: Callable[[dict[str, Any]], bool], id: int = 1) -> dict[str, Any]:  # noqa: A002
    """Wait until the download's view meets the condition `holds`; return that view."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not holds(view := downloads.view(id)):
            await downloads.changed()
    return view


async def until_state(downloads: Downloads, state: str, id: int = 1) -> dict[str, Any]:  # noqa: A002
    """Wait for a state and return the view; if the download fails instead, the assertion shows its view."""
    view = await until(downloads, lambda view: view["state"] in {state, "failed"}, id)
    assert view["state"] == state, view
    return view
