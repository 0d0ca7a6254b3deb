"""Opens the dashboard, in a pywebview window if possible, else in the browser; also handles a double click on the app.

The server does not belong to the window: it is started if none runs, and keeps running when the window closes.
"""

import importlib
import importlib.util
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, cast

import msgspec

from app.command.server import NoServer, Server, running_server
from app.command.service import ANSWER_SECONDS, ENTRY, open_page, setup_address, start
from app.core.errors import CommandError, PacelineError
from app.desktop.bundle import DIALOG, ICONS
from app.desktop.menubar import has_screen
from app.machine.own_files import read_json_as, write_privately
from app.settings import Settings

SIZE_FILE = "window.json"
SMALLEST, LARGEST = (360, 400), (10_000, 10_000)
MAX_SIZE_BYTES = 1000


class WindowSize(msgspec.Struct, frozen=True):
    """Last size of the window, in points."""

    width: int = 1280
    height: int = 860

    def clamped(self) -> "WindowSize":
        """Return the size, clamped to the allowed range."""
        sides = zip((self.width, self.height), SMALLEST, LARGEST, strict=True)
        return WindowSize(*(min(max(side, least), most) for side, least, most in sides))


class WindowEvent(Protocol):
    """An event of pywebview: `+=` adds a handler."""

    def __iadd__(self, handler: Callable[..., None]) -> Self: ...


class WindowEvents(Protocol):
    """The events used here."""

    resized: WindowEvent


class NativeWindow(Protocol):
    """A window of pywebview."""

    events: WindowEvents


class WebView(Protocol):
    """The part of the module `webview` that is used."""

    WebViewException: type[Exception]
    settings: dict[str, Any]

    def create_window(
        self,
        title: str,
        url: str,
        *,
        width: int,
        height: int,
        min_size: tuple[int, int],
        text_select: bool,
        zoomable: bool,
    ) -> NativeWindow | None: ...

    def start(self, *, private_mode: bool, storage_path: str, icon: str) -> None: ...


def ensure_server(settings: Settings) -> Server:
    """Return the server of this home, started if none runs. Raises `CommandError`."""
    start(settings, (), lambda _text: None)
    server = running_server(settings)
    if server is None:
        raise NoServer("the server ended before it answered: see `paceline logs`")
    return server


def open_app(
    settings: Settings,
    show_menu_bar: Callable[[Settings, Callable[[Server, str], None]], bool] | None,
    *,
    connect: Callable[[Settings], Server] = ensure_server,
    open_in_browser: Callable[[Server, str], None] = open_page,
) -> None:
    """Handle a double click: start server and menu bar, and open the dashboard if there is no account or no menu bar.

    Raises `CommandError`.
    """
    server = connect(settings)
    is_new = bool(setup_address(settings))
    if is_new or show_menu_bar is None:
        open_in_browser(server, "/admin/")
    is_shown = show_menu_bar is not None and show_menu_bar(settings, open_in_browser)
    if not (is_shown or is_new or show_menu_bar is None):  # a menu bar is running already: show something
        open_in_browser(server, "/admin/")


@contextmanager
def errors_in_dialog() -> Iterator[None]:
    """Show errors in a dialog too: a double click has no terminal."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, PacelineError)
        text = str(error) if known else f"{type(error).__name__}: {error} (`paceline app open` says where)"
        if shutil.which("osascript"):
            command = ["osascript", *(argument for line in DIALOG for argument in ("-e", line)), text]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # noqa: S603 - the text is only an argument
        raise


def web_view(environment: Mapping[str, str], platform: str = sys.platform) -> WebView | None:
    """Return pywebview, if it is installed and there is a screen; else None."""
    if not has_screen(environment, platform) or importlib.util.find_spec("webview") is None:
        return None
    return cast("WebView", importlib.import_module("webview"))


def open_window(
    settings: Settings,
    to: str,
    view: WebView | None,
    *,
    connect: Callable[[Settings], Server] = ensure_server,
    open_in_browser: Callable[[Server, str], None] = open_page,
) -> None:
    """Show a page in a window until it is closed, or in the browser. Raises `CommandError`."""
    server = connect(settings)
    if view is None or not show(server, settings.home, to, view):
        open_in_browser(server, to)


def show(server: Server, home: Path, to: str, view: WebView) -> bool:
    """Show a page in a window until it is closed; False if pywebview finds no toolkit to draw with."""
    size_file = home / SIZE_FILE
    size = read_size(size_file)
    view.settings["ALLOW_DOWNLOADS"] = True  # the chat exports conversations
    logging.getLogger("pywebview").setLevel(logging.CRITICAL)  # it logs every toolkit that it does not find
    window = view.create_window(
        "Paceline",
        address_of(server, to),
        width=size.width,
        height=size.height,
        min_size=SMALLEST,
        text_select=True,
        zoomable=True,
    )

    def resized(width: float, height: float) -> None:
        nonlocal size
        size = WindowSize(round(width), round(height)).clamped()

    if window is not None:
        window.events.resized += resized
    storage = home / "window"
    storage.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # Not private: chat turns that the server has not acknowledged must outlive the window.
        view.start(private_mode=False, storage_path=str(storage), icon=str(ICONS / "paceline.png"))
    except view.WebViewException:
        return False
    write_privately(size_file, msgspec.json.encode(size))
    return True


def address_of(server: Server, to: str) -> str:
    """Return a one-time address that also signs in; an older server has none and will ask for the password."""
    try:
        return str(server.call("POST", ENTRY, {"to": to}, seconds=ANSWER_SECONDS)["address"])
    except CommandError:
        return f"{server.address}{to}"


def read_size(path: Path) -> WindowSize:
    """Return the stored size, or the default."""
    return (read_json_as(path, WindowSize, MAX_SIZE_BYTES) or WindowSize()).clamped()
