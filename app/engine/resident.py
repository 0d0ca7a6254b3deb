"""What the pool keeps and tells: one resident unit with its bytes, and the events of its life."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.core.errors import PacelineError
from app.core.footprint import Footprint
from app.core.messages import LoadedModel, ModelSpecification
from app.core.ports import EnginePort
from app.core.step import StepCost
from app.engine.unit import LoadedUnit


class PooledEngine(EnginePort, Protocol):
    """What the pool asks of an engine beyond stepping: its bytes, and to let go of them."""

    measured: Sequence[StepCost]

    @property
    def cache_bytes(self) -> int: ...
    @property
    def prefix_cache_bytes(self) -> int: ...
    @property
    def cache_families(self) -> tuple[str, ...]: ...
    def drop_prefix_cache(self) -> None: ...
    def bound_prefix_cache(self, limit_bytes: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """One slice of a load is done; `fraction` (0–1) counts the bytes of target and drafters together."""

    model_id: str
    phase: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model can step; `seconds` since its load was asked for."""

    model_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load ended without a model, and every lease on it with it: do not release; the next `acquire` tries again."""

    model_id: str
    error: PacelineError


@dataclass(frozen=True, slots=True)
class Evicted:
    """An idle engine is closed and gone. No lease ends with it: nobody held one."""

    model_id: str


NOT_THE_UNITS = frozenset(
    {"policy", "num_draft_tokens", "queue_limit", "draft_unavailable", "context_tokens", "longest_token_bytes"}
)
"""Of a specification: what an open engine does not depend on; whatever is not named here is the unit's."""

PoolEvent = Progress | Loaded | LoadFailed | Evicted
LoadSteps = Generator[tuple[str, float], None, LoadedUnit]


@dataclass(slots=True, eq=False)
class Resident:
    """One model that is loading (`steps` is set; its engine warms up last) or ready (`engine` is set)."""

    spec: ModelSpecification
    footprint: Footprint
    started: float
    last_used: float
    rows_bytes: int = 0
    """What the caches of its rows were promised."""
    steps: Generator[tuple[str, float], None, None] | None = None
    leases: int = 0
    unit: LoadedUnit | None = None
    engine: PooledEngine | None = None

    @property
    def ready_engine(self) -> PooledEngine | None:
        """The engine once the load is over."""
        return self.engine if self.steps is None else None

    @property
    def reserved_bytes(self) -> int:
        return self.footprint.fixed_bytes + max(self.footprint.cache_bytes, self.rows_bytes)

    @property
    def prefix_bytes(self) -> int:
        return self.engine.prefix_cache_bytes if self.engine else 0

    @property
    def cache_bytes(self) -> int:
        """What the caches of its rows really take."""
        return self.engine.cache_bytes if self.engine else 0

    @property
    def row_bytes_held(self) -> int:
        """What its rows were promised, or have."""
        return max(self.rows_bytes, self.cache_bytes)

    @property
    def working_bytes(self) -> int:
        """The reservation, or what is really there when caches outgrew it."""
        return max(self.reserved_bytes, (self.unit.weights_bytes if self.unit else 0) + self.cache_bytes)

    def close(self) -> None:
        """Abandon the load or close the engine; afterwards nothing here refers to an array."""
        steps, engine, self.steps, self.engine, self.unit = self.steps, self.engine, None, None, None
        if steps is not None:
            steps.close()
        if engine is not None:
            engine.close()

    def describe(self, *, pinned: bool, idle_seconds: float) -> LoadedModel:
        """The state of this model; running and waiting requests are the scheduler's to fill in."""
        engine, unit = self.engine, self.unit
        return LoadedModel(
            id=self.spec.id,
            state="loading" if self.ready_engine is None else "ready",
            draft_ids=tuple(draft.id for draft in self.spec.drafts),
            weights_bytes=unit.weights_bytes if unit else 0,
            cache_bytes=self.cache_bytes,
            prefix_cache_bytes=self.prefix_bytes,
            cache_families=engine.cache_families if engine else (),
            methods=engine.limits.drafters if engine else (),
            unavailable=dict(engine.limits.unavailable) if engine else {},
            longest_drafts=dict(engine.limits.longest_drafts) if engine else {},
            max_context_tokens=engine.limits.max_context_tokens if engine else 0,
            pinned=pinned,
            idle_seconds=idle_seconds,
            leases=self.leases,
        )


def same_unit(old: ModelSpecification, new: ModelSpecification) -> bool:
    """Whether an engine opened for `old` serves `new`: only what the scheduler or the server alone reads may differ."""
    return all(getattr(old, name) == getattr(new, name) for name in old.__struct_fields__ if name not in NOT_THE_UNITS)
