"""`paceline menubar`: the menu bar's process, which polls the server over HTTP and performs the actions chosen in it.

One thread polls, and each action has a thread; only the thread of the native event loop touches the menu. Menu bar and
server run independently of each other.
"""

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import cast

from app.command import autostart
from app.command.port import port_conflict
from app.command.server import Server, peek_settings, running_server
from app.command.service import ANSWER_SECONDS
from app.core.errors import CommandError
from app.desktop.menu import ServiceState, notifications, tray_content, tray_state
from app.desktop.tray import Tray
from app.i18n.catalogs import Catalogs, Words
from app.machine.installation import this_installation
from app.machine.own_files import open_regular_file
from app.machine.server_file import is_served
from app.settings import Settings

LOCK_NAME = "menubar.lock"
BUSY_SECONDS, IDLE_SECONDS = 1.0, 3.0
"""Polling intervals in seconds; the longer one while the server is idle or stopped."""
TITLE = "Paceline"
MENU = "/admin/api/menu"
KEYS = "/admin/api/keys"
COMMANDS = {
    "start": ("start",),
    "stop": ("stop",),
    "restart": ("restart",),
    "login": ("service", "install"),
    "logout": ("service", "uninstall"),
    "quit_all": ("stop",),
}
"""Actions that run one of our commands."""
PAGES = {"dashboard": "/admin/", "chat": "/admin/chat"}

TRAYS = {
    "darwin": ("AppKit", "app.desktop.macos", "MacTray"),
    "linux": ("PySide6", "app.desktop.linux", "LinuxTray"),
}
"""Menu bar by system: its library, which the extra `desktop` installs, and the module and class that use it."""

OpenPage = Callable[[Server, str], None]
logger = logging.getLogger("paceline.menubar")


