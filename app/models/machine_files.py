"""Stores measurements of this machine, such as step costs, across loads: one small file for each key."""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from app.core.errors import ModelUnavailable
from app.core.step import StepCost
from app.core.unit import ModelSpecification
from app.machine.own_files import write_privately
from app.models.safe_files import read_object

MAX_FILE_BYTES = 1 << 20
MAX_COSTS = 4_096
FILE_VERSION = 2
"""Version of the cost measurement. Version 1 measured with six repeating tokens."""

logger = logging.getLogger("paceline.costs")


class Stored(msgspec.Struct, frozen=True):
    """Content of a file; the file's name is the hash of `key`."""

    key: list[str]


Content = TypeVar("Content", bound=Stored)


class MachineFiles:
    """Measurements in `folder` (None: not stored). `machine` names the device and libraries; every key begins with it.

    Called from the MLX thread. No method raises: if a file is missing, broken or from another machine, the caller
    measures again.
    """

    def __init__(self, folder: Path | None, machine: Sequence[str]) -> None:
        self._folder = folder
        self._machine = list(machine)

    def key(self, *parts: str) -> list[str]:
        """Return the key for `parts` on this machine."""
        return [*self._machine, *parts]

    def read(self, key: list[str], kind: type[Content]) -> Content | None:
        """Return the content stored under `key`; None if it is missing or invalid."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            stored = msgspec.convert(read_object(path, MAX_FILE_BYTES), kind)
        except (ModelUnavailable, msgspec.ValidationError) as error:
            logger.warning("%s is ignored and will be replaced: %s", path.name, error)
            return None
        if stored.key != key:
            logger.warning("%s is ignored and will be replaced: it belongs to another key", path.name)
            return None
        return stored

    def write(self, content: Stored) -> bool:
        """Store `content` under its key; return whether this succeeded. Readers see the old file or the new one."""
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


class _StoredCosts(Stored, frozen=True):
    costs: list[StepCost]
    version: int = 1


class CostFiles(MachineFiles):
    """Step costs on this machine, one file for each unit."""

    def __init__(self, folder: Path | None, machine: Sequence[str]) -> None:
        super().__init__(folder, machine)
        self._written: dict[str, tuple[StepCost, ...]] = {}

    def load(self, spec: ModelSpecification) -> tuple[StepCost, ...]:
        """Return the costs stored for this unit; empty if they are missing, invalid or of another version."""
        stored = self.read(self._key(spec), _StoredCosts)
        if stored is None:
            return ()
        if stored.version != FILE_VERSION:
            logger.info("the costs of %s are of another version and will be measured anew", spec.id)
            return ()
        if len(stored.costs) > MAX_COSTS or not all(map(_is_valid, stored.costs)):
            logger.warning("the costs of %s are ignored and will be replaced: they are invalid", spec.id)
            return ()
        self._written[str(stored.key)] = tuple(stored.costs)
        return tuple(stored.costs)

    def save(self, spec: ModelSpecification, costs: Sequence[StepCost]) -> None:
        """Store the costs unless the same costs are stored already."""
        key, costs = self._key(spec), tuple(costs)
        if not costs or self._written.get(str(key)) == costs:
            return
        rounded = [
            replace(cost, seconds=round(cost.seconds, 7), draft_seconds=round(cost.draft_seconds, 7)) for cost in costs
        ]
        if self.write(_StoredCosts(key, rounded, FILE_VERSION)):
            self._written[str(key)] = costs

    def _key(self, spec: ModelSpecification) -> list[str]:
        drafts = [text for drafter in spec.drafters for text in (drafter.method, drafter.id, drafter.path)]
        return self.key(spec.id, spec.path, *drafts)


def _is_valid(cost: StepCost) -> bool:
    times = (cost.seconds, cost.draft_seconds)
    return (
        cost.rows > 0
        and min(cost.drafts, cost.context_tokens) >= 0
        and all(math.isfinite(time) and 0 <= time < 3600 for time in times)
    )
