"""Costs that nobody measures, for engines that only pretend to step."""

from collections.abc import Generator

from app.core.step import EnginePort, StepCost
from app.core.unit import ModelSpecification
from app.engine.loading.warm_up import Key, WarmUps, WarmUpSteps


class Unmeasured(WarmUps):
    """Warm-ups of no steps, and nothing stored."""

    def __init__(self) -> None:
        super().__init__(None, ())

    def first_costs(self, engine: EnginePort, spec: ModelSpecification) -> WarmUpSteps:
        yield from ()
        return ()

    def warm_up(self, engine: EnginePort, spec: ModelSpecification, costs: dict[Key, StepCost]) -> Generator[None]:
        yield from ()
