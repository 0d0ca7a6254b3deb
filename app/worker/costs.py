"""What steps cost on this machine, kept from one load of a model to the next: one small file for each unit.

Nothing here raises: a file that is missing, broken or of another machine only means that the warm-up measures again.
"""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from app.core.errors import ModelUnavailable
from app.core.messages import ModelSpecification
from app.core.safe_files import read_object, write_privately
from app.core.step import StepCost

MAX_FILE_BYTES = 1 << 20
MAX_COSTS = 4_096

_logger = logging.getLogger("paceline.costs")


class _KeptCosts(msgspec.Struct, frozen=True):
    """The content of a file. `key` says in words what its name is the hash of."""

    key: list[str]
    costs: list[StepCost]


class CostFiles:
    """Files in `folder` (None: nothing is kept); `machine` names device and libraries. Called from the MLX thread."""

    def __init__(self, folder: Path | None, machine: Sequence[str]) -> None:
        self._folder = folder
        self._machine = list(machine)
        self._written: dict[Path, tuple[StepCost, ...]] = {}

    def recall(self, spec: ModelSpecification) -> tuple[StepCost, ...]:
        """What was kept for this unit; empty when there is nothing to trust."""
        path = self._path(spec)
        if path is None or not path.exists():
            return ()
        try:
            kept = msgspec.convert(read_object(path, MAX_FILE_BYTES), _KeptCosts)
        except (ModelUnavailable, msgspec.ValidationError) as error:
            _logger.warning("%s is ignored and will be replaced: %s", path.name, error)
            return ()
        if kept.key != self._key(spec) or len(kept.costs) > MAX_COSTS or not all(map(_is_sound, kept.costs)):
            _logger.warning("%s is ignored and will be replaced: it does not fit", path.name)
            return ()
        self._written[path] = tuple(kept.costs)
        return self._written[path]

    def keep(self, spec: ModelSpecification, costs: Sequence[StepCost]) -> None:
        """Write what is known now, unless that was written already. Readers see the old file or the new one."""
        path, costs = self._path(spec), tuple(costs)
        if path is None or not costs or self._written.get(path) == costs:
            return
        self._written[path] = costs
        content: Any = _KeptCosts(self._key(spec), [_rounded(cost) for cost in costs])
        try:
            write_privately(path, msgspec.json.format(msgspec.json.encode(content), indent=1))
        except OSError as error:
            _logger.warning("the costs of %s cannot be kept: %s", spec.id, error.strerror)

    def _key(self, spec: ModelSpecification) -> list[str]:
        drafts = [text for draft in spec.drafts for text in (draft.method, draft.id, draft.path)]
        return [*self._machine, spec.id, spec.path, *drafts]

    def _path(self, spec: ModelSpecification) -> Path | None:
        if self._folder is None:
            return None
        name = hashlib.sha256(json.dumps(self._key(spec)).encode()).hexdigest()[:32]
        return self._folder / f"{name}.json"


def _is_sound(cost: StepCost) -> bool:
    times = (cost.seconds, cost.draft_seconds)
    return cost.rows > 0 and cost.drafts >= 0 and all(math.isfinite(time) and 0 <= time < 3600 for time in times)


def _rounded(cost: StepCost) -> StepCost:
    seconds, draft_seconds = round(cost.seconds, 7), round(cost.draft_seconds, 7)
    return StepCost(cost.method, cost.rows, cost.drafts, seconds, draft_seconds)
