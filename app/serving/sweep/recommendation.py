"""What the measurement says to do, in one line and as a choice to keep. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.model_settings import ModelSettings
from app.serving.sweep.grid import GOVERNOR, MAIN, PLAIN, Cell
from app.serving.sweep.turns import Point, Sweep

PAYS = 1.05
"""Below this, drafting is not worth having: as the governor sees it."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`text` for people, `choice` for the store."""

    text: str
    choice: ModelSettings


def recommend(sweep: Sweep, drafters: Mapping[str, str]) -> Recommendation | None:
    """The best of what was measured, None when no drafting was; `drafters` are the ids of the loaded ones, by method.

    A number of drafts is kept where one request runs alone. Where drafting pays for several, the governor chooses:
    no one number suits them all.
    """
    if not any(_drafting(sweep, MAIN)):
        return None
    alone = _best(sweep, MAIN)
    batches = [cell for cell in sorted(sweep.cells()) if cell.rows > 1 and cell.context == MAIN.context]
    paying = {cell: point for cell in batches if (point := _best(sweep, cell)) is not None}
    if alone is None and not paying:
        return Recommendation("plain is fastest here", ModelSettings(policy="off"))
    said = [_said(sweep, cell, point) for cell, point in ((MAIN, alone), *paying.items()) if point is not None]
    off = [cell for cell in batches if cell not in paying]
    if alone is None:
        off.insert(0, MAIN)
    if off:
        said.append(f"off at {_rows(off)}")
    named = [point.setting for point in (alone, *paying.values()) if point is not None]
    governed = GOVERNOR in named
    methods = tuple(dict.fromkeys(setting.method for setting in named))
    choice = ModelSettings(
        drafts=tuple(name for method, name in drafters.items() if governed or method in methods) or None,
        methods=None if governed else methods,
        num_draft_tokens=None if governed or paying else named[0].drafts,
        policy="auto" if paying else "single",
    )
    return Recommendation("; ".join(said), choice)


def _best(sweep: Sweep, cell: Cell) -> Point | None:
    """The fastest setting of a cell, or None when that is plain decoding."""
    best = max(_drafting(sweep, cell), key=sweep.gain, default=None)
    return best if best is not None and sweep.gain(best) >= PAYS else None


def _drafting(sweep: Sweep, cell: Cell) -> list[Point]:
    return [point for point in sweep.points_of(cell) if point.setting != PLAIN]


def _said(sweep: Sweep, cell: Cell, point: Point) -> str:
    if point.setting == GOVERNOR:
        how = f"the governor, mostly with {point.method}" if point.method else "the governor"
    else:
        how = f"{point.setting.method} with {point.setting.drafts} draft{'s' if point.setting.drafts > 1 else ''}"
    return f"{how}: {sweep.gain(point):.1f}x plain ({_rows([cell])})"


def _rows(cells: list[Cell]) -> str:
    counts = [str(cell.rows) for cell in cells]
    listed = " and ".join([", ".join(counts[:-1]), counts[-1]]) if len(counts) > 1 else counts[0]
    return f"{listed} {'row' if counts == ['1'] else 'rows'}"
