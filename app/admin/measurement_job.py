"""One measurement: what is wished, how far it is, how it ended."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from app.serving.sweep.grid import Grid
from app.serving.sweep.report import report_object
from app.serving.sweep.turns import Ask, Budget, Sweep

Phase = Literal["loading", "measuring", "paused", "restoring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be measured. `drafts` None: the best drafter of each method."""

    model_id: str
    drafts: tuple[str, ...] | None = None
    prompts: tuple[str, ...] = ()
    minutes: float = 2.0
    rounds: int = 3
    grid: Grid = "several"


@dataclass(slots=True)
class MeasurementJob:
    """The measurement under way."""

    wish: Wish
    budget: Budget
    phase: Phase = "loading"
    sweep: Sweep = field(default_factory=Sweep)
    ask: Ask | None = None
    disturbed: int = 0
    """Turns that were given up for the request of somebody else."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self) -> dict[str, Any]:
        """As JSON, with what was measured up to now."""
        ask = self.ask
        return {
            "model_id": self.wish.model_id,
            "phase": self.phase,
            "ask": ask and _ask_object(ask),
            "seconds_left": max(0, round(self.budget.remaining)),
            "minutes": self.wish.minutes,
            "disturbed": self.disturbed,
            "report": report_object(self.sweep.results(options={"disturbed": self.disturbed})),
        }


@dataclass(frozen=True, slots=True)
class MeasurementEnd:
    """How the last measurement ended; `number` is that of the kept result, 0 where nothing was kept."""

    model_id: str
    outcome: Literal["done", "stopped", "failed"]
    number: int = 0
    problem: str = ""


def _ask_object(ask: Ask) -> dict[str, Any]:
    return {
        "text": ask.text,
        "rows": ask.cell.rows,
        "method": ask.setting.method,
        "drafts": ask.setting.drafts,
        "round": ask.number + 1,
        "rounds": ask.rounds,
    }
