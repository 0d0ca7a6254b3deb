"""The prefix cache on disk, as seen without loading a model: how much is kept of each model, and how to remove it.

Each model has a folder, named after it with a mark behind a dash; its contents are the worker's
(`app/engine/prefix/disk.py`).
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from app.machine.own_files import ANY, own_files, own_folders

KEPT_NAME = r"(?:rows|state)-[0-9a-f]{64}\.safetensors"
"""Pattern of a kept file's name: its kind, and the hash of the text that it stands for."""
GROWING_NAME = r"(?:rows|state)-[0-9a-f]{64}\.[0-9]+\.part"
"""Pattern of the name of a file being written, which includes the id of the writing process."""


@dataclass(frozen=True, slots=True)
class KeptPrompts:
    """The files kept of one model; `used_at` is when any of them was last used (Unix seconds)."""

    model: str
    files: int
    size_bytes: int
    used_at: float


def prefix_files(folder: Path, name: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all models' files that match `name`, with their status; none below a `folder` that is a link."""
    for path in own_files(folder.parent, re.escape(folder.name), ANY, name):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.lstat()


def kept_prompts(folder: Path) -> list[KeptPrompts]:
    """Return what is kept by model, most recently used first."""
    prompts = []
    for model, files in groupby(prefix_files(folder, KEPT_NAME), lambda file: file[0].parent.name):
        stats = [status for _, status in files]
        size, used_at = sum(status.st_size for status in stats), max(status.st_mtime for status in stats)
        prompts.append(KeptPrompts(model.rpartition("-")[0], len(stats), size, used_at))
    return sorted(prompts, key=lambda kept: -kept.used_at)


def clear_prompts(folder: Path) -> int:
    """Remove all of it and return its bytes. A running worker finds nothing there any more."""
    size = 0
    for path, status in prefix_files(folder, f"{KEPT_NAME}|{GROWING_NAME}"):
        path.unlink(missing_ok=True)
        size += status.st_size
    for model_folder in own_folders(folder.parent, re.escape(folder.name), ANY):
        with contextlib.suppress(OSError):  # not empty: a worker writes there, or other files are there
            model_folder.rmdir()
    return size