@contextlib.contextmanager
def only_one(home: Path) -> Iterator[bool]:
    """Yield whether this is the only menu bar of a home; the lock is held until exit."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = open_regular_file(home / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


class MenuBar:
    """The menu bar of one home."""

    def __init__(
        self,
        settings: Settings,
        tray: Tray,
        words: Words,
        open_page: OpenPage,
        program: tuple[str, ...] | None = None,
    ) -> None:
        self._settings, self._tray, self._words, self._open_page = settings, tray, words, open_page
        self._program = program or autostart.program()
        self._refresh, self._ended = threading.Event(), threading.Event()
        self._service = self._trouble = ServiceState()
        self._running_command = ""
        self._key_id = 0

    def run(self) -> None:
        """Run the menu bar until the user quits it."""
        self._service = read_service_state(self._settings, self._trouble)
        self._tray.show(tray_content(self._service, self._words))
        threading.Thread(target=self._poll, daemon=True).start()
        self._tray.run(lambda action: threading.Thread(target=self._perform, args=(action,), daemon=True).start())
        self._ended.set()
        self._refresh.set()

    def _poll(self) -> None:
        while not self._ended.is_set():
            own = replace(self._trouble, running_command=self._running_command)
            service = read_service_state(self._settings, own)
            self._tray.schedule(functools.partial(self._show, service))
            self._refresh.wait(IDLE_SECONDS if tray_state(service) in {"ready", "stopped"} else BUSY_SECONDS)
            self._refresh.clear()

    def _show(self, service: ServiceState) -> None:
        for text in notifications(self._service, service, self._words):
            self._tray.notify(TITLE, text)
        self._service = service
        self._tray.show(tray_content(service, self._words))

    def _perform(self, action: str) -> None:
        """Perform an action in its own thread, because a load or a stop takes a while. Each action, `SEEN_ACTION`
        included, clears the problem of the previous one."""
        self._trouble = ServiceState()
        try:
            self._execute(*action.partition(" ")[::2])
        except CommandError as error:
            self._trouble = self._explain(error)
        except (KeyError, TypeError):
            logger.exception("%s failed", action)
            self._trouble = ServiceState(problem="the running server has another version: restart it")
        self._refresh.set()

    def _explain(self, error: CommandError) -> ServiceState:
        """Return the state that shows the error, and a free port if another program uses the server's."""
        conflict = None if is_served(self._settings.home) else port_conflict(self._settings)
        if conflict is None:
            return ServiceState(problem=str(error))
        text = "menu.port_taken" if conflict.pid else "menu.port_taken_unknown"
        return ServiceState(problem=self._words(text, **conflict._asdict()), free_port=conflict.free_port)

    def _execute(self, verb: str, model: str) -> None:
        """Perform the chosen action. Raises `CommandError`."""
        if verb == "port":
            self._run_command("start", "config", "set", "port", model)
            verb = "start"
        if verb in COMMANDS:
            self._run_server_command(verb)
        if verb in {"quit", "quit_all"}:
            self._tray.quit()
        elif verb == "copy":
            self._copy(f"{self._server().address}/v1")
        elif verb == "copy_key":
            self._copy_key(self._server())
        elif verb == "update":
            command = self._service.update_command
            self._copy(command, self._words("menu.update_copied", command=command))
        elif verb in PAGES:
            self._open_page(self._server(), PAGES[verb])
        elif verb in {"load", "pin", "unpin"}:
            pin = {} if verb == "load" else {"pin": verb == "pin"}
            self._server().call("POST", "/api/load", {"model": model, **pin})
        elif verb == "unload":
            self._server().call("POST", "/api/unload", {"model": model})

    def _copy_key(self, server: Server) -> None:
        """Copy a new, named API key; delete the previously copied key if it was never used."""
        unused = {key["id"] for key in server.call("GET", KEYS)["keys"] if key["used_at"] is None}
        if self._key_id in unused:
            server.call("DELETE", f"{KEYS}/{self._key_id}")
        name = self._words("menu.key_name", date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"))
        new_key = server.call("POST", KEYS, {"name": name, "scope": "inference"})
        self._key_id = new_key["key"]["id"]
        self._copy(new_key["text"], self._words("menu.key_copied", name=name))

    def _copy(self, text: str, notice: str = "") -> None:
        """Put `text` on the clipboard, and show `notice` as a notification, if given."""

        def put() -> None:
            self._tray.copy(text)
            if notice:
                self._tray.notify(TITLE, notice)

        self._tray.schedule(put)

    def _server(self) -> Server:
        server = running_server(self._settings)
        if server is None:
            raise CommandError(self._words("menu.stopped"))
        return server

    def _run_server_command(self, verb: str) -> None:
        was_running = is_served(self._settings.home)
        self._run_command(verb, *COMMANDS[verb])
        if verb == "logout" and was_running:  # the system also stops the server that it had started
            self._run_command("start", "start")

    def _run_command(self, verb: str, *command: str) -> None:
        """Run one of our commands for an action. Raises `CommandError` with its last line of output if it fails."""
        self._running_command = verb
        self._refresh.set()
        try:
            completed = subprocess.run(  # noqa: S603 - our own program
                [*self._program, *command], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
            )
        except OSError as error:
            message = f"{self._program[0]} cannot be run ({error.strerror}): install Paceline again"
            raise CommandError(message) from error
        finally:
            self._running_command = ""
        if completed.returncode:
            lines = (completed.stderr.strip() or completed.stdout.strip()).splitlines()
            raise CommandError(lines[-1] if lines else f"paceline {command[0]}: {completed.returncode}")


def has_screen(environment: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Return whether there is a screen to draw on."""
    return platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def has_tray() -> bool:
    """Return whether a menu bar can be drawn here."""
    library = TRAYS.get(sys.platform, ("",))[0]
    return bool(library) and importlib.util.find_spec(library) is not None and has_screen(os.environ)


def show_menu_bar(settings: Settings, open_page: OpenPage) -> bool:
    """Run the menu bar until it is quit; False if this home already has one. Raises `CommandError`."""
    if not has_tray():
        advice = f"`{this_installation().desktop}` adds it; `paceline desktop` opens a window anywhere"
        raise CommandError(f"the menu bar needs a screen and the extra desktop: {advice}")
    with only_one(settings.home) as is_only_one:
        if is_only_one:
            _, module, name = TRAYS[sys.platform]
            tray = cast("Tray", getattr(importlib.import_module(module), name)())
            catalogs = Catalogs(settings.home / "languages")
            words = catalogs.words((peek_settings(settings) or settings).language or catalogs.choose(tray.languages()))
            MenuBar(settings, tray, words, open_page).run()
        return is_only_one


def read_service_state(settings: Settings, own: ServiceState) -> ServiceState:
    """Return `own`, updated with the server's current state. A server that does not respond is starting or ending."""
    at_login = autostart.installed_agent(settings) is not None
    served = is_served(settings.home)
    service = replace(own, is_served=served, starts_at_login=at_login)
    server = running_server(settings) if served else None
    if server is None:
        return service
    try:
        answer = server.call("GET", MENU, seconds=ANSWER_SECONDS)
        return replace(
            service,
            address=server.address,
            state=answer["state"],
            pace=answer["pace"],
            models=tuple(answer["models"]),
            full_disk=answer["full_disk"],
            newer_version=answer["newer"],
            update_command=answer["update_command"],
        )
    except (CommandError, KeyError, TypeError):  # no answer, or a server of another version
        return service
