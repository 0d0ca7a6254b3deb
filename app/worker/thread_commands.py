"""Messages between the worker's threads: commands for the MLX thread, and the ids by which it knows choices."""

from dataclasses import dataclass

from app.core.messages import Cancel, ClearPrefixes, KeepModel, LoadModel, ModelSpecification, UnloadModel
from app.core.request import Request


@dataclass(frozen=True, slots=True)
class Submission:
    """All choices of one Generate: queued together or refused together."""

    id: str
    model: ModelSpecification
    requests: tuple[Request, ...]
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """Leave the loop: everything that is to be said has been said."""


LoopCommand = Submission | Cancel | LoadModel | KeepModel | UnloadModel | ClearPrefixes | Halt
"""A command for the MLX thread, which knows choices by their ids."""


def choice_id(request_id: str, index: int) -> str:
    """The id of one choice, as scheduler and engine see it."""
    return f"{request_id}#{index}"


def choice_of(choice: str) -> tuple[str, int]:
    """Request id and index of a choice id."""
    request_id, _, index = choice.rpartition("#")
    return request_id, int(index)
