"""What the worker's two threads tell each other: mail goes to the MLX thread, deliveries come back. Frozen values."""

from dataclasses import dataclass

from app.core.errors import PacelineError
from app.core.messages import Cancel, LoadModel, ModelSpecification, UnloadModel
from app.core.request import Request
from app.core.step import TokenEvent


@dataclass(frozen=True, slots=True)
class Submission:
    """All choices of one Generate: queued together or refused together."""

    id: str
    model: ModelSpecification
    requests: tuple[Request, ...]
    to_context_end: bool = False
    """The client gave no `max_tokens`: the loop sets it once it knows the engine's context."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """End these choices; unknown and ended ones are fine."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Halt:
    """Leave the loop: everything that is to be said has been said."""


Mail = Submission | Withdrawal | LoadModel | UnloadModel | Cancel | Halt


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
class Admitted:
    """One choice got its row; `cached_tokens` of its prompt were there already."""

    request_id: str
    cached_tokens: int
    at: float


@dataclass(frozen=True, slots=True)
class Told:
    """What one step, or one cancel, told."""

    events: tuple[TokenEvent, ...]
    at: float
    step_seconds: float = 0.0


Delivery = Queued | Refused | Admitted | Told


def choice_id(request_id: str, index: int) -> str:
    """The id of one choice, as scheduler and engine see it."""
    return f"{request_id}#{index}"


def choice_of(choice: str) -> tuple[str, int]:
    """Request id and index of a choice id."""
    request_id, _, index = choice.rpartition("#")
    return request_id, int(index)
