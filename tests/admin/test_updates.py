"""A newer version is looked for where somebody switched that on, at the index of this computer, and nowhere else."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from app import __version__
from app.admin.updates import JSON_PAGE, KEPT, IndexFile, Updates, newest, package_index
from app.settings import Settings
from tests.admin.test_frame import OWN
from tests.api.fakes import make_site

pytestmark = pytest.mark.anyio

DAY = 86_400.0
FILES: tuple[dict[str, Any], ...] = (
    {"filename": "paceline-0.9.0-py3-none-any.whl", "yanked": False},
    {"filename": "paceline-0.10.0.tar.gz", "yanked": False, "requires-python": ">=3.11"},
    {"filename": "paceline-0.11.0rc1.tar.gz", "yanked": False},
    {"filename": "paceline-0.12.0.tar.gz", "yanked": "it loses words"},
    {"filename": "paceline-0.13.0.tar.gz", "yanked": False, "requires-python": ">=3.99"},
    {"filename": "paceline-latest.zip", "yanked": False},
)


class StandInIndex(ThreadingHTTPServer):
    """A package index of this computer. `asked` are the requests that it got: path and headers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), IndexHandler)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.status = 200
        self.content = json.dumps({"meta": {"api-version": "1.1"}, "name": "paceline", "files": FILES}).encode()
        self.was_asked = threading.Semaphore(0)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/packages/"


class IndexHandler(BaseHTTPRequestHandler):
    server: StandInIndex

    def do_GET(self) -> None:
        self.server.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        self.send_response(self.server.status)
        self.send_header("content-type", JSON_PAGE)
        self.end_headers()
        self.wfile.write(self.server.content)
        self.server.was_asked.release()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def stand_in_index() -> Iterator[StandInIndex]:
    with StandInIndex() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def index() -> Iterator[StandInIndex]:
    with stand_in_index() as server:
        yield server


class Here:
    """A home whose settings change, the updates of it, and the time."""

    def __init__(self, home: Path, index: Callable[[], str], *, is_on: bool = True) -> None:
        self.settings = Settings(home=home, check_updates=is_on)
        self.now = 1_000_000.0
        self.updates = Updates(lambda: self.settings, index=index, clock=lambda: self.now)

    def switch(self, *, on: bool) -> None:
        self.settings = self.settings.with_values({"check_updates": on})
        self.updates.on_settings_changed()

    async def until(self, outcome: str) -> dict[str, Any]:
        """Look until it is so."""
        async with asyncio.timeout(10):
            while self.updates.view()["outcome"] != outcome:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)
        return self.updates.view()

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.updates.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_the_newest_release_is_neither_withdrawn_nor_a_candidate_nor_for_another_python() -> None:
    files = [IndexFile(each["filename"], each["yanked"], each.get("requires-python")) for each in FILES]
    assert newest(files, "3.11.4") == "0.10.0", "as versions, not as texts"
    assert newest(files, "3.99.0") == "0.13.0"
    assert newest([], "3.11.4") == ""


async def test_the_index_is_asked_by_the_name_and_told_nothing_but_the_version(
    tmp_path: Path, index: StandInIndex
) -> None:
    async with Here(tmp_path, lambda: index.address) as here:
        told = await here.until("newer")
    assert told["newer"] == here.updates.newer == "0.10.0"
    assert told["command"] == here.updates.command
    ((path, headers),) = index.asked
    assert path == "/packages/paceline/"
    assert headers.pop("user-agent") == f"paceline/{__version__}"
    assert set(headers) <= {"host", "accept", "accept-encoding", "connection"}


async def test_nobody_is_asked_until_it_is_switched_on_and_then_at_once(tmp_path: Path, index: StandInIndex) -> None:
    async with Here(tmp_path, lambda: index.address, is_on=False) as here:
        here.switch(on=True)
        await here.until("newer")
        assert len(index.asked) == 1
        here.switch(on=False)
        assert here.updates.view() == {"newer": "", "command": here.updates.command, "outcome": ""}
        here.switch(on=True)
        await asyncio.to_thread(index.was_asked.acquire, timeout=10)
        await asyncio.to_thread(index.was_asked.acquire, timeout=10)
        assert len(index.asked) == 2


