"""What models would take in memory, against what there is: the worker's ceiling, told with every number it is made of.

Nothing is loaded: headers and configs are read, once for each folder as it is. Call it in a thread.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from app.core.errors import ModelUnavailable
from app.core.footprint import Footprint, main_footprint
from app.core.messages import ModelSpecification, Ready
from app.hub.catalog import CatalogModel
from app.serving.context import Context

HALF_PRECISION_SLOW = "(cpu)"
"""How the name of a device ends on which weights become float32."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of this computer as the worker told it; a ceiling of 0: no worker has told it yet."""

    ceiling_bytes: int = 0
    widen: bool = False

    @classmethod
    def of(cls, info: Ready | None) -> "Room":
        """What a worker said when it started."""
        return cls() if info is None else cls(info.memory_ceiling_bytes, info.device.endswith(HALF_PRECISION_SLOW))

    def holds(self, footprint: Footprint) -> bool:
        """Whether it fits when nothing else is loaded; what nobody knows is no obstacle."""
        return not self.ceiling_bytes or footprint.total_bytes <= self.ceiling_bytes


class Footprints:
    """Remembers what main models take, until their folder changes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._read = lru_cache(maxsize=1024)(_read)

    @property
    def room(self) -> Room:
        """As the worker that runs now told it."""
        return Room.of(self._context.worker.ready_info)

    def specification(self, main: CatalogModel) -> ModelSpecification:
        """The model alone, with the rows of the settings: what its memory is counted for."""
        return ModelSpecification(id=main.id, path=str(main.path), max_rows=self._context.settings.max_rows)

    def main(self, main: CatalogModel) -> Footprint | None:
        """Of a main model without drafters; None for a broken folder, and for a drafter."""
        if main.kind != "main" or main.problem:
            return None
        return self._read(self.specification(main), main.size_bytes, self.room.widen)

    def describe(self, footprint: Footprint | None) -> dict[str, Any] | None:
        """As JSON: every part in bytes, and whether it fits under the ceiling."""
        if footprint is None:
            return None
        return {**sizes(footprint), "fits": self.room.holds(footprint), "ceiling_bytes": self.room.ceiling_bytes}


def sizes(footprint: Footprint) -> dict[str, int]:
    """A footprint as JSON."""
    parts: dict[str, int] = msgspec.to_builtins(footprint)
    return {**parts, "total_bytes": footprint.total_bytes}


def _read(specification: ModelSpecification, size_bytes: int, widen: bool) -> Footprint | None:  # noqa: ARG001, FBT001
    try:
        return main_footprint(specification, widen=widen)
    except (ModelUnavailable, OSError):
        return None
