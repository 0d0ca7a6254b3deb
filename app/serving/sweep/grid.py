"""The plan of a measurement and its results: the same for every model. Pure.

Cells (rows, context) and settings (method, drafts) are ordered, the most informative first. In a cell, settings take
turns, round by round, until the rounds are done or the time is used up. In a round every setting gets the same prompts,
plain decoding first, so that ratios can be paired by round. A cell includes as many settings as three rounds leave
time for. `turns` yields the next turn and receives its measurement; the caller runs the turn on a model.
"""

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Literal

from app.core.clock import Clock
from app.core.request import AUTO, OFF

TOKENS = 64
WARM_UP_TOKENS = 20
MIN_TOKENS = 24
"""Minimum tokens per row: if plain decoding ends sooner, all settings of the round generate past the end token."""
TASKS = (
    "Explain in a few sentences why the sky is blue by day and red in the evening.",
    "Add type hints and docstrings to this Python module and repeat all of it:\n\n"
    "def mean(values):\n    return sum(values) / len(values)\n\n"
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n        return ordered[middle]\n    return mean(ordered[middle - 1 : middle + 1])",
    "Write JSON with the names, capitals and populations of eight European countries.",
    "Write a Python function that finds all prime numbers below n, and a test for it.",
    "Count from 1 to 40.",
)
CHARACTERS_PER_TOKEN = 3
"""Characters per token of filler text: fewer than with any common tokenizer, so that prompts stay below the context."""
SUBJECTS = ("The heron", "A courier", "The old mill", "Our neighbour", "The night train", "The harbour")
ACTIONS = ("reached", "passed", "described", "left behind", "was painted near", "looked for", "measured")
PLACES = ("the birch grove", "a narrow bridge", "the eastern gate", "the fjord", "an empty market", "the lighthouse")


def long_prompt(task: str, seed: str, context: int) -> str:
    """Return filler text followed by `task`, together about `context` tokens; `seed` varies the text from its start."""
    generator, lines = random.Random(seed), [""]
    room = context * CHARACTERS_PER_TOKEN - len(task)
    while room > 0:
        lines.append(
            f"{generator.choice(SUBJECTS)} {generator.choice(ACTIONS)} {generator.choice(PLACES)} "
            f"at {generator.randrange(24)}:{generator.randrange(10, 60)}."
        )
        room -= len(lines[-1])
    return "\n".join([*lines[1:], "", task])


LENGTHS = (4, 2, 8, 1, 16, 6, 3, 12)
"""Draft lengths in tokens, the most informative first; each method caps them at its longest."""
CONTEXTS = (128, 1024, 4096)
"""Context lengths in prompt tokens; prompts of the first have no filler text."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A load: `rows` concurrent requests, each with a prompt of about `context` tokens."""

    rows: int
    context: int

    @property
    def name(self) -> str:
        """Name for display: "4 requests, 1k"."""
        context = f"{self.context // 1024}k" if self.context >= 1024 else "0.1k"
        return f"{self.rows} {'request' if self.rows == 1 else 'requests'}, {context}"


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """A method with a fixed draft length; `off` is plain decoding, `auto` leaves the choice to the governor."""

    method: str
    drafts: int = 0

    @property
    def name(self) -> str:
        """Name for display: "no drafting", "governor", "dflash 7"."""
        return {OFF: "no drafting", AUTO: "governor"}.get(self.method, f"{self.method} {self.drafts}")


PLAIN, GOVERNOR = Setting(OFF), Setting(AUTO)
MAIN = Cell(1, CONTEXTS[0])
Grid = Literal["one", "several", "full"]
_FULL = ((1, 0), (4, 0), (1, 1), (8, 0), (2, 0), (1, 2), (4, 1), (8, 1), (2, 1), (4, 2), (8, 2), (2, 2))
GRIDS: Mapping[Grid, tuple[Cell, ...]] = {
    "one": (MAIN,),
    "several": (MAIN, Cell(4, CONTEXTS[0])),
    "full": tuple(Cell(rows, CONTEXTS[context]) for rows, context in _FULL),
}
"""Cells of each grid, in the order in which they are measured."""


def cells(candidates: Sequence[Cell], *, max_rows: int, max_context_tokens: int, tokens: int) -> list[Cell]:
    """Return the cells that a model can run, and always the main cell. `tokens` more must fit after the prompt, even if
    the tokenizer turns each character into a token."""

    def can_run(cell: Cell) -> bool:
        return cell.rows <= max_rows and cell.context * CHARACTERS_PER_TOKEN + tokens <= max_context_tokens

    return [cell for cell in candidates if cell == MAIN or can_run(cell)]


def settings_of(methods: Mapping[str, int]) -> list[Setting]:
    """Return the settings to compare in a cell, the most informative first; `methods`: longest draft by method."""
    drafting = {
        Setting(method, min(length, longest)): None for length in LENGTHS for method, longest in methods.items()
    }
    return [PLAIN, *((GOVERNOR, *drafting) if methods else ())]


# --- turns ------------------------------------------------------------------------------------------------------

