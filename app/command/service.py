"""`start`, `stop`, `restart`, `status` and `logs`: the background server of a home, which outlives the shell.

A home has at most one server. A start takes `start.lock`, so concurrent starts create only one server. The lock of
`app/machine/server_file.py` shows whether the server runs, and its process id. A new server inherits `start.lock` as
standard input and keeps it until it has the other lock. So a start after an interrupted one does not create a second
server.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from app.command import autostart
from app.command.server import Server, running_server
from app.core.errors import CommandError
from app.machine.own_files import open_regular_file, read_regular_file
from app.machine.server_file import (
    LOG,
    LOG_FOLDER,
    START_LOCK,
    START_LOG,
    RunningServer,
    is_served,
    lock_holder,
    read_server,
)
from app.settings import Settings

POLL_SECONDS = 0.05
ANSWER_SECONDS = 3.0
"""Timeout for a server's answer, in seconds: a server that hangs must not block a command."""
HANG_SECONDS = 30.0
"""Longest time without an answer before a command gives up on a server, in seconds."""
SYSTEM_SECONDS = 20.0
"""Time that launchd or systemd gets to start the server, in seconds: both wait ten seconds between two attempts."""
SYSTEM_POLL_SECONDS = 1.0
"""Interval between status queries to launchd or systemd, in seconds."""
OPEN_SECONDS = 5.0
"""Timeout for opening a browser, in seconds: with some browsers, the call returns only when the browser is closed."""
KILL_SECONDS = 10.0
"""Time between a forced stop and SIGKILL, in seconds."""
BLOCK_BYTES = 1 << 16
NEW_LOG_FLAGS = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

ENTRY = "/admin/api/entry"
OPTIONS_OF_AGENT = "give options to `paceline service install`, or remove it by `paceline service uninstall`"

ShowProgress = Callable[[str], None]
"""Callback that shows one line of progress."""