async def test_a_restart_within_a_day_asks_nobody_and_knows_the_answer(tmp_path: Path, index: StandInIndex) -> None:
    async with Here(tmp_path, lambda: index.address) as here:
        await here.until("newer")
    async with Here(tmp_path, lambda: index.address) as again:
        assert (await again.until("newer"))["newer"] == "0.10.0"
        assert len(index.asked) == 1
    later = Here(tmp_path, lambda: index.address)
    later.now += DAY
    async with later:
        for _ in range(2):
            assert await asyncio.to_thread(index.was_asked.acquire, timeout=10)
    assert len(index.asked) == 2


@pytest.mark.parametrize(
    ("status", "content", "outcome"),
    [(503, b"{}", "unreachable"), (200, b"<html>Sign in to the hotel", "unreachable"), (404, b"", "unlisted")],
)
async def test_an_index_that_does_not_tell_is_one_quiet_line_and_asked_later(
    tmp_path: Path, index: StandInIndex, caplog: pytest.LogCaptureFixture, status: int, content: bytes, outcome: str
) -> None:
    caplog.set_level("INFO", "paceline.updates")
    index.status, index.content = status, content
    async with Here(tmp_path, lambda: index.address) as here:
        assert (await here.until(outcome))["newer"] == ""
        assert not here.task.done()
    assert len(index.asked) == 1
    (record,) = caplog.records
    assert (record.levelname, "again in" in record.message) == ("INFO", True)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/", "http://[", "http://\x7f/"])
async def test_an_index_that_cannot_be_reached_ends_nothing(tmp_path: Path, address: str) -> None:
    async with Here(tmp_path, lambda: address) as here:
        await here.until("unreachable")
        assert not here.task.done()


async def test_without_an_index_nobody_is_asked_and_that_is_told(tmp_path: Path) -> None:
    async with Here(tmp_path, lambda: "") as here:
        assert (await here.until("no_index"))["newer"] == ""


async def test_a_damaged_note_of_the_last_time_is_as_none(tmp_path: Path, index: StandInIndex) -> None:
    (tmp_path / KEPT).write_text('{"latest": "very new", "checked_at": 1e300}')
    async with Here(tmp_path, lambda: index.address) as here:
        assert (await here.until("newer"))["newer"] == "0.10.0"


async def test_requests_go_by_the_proxy_of_the_environment(
    tmp_path: Path, index: StandInIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{index.server_address[1]}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{index.server_address[1]}")
    async with Here(tmp_path, lambda: "http://index.example/packages") as here:
        await here.until("newer")
    assert index.asked[0][0] == "http://index.example/packages/paceline/"


def test_the_index_is_the_one_of_the_environment_or_of_pip(tmp_path: Path) -> None:
    nobody = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        assert package_index({**nobody, name: "https://packages.example/all"}) == "https://packages.example/all"
    assert package_index({**nobody, "PIP_INDEX_URL": "file:///srv/packages"}) == ""


def test_pip_tells_the_index_that_its_configuration_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = tmp_path / "pip.conf"
    configuration.write_text("[global]\nindex" + "-url = https://packages.example/" + "long-" * 40 + "/all\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    assert package_index(os.environ) == "https://packages.example/" + "long-" * 40 + "/all"


async def test_the_state_tells_programs_of_a_newer_version_and_the_command(tmp_path: Path) -> None:
    site = make_site(api_key="k")
    told = (await site.client.get("/admin/api/state", headers=OWN)).json()
    updates = site.app.state.admin.updates
    assert (told["newer"], told["update_command"]) == ("", updates.command)
    assert "install" in updates.command or "upgrade" in updates.command
