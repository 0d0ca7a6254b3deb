"""Files that Paceline itself keeps, found by the exact patterns of their names: what else lies beside them is somebody
else's. No link is followed below the folder that was named, and nothing is opened that is no regular file."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

ANY = ".+"
"""Any name, as a pattern."""
MOST_BYTES = 1 << 20
"""Bytes that are read of a small file of ours, whatever its size has become."""
Kept = TypeVar("Kept")


def own_files(root: Path, *names: str) -> Iterator[Path]:
    """Yield the regular files below `root` whose names match these patterns, one pattern for each level."""
    return (Path(entry) for entry in _matching(root, names) if entry.is_file(follow_symlinks=False))


def own_folders(root: Path, *names: str) -> Iterator[Path]:
    """Yield the folders below `root` whose names match these patterns, one pattern for each level."""
    return (Path(entry) for entry in _matching(root, names) if entry.is_dir(follow_symlinks=False))


def _matching(root: str | Path, names: tuple[str, ...]) -> Iterator["os.DirEntry[str]"]:
    """Yield what matches in the order of names, links too; what is not there, or cannot be listed, holds nothing."""
    try:
        with os.scandir(root) as entries:
            found = sorted((each for each in entries if re.fullmatch(names[0], each.name)), key=lambda each: each.name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for entry in found:
        if len(names) == 1:
            yield entry
        elif entry.is_dir(follow_symlinks=False):
            yield from _matching(entry.path, names[1:])


def open_own(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file, through no link and without waiting; the answer is its descriptor. Raises `OSError`."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    os.set_blocking(descriptor, True)  # a child may get it
    return descriptor


def read_own(path: Path, max_bytes: int = MOST_BYTES) -> bytes:
    """Read a file; one that is larger than `max_bytes` is cut there. Raises `OSError`."""
    with os.fdopen(open_own(path), "rb") as file:
        return file.read(max_bytes)


def read_kept(path: Path, kind: type[Kept], max_bytes: int = MOST_BYTES) -> Kept | None:
    """Read the JSON value that a file holds; None where nothing can be read as `kind`."""
    try:
        return msgspec.json.decode(read_own(path, max_bytes), type=kind)
    except (OSError, ValueError, RecursionError):
        return None


def make_own_folder(folder: Path, mode: int = 0o700) -> None:
    """Make a folder unless it is there. Raises `OSError`, for a link too: what it leads to is somebody else's."""
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder.name} is a link", str(folder))
