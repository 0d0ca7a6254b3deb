"""Earlier prompts, as whoever does not load models sees them: how much is kept of each, and how it is removed.

A folder for each model, named after it with a mark behind a dash; what is inside is the worker's (`prefix_disk`).
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class KeptPrompts:
    """What is kept of one model; `used_at` is when any of it was last used (Unix seconds)."""

    model: str
    files: int
    size_bytes: int
    used_at: float


class PrefixState(NamedTuple):
    """What is kept on disk of earlier prompts, how many of their tokens were put back, by where they were (`memory` or
    `disk`), and why nothing is written for the moment."""

    disk_bytes: int = 0
    found_tokens: Mapping[str, int] = {}
    trouble: str = ""


def kept_prompts(folder: Path) -> list[KeptPrompts]:
    """By model, the one that was used last first."""
    found = []
    for each in folder.glob("*/") if folder.is_dir() else ():
        stats = [status for _, status in _files(each)]
        if stats:
            size, used_at = sum(status.st_size for status in stats), max(status.st_mtime for status in stats)
            found.append(KeptPrompts(each.name.rpartition("-")[0], len(stats), size, used_at))
    return sorted(found, key=lambda kept: -kept.used_at)


def clear_prompts(folder: Path) -> int:
    """Remove all of it; the answer is how many bytes that were. A worker that runs finds nothing there any more."""
    size = 0
    for each in folder.glob("*/") if folder.is_dir() else ():
        for path, status in _files(each):
            path.unlink(missing_ok=True)
            size += status.st_size
        with contextlib.suppress(OSError):  # not empty: somebody writes
            each.rmdir()
    return size


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.iterdir() if not folder.is_symlink() else ():
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.lstat()
