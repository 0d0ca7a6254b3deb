"""Messages between the worker's threads: commands for the MLX thread, and the ids of choices."""

from dataclasses import dataclass

from app.core.messages import (
    UNSAID,
    Cancel,
    ClearPrefixes,
    KeepModels,
    LoadModel,
    ModelSpecification,
    Stay,
    UnloadModel,
)
from app.core.request import Request


@dataclass(frozen=True, slots=True)
class Submission:
    """All choices of one Generate: queued together or refused together."""

    id: str
    model: ModelSpecification
    requests: tuple[Request, ...]
    stay: Stay = UNSAID


@dataclass(frozen=True, slots=True)
class Halt:
    """End the loop; every event was sent."""


LoopCommand = Submission | Cancel | LoadModel | KeepModels | UnloadModel | ClearPrefixes | Halt
"""Command for the MLX thread."""


def choice_id(request_id: str, index: int) -> str:
    """Return the id of one choice, as used by scheduler and engine."""
    return f"{request_id}#{index}"


def choice_of(choice: str) -> tuple[str, int]:
    """Return request id and index of a choice id."""
    request_id, _, index = choice.rpartition("#")
    return request_id, int(index)
