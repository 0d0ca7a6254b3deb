"""A page that a command opens: the browser is signed in, and no process list, log or history shows the code."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, expect

from app.command.server import running_server
from app.command.service import open_page
from app.i18n.catalogs import read_words
from app.settings import read_settings
from tests.browser.conftest import CHROMIUM, Visitor
from tests.browser.server import Server, serving

words = read_words()
CODE = re.compile(r"/admin/enter#([\w\-]+)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("entry")) as server:
        yield server


@contextlib.contextmanager
def opened(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> Iterator[tuple[Path, str]]:
    """Open a page in a new Chromium as a command does; yield the file it got and its DevTools address, then end it."""
    script, pipe, profile = folder / "browser", folder / "told", folder / "profile"
    os.mkfifo(pipe)
    start = f"exec {CHROMIUM} --headless --no-sandbox --remote-debugging-port=0 --user-data-dir={profile}"
    script.write_text(f'#!/bin/sh\necho "$$ $1" > {pipe}\n{start} "$1" 2> {folder / "said"}\n', encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{script} %s &")  # `&`: Python does not wait for the browser
    monkeypatch.setattr("webbrowser._tryorder", None)
    running = running_server(read_settings(home=server.home))
    assert running is not None
    open_page(running, to)
    number, _, word = pipe.read_text(encoding="utf-8").strip().partition(" ")
    process = psutil.Process(int(number))
    try:
        yield Path(word.removeprefix("file://")), listens_at(folder / "said", process)
    finally:
        process.terminate()
        process.wait()


def listens_at(said: Path, process: psutil.Process) -> str:
    """Wait for the DevTools address that Chromium writes to stderr once it listens; return it."""
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        address = re.search(r"ws://\S+(?=\n)", said.read_text(encoding="utf-8") if said.exists() else "")
        if address:
            return address[0]
    raise AssertionError(said.read_text(encoding="utf-8"))


def test_a_browser_is_signed_in_once_and_no_list_of_processes_log_or_history_shows_how(
    server: Server, visitor: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser
) -> None:
    with opened(server, tmp_path, monkeypatch, "/admin/settings") as (file, devtools):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        code = CODE.search(file.read_text(encoding="utf-8"))
        assert code is not None
        lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        assert any(CHROMIUM.name in line and file.as_uri() in line for line in lines), "it shows what was opened"
        assert not [line for line in lines if code[1] in line]
        started = browser.browser_type.connect_over_cdp(devtools)
        page = started.contexts[0].pages[0]
        expect(page).to_have_url(server.url("/admin/settings"))
        expect(page.get_by_role("heading", level=1)).to_have_text(words("navigation.settings"))
        assert page.evaluate("history.length") <= 2
        page.go_back()
        assert code[1] not in page.url
        started.close()
    assert code[1] not in server.log.read_text(encoding="utf-8")
    for log in (server.home / "logs").iterdir():
        assert code[1] not in log.read_text(encoding="utf-8")

    visit = visitor(server, signed_in=False)
    visit.witness.expects(403)
    late = visit.context.new_page()
    late.goto(server.url(f"/admin/enter#{code[1]}"))
    expect(late.get_by_role("alert")).to_have_text(words("error.invalid_entry_code"))
    assert "#" not in late.url
    late.get_by_role("link", name=words("login.title")).click()
    expect(late).to_have_url(re.compile("/admin/"))


def test_what_serve_opens_by_itself_shows_no_code_to_the_list_of_processes(tmp_path: Path) -> None:
    pipe, browser = tmp_path / "told", tmp_path / "browser"
    os.mkfifo(pipe)
    browser.write_text(f'#!/bin/sh\necho "$1" > {pipe}\n', encoding="utf-8")
    browser.chmod(0o755)
    with serving(tmp_path / "state", account=False, PACELINE_OPEN="1", BROWSER=str(browser)) as fresh:
        word = pipe.read_text(encoding="utf-8").strip()  # blocks until the browser has started
        assert word.startswith("file://")
        assert "#" not in word
        page = Path(word.removeprefix("file://"))
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
        assert fresh.url("/admin/setup#") in page.read_text(encoding="utf-8")
        fresh.set_up()  # the printed code works as well
