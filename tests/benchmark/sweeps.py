"""A scripted side for the sweep: speeds are given, and the clock advances by the scripted cost of each turn."""

from collections.abc import Callable
from typing import Any

from app.serving.sweep.grid import PLAIN, Budget, Cell, MeasuredTurn, Setting, Sweep

Speed = Callable[[Cell, Setting], float]


class ScriptedSide:
    """Runs turns of `tokens` tokens at the given speeds; a first prefill takes `reading` seconds per 128 tokens."""

    def __init__(self, speed: Speed, *, tokens: int = 60, reading: float = 0.5) -> None:
        self.now = 0.0
        self.turns: list[tuple[Cell, Setting, int, bool]] = []
        self._speed = speed
        self._tokens = tokens
        self._reading = reading
        self._read: set[tuple[Cell, int]] = set()

    def turn(self, cell: Cell, setting: Setting, number: int, *, warm_up: bool = False) -> MeasuredTurn:
        self.turns.append((cell, setting, number, warm_up))
        reading = 0.0 if (cell, number) in self._read else self._reading * cell.rows * cell.context / 128
        self._read.add((cell, number))
        speed = self._speed(cell, setting)
        seconds = reading + (self._tokens / 3 if warm_up else self._tokens) / speed
        self.now += seconds
        drafting = setting != PLAIN
        return MeasuredTurn(
            tokens_per_second=speed,
            seconds=seconds,
            prompt_seconds=reading,
            acceptance=0.8 if drafting else None,
            tokens_per_cycle=3.0 if drafting else None,
            methods=() if not drafting else (setting.method if setting.drafts else "dflash",),
        )

    def budget(self, seconds: float) -> Budget:
        return Budget(seconds, lambda: self.now)


def swept(speeds: dict[tuple[int, str, int], float], *, rounds: int = 3) -> Sweep:
    """Return a finished sweep at the shortest context; `speeds` are by (rows, method, drafts), equal in all rounds."""
    sweep = Sweep()
    for (rows, method, drafts), speed in speeds.items():
        for _ in range(rounds):
            accepted = None if method == "off" else 0.8
            yielded = None if accepted is None else 9.0
            turn = MeasuredTurn(
                speed, 1.0, acceptance=accepted, tokens_per_cycle=yielded, methods=("dflash",) if accepted else ()
            )
            sweep.add(Cell(rows, 128), Setting(method, drafts), turn)
    return sweep


def measured(cells: dict[int, dict[tuple[str, int], list[float]]], **options: Any) -> dict[str, Any]:
    """Return the results of rounds that differ; `cells` has a speed per round, by rows and (method, drafts)."""
    sweep = Sweep()
    for rows, settings in cells.items():
        for (method, drafts), speeds in settings.items():
            for speed in speeds:
                turn = MeasuredTurn(speed, 1.0, tokens_per_cycle=None if method == "off" else 9.0, methods=("dflash",))
                sweep.add(Cell(rows, 128), Setting(method, drafts), turn)
    return sweep.results(model="big", drafts={"dflash": "big-dflash", "draft_model": "small"}, options=options)
