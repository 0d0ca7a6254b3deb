"""What the worker's two threads ask of the scheduler, the engine pool and the text layer; tests pass fakes."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.core.messages import LoadedModel, ModelSpecification
from app.core.ports import EnginePort
from app.core.request import Request
from app.core.step import StepCost, StepPlan, StepResult, TokenEvent
from app.engine.pool import PoolEvent


class SchedulerPort(Protocol):
    """The pure scheduler of one loaded model; see `app.scheduler`."""

    @property
    def has_work(self) -> bool: ...

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def reading(self) -> dict[str, int]: ...

    @property
    def costs(self) -> Sequence[StepCost]: ...

    @property
    def expected(self) -> Sequence[int]: ...

    def expected_of(self, request: Request) -> int: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> list[TokenEvent]: ...

    def next_admission(self) -> Request | None: ...

    def admitted(self, request_id: str, cached_tokens: int) -> None: ...

    def plan(self) -> StepPlan | None: ...

    def commit(self, result: StepResult) -> list[TokenEvent]: ...

    def fail(self, request_id: str, message: str) -> list[TokenEvent]: ...

    def fail_running(self, message: str) -> list[TokenEvent]: ...

    def drain_released(self) -> list[tuple[str, tuple[int, ...]]]: ...


class PoolPort(Protocol):
    """The models in memory; see `app.engine.pool`."""

    @property
    def loading(self) -> bool: ...

    @property
    def next_load(self) -> str: ...

    def acquire(self, spec: ModelSpecification) -> None: ...

    def release(self, model_id: str) -> None: ...

    def engine(self, model_id: str) -> EnginePort | None: ...

    def check_row(self, model_id: str, tokens: int) -> None: ...

    def reserve(self, model_id: str, lengths: Sequence[int]) -> bool: ...

    def advance(self) -> list[PoolEvent]: ...

    def cancel_load(self, model_id: str) -> None: ...

    def unload(self, model_id: str) -> None: ...

    def pin(self, model_id: str, pinned: bool) -> None: ...  # noqa: FBT001 - as the pool has it

    def set_idle(self, model_id: str, seconds: float | None) -> None: ...

    def expire(self) -> list[PoolEvent]: ...

    def snapshot(self) -> tuple[LoadedModel, ...]: ...

    def memory(self) -> tuple[int, int, int]: ...


class TextChunkPort(Protocol):
    """Text that may be told now. `tokens_used` of the tokens fed belong to it or to text held back; the rest is cut."""

    @property
    def text(self) -> str: ...

    @property
    def tokens_used(self) -> int: ...

    @property
    def accepted_spans(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def stopped(self) -> bool: ...


class TextStreamPort(Protocol):
    """Detokenizer and stop strings of one choice."""

    def feed(self, tokens: Sequence[int], accepted: int) -> TextChunkPort: ...

    def finish(self) -> TextChunkPort: ...


class TextModelPort(Protocol):
    """Tokenizer and chat template of one model folder."""

    stop_token_ids: frozenset[int]
    vocabulary_size: int

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any] | None,
    ) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def token_text(self, token: int) -> tuple[str, bytes]: ...