MAIN_SHARE = 0.5
"""Share of the time for the main cell if there are others."""
MEDIAN_ROUNDS = 3
OVERRUN_FACTOR = 1.5
"""Factor on the time of a plain turn when estimating how many settings fit: drafting that does not pay takes longer,
and warm-ups come on top."""


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """One measured turn. `seconds` is its duration, `prompt_seconds` the part before every row had emitted a token."""

    tokens_per_second: float
    seconds: float
    prompt_seconds: float = 0.0
    acceptance: float | None = None
    tokens_per_cycle: float | None = None
    methods: tuple[str, ...] = ()
    """Methods that drafted in at least `MIN_USED_SHARE` of the drafting steps, the most used first."""
    tokens: int = 0
    """Tokens of all rows together."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """The next turn: the prompts of round `number` with `setting`; a warm-up generates fewer tokens and is not kept."""

    cell: Cell
    setting: Setting
    number: int
    rounds: int = 1
    warm_up: bool = False
    prefill: bool = False
    """Whether this turn only fills the prefix cache with the prompts; the next one repeats and measures it."""

    @property
    def text(self) -> str:
        """Description of the turn for display."""
        if self.prefill:
            return f"{self.cell.name}: reading the prompts"
        if self.warm_up:
            return f"{self.cell.name}: {self.setting.name}, warm-up"
        return f"{self.cell.name}: {self.setting.name}, round {self.number + 1} of {self.rounds}"


@dataclass(slots=True)
class Sweep:
    """Results of a measurement, filled while it runs."""

    measured: dict[Cell, dict[Setting, list[MeasuredTurn]]] = field(default_factory=dict)
    """Turns by cell and setting, in the order of the rounds."""
    skipped: list[Cell] = field(default_factory=list)
    """Cells for which no time was left."""
    interrupted: bool = False

    def add(self, cell: Cell, setting: Setting, turn: MeasuredTurn) -> None:
        """Add the turn of the next round."""
        self.measured.setdefault(cell, {}).setdefault(setting, []).append(turn)

    def speed(self, setting: Setting) -> float:
        """Return the median tokens per second in the main cell; 0 if not measured there."""
        turns = self.measured.get(MAIN, {}).get(setting)
        return median(turn.tokens_per_second for turn in turns) if turns else 0.0

    def results(
        self, *, model: str = "", drafts: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the results as plain JSON values, as the store keeps them; `drafts`: drafter id by method."""
        return {
            "model": model,
            "drafts": list((drafts or {}).values()),
            "methods": dict(drafts or {}),
            "options": dict(options or {}),
            "cells": [
                {"rows": cell.rows, "context": cell.context, "settings": _results_of(settings)}
                for cell, settings in self.measured.items()
            ],
            "skipped": [cell.name for cell in self.skipped],
            "interrupted": self.interrupted,
        }


def _results_of(settings: Mapping[Setting, Sequence[MeasuredTurn]]) -> list[dict[str, Any]]:
    """Return the results grouped by method; the index of a value is its round."""
    methods = list(dict.fromkeys(setting.method for setting in settings))
    return [
        {
            "name": setting.name,
            "method": setting.method,
            "num_draft_tokens": setting.drafts,
            "used": list(settings[setting][-1].methods),  # the governor has learned by the last turn
            "acceptance": _median([turn.acceptance for turn in settings[setting]]),
            "tokens_per_cycle": _median([turn.tokens_per_cycle for turn in settings[setting]]),
            "values": [turn.tokens_per_second for turn in settings[setting]],
        }
        for setting in sorted(settings, key=lambda candidate: (methods.index(candidate.method), candidate.drafts))
    ]


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median of the known values; None if nothing was drafted."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


class Budget:
    """A time budget in seconds, starting now."""

    def __init__(self, seconds: float, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; negative if overdrawn."""
        return self._end - self._clock()

    def extend(self, seconds: float) -> None:
        """Extend the budget by time that was lost to other work."""
        self._end += seconds


Turns = Generator[TurnRequest, MeasuredTurn, None]


def turns(sweep: Sweep, cells: Sequence[Cell], methods: Mapping[str, int], *, budget: Budget, rounds: int) -> Turns:
    """Fill `sweep` cell by cell: yields turns and receives their measurements. `methods`: longest draft by method."""
    settings, prefill_seconds_per_token = settings_of(methods), 0.0
    for index, cell in enumerate(cells):
        remaining_cells = len(cells) - index
        share = MAIN_SHARE if cell == MAIN and remaining_cells > 1 else 2 / (remaining_cells + 1)
        reserve = (1 - share) * budget.remaining
        if cell != MAIN and prefill_seconds_per_token * cell.rows * cell.context >= budget.remaining:
            sweep.skipped.append(cell)
            continue
        cold = yield TurnRequest(cell, PLAIN, 0, prefill=True)
        prefill_seconds_per_token = cold.prompt_seconds / (cell.rows * cell.context)
        turn = yield TurnRequest(cell, PLAIN, 0, rounds)
        sweep.add(cell, PLAIN, turn)
        seconds = (budget.remaining - reserve) / min(rounds, MEDIAN_ROUNDS) - cold.prompt_seconds
        fitting = int(seconds / (OVERRUN_FACTOR * turn.seconds)) if seconds > 0 else 0
        yield from _rounds(sweep, cell, settings[: max(len(methods) + 2, fitting)], rounds, budget, reserve)
        settings = ranked(sweep, settings)


def _rounds(
    sweep: Sweep, cell: Cell, settings: Sequence[Setting], rounds: int, budget: Budget, reserve: float
) -> Turns:
    """Run every setting once per round; after the first round, stop when only `reserve` seconds are left."""
    for setting in settings[1:]:
        yield TurnRequest(cell, setting, 0, warm_up=True)
    for number in range(rounds):
        for setting in settings:
            if number and budget.remaining <= reserve:
                return
            if (number, setting) != (0, PLAIN):
                turn = yield TurnRequest(cell, setting, number, rounds)
                sweep.add(cell, setting, turn)


def ranked(sweep: Sweep, settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings in order of interest: plain, governor, then the best of each method in the main cell."""
    speeds = {setting: speed for setting in settings if setting.drafts and (speed := sweep.speed(setting))}
    by_speed = sorted(speeds, key=speeds.__getitem__, reverse=True)
    best = list({setting.method: setting for setting in reversed(by_speed)}.values())[::-1]
    return list(dict.fromkeys((*settings[:2], *best, *by_speed, *settings)))
