"""One model over the grid: settings take turns, round by round, until the grid or the time is used up.

A round asks every setting the same prompts, plain decoding first, so that ratios pair the rounds. `turns` says what to
ask next and hears how it went: whoever asks a model, in this process or in another one, drives it.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from app.core.ports import Clock
from app.serving.sweep.grid import MAIN, PLAIN, Cell, Setting, choices
from app.serving.sweep.report import report_of

MAIN_SHARE = 0.5
"""Share of the time for the main cell while others wait."""
WARM_UP_COST = 0.4
"""Cost of a warm-up, in turns."""
MEDIAN_ROUNDS = 3
SURPRISE = 1.3
"""Drafting that does not pay takes longer than the plain turn that the plan is made from."""


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """One measured turn. `seconds` counts all of it, `prompt_seconds` what came before every row spoke."""

    tokens_per_second: float
    seconds: float
    prompt_seconds: float = 0.0
    acceptance: float | None = None
    tokens_per_cycle: float | None = None
    method: str = ""
    """What the governor used most; empty for plain decoding."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The next turn: the prompts of round `number` with `setting`; a warm-up asks for fewer tokens and is not kept."""

    cell: Cell
    setting: Setting
    number: int
    rounds: int = 1
    warm_up: bool = False
    reading: bool = False
    """Nobody has read these prompts before, so the turn is asked again."""

    @property
    def text(self) -> str:
        """For people: what is measured now."""
        if self.reading:
            return f"{self.cell.name}: reading the prompts"
        if self.warm_up:
            return f"{self.cell.name}: {self.setting.name}, warm-up"
        return f"{self.cell.name}: {self.setting.name}, round {self.number + 1} of {self.rounds}"


@dataclass(slots=True)
class Point:
    """All turns of one setting in one cell, by round."""

    cell: Cell
    setting: Setting
    turns: dict[int, MeasuredTurn] = field(default_factory=dict)

    @property
    def acceptance(self) -> float | None:
        """Median share of accepted drafts; None when nothing was drafted."""
        return _median([turn.acceptance for turn in self.turns.values()])

    @property
    def tokens_per_cycle(self) -> float | None:
        """Median tokens that one verify forward gained a row; None when nothing was drafted."""
        return _median([turn.tokens_per_cycle for turn in self.turns.values()])

    @property
    def method(self) -> str:
        """What ran in the last turn: the governor has learned by then."""
        return self.turns[max(self.turns)].method

    def results(self) -> dict[str, Any]:
        """As plain JSON values; the place of a value is its round."""
        return {
            "name": self.setting.name,
            "method": self.setting.method,
            "num_draft_tokens": self.setting.drafts,
            "used": self.method,
            "acceptance": self.acceptance,
            "tokens_per_cycle": self.tokens_per_cycle,
            "values": [self.turns[number].tokens_per_second for number in sorted(self.turns)],
        }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(slots=True)
