"""Messages to the worker's MLX thread and to its text thread, and the ids of choices."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from app.core.errors import PacelineError
from app.core.messages import Cancel, ClearPrefixes, Command, Generate, KeepModels, LoadModel, ReadPrompt, UnloadModel
from app.core.request import Request
from app.core.step import TokenEvent
from app.core.unit import UNSPECIFIED_STAY, ModelSpecification, Stay


@dataclass(frozen=True, slots=True)
class Submission:
    """All choices of one Generate: queued together or refused together."""

    id: str
    model: ModelSpecification
    requests: tuple[Request, ...]
    stay: Stay = UNSPECIFIED_STAY


@dataclass(frozen=True, slots=True)
class Halt:
    """End the loop; the text thread has sent every event."""


LoopCommand = Submission | Cancel | LoadModel | KeepModels | UnloadModel | ClearPrefixes | Halt
"""Message to the MLX thread."""


@dataclass(frozen=True, slots=True)
class Received:
    """A command from the server. Times in these messages are in seconds of the worker's monotonic clock."""

    command: Command
    at: float
    nbytes: int
    """Size of the command, in bytes."""


@dataclass(frozen=True, slots=True)
class PromptDone:
    """The prompt of `command` has been processed, or could not be."""

    command: Generate | ReadPrompt
    nbytes: int
    prompt_future: Future[Any]
    """A finished `PromptFuture` of `app.worker.texts`."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A submission is queued for its engine."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A submission was refused before it was queued."""

    request_id: str
    error: PacelineError


@dataclass(frozen=True, slots=True)
class Emitted:
    """The events of one step, or of one cancel."""

    events: Sequence[TokenEvent]
    at: float


@dataclass(frozen=True, slots=True)
class InMemory:
    """The folders of the models that are in memory now."""

    paths: frozenset[str]


TextMessage = Received | PromptDone | Queued | Refused | Emitted | InMemory
"""Message to the text thread."""


def choice_id(request_id: str, index: int) -> str:
    """Return the id of one choice, as used by scheduler and engine."""
    return f"{request_id}#{index}"


def choice_of(choice: str) -> tuple[str, int]:
    """Return the request id and the index in a choice id."""
    request_id, _, index = choice.rpartition("#")
    return request_id, int(index)
