"""What the worker's two threads tell each other: mail goes to the MLX thread, deliveries come back. Frozen values."""

from dataclasses import dataclass

from app.core.errors import PacelineError
from app.core.messages import Cancel, KeepModel, LoadModel, ModelSpecification, UnloadModel
from app.core.request import Request
from app.core.step import TokenEvent


@dataclass(frozen=True, slots=True)
class Submission:
    """All choices of one Generate: queued together or refused together."""

    id: str
    model: ModelSpecification
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """End these choices: each gets its terminal event, unless it had one. Unknown ones are fine."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Halt:
    """Leave the loop: everything that is to be said has been said."""


Mail = Submission | Withdrawal | LoadModel | KeepModel | UnloadModel | Cancel | Halt


@dataclass(frozen=True, slots=True)
class Queued:
    """All choices of a submission wait or run; times here are seconds of the worker's monotonic clock."""

    id: str
    at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A submission ended before it was queued."""

    id: str
    error: PacelineError


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step, or one cancel, told."""

    events: tuple[TokenEvent, ...]
    at: float


Delivery = Queued | Refused | StepEvents


def choice_id(request_id: str, index: int) -> str:
    """The id of one choice, as scheduler and engine see it."""
    return f"{request_id}#{index}"


def choice_of(choice: str) -> tuple[str, int]:
    """Request id and index of a choice id."""
    request_id, _, index = choice.rpartition("#")
    return request_id, int(index)
