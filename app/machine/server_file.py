"""Allows one server per home. The server locks `PACELINE_HOME/server.lock` while it runs, and writes its address, with
a key for its owner's commands, to `server.json`.

Only the lock shows whether a server runs: the system frees it when the process ends, so a `server.json` left by a
killed server is ignored. While the lock is held, the process in `server.json` is the server. Only the owner can read
that file, and the key is accepted only from this computer.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from app.core.errors import ServerRuns
from app.core.setting_texts import local_url
from app.machine.own_files import lock_file, open_regular_file, read_json_as, read_regular_file

FILE_NAME = "server.json"
LOCK_NAME, START_LOCK = "server.lock", "start.lock"
"""Locks held by the server while it runs, and by `paceline start` until the new server holds `server.lock`."""
LOG_FOLDER, LOG, START_LOG = "logs", "paceline.log", "start.log"
"""Folder and names of a home's logs; `start.log` has a background server's output until it writes its own log."""
SERVICE_LABEL = "app.paceline.server"
"""Prefix of launchd's label for the server of a home."""
LOCK_SECONDS = 0.5
"""Time to wait for the lock, in seconds: a process that only checks the lock also holds it for a moment."""


class RunningServer(msgspec.Struct, frozen=True):
    """Content of `server.json`. `words` are the command-line options of `serve`, `started_at` is a Unix time."""

    host: str
    port: int
    key: str
    pid: int = 0
    version: str = ""
    started_at: float = 0.0
    words: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """URL of the server, without a path."""
        return local_url(self.host, self.port)


def is_served(home: Path) -> bool:
    """Return whether a server of this home runs, or is starting or ending."""
    try:
        descriptor = open_regular_file(home / LOCK_NAME)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def lock_holder(home: Path) -> int:
    """Return the id of the process that holds the lock, even before it listens; 0 if none does."""
    try:
        content = read_regular_file(home / LOCK_NAME)
        return int(content) if is_served(home) else 0
    except (OSError, ValueError):
        return 0


def read_server(home: Path) -> RunningServer | None:
    """Return the server of this home; None if no server runs, or it is not yet listening."""
    server = read_json_as(home / FILE_NAME, RunningServer)
    return server if server is not None and is_served(home) else None


@contextlib.contextmanager
def lock_home(home: Path) -> Iterator[Callable[[RunningServer], None]]:
    """Hold the lock of this home; yield a function that writes `server.json`.

    If the home cannot be written or its file system has no locks, the server runs all the same. Raises `ServerRuns`.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_regular_file(home / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    except OSError:
        yield lambda _server: None
        return
    try:
        is_ours = True
        with contextlib.suppress(OSError):  # a file system without locks
            is_ours = lock_file(descriptor, LOCK_SECONDS)
        if not is_ours:
            raise ServerRuns(_running_text(read_server(home)))
        _release_start_lock(home)
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        with contextlib.suppress(OSError):
            (home / FILE_NAME).unlink(missing_ok=True)
        yield lambda server: _write(home, server)
        with contextlib.suppress(OSError):
            (home / FILE_NAME).unlink(missing_ok=True)
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _release_start_lock(home: Path) -> None:
    """Release the lock inherited from `paceline start` as standard input."""
    with contextlib.suppress(OSError), Path(os.devnull).open("rb") as null_device:
        if os.path.samestat(os.fstat(0), (home / START_LOCK).stat()):
            os.dup2(null_device.fileno(), 0)


def _write(home: Path, server: RunningServer) -> None:
    new = home / f"{FILE_NAME}.new"
    with contextlib.suppress(OSError):
        descriptor = open_regular_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(msgspec.json.encode(server))
        new.replace(home / FILE_NAME)


def _running_text(server: RunningServer | None) -> str:
    if server is None:
        return "Paceline is starting or ending already: look with `paceline status`"
    return f"Paceline is already running: {server.address} (process {server.pid}); `paceline stop` ends it"
