"""Events of the pool, about one model each."""

from dataclasses import dataclass

from app.core.errors import PacelineError
from app.core.messages import LoadProgress
from app.core.step import StepCost


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is ready, `seconds` after its load was requested; `costs` are the known costs of its steps."""

    model_id: str
    seconds: float
    costs: tuple[StepCost, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load failed, which ended every lease on the model: do not release them. The next `acquire` tries again."""

    model_id: str
    error: PacelineError


@dataclass(frozen=True, slots=True)
class Evicted:
    """An idle engine, or a load without leases, was closed. No lease ends with it."""

    model_id: str


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """The model has been warmed up; `costs` are the measured costs of its steps."""

    model_id: str
    costs: tuple[StepCost, ...]


PoolEvent = LoadProgress | Loaded | LoadFailed | Evicted | WarmedUp
