"""Safe access to files that Paceline wrote: found by exact name patterns, so that other files are never touched.

Below the given folder no link is followed, and only regular files are opened.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import plistlib
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

ANY = ".+"
"""Pattern of any name."""
MAX_FILE_BYTES = 1 << 20
"""Maximum number of bytes read from a small file."""
RETRY_SECONDS = 0.05
"""Interval between two attempts to lock a file, in seconds."""
NO_BACKUP = b"com.apple.metadata:com_apple_backup_excludeItem"
"""Extended attribute that excludes a folder from Time Machine's backups."""
Value = TypeVar("Value")


def own_files(root: Path, *names: str) -> Iterator[Path]:
    """Yield the regular files below `root` whose names match these patterns, one pattern for each level."""
    return (Path(entry) for entry in _matching(root, names) if entry.is_file(follow_symlinks=False))


def own_folders(root: Path, *names: str) -> Iterator[Path]:
    """Yield the folders below `root` whose names match these patterns, one pattern for each level."""
    return (Path(entry) for entry in _matching(root, names) if entry.is_dir(follow_symlinks=False))


def _matching(root: str | Path, names: tuple[str, ...]) -> Iterator["os.DirEntry[str]"]:
    """Yield matching entries, links included, in order of names; none for a folder that is missing or unreadable."""
    try:
        with os.scandir(root) as entries:
            matches = sorted(
                (entry for entry in entries if re.fullmatch(names[0], entry.name)), key=lambda entry: entry.name
            )
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for entry in matches:
        if len(names) == 1:
            yield entry
        elif entry.is_dir(follow_symlinks=False):
            yield from _matching(entry.path, names[1:])


def open_regular_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file, not through a link and without blocking; return its descriptor. Raises `OSError`."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    os.set_blocking(descriptor, True)  # a child may inherit the descriptor
    return descriptor


def lock_file(descriptor: int, wait_seconds: float) -> bool:
    """Lock an open file until it is closed; False if it stays locked for `wait_seconds`. Raises `OSError`."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(RETRY_SECONDS)
        else:
            return True


def read_regular_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a file, at most its first `max_bytes`. Raises `OSError`."""
    with os.fdopen(open_regular_file(path), "rb") as file:
        return file.read(max_bytes)


def read_json_as(path: Path, kind: type[Value], max_bytes: int = MAX_FILE_BYTES) -> Value | None:
    """Decode a JSON file as `kind`; None if it is missing or invalid."""
    try:
        return msgspec.json.decode(read_regular_file(path, max_bytes), type=kind)
    except (OSError, ValueError, RecursionError):
        return None


def write_privately(path: Path, content: bytes) -> None:
    """Write a temporary file, sync it and rename it to `path`; only the owner may read it. Raises `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            flush_to_disk(file.fileno())
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Make a folder unless it exists. Raises `OSError`, also for a link: its target is not ours."""
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link", str(folder))


def make_cache_folder(folder: Path, mode: int = 0o700, *, system: str = sys.platform, library: Any = None) -> None:
    """Make a folder as `make_folder` does, and exclude it from Time Machine: its files can be made or fetched again."""
    make_folder(folder, mode)
    if system == "darwin":
        value = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
        # the result is ignored: not every file system has extended attributes
        (library or ctypes.CDLL(None)).setxattr(os.fsencode(folder), NO_BACKUP, value, len(value), 0, 0)


def sync(path: Path) -> None:
    """Write a file or a folder's entries through to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)


def flush_to_disk(descriptor: int) -> None:
    """Write a file through to the medium; macOS's `fsync` leaves it in the drive's cache. Raises `OSError`."""
    os.fsync(descriptor)
    if (full_sync := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with contextlib.suppress(OSError):  # not on every file system
            fcntl.fcntl(descriptor, full_sync)


def nearest_folder(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