def option_arguments(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options of `serve` as command-line arguments, with absolute folders."""
    arguments: list[str] = []
    for name, value in options.items():
        for entry in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            text = str(entry.expanduser().absolute() if isinstance(entry, Path) else entry)
            arguments.append(f"--{name.replace('_', '-')}={text}")
    return tuple(arguments)


# --- start ------------------------------------------------------------------------------------------------------


def start(settings: Settings, arguments: Sequence[str], show_progress: ShowProgress) -> tuple[RunningServer, bool]:
    """Start the home's server if none runs; return it, and whether this call started it. Raises `CommandError`."""
    show_progress("Looking for a server")
    with _start_lock(settings.home) as lock:
        server = _find_running(settings, show_progress)
        if server is not None:
            return server, False
        agent = autostart.installed_agent(settings)
        if agent is not None and arguments:
            raise CommandError(f"the system starts this server, at login too: {OPTIONS_OF_AGENT}")
        with _start_log(settings.home) as log:
            if agent is not None:
                agent.start()
                return _wait_until_ready(settings, show_progress, _system_failure(agent)), True
            child = subprocess.Popen(  # noqa: S603 - our own program
                [*autostart.program(), "serve", *arguments],
                stdin=lock,
                stdout=subprocess.DEVNULL,  # its greeting may contain the set-up code
                stderr=log,
                start_new_session=True,
            )
            return _wait_until_ready(settings, show_progress, lambda: _exit_reason(child, settings.home)), True


def _find_running(settings: Settings, show_progress: ShowProgress) -> RunningServer | None:
    """Return the running server of the home; None if there is none, or once it has ended.

    Raises `CommandError` if it hangs.
    """
    deadline = time.monotonic() + HANG_SECONDS
    while is_served(settings.home):
        server, answer = read_server(settings.home), _server_status(settings)
        if server is not None and answer and not answer.get("draining"):
            return server
        if answer:
            show_progress("Waiting for the previous server to stop")
            deadline = time.monotonic() + HANG_SECONDS
        elif time.monotonic() > deadline:
            pid = lock_holder(settings.home)
            raise CommandError(f"process {pid} of Paceline does not answer: `paceline stop --force` ends it")
        time.sleep(POLL_SECONDS)
    return None


@contextlib.contextmanager
def _start_lock(home: Path) -> Iterator[int]:
    """Hold the start lock of this home until the block ends and no child process has the descriptor open."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_regular_file(home / START_LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise CommandError(f"{home} cannot be used ({error.strerror}): set PACELINE_HOME to another folder") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            advice = (
                f"set PACELINE_HOME to a folder on a disk of this computer, or use `paceline serve` ({error.strerror})"
            )
            raise CommandError(f"the file system of {home} does not support file locks: {advice}") from None
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _start_log(home: Path) -> Iterator[BinaryIO]:
    """Open the log that receives the server's output until the server writes its own log; each start truncates it."""
    folder = home / LOG_FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = open_regular_file(folder / START_LOG, NEW_LOG_FLAGS)
    except OSError as error:
        advice = "free some space, or check who owns it"
        raise CommandError(f"{folder} cannot be written ({error.strerror}): {advice}") from None
    with os.fdopen(descriptor, "rb+") as log:
        yield log


def _wait_until_ready(
    settings: Settings, show_progress: ShowProgress, failure_reason: Callable[[], str]
) -> RunningServer:
    show_progress("Starting")
    with _on_interrupt("Paceline is still starting: `paceline status` shows when it runs"):
        while True:
            server = read_server(settings.home)
            if server is not None and _server_status(settings):
                return server
            reason = failure_reason()
            if reason and not is_served(settings.home):
                raise CommandError(reason)
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _on_interrupt(message: str) -> Iterator[None]:
    """Turn Ctrl-C into a `CommandError` with this message, since the operation continues in the background."""
    try:
        yield
    except KeyboardInterrupt:
        raise CommandError(message) from None


def _server_status(settings: Settings) -> dict[str, Any]:
    """Return the status of the home's server; empty if it does not answer within `ANSWER_SECONDS`."""
    server = running_server(settings)
    try:
        return {} if server is None else server.call("GET", "/api/status", seconds=ANSWER_SECONDS)
    except CommandError:
        return {}


def _exit_reason(child: "subprocess.Popen[bytes]", home: Path) -> str:
    """Return the reason why the child process exited, from its last line of output; empty while it runs."""
    return "" if child.poll() is None else _last_log_line(home) or "the server ended at once: look at `paceline logs`"


def _system_failure(agent: autostart.Agent) -> Callable[[], str]:
    """Return a function that reports why the system could not start the server; empty while it may still start."""
    deadline = time.monotonic() + SYSTEM_SECONDS
    next_poll = 0.0

    def failure_reason() -> str:
        nonlocal next_poll
        if time.monotonic() < next_poll:
            return ""
        next_poll = time.monotonic() + SYSTEM_POLL_SECONDS
        reason = agent.failure_reason()
        if not reason and time.monotonic() < deadline:
            return ""
        return _last_log_line(agent.log.parent.parent) or reason or f"the system did not start it: see {agent.log}"

    return failure_reason


def _last_log_line(home: Path) -> str:
    try:
        content = read_regular_file(home / LOG_FOLDER / START_LOG)
        lines = content.decode("utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("paceline: ") if lines else ""


# --- stop -------------------------------------------------------------------------------------------------------


def stop(settings: Settings, show_progress: ShowProgress, *, force: bool = False) -> RunningServer | None:
    """Stop the home's server after its requests finish, or immediately with `force`. Return it, or None if none ran."""
    if not is_served(settings.home):
        return None
    show_progress("Stopping")
    server = _server_to_stop(settings.home, force=force)
    if server is None:
        return None
    _signal(server, signal.SIGTERM)
    if force:
        _signal(server, signal.SIGTERM)  # after a second signal, the server does not wait for requests
    deadline = time.monotonic() + KILL_SECONDS if force else float("inf")
    with _on_interrupt("Paceline is still stopping: `paceline stop --force` ends it immediately"):
        while is_served(settings.home) and lock_holder(settings.home) in (0, server.pid):  # ignores a successor
            if time.monotonic() > deadline:
                _kill(server, autostart.installed_agent(settings))
            count = int(_server_status(settings).get("open_requests", 0))
            show_progress(f"Waiting for {count} request{'s' * (count != 1)} to finish" if count else "Stopping")
            time.sleep(POLL_SECONDS)
    return server


def _server_to_stop(home: Path, *, force: bool) -> RunningServer | None:
    """Return the server to stop, once it has started; None once it has ended. Raises `CommandError` if it hangs."""
    deadline = time.monotonic() + HANG_SECONDS
    while is_served(home):
        server = read_server(home)
        if server is None and force:
            server = RunningServer("", 0, "", pid=lock_holder(home))
        if server is not None and server.pid:
            return server
        if time.monotonic() > deadline:
            raise CommandError(f"process {lock_holder(home)} neither starts nor ends: `paceline stop --force` ends it")
        time.sleep(POLL_SECONDS)
    return None


def _kill(server: RunningServer, agent: autostart.Agent | None) -> None:
    """Kill the server and stop its agent, or the system would take the kill for a crash and restart the server."""
    _signal(server, signal.SIGKILL)
    if agent is not None:
        agent.end()


def _signal(server: RunningServer, number: signal.Signals) -> None:
    try:
        os.kill(server.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise CommandError(f"process {server.pid} belongs to another user: stop Paceline as that user") from None


def restart(settings: Settings, arguments: Sequence[str], show_progress: ShowProgress) -> RunningServer:
    """Stop the server and start it with these arguments, or by default with its previous ones."""
    is_own = autostart.installed_agent(settings) is None
    if arguments and not is_own:
        raise CommandError(f"the system starts this server, at login too: {OPTIONS_OF_AGENT}")
    before = stop(settings, show_progress)
    return start(settings, arguments or (before.words if before is not None and is_own else ()), show_progress)[0]


# --- start at login ---------------------------------------------------------------------------------------------


def install(
    settings: Settings, arguments: Sequence[str], show_progress: ShowProgress
) -> tuple[RunningServer, autostart.Agent]:
    """Have the system start the server now, at login, and after a crash. Raises `CommandError`."""
    content = autostart.agent_file_content(settings, arguments)
    ended = stop(settings, show_progress)
    try:
        with _start_lock(settings.home), _start_log(settings.home):
            agent = autostart.install(settings, content)
    except CommandError:
        if ended is not None:
            start(settings, ended.words, show_progress)
        raise
    with _start_lock(settings.home):
        return _wait_until_ready(settings, show_progress, _system_failure(agent)), agent


# --- status -----------------------------------------------------------------------------------------------------


def status(settings: Settings) -> dict[str, Any]:
    """Return the state of this home's server: the JSON of `paceline status`."""
    server = read_server(settings.home)
    agent = autostart.installed_agent(settings)
    report: dict[str, Any] = {"running": server is not None, "home": str(settings.home), "login": agent is not None}
    if server is None:
        return {**report, "starting": is_served(settings.home)}
    place = {"address": server.address, "pid": server.pid, "version": server.version, "words": list(server.words)}
    return {**report, **place, "started_at": server.started_at, **_live_status(settings)}


def _live_status(settings: Settings) -> dict[str, Any]:
    answer = _server_status(settings)
    models = [str(model.get("id")) for model in answer.get("models", [])]
    return {"answers": bool(answer), "draining": bool(answer.get("draining")), "models": models}


def status_lines(report: Mapping[str, Any]) -> list[str]:
    """Format the status for a person."""
    login = f"Starts at login: {'yes' if report['login'] else 'no (`paceline service install`)'}"
    if not report["running"]:
        state = "Paceline is starting." if report["starting"] else "Paceline is not running: try `paceline start`."
        return [state, f"State folder: {report['home']}", login]
    since = datetime.fromtimestamp(report["started_at"]).astimezone()
    memory = f"In memory: {', '.join(report['models']) or 'no model'}"
    return [
        f"Paceline {report['version']} runs at {report['address']} (process {report['pid']})"
        f" since {since:%Y-%m-%d %H:%M}",
        memory if report["answers"] else "It does not answer: `paceline stop --force` ends it.",
        *(["It stops when its running requests have finished."] if report["draining"] else []),
        *([f"Started with: {' '.join(report['words'])}"] if report["words"] else []),
        f"State folder: {report['home']}",
        login,
    ]


# --- dashboard pages ------------------------------------------------------------------------------------------


def open_page(server: Server, to: str = "/admin/") -> None:
    """Open a page of the dashboard in the browser, signed in. Raises `CommandError` if there is no browser.

    The browser opens a local file that redirects to a one-time address, so no process list ever shows the address.
    """
    file = server.call("POST", ENTRY, {"to": to}, seconds=ANSWER_SECONDS)["file"]
    if not open_in_browser(Path(file).as_uri() if file else f"{server.address}{to}"):
        raise CommandError(f"no browser could be opened: open {server.address}{to} yourself")


def open_in_browser(address: str) -> bool:
    """Return whether a browser opened the address; True if that is not known after `OPEN_SECONDS`."""
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(webbrowser.open(address)), daemon=True)
    thread.start()
    thread.join(OPEN_SECONDS)
    return results != [False]


def setup_address(settings: Settings) -> str:
    """Return the address for choosing the first password, with a new code; empty once a password exists."""
    server = running_server(settings)
    if server is None:
        return ""
    address = str(server.call("POST", ENTRY, {}, seconds=ANSWER_SECONDS)["address"])
    return address if "/admin/setup#" in address else ""


# --- logs -------------------------------------------------------------------------------------------------------


def log_lines(home: Path, count: int, *, follow: bool = False) -> Iterator[str]:
    """Yield the last `count` lines of the log, formatted for a person; with `follow` also new lines, across rotations.

    Raises `CommandError` if there is no log.
    """
    path = home / LOG_FOLDER / LOG
    try:
        file = os.fdopen(open_regular_file(path), "rb")
    except FileNotFoundError:
        raise CommandError(f"there is no log in {path.parent} yet: `paceline start` starts the server") from None
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    lines, rest = _tail(file, count)
    yield from map(readable, lines)
    while follow:
        is_current = _is_at(path, file)  # checked first, so that a rotated file is read to its end
        block = file.read(BLOCK_BYTES)
        *lines, rest = (rest + block).split(b"\n")
        yield from map(readable, lines)
        if not block and not is_current:
            file.close()
            file, rest = os.fdopen(open_regular_file(path), "rb"), b""
        elif not block:
            time.sleep(POLL_SECONDS)
    file.close()


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Return whether `path` still names the open file; True while no file exists there."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return True


def _tail(file: BinaryIO, count: int) -> tuple[list[bytes], bytes]:
    """Return the last `count` complete lines and the incomplete line after them; leave the file position at the end."""
    end = position = file.seek(0, os.SEEK_END)
    content = b""
    while position > 0 and content.count(b"\n") <= count:
        step = min(position, BLOCK_BYTES)
        position -= step
        file.seek(position)
        content = file.read(step) + content
    file.seek(end)
    *lines, rest = content.split(b"\n")
    return (lines[-count:] if count else []), rest


def readable(line: bytes) -> str:
    """Format a log record for a person; return any other line unchanged."""
    try:
        record = msgspec.json.decode(line, type=dict[str, str])
        moment = datetime.fromisoformat(record["time"]).astimezone()
        trace = "".join(f"\n    {trace_line}" for trace_line in record.get("trace", "").splitlines())
        return f"{moment:%Y-%m-%d %H:%M:%S} {record['level']:7} {record['logger']}: {record['text']}{trace}"
    except (msgspec.DecodeError, KeyError, ValueError):
        return line.decode(errors="replace")
