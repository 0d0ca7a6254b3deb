"""Earlier prompts, as whoever does not load models sees them: how much is kept of each, and how it is removed.

A folder for each model, named after it with a mark behind a dash; what is inside is the worker's (`prefix_disk`).
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from app.core.own_files import ANY, own_files, own_folders

KEPT_NAME = r"(?:rows|state)-[0-9a-f]{64}\.safetensors"
"""Name of a kept file, as a pattern: its kind, and the hash of the text that it stands for."""
GROWING_NAME = r"(?:rows|state)-[0-9a-f]{64}\.[0-9]+\.part"
"""Name of a file that is being written, as a pattern, with the process that writes it."""


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


def prefix_files(folder: Path, name: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files of such a name of all models, below a folder that is no link."""
    for path in own_files(folder.parent, re.escape(folder.name), ANY, name):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.lstat()


def kept_prompts(folder: Path) -> list[KeptPrompts]:
    """By model, the one that was used last first."""
    found = []
    for model, files in groupby(prefix_files(folder, KEPT_NAME), lambda each: each[0].parent.name):
        stats = [status for _, status in files]
        size, used_at = sum(status.st_size for status in stats), max(status.st_mtime for status in stats)
        found.append(KeptPrompts(model.rpartition("-")[0], len(stats), size, used_at))
    return sorted(found, key=lambda kept: -kept.used_at)


def clear_prompts(folder: Path) -> int:
    """Remove all of it; the answer is how many bytes that were. A worker that runs finds nothing there any more."""
    size = 0
    for path, status in prefix_files(folder, f"{KEPT_NAME}|{GROWING_NAME}"):
        path.unlink(missing_ok=True)
        size += status.st_size
    for each in own_folders(folder.parent, re.escape(folder.name), ANY):
        with contextlib.suppress(OSError):  # not empty: somebody writes, or keeps something of their own there
            each.rmdir()
    return size