class Sweep:
    """What was measured; grows while it is measured."""

    points: dict[tuple[Cell, Setting], Point] = field(default_factory=dict)
    skipped: list[Cell] = field(default_factory=list)
    """Cells that no time was left for."""
    interrupted: bool = False

    def cells(self) -> list[Cell]:
        """The cells with a plain turn, in the order of measuring."""
        return [cell for cell, setting in self.points if setting == PLAIN]

    def points_of(self, cell: Cell) -> list[Point]:
        """Everything measured in a cell."""
        return [point for (at, _), point in self.points.items() if at == cell]

    def add(self, cell: Cell, setting: Setting, number: int, turn: MeasuredTurn) -> None:
        self.points.setdefault((cell, setting), Point(cell, setting)).turns[number] = turn

    def results(
        self, *, model: str = "", drafts: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What was measured as plain JSON values, as the store keeps it; `drafts`: id by method."""
        return {
            "model": model,
            "drafts": list((drafts or {}).values()),
            "methods": dict(drafts or {}),
            "options": dict(options or {}),
            "cells": [self._cell(cell) for cell in self.cells()],
            "skipped": [cell.name for cell in self.skipped],
            "interrupted": self.interrupted,
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        settings = [point.results() for point in self.points_of(cell)]
        return {"rows": cell.rows, "context": cell.context, "settings": settings}

    def best_lengths(self, cell: Cell) -> dict[str, int]:
        """The number of drafts with which each method was fastest in a cell."""
        report = report_of(self.results())
        settings = next((each.settings for each in report.cells if Cell(each.rows, each.context) == cell), ())
        drafting = sorted((each for each in settings if each.num_draft_tokens), key=lambda each: each.ratio)
        return {each.method: each.num_draft_tokens for each in drafting}


class Budget:
    """Seconds that may be spent, from now on."""

    def __init__(self, seconds: float, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def remaining(self) -> float:
        """Below zero when it is overdrawn."""
        return self._end - self._clock()

    def extend(self, seconds: float) -> None:
        """Time was lost that is not the measurement's: give it back."""
        self._end += seconds


@dataclass(frozen=True, slots=True)
class CellPlan:
    """What is measured in one cell."""

    settings: tuple[Setting, ...]
    rounds: int


def plan(
    options: Sequence[tuple[Setting, ...]], *, turn: MeasuredTurn, new_prompt: float, seconds: float, rounds: int
) -> CellPlan:
    """The most settings of which three rounds fit into `seconds`, so that a median is one; else two, else one.

    `turn` is a plain turn over prompts that were read before; `new_prompt` what reading others takes.
    """
    affordable = []
    for settings in options:
        cost = len(settings) * turn.seconds * SURPRISE
        affordable.append(int((seconds - WARM_UP_COST * cost + new_prompt) / (cost + new_prompt)))
    for wanted in range(min(rounds, MEDIAN_ROUNDS), 0, -1):
        for settings, fitting in zip(options, affordable, strict=True):
            if fitting >= wanted:
                return CellPlan(settings, min(fitting, rounds))
    return CellPlan(options[-1], 1)


Turns = Generator[Ask, MeasuredTurn, None]


def turns(sweep: Sweep, cells: Sequence[Cell], methods: Mapping[str, int], *, budget: Budget, rounds: int) -> Turns:
    """Fill `sweep` cell by cell: yields what to ask, is sent how it went. `methods` tell their longest draft."""
    planner = _Planner(methods, budget, rounds, sweep)
    for place, cell in enumerate(cells):
        left = len(cells) - place
        share = MAIN_SHARE if cell == MAIN and left > 1 else 2 / (left + 1)
        if cell != MAIN and planner.expected_seconds(cell) > budget.remaining:
            sweep.skipped.append(cell)
        else:
            yield from planner.measure(cell, share * budget.remaining)


@dataclass(slots=True)
class _Planner:
    """Goes from cell to cell and remembers what turns cost."""

    methods: Mapping[str, int]
    budget: Budget
    rounds: int
    sweep: Sweep
    turn_seconds: float = 0.0
    """A plain turn of the main cell, without its prompt."""
    seconds_per_prompt_token: float = 0.0

    def expected_seconds(self, cell: Cell) -> float:
        """The least that a cell takes: its prompts, and a few turns that grow with the rows."""
        reading = self.seconds_per_prompt_token * cell.rows * cell.context
        fewest = len(choices(self.methods, {})[-1]) + 1
        return reading + fewest * self.turn_seconds * (1 + cell.rows / 8)

    def measure(self, cell: Cell, seconds: float) -> Turns:
        """One cell: a plain turn tells what it costs, the plan follows."""
        before = self.budget.remaining
        cold = yield Ask(cell, PLAIN, 0, reading=True)
        first = yield from self._kept(Ask(cell, PLAIN, 0))
        self._learn(cell, cold, first)
        best = self.sweep.best_lengths(MAIN)
        chosen = plan(
            choices(self.methods, best),
            turn=first,
            new_prompt=max(0.0, cold.seconds - first.seconds),
            seconds=seconds - (before - self.budget.remaining),
            rounds=self.rounds,
        )
        for setting in chosen.settings[1:]:
            yield Ask(cell, setting, 0, warm_up=True)
        for number in range(chosen.rounds):
            yield from self._round(cell, number, chosen)

    def _learn(self, cell: Cell, cold: MeasuredTurn, warm: MeasuredTurn) -> None:
        if cell == MAIN:
            self.turn_seconds = warm.seconds
        self.seconds_per_prompt_token = max(cold.prompt_seconds, 0.0) / (cell.rows * cell.context)

    def _round(self, cell: Cell, number: int, chosen: CellPlan) -> Turns:
        """Every setting once; a later round is not begun, and not ended, without time."""
        for setting in chosen.settings:
            if number and self.budget.remaining <= 0:
                return
            if (number, setting) != (0, PLAIN):
                yield from self._kept(Ask(cell, setting, number, chosen.rounds))

    def _kept(self, ask: Ask) -> Generator[Ask, MeasuredTurn, MeasuredTurn]:
        turn = yield ask
        self.sweep.add(ask.cell, ask.setting, ask.number, turn)
        return turn
