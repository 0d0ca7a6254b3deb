"""Warm-ups that measure no step costs, for engines that run no model."""

from collections.abc import Generator

from app.core.step import EnginePort, StepCost
from app.core.unit import ModelSpecification
from app.engine.loading.warm_up import Key, WarmUps, WarmUpSteps


class Unmeasured(WarmUps):
    """Warm-ups that run no steps and store nothing."""

    def __init__(self) -> None:
        super().__init__(None, ())

    def first_costs(self, engine: EnginePort, spec: ModelSpecification) -> WarmUpSteps:
        yield from ()
        return ()

    def warm_up(self, engine: EnginePort, spec: ModelSpecification, costs: dict[Key, StepCost]) -> Generator[None]:
        yield from ()
