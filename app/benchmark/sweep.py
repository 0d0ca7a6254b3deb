"""`paceline bench MODEL` drives the sweep in this process. Ctrl-C and the end of the time keep what was measured."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from app.benchmark.measure import Progress
from app.serving.sweep.grid import Cell, Setting
from app.serving.sweep.turns import Ask, Budget, Sweep, Turn, Turns, turns


class Side(Protocol):
    """Whoever runs turns."""

    def turn(self, cell: Cell, setting: Setting, number: int, *, warm_up: bool = False) -> Turn:
        """Ask the prompts of round `number`."""
        ...


def measure(
    side: Side,
    cells: Sequence[Cell],
    methods: Mapping[str, int],
    *,
    budget: Budget,
    rounds: int,
    progress: Progress,
) -> Sweep:
    """Measure the cells one after the other. `methods` tell their longest draft."""
    sweep = Sweep()
    asking = turns(sweep, cells, methods, budget=budget, rounds=rounds)
    ask: Ask | None = next(asking, None)
    try:
        while ask is not None:
            left = "" if ask.warm_up or ask.reading else f", {max(0, round(budget.remaining))} s left"
            progress(ask.text + left)
            ask = _answer(asking, side.turn(ask.cell, ask.setting, ask.number, warm_up=ask.warm_up))
    except KeyboardInterrupt:
        sweep.interrupted = True
    return sweep


def _answer(asking: Turns, turn: Turn) -> Ask | None:
    """What is asked after `turn`; None at the end."""
    try:
        return asking.send(turn)
    except StopIteration:
        return None
