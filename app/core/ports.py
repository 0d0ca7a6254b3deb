"""What the layers ask of one another, so that each can be tested with a fake."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.core.reason import Reason
from app.core.request import Request
from app.core.step import StepCost, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a loaded engine can do, fixed for its life."""

    max_context_tokens: int
    max_rows: int
    prefill_chunk_tokens: int = 512
    drafters: tuple[str, ...] = ()
    """Methods that can run here, best first."""
    longest_drafts: Mapping[str, int] = field(default_factory=dict)
    """Method -> the most drafts that it ever proposes; others know no such limit."""
    unavailable: Mapping[str, Reason] = field(default_factory=dict)
    """Method -> the reason why it cannot run here."""


class EnginePort(Protocol):
    """One loaded model with its drafters. All calls come from the MLX thread; none blocks on anything else."""

    measured: Sequence[StepCost]
    """What steps cost when the model was warmed up, or in an earlier life on this machine."""

    @property
    def limits(self) -> EngineLimits: ...

    def admit(self, request: Request) -> int:
        """Claim a row; the answer is how many prompt tokens the prefix cache already holds (< prompt length)."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run one forward. All caches commit or none: on an exception the rows of the plan are unusable."""
        ...

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        """Free the row; `tokens` (prompt and told output) may be kept for the prefix cache. Unknown ids are fine."""
        ...

    # --- for the pool: its bytes, and to let go of them -------------------------------------------------------

    @property
    def cache_bytes(self) -> int: ...
    @property
    def prefix_cache_bytes(self) -> int: ...
    @property
    def cache_families(self) -> tuple[str, ...]: ...
    def drop_prefix_cache(self) -> None: ...
    def bound_prefix_cache(self, limit_bytes: int) -> None: ...
    def close(self) -> None: ...


Clock = Callable[[], float]
"""Seconds that only go forward."""
