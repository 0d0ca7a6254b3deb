"""Reports the size of the prefix cache on disk by model, and clears it, without loading a model.

Each model has a folder; the worker writes its files (`app/engine/prefix/disk.py`).
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from urllib.parse import quote, unquote

from app.machine.own_files import ANY, own_files, own_folders

PREFIX_FILE_NAME = r"(?:rows|state)-[0-9a-f]{64}\.safetensors"
"""Pattern of the name of a cache file: its kind, and a hash that identifies the cached text."""
PREFIX_PARTIAL_NAME = r"(?:rows|state)-[0-9a-f]{64}\.[0-9]+\.part"
"""Pattern of the name of a file being written, which includes the id of the writing process."""
QUOTED_LENGTH = 200
"""Maximum number of characters that a folder's name takes from the quoted id of its model."""


@dataclass(frozen=True, slots=True)
class CachedPrompts:
    """Cache files of one model; `used_at` is the Unix time of the last use of any of them."""

    model: str
    files: int
    size_bytes: int
    used_at: float


def model_folder_name(model_id: str, identity: str) -> str:
    """Return the folder name of a model's files: its id, quoted, and a hash that changes with `identity`."""
    quoted = quote(model_id, safe="", errors="replace")
    return f"{quoted[:QUOTED_LENGTH]}-{sha256(identity.encode()).hexdigest()[:16]}"


def prefix_files(folder: Path, name: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all models' files with a name that matches `name`, and their status; none if `folder` is a link."""
    for path in own_files(folder.parent, re.escape(folder.name), ANY, name):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.lstat()


def cached_prompts(folder: Path) -> list[CachedPrompts]:
    """Return the cached prompts by model, most recently used first."""
    prompts = []
    for model, files in groupby(prefix_files(folder, PREFIX_FILE_NAME), lambda file: file[0].parent.name):
        stats = [status for _, status in files]
        size, used_at = sum(status.st_size for status in stats), max(status.st_mtime for status in stats)
        prompts.append(CachedPrompts(unquote(model.rpartition("-")[0]), len(stats), size, used_at))
    return sorted(prompts, key=lambda prompts: -prompts.used_at)


def clear_cached_prompts(folder: Path) -> int:
    """Delete all cache files and return their size in bytes. A running worker then gets cache misses."""
    size = 0
    for path, status in prefix_files(folder, f"{PREFIX_FILE_NAME}|{PREFIX_PARTIAL_NAME}"):
        path.unlink(missing_ok=True)
        size += status.st_size
    for model_folder in own_folders(folder.parent, re.escape(folder.name), ANY):
        with contextlib.suppress(OSError):  # not empty: a worker writes there, or other files are there
            model_folder.rmdir()
    return size
