"""The app and the window as a user meets them: a real server is started and shown, and keeps running."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from app.desktop.bundle import LAUNCHER, NAME
from app.desktop.menu import tray_content
from app.desktop.menubar import read_service_state
from app.i18n.catalogs import read_words
from app.machine.server_file import is_served, read_server
from app.settings import read_settings
from tests.desktop.test_menu import STOPPED

SECONDS = 60
WEB_VIEW = """
import pathlib
settings, WebViewException = {}, RuntimeError
def create_window(title, url, **rest):
    pathlib.Path(SHOWN).write_text(url)
def start(**rest):
    pass
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """Environment of a new user, with a browser that logs what it opens; the server is stopped at the end."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path / "opened"}\n')
    browser.chmod(0o755)
    own = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "BROWSER": f"{browser} %s",
        "PACELINE_HOME": str(tmp_path / "state of hers"),
        "PACELINE_PORT": "0",
    }
    yield own
    paceline(own, "stop")
    assert not is_served(Path(own["PACELINE_HOME"]))


def paceline(environment: Mapping[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "app.cli", *words]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True)
    return ran.stdout


def test_a_double_click_starts_the_server_and_opens_the_dashboard(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    paceline(environment, "app", "install", "--folder", str(tmp_path / "Applications"))
    script = tmp_path / "Applications" / NAME / LAUNCHER
    finder = {name: environment[name] for name in ("PATH", "HOME", "BROWSER")}
    servers = []
    for _ in range(2):
        subprocess.run([script], cwd="/", env=finder, capture_output=True, timeout=SECONDS, check=True)
        servers.append(read_server(Path(environment["PACELINE_HOME"])))
    assert servers[0] is not None
    assert servers[0] == servers[1]
    opened = (tmp_path / "opened").read_text().splitlines()
    assert [address.partition("/open")[0] for address in opened] == [Path(environment["PACELINE_HOME"]).as_uri()] * 2


def test_the_window_starts_the_server_which_outlives_it(environment: Mapping[str, str], tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    (tmp_path / "webview.py").write_text(WEB_VIEW.replace("SHOWN", repr(str(shown))))
    paceline({**environment, "PYTHONPATH": str(tmp_path), "DISPLAY": ":0"}, "desktop", "chat")
    server = read_server(Path(environment["PACELINE_HOME"]))
    assert server is not None
    assert shown.read_text().startswith(f"{server.address}/admin/setup#")
    assert not (tmp_path / "opened").exists()


def test_the_menu_understands_what_a_real_server_says(environment: Mapping[str, str]) -> None:
    paceline(environment, "start")
    paceline(environment, "load", "demo-assistant", "--draft", "demo-draft", "--pin")
    seen = read_service_state(read_settings(home=Path(environment["PACELINE_HOME"])), STOPPED)
    shown = tray_content(seen, read_words())
    assert shown.state == "ready"
    memory, load = shown.entries[2:4]
    assert [entry.title for entry in memory.children] == ["demo-assistant"]
    assert [(entry.title, entry.action) for entry in memory.children[0].children] == [
        ("demo-draft", ""),
        ("Pin", "unpin demo-assistant"),
        ("Unload", "unload demo-assistant"),
    ]
    assert "load demo-hybrid" in [entry.action for entry in load.children]
    assert {"tokens_per_second", "acceptance"} <= set(seen.pace)
    assert {"restarts", "last_exit", "ready"} <= set(seen.worker)
