"""Stores measurements of this machine across loads: one small file for each key."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from app.core.errors import ModelUnavailable
from app.models.safe_files import read_object, write_privately

MAX_FILE_BYTES = 1 << 20

logger = logging.getLogger("paceline.costs")


class Stored(msgspec.Struct, frozen=True):
    """Content of a file. `key` spells out what the file's name is the hash of."""

    key: list[str]


Content = TypeVar("Content", bound=Stored)


class MachineFiles:
    """Measurements in `folder` (None: not stored). `machine` names device and libraries, and begins every key.

    Called from the MLX thread. Nothing here raises: a file that is missing, broken or of another machine only means
    measuring again.
    """

    def __init__(self, folder: Path | None, machine: Sequence[str]) -> None:
        self._folder = folder
        self._machine = list(machine)

    def key(self, *parts: str) -> list[str]:
        """Return the key of what `parts` name, on this machine."""
        return [*self._machine, *parts]

    def read(self, key: list[str], kind: type[Content]) -> Content | None:
        """Return what is stored under a key; None if there is nothing to trust."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            stored = msgspec.convert(read_object(path, MAX_FILE_BYTES), kind)
        except (ModelUnavailable, msgspec.ValidationError) as error:
            logger.warning("%s is ignored and will be replaced: %s", path.name, error)
            return None
        if stored.key != key:
            logger.warning("%s is ignored and will be replaced: it does not fit", path.name)
            return None
        return stored

    def write(self, content: Stored) -> bool:
        """Store `content` under its key; return whether that worked. Readers see the old file or the new one."""
        path = self._path(content.key)
        if path is None:
            return False
        try:
            write_privately(path, msgspec.json.format(msgspec.json.encode(content), indent=1))
        except OSError as error:
            logger.warning("%s cannot be stored: %s", path.name, error.strerror)
            return False
        return True

    def _path(self, key: list[str]) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
