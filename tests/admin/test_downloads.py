"""Downloads through the dashboard's routes, against the stand-in hub: search, sizes, queue, files and the token."""

import asyncio
import dataclasses
import re
import stat
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.admin.downloading import Downloads
from app.core.download import Download
from app.core.messages import Ready, Snapshot
from app.core.unit import DrafterSpecification
from app.hub.hub_files import Hub, HubToken
from app.hub.hub_search import FoundRepository, search
from app.main import admin_context, build
from app.models.catalog import FolderCatalog
from app.serving.context import Activity, Context
from app.serving.live_settings import LiveSettings
from app.serving.resolver import Resolver
from app.settings import Settings
from app.store.rows import DownloadRows
from app.store.store import FILE_NAME, Store
from tests.api.fakes import FakeStorage, FakeWorker
from tests.hub.queue import model_files
from tests.hub.stand_in import StandInHub, stand_in_hub
from tests.loaded import loaded

pytestmark = pytest.mark.anyio

ID = "paceline-test/tiny-4bit"
KEY = "sk-of-this-test"


@dataclass
class DownloadSite:
    """An application whose hub is the stand-in."""

    client: httpx2.AsyncClient
    downloads: Downloads
    worker: FakeWorker
    hub: StandInHub
    home: Path
    arrived: list[Download]

    async def call(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        response = await self.client.request(method, path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def until(self, state: str, number: int = 1) -> dict[str, Any]:
        while (view := self.downloads.view(number))["state"] not in {state, "failed"}:
            await self.downloads.changed()
        assert view["state"] == state, view
        return view


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        hub.add(ID, model_files(), config={"model_type": "qwen3"})
        yield hub


@pytest.fixture
async def site(tmp_path: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[DownloadSite, None]:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    settings = Settings(home=tmp_path, api_key=KEY, hub_endpoint=hub.address)
    live, worker = LiveSettings(settings, FakeStorage()), FakeWorker()
    worker.ready_info = Ready(process_id=1, device="cpu", memory_ceiling_bytes=16_000_000_000)
    resolver = Resolver(live, FolderCatalog([settings.downloads_path], refresh_seconds=1e9), worker)
    activity = Activity(lambda: live.current.max_requests)
    context = Context(live=live, worker=worker, resolver=resolver, activity=activity)
    store = Store(tmp_path / FILE_NAME)
    arrived: list[Download] = []

    def listed(download: Download) -> None:
        resolver.refresh()
        arrived.append(download)

    downloads = Downloads(lambda: settings, DownloadRows(store), HubToken(tmp_path), on_done=listed)
    app = build(dataclasses.replace(admin_context(context, store), downloads=downloads))
    await downloads.start()
    headers = {"authorization": f"Bearer {KEY}"}
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8710", headers=headers) as client:
        yield DownloadSite(client, downloads, worker, hub, tmp_path, arrived)
    await downloads.stop()
    store.close()


async def test_search_sizes_download_and_delete(site: DownloadSite) -> None:
    answer = await site.call("GET", "/admin/api/hub/search?q=tiny")
    assert [(result["repository"], result["is_here"]) for result in answer["results"]] == [(ID, False)]
    details = await site.call("GET", f"/admin/api/hub/repository?id={ID}")
    assert details["total_bytes"] == sum(map(len, model_files().values()))
    assert details["free_bytes"] > details["total_bytes"]
    assert (details["fits_memory"], details["is_here"]) == (True, False)
    body = {"repository": ID, "revision": details["commit"], "drafts_for": "demo-main"}
    assert (await site.call("POST", "/admin/api/downloads", body, 202))["state"] == "running"
    await site.until("done")
    assert [(model.repository, model.drafts_for) for model in site.arrived] == [(ID, "demo-main")]
    assert (await site.call("GET", f"/admin/api/hub/repository?id={ID}"))["is_here"]
    assert (await site.call("GET", "/admin/api/downloads"))["downloads"][0]["state"] == "done"
    await site.call("DELETE", f"/admin/api/files/{ID}", {})
    assert list(site.downloads.folder.glob("[!.]*")) == []
    await site.call("DELETE", f"/admin/api/files/{ID}", {}, 404)
    await site.call("DELETE", "/admin/api/downloads/1", {})
    assert (await site.call("GET", "/admin/api/downloads"))["downloads"] == []


async def test_pause_resume_cancel_and_retry(site: DownloadSite) -> None:
    site.hub.faults.held = {ID}
    await site.call("POST", "/admin/api/downloads", {"repository": ID}, 202)
    assert (await site.call("POST", "/admin/api/downloads/1/pause", {}))["state"] == "paused"
    assert (await site.call("POST", "/admin/api/downloads/1/pause", {}, 400))["error"]["code"] == "invalid_request"
    assert (await site.call("POST", "/admin/api/downloads/1/resume", {}))["state"] == "running"
    await site.call("DELETE", "/admin/api/downloads/1", {}, 400)
    assert (await site.call("POST", "/admin/api/downloads/1/cancel", {}))["state"] == "cancelled"
    site.hub.release.set()
    assert (await site.call("POST", "/admin/api/downloads/1/retry", {}))["state"] == "running"
    await site.until("done")


async def test_what_is_not_there_is_told(site: DownloadSite) -> None:
    for verb in ("pause", "resume", "cancel", "retry", "up", "down"):
        assert (await site.call("POST", f"/admin/api/downloads/7/{verb}", {}, 404))["error"]["code"] == "no_download"
    await site.call("DELETE", "/admin/api/downloads/7", {}, 404)
    await site.call("POST", "/admin/api/downloads/1/explode", {}, 400)
    await site.call("POST", "/admin/api/downloads", {"repository": "../../etc"}, 400)
    await site.call("POST", "/admin/api/downloads", {"repository": ID, "revision": "../x"}, 400)
    await site.call("GET", "/admin/api/hub/search?q=x&sort=size", status=400)
    assert (await site.call("GET", "/admin/api/hub/repository?id=no/such", status=404))["error"]["code"]


async def test_offline_has_words_and_leaves_the_rest_alone(site: DownloadSite) -> None:
    assert await site.call("GET", "/admin/api/hub") == {"problem": ""}
    site.hub.close()
    assert await site.call("GET", "/admin/api/hub") == {"problem": "offline"}
    for path in ("/admin/api/hub/search?q=x", f"/admin/api/hub/repository?id={ID}"):
        error = (await site.call("GET", path, status=503))["error"]
        assert error["code"] == "hub_offline"
        assert "Check your network" in error["message"]
    await site.call("GET", "/admin/api/downloads")
    assert (await site.call("GET", "/admin/api/hub/recommended"))["pairs"]


async def test_a_hub_that_does_not_answer_holds_up_nothing_else(site: DownloadSite) -> None:
    site.hub.faults.searches_hang = True
    searches = [asyncio.create_task(site.downloads.call_hub(_search)) for _ in range(40)]
    async with asyncio.timeout(60):
        while not site.hub.requests:
            await site.call("GET", "/admin/api/downloads")
        await site.call("GET", "/admin/api/hub/token")
    site.hub.faults.searches_hang = False
    site.hub.release.set()
    await asyncio.gather(*searches)


def _search(hub: Hub) -> list[FoundRepository]:
    return search(hub, "x")


async def test_a_model_in_use_or_of_somebody_else_is_not_deleted(site: DownloadSite) -> None:
    await site.call("POST", "/admin/api/downloads", {"repository": ID}, 202)
    await site.until("done")
    for held in (loaded(ID), loaded("main", DrafterSpecification(ID, ""))):
        site.worker.book.snapshot = Snapshot(models=(held,))
        error = (await site.call("DELETE", f"/admin/api/files/{ID}", {}, 409))["error"]
        assert (error["code"], held.id in error["message"]) == ("model_in_use", True)
    site.worker.book.snapshot = Snapshot()
    (site.downloads.folder / ID / ".paceline.json").unlink()
    assert (await site.call("DELETE", f"/admin/api/files/{ID}", {}, 409))["error"]["code"] == "not_downloaded"
    assert (site.downloads.folder / ID / "config.json").is_file()


async def test_what_was_downloaded_into_a_folder_that_is_left_stays_and_can_be_deleted(
    site: DownloadSite, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        await site.call("PATCH", "/admin/api/settings", {"downloads_folder": str(folder)})
        if folder is first:
            await site.call("POST", "/admin/api/downloads", {"repository": ID}, 202)
            await site.until("done")
    rows = (await site.call("GET", "/admin/api/settings"))["settings"]
    assert next(row["value"] for row in rows if row["name"] == "model_dirs") == [str(first)]
    models = {model["id"]: model for model in (await site.call("GET", "/admin/api/models"))["models"]}
    assert models[ID]["is_downloaded"]
    first.rename(tmp_path / "away")
    await site.call("PATCH", "/admin/api/settings", {"model_dirs": [str(first), str(second)]})
    (tmp_path / "away").rename(first)
    assert await site.call("DELETE", f"/admin/api/files/{ID}", {}) == {"removed": ID}
    assert not (first / ID).exists()
    await site.call("PATCH", "/admin/api/settings", {"downloads_folder": str(first), "model_dirs": []})
    rows = (await site.call("GET", "/admin/api/settings"))["settings"]
    assert next(row["value"] for row in rows if row["name"] == "model_dirs") == [str(second)], "no other one stays"


@pytest.mark.parametrize("name", ["../secret", "%2e%2e/secret", "/etc", "a/../../secret", ".partial/x", ".", "~"])
async def test_nothing_outside_the_downloads_folder_can_be_deleted(site: DownloadSite, name: str) -> None:
    secret = site.home / "secret"
    secret.mkdir()
    (secret / "config.json").write_text("{}")
    await site.call("DELETE", f"/admin/api/files/{name}", {}, 404)
    assert (secret / "config.json").is_file()


async def test_the_token_is_written_and_never_read(site: DownloadSite) -> None:
    assert (await site.call("GET", "/admin/api/hub/token"))["origin"] == "none"
    answer = await site.call("PUT", "/admin/api/hub/token", {"token": " hf_abcdefgh1234 "})
    assert answer == {"origin": "paceline"}
    file = site.home / "hub_token"
    assert (file.read_text().split(), stat.S_IMODE(file.stat().st_mode)) == (
        ["hf_abcdefgh1234", site.hub.address],
        0o600,
    )
    refused = await site.call("PUT", "/admin/api/hub/token", {"token": "hf_a b<script>"}, 400)
    assert "script" not in str(refused)
    site.hub.tokens.add("hf_abcdefgh1234")
    await site.call("GET", "/admin/api/hub/search?q=tiny")
    assert site.hub.requests[-1].authorization == "Bearer hf_abcdefgh1234"
    for path in ("/admin/api/hub/token", "/admin/api/downloads", "/admin/api/settings"):
        assert "hf_abcdefgh1234" not in (await site.client.get(path)).text
    assert await site.call("PUT", "/admin/api/hub/token", {"token": ""}) == {"origin": "none"}
    assert not file.exists()


async def test_a_token_is_told_to_the_hub_that_it_is_for_and_to_no_other(
    site: DownloadSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = site.hub.address
    monkeypatch.setenv("HF_TOKEN", "hf_of_other_tools")
    site.downloads.token.write("hf_of_the_hub", "")
    assert (site.downloads.token.read(""), site.downloads.token.read(stranger)) == ("hf_of_the_hub", "")
    assert (await site.call("GET", "/admin/api/hub/token"))["origin"] == "none"
    await site.call("GET", "/admin/api/hub/search?q=tiny")
    await site.call("POST", "/admin/api/downloads", {"repository": ID}, 202)
    await site.until("done")
    assert {request.authorization for request in site.hub.requests} == {""}
    site.downloads.token.write("", "")
    assert (site.downloads.token.read(""), site.downloads.token.origin("")) == ("hf_of_other_tools", "hugging_face")
    (site.home / "hub_token").write_text("hf_as_once_written")
    assert (site.downloads.token.read(""), site.downloads.token.read(stranger)) == ("hf_as_once_written", "")


async def test_recommended_pairs_fit_the_memory_of_this_computer(site: DownloadSite) -> None:
    answer = await site.call("GET", "/admin/api/hub/recommended")
    assert answer["memory_ceiling_bytes"] == 16_000_000_000
    drafters = [(pair, drafter) for pair in answer["pairs"] for drafter in pair["drafters"]]
    assert all(pair["main_bytes"] + drafter["size_bytes"] < 16_000_000_000 for pair, drafter in drafters)
    assert not any(pair["main_is_here"] or drafter["is_here"] for pair, drafter in drafters)
    assert all(pair["tokens_per_second"] > 0 and pair["strength"] for pair in answer["pairs"])


async def test_the_page_renders_and_takes_a_search_along(site: DownloadSite) -> None:
    page = await site.client.get("/admin/downloads", params={"q": "</script><b>x"})
    assert page.status_code == 200
    assert re.search(r"downloads\.js", page.text)
    assert "<b>x" not in page.text
