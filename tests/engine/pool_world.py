"""A fake loader and fake engines under a virtual clock, for tests of the pool."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from mlx import nn

from app.core.errors import ModelUnavailable
from app.core.messages import KeepModels
from app.core.pool_events import PoolEvent
from app.core.request import Request
from app.core.step import EngineLimits, StepPlan, StepResult
from app.core.unit import ModelSpecification, PrefixState, Stay
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.pool import EnginePool
from app.models.footprint import Footprint
from tests.unmeasured import Unmeasured

SIZES = {"a": 3, "b": 4, "c": 5, "d": 9, "huge": 11}
CEILING = 10


@dataclass
class FakeEngine:
    """An engine that only has sizes. `world` lists the open engines, which reveals leaks and double opens."""

    world: "World"
    id: str
    cache_bytes: int = 0
    prefix_cache_bytes: int = 0
    prefix_state: PrefixState = PrefixState()  # noqa: RUF009 - frozen
    cache_families: tuple[str, ...] = ("kv",)
    limits: EngineLimits = field(default_factory=lambda: EngineLimits(max_context_tokens=64, max_rows=2))
    on_progress: Callable[[], None] = lambda: None

    def fetch(self, request: Request) -> bool:
        return True

    def admit(self, request: Request) -> int:
        return 0

    def step(self, plan: StepPlan) -> StepResult:
        return StepResult()

    def release(self, request_id: str, tokens: Any) -> None:
        return None

    def drop_prefix_cache(self, retained_share: float = 0.0) -> None:
        self.prefix_cache_bytes = int(self.prefix_cache_bytes * retained_share)

    def bound_prefix_cache(self, limit_bytes: int) -> None:
        self.prefix_cache_bytes = min(self.prefix_cache_bytes, limit_bytes)

    def close(self) -> None:
        assert self.id in self.world.open
        self.world.open.remove(self.id)
        self.world.actions.append(f"close {self.id}")


class World:
    """A virtual clock, a loader and engines that log calls. `broken` maps a model to the error of its next load."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.now = 0.0
        self.loading: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.unopenable: set[str] = set()
        self.reclaimed = 0
        self.actions: list[str] = []
        """Closed engines and wired limits, in order."""
        self.row_bytes = self.position_bytes = 0

    def clock(self) -> float:
        return self.now

    def estimate(self, spec: ModelSpecification) -> int:
        return self.sizes[spec.id] + len(spec.drafters)

    def footprint(self, spec: ModelSpecification) -> Footprint:
        """Return a footprint whose rows take `row_bytes` each, plus `position_bytes` per token."""
        return Footprint(
            weights_bytes=self.estimate(spec), row_bytes=self.row_bytes, position_bytes=self.position_bytes
        )

    def load(self, spec: ModelSpecification) -> Generator[tuple[str, float], None, LoadedUnit]:
        self.loads.append(spec.id)
        self.loading.append(spec.id)
        try:
            yield "weights", 0.5
            if spec.id in self.broken:
                raise self.broken.pop(spec.id)
            yield "weights", 1.0
            return unit_of(spec, self.estimate(spec))
        finally:
            self.loading.remove(spec.id)

    def open_engine(self, unit: LoadedUnit) -> FakeEngine:
        if unit.spec.id in self.unopenable:
            raise ModelUnavailable("it does not open")
        self.open.append(unit.spec.id)
        return FakeEngine(self, unit.spec.id)

    def reclaim(self) -> None:
        self.reclaimed += 1

    def set_limit(self, size: int) -> None:
        self.actions.append(f"wire {size}")

    def pool(self, ceiling: int = CEILING, **options: Any) -> EnginePool:
        return EnginePool(
            ceiling_bytes=ceiling,
            load=self.load,
            open_engine=self.open_engine,
            estimate=self.footprint,
            clock=self.clock,
            reclaim=self.reclaim,
            **{"costs": Unmeasured(), **options},
        )


def kept(pinned: str = "", usual: float = 3600.0, **idle_seconds: float) -> KeepModels:
    """Return settings that pin the models named by the letters of `pinned`. Idle times are in seconds, by model."""
    models = {name: Stay(pinned=True) for name in pinned} | {
        name: Stay(pinned=name in pinned, idle_seconds=seconds) for name, seconds in idle_seconds.items()
    }
    return KeepModels(usual=Stay(pinned=False, idle_seconds=usual), models=models)


def unit_of(spec: ModelSpecification, size: int) -> LoadedUnit:
    return LoadedUnit(
        spec=spec,
        target=nn.Module(),
        config={},
        weights_bytes=size,
        max_context_tokens=64,
        vocabulary_size=8,
    )


def specification(model_id: str, **changes: Any) -> ModelSpecification:
    return ModelSpecification(id=model_id, path=f"/models/{model_id}", **changes)


def drain(pool: EnginePool) -> list[PoolEvent]:
    events: list[PoolEvent] = []
    while pool.loading:
        events += pool.advance()
    return events


def ready(pool: EnginePool, *ids: str) -> None:
    """Load each model and release its lease."""
    for model_id in ids:
        pool.acquire(specification(model_id))
        drain(pool)
        assert pool.engine(model_id) is not None
        pool.release(model_id)
