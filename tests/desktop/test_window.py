"""The separate window: it enters by a one-time address and remembers its size; without it, the browser opens."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from app.command.server import Server
from app.core.errors import CommandError
from app.desktop.window import (
    SIZE_FILE,
    SMALLEST,
    WindowSize,
    errors_in_dialog,
    open_app,
    open_window,
    read_size,
    web_view,
)
from app.settings import Settings, read_settings
from tests.cli.fake_server import FakeServer

ADDRESS = "http://127.0.0.1:8710/admin/enter#one-time"


class Resizing:
    def __init__(self) -> None:
        self.heard: list[Callable[..., None]] = []

    def __iadd__(self, heard: Callable[..., None]) -> Self:
        self.heard.append(heard)
        return self


class FakeWebView:
    """A fake pywebview, whose user drags the window to a size and closes it."""

    class WebViewException(Exception):
        pass

    def __init__(self, dragged_to: tuple[float, float] | None = None, *, has_toolkit: bool = True) -> None:
        self.settings: dict[str, Any] = {}
        self.shown: list[dict[str, Any]] = []
        self.started: list[dict[str, Any]] = []
        self._dragged_to, self._has_toolkit = dragged_to, has_toolkit
        self.events = self
        self.resized = Resizing()

    def create_window(self, title: str, url: str, **rest: Any) -> Any:
        self.shown.append({"title": title, "url": url, **rest})
        return self

    def start(self, **rest: Any) -> None:
        if not self._has_toolkit:
            raise self.WebViewException("You must have either QT or GTK with Python extensions installed")
        self.started.append(rest)
        for heard in self.resized.heard if self._dragged_to else []:
            heard(*self._dragged_to)


class Opening:
    """A home whose server answers, with the pages that its browser was asked to open."""

    def __init__(self, home: Path, fake: FakeServer) -> None:
        self.settings = read_settings(home=home, port=fake.port)
        self.in_browser: list[str] = []
        fake.answers["/admin/api/entry"] = (200, {"address": ADDRESS})

    def open(self, view: Any, to: str = "/admin/") -> None:
        open_window(
            self.settings, to, view, connect=Server, open_in_browser=lambda _server, page: self.in_browser.append(page)
        )


@pytest.fixture
def opening(tmp_path: Path, fake: FakeServer) -> Opening:
    return Opening(tmp_path, fake)


def test_the_window_enters_by_a_one_time_address_of_the_page_that_was_asked_for(
    opening: Opening, fake: FakeServer
) -> None:
    view = FakeWebView()
    opening.open(view, "/admin/chat")
    assert [request[:3] for request in fake.requests] == [("POST", "/admin/api/entry", {"to": "/admin/chat"})]
    assert (view.shown[0]["title"], view.shown[0]["url"]) == ("Paceline", ADDRESS)
    assert opening.in_browser == []


def test_what_the_chat_keeps_outlives_the_window_in_the_state_folder(opening: Opening, tmp_path: Path) -> None:
    view = FakeWebView()
    opening.open(view)
    assert view.started[0]["private_mode"] is False
    assert view.started[0]["storage_path"] == str(tmp_path / "window")
    assert (tmp_path / "window").stat().st_mode & 0o777 == 0o700
    assert Path(view.started[0]["icon"]).is_file()


def test_a_window_opens_as_large_as_it_was_left(opening: Opening) -> None:
    opening.open(FakeWebView(dragged_to=(901.5, 700.0)))
    again = FakeWebView()
    opening.open(again)
    assert (again.shown[0]["width"], again.shown[0]["height"]) == (902, 700)


@pytest.mark.parametrize(
    ("remembered", "size"),
    [
        (b'{"width": 1, "height": 99999999}', WindowSize(SMALLEST[0], 10_000)),
        (b'{"width": "wide"}', WindowSize()),
        (b"\xff", WindowSize()),
        (b"x" * 10_000, WindowSize()),
    ],
)
def test_a_remembered_size_that_cannot_be_is_no_reason_not_to_open(
    tmp_path: Path, remembered: bytes, size: WindowSize
) -> None:
    (tmp_path / SIZE_FILE).write_bytes(remembered)
    assert read_size(tmp_path / SIZE_FILE) == size


def test_without_pywebview_or_without_its_toolkit_the_browser_opens(opening: Opening) -> None:
    opening.open(None)
    opening.open(FakeWebView(has_toolkit=False), "/admin/chat")
    assert opening.in_browser == ["/admin/", "/admin/chat"]


@pytest.mark.parametrize(
    ("has_account", "runs_already", "opened"),
    [(False, False, 1), (True, False, 0), (True, True, 1), (False, True, 1)],
)
def test_a_double_click_opens_the_dashboard_where_nothing_else_would_be_seen(
    served: FakeServer, settings: Settings, *, has_account: bool, runs_already: bool, opened: int
) -> None:
    address = "http://127.0.0.1/admin/" + ("enter#code" if has_account else "setup#code")
    served.answers |= {"/admin/api/entry": (200, {"address": address, "file": ""})}
    shown: list[str] = []
    open_app(
        settings,
        lambda _settings, _open: not runs_already,
        connect=Server,
        open_in_browser=lambda _server, to: shown.append(to),
    )
    assert shown == ["/admin/"] * opened


@pytest.mark.parametrize(
    ("error", "shown"), [(CommandError("port 1 is taken"), "port 1 is taken"), (OSError("denied"), "OSError: denied")]
)
def test_whatever_fails_in_a_double_click_is_shown_in_a_dialog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    dialog = tmp_path / "osascript"
    dialog.write_text(f'#!/bin/sh\nfor word; do :; done\nprintf "%s" "$word" >{tmp_path}/shown\n')
    dialog.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(type(error)), errors_in_dialog():
        raise error
    assert (tmp_path / "shown").read_text().startswith(shown)


def test_pywebview_is_used_where_it_is_installed_and_a_screen_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "webview.py").write_text("settings = {}\n")
    monkeypatch.delitem(sys.modules, "webview", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    screens = [({}, "darwin"), ({"DISPLAY": ":0"}, "linux"), ({"WAYLAND_DISPLAY": "wayland-0"}, "linux")]
    assert all(web_view(environment, platform) is not None for environment, platform in screens)
    assert web_view({}, "linux") is None
    monkeypatch.undo()
    sys.modules.pop("webview", None)
