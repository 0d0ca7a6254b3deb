"""What opens: the dashboard in a window of its own (pywebview, where it is installed and a screen is there, else the
browser), and the app by a double click.

The server is not the window's: it is started if none runs, and stays when the window closes.
"""

import importlib
import importlib.util
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, cast

import msgspec

from app.command.server import NoServer, Server, running_server
from app.command.service import ENTRY, open_page, setup_address, start
from app.core.errors import CommandError
from app.core.own_files import read_kept
from app.core.safe_files import write_privately
from app.desktop.bundle import DIALOG, ICONS
from app.desktop.menubar import has_screen
from app.settings import Settings

SIZE_FILE = "window.json"
SMALLEST, LARGEST = (360, 400), (10_000, 10_000)
MAX_SIZE_BYTES = 1000


class WindowSize(msgspec.Struct, frozen=True):
    """How large the window was last, in points."""

    width: int = 1280
    height: int = 860

    def within(self) -> "WindowSize":
        """The same, kept usable."""
        sides = zip((self.width, self.height), SMALLEST, LARGEST, strict=True)
        return WindowSize(*(min(max(each, least), most) for each, least, most in sides))


class Happening(Protocol):
    """An event of pywebview: `+=` hears it."""

    def __iadd__(self, heard: Callable[..., None]) -> Self: ...


class WindowHappenings(Protocol):
    """Those that are heard here."""

    resized: Happening


class NativeWindow(Protocol):
    """A window of pywebview."""

    events: WindowHappenings


class WebView(Protocol):
    """What is used of the module `webview`."""

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


def started_server(settings: Settings) -> Server:
    """The server of this home, started if none runs. Raises `CommandError`."""
    start(settings, (), lambda _text: None)
    server = running_server(settings)
    if server is None:
        raise NoServer("the server ended while it was asked: `paceline logs` says why")
    return server


def open_app(
    settings: Settings,
    show_menu_bar: Callable[[Settings, Callable[[Server, str], None]], bool] | None,
    *,
    connect: Callable[[Settings], Server] = started_server,
    in_browser: Callable[[Server, str], None] = open_page,
) -> None:
    """What a double click does: server and menu bar, and the dashboard while there is no account or no menu bar.

    Nobody sees a terminal: a dialog tells what fails, too. Raises `CommandError`.
    """
    try:
        server = connect(settings)
        is_new = bool(setup_address(settings))
        if is_new or show_menu_bar is None:
            in_browser(server, "/admin/")
        is_shown = show_menu_bar is not None and show_menu_bar(settings, in_browser)
        if not (is_shown or is_new or show_menu_bar is None):  # it runs already: something is to be seen
            in_browser(server, "/admin/")
    except CommandError as error:
        if shutil.which("osascript"):
            words = ["osascript", *(word for line in DIALOG for word in ("-e", line)), str(error)]
            subprocess.run(words, stdout=subprocess.DEVNULL, check=False)  # noqa: S603 - no word of it is a program
        raise


def web_view(environment: Mapping[str, str], platform: str = sys.platform) -> WebView | None:
    """pywebview, where it is installed and there is a screen to show a window on."""
    if not has_screen(environment, platform) or importlib.util.find_spec("webview") is None:
        return None
    return cast("WebView", importlib.import_module("webview"))


def open_window(
    settings: Settings,
    to: str,
    view: WebView | None,
    *,
    connect: Callable[[Settings], Server] = started_server,
    in_browser: Callable[[Server, str], None] = open_page,
) -> None:
    """The page in a window until that is closed, or in the browser. Raises `CommandError`."""
    server = connect(settings)
    if view is None or not show(server, settings.home, to, view):
        in_browser(server, to)


def show(server: Server, home: Path, to: str, view: WebView) -> bool:
    """The page in a window until that is closed; False where pywebview finds nothing to draw with."""
    size_file = home / SIZE_FILE
    size = read_size(size_file)
    view.settings["ALLOW_DOWNLOADS"] = True  # the chat exports conversations
    logging.getLogger("pywebview").setLevel(logging.CRITICAL)  # it tells of each toolkit that it does not find
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
        size = WindowSize(round(width), round(height)).within()

    if window is not None:
        window.events.resized += resized
    storage = home / "window"
    storage.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # Not private: what the chat keeps until the server has it must outlive the window.
        view.start(private_mode=False, storage_path=str(storage), icon=str(ICONS / "paceline.png"))
    except view.WebViewException:
        return False
    write_privately(size_file, msgspec.json.encode(size))
    return True


def address_of(server: Server, to: str) -> str:
    """Where the page is, signed in; a server of an earlier version knows no such address, and asks for the password."""
    try:
        return str(server.call("POST", ENTRY, {"to": to})["address"])
    except CommandError:
        return f"{server.address}{to}"


def read_size(path: Path) -> WindowSize:
    """What was remembered, or a usual size."""
    return (read_kept(path, WindowSize, MAX_SIZE_BYTES) or WindowSize()).within()
