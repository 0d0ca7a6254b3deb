"""One model in the pool: its reservation, its actual memory use, and its description."""

from collections.abc import Generator
from dataclasses import dataclass, field

from app.core.step import EnginePort, StepCost
from app.core.unit import UNSPECIFIED_STAY, LoadedModel, ModelSpecification, PrefixState, Stay
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.warm_up import Key
from app.models.footprint import Footprint


@dataclass(slots=True, eq=False)
class Resident:
    """A model that is loading (`steps` is set) or ready (`engine` is set)."""

    spec: ModelSpecification
    footprint: Footprint
    started: float
    last_used: float
    rows_bytes: int = 0
    """Bytes reserved for the caches of its rows."""
    steps: Generator[tuple[str, float], None, None] | None = None
    leases: int = 0
    requested_stay: Stay = UNSPECIFIED_STAY
    """Time that it stays in memory, as specified by requests since its load."""
    unit: LoadedUnit | None = None
    engine: EnginePort | None = None
    warm_up: Generator[None] | None = None
    """Warm-up in progress; None if there is none."""
    costs: dict[Key, StepCost] = field(default_factory=dict)
    """Step costs known at the load or measured by warm-ups, interrupted ones included."""
    is_warm: bool = False
    """Whether the warm-up is done, or not needed."""

    @property
    def ready_engine(self) -> EnginePort | None:
        """The engine, once the load is over."""
        return self.engine if self.steps is None else None

    @property
    def reserved_bytes(self) -> int:
        return self.footprint.fixed_bytes + max(self.footprint.cache_bytes, self.rows_bytes)

    @property
    def prefix_bytes(self) -> int:
        return self.engine.prefix_cache_bytes if self.engine else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes that the caches of its rows actually take."""
        return self.engine.cache_bytes if self.engine else 0

    @property
    def row_bytes_held(self) -> int:
        """Bytes reserved for its rows, or taken by them if that is more."""
        return max(self.rows_bytes, self.cache_bytes)

    @property
    def working_bytes(self) -> int:
        """Bytes reserved, or actually held where caches outgrew the reservation."""
        return max(self.reserved_bytes, (self.unit.weights_bytes if self.unit else 0) + self.cache_bytes)

    def close(self) -> None:
        """Abandon the load or close the engine; afterwards nothing here refers to an array."""
        self.interrupt_warm_up()
        steps, engine, self.steps, self.engine, self.unit = self.steps, self.engine, None, None, None
        if steps is not None:
            steps.close()
        if engine is not None:
            engine.close()

    def interrupt_warm_up(self) -> None:
        """End a warm-up in progress, freeing its rows for requests. The next one keeps the costs measured so far."""
        warm_up, self.warm_up = self.warm_up, None
        if warm_up is not None:
            warm_up.close()

    def describe(self, stay: Stay) -> LoadedModel:
        """Return the state of this model; `ServedModel.describe` adds its requests."""
        engine, unit = self.engine, self.unit
        return LoadedModel(
            unit=self.spec,
            state="loading" if self.ready_engine is None else "ready",
            stay=stay,
            last_used=self.last_used,
            weights_bytes=unit.weights_bytes if unit else 0,
            cache_bytes=self.cache_bytes,
            prefix_cache_bytes=self.prefix_bytes,
            prefixes=engine.prefix_state if engine else PrefixState(),
            cache_families=engine.cache_families if engine else (),
            methods=engine.limits.available if engine else (),
            unavailable=dict(engine.limits.unavailable) if engine else {},
            longest_drafts=dict(engine.limits.longest_drafts) if engine else {},
            max_context_tokens=engine.limits.max_context_tokens if engine else 0,
            leases=self.leases,
        )
