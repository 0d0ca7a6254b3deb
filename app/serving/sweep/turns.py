"""One model over the grid: settings take turns, round by round, until the rounds are done or the time is used up.

A round asks every setting the same prompts, plain decoding first, so that ratios pair the rounds. Of the grid, as many
settings are taken as have time for three rounds, the most telling first. `turns` says what to ask next and hears how it
went: whoever asks a model drives it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from app.core.ports import Clock
from app.serving.sweep.grid import MAIN, PLAIN, Cell, Setting, settings_of

MAIN_SHARE = 0.5
"""Share of the time for the main cell while others wait."""
MEDIAN_ROUNDS = 3
SURPRISE = 1.5
"""Drafting that does not pay takes longer than the plain turn that the number of settings follows from; warm-ups come
on top."""


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
    def speed(self) -> float:
        """Median tokens per second of all rows."""
        return median(turn.tokens_per_second for turn in self.turns.values())

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
        points = self.points_of(cell)
        methods = list(dict.fromkeys(point.setting.method for point in points))
        points.sort(key=lambda point: (methods.index(point.setting.method), point.setting.drafts))
        settings = [point.results() for point in points]
        return {"rows": cell.rows, "context": cell.context, "settings": settings}


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


Turns = Generator[Ask, MeasuredTurn, None]


def turns(sweep: Sweep, cells: Sequence[Cell], methods: Mapping[str, int], *, budget: Budget, rounds: int) -> Turns:
    """Fill `sweep` cell by cell: yields what to ask, is sent how it went. `methods` tell their longest draft."""
    settings, reading = settings_of(methods), 0.0
    for place, cell in enumerate(cells):
        left = len(cells) - place
        share = MAIN_SHARE if cell == MAIN and left > 1 else 2 / (left + 1)
        ends = (1 - share) * budget.remaining
        if cell != MAIN and reading * cell.rows * cell.context >= budget.remaining:
            sweep.skipped.append(cell)
            continue
        cold = yield Ask(cell, PLAIN, 0, reading=True)
        reading = cold.prompt_seconds / (cell.rows * cell.context)
        turn = yield Ask(cell, PLAIN, 0, rounds)
        sweep.add(cell, PLAIN, 0, turn)
        seconds = (budget.remaining - ends) / min(rounds, MEDIAN_ROUNDS) - cold.prompt_seconds
        fitting = int(seconds / (SURPRISE * turn.seconds)) if seconds > 0 else 0
        chosen = settings[: max(len(methods) + 2, fitting)]
        yield from _rounds(sweep, cell, chosen, rounds, lambda ends=ends: budget.remaining > ends)  # type: ignore[misc]
        settings = ranked(sweep, settings)


def _rounds(sweep: Sweep, cell: Cell, settings: Sequence[Setting], rounds: int, has_time: Callable[[], bool]) -> Turns:
    """Every setting once a round; a later round is not begun, and not ended, without time."""
    for setting in settings[1:]:
        yield Ask(cell, setting, 0, warm_up=True)
    for number in range(rounds):
        for setting in settings:
            if number and not has_time():
                return
            if (number, setting) != (0, PLAIN):
                turn = yield Ask(cell, setting, number, rounds)
                sweep.add(cell, setting, number, turn)


def ranked(sweep: Sweep, settings: Sequence[Setting]) -> list[Setting]:
    """In the order of telling most about further cells: the best of each method in the main one, then the others."""
    measured = {each: point.speed for each in settings if each.drafts and (point := sweep.points.get((MAIN, each)))}
    by_speed = sorted(measured, key=measured.__getitem__, reverse=True)
    best = list({each.method: each for each in reversed(by_speed)}.values())[::-1]
    return list(dict.fromkeys((*settings[:2], *best, *by_speed, *settings)))
