"""What a measurement may cover, the most telling first: cells (rows, context) and settings (method, drafts).

Pure. A budget thins the grid out: fewer draft lengths in a cell first, then fewer cells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from app.serving.sweep.tasks import CHARACTERS_PER_TOKEN

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXTS = (128, 1024, 4096)
"""Prompt tokens; prompts of the first one stay as short as they are."""
USUAL_LENGTH = 4


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """So many requests at once, each with a prompt of about so many tokens."""

    rows: int
    context: int

    @property
    def name(self) -> str:
        """As people read it: "4 requests, 1k"."""
        context = f"{self.context // 1024}k" if self.context >= 1024 else "0.1k"
        return f"{self.rows} {'request' if self.rows == 1 else 'requests'}, {context}"


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """A method with a fixed number of drafts; `off` is plain decoding, `auto` what the governor does by itself."""

    method: str
    drafts: int = 0

    @property
    def name(self) -> str:
        """As people read it: "plain", "governor", "dflash 7"."""
        return {"off": "no drafting", "auto": "governor"}.get(self.method, f"{self.method} {self.drafts}")


PLAIN, GOVERNOR = Setting("off"), Setting("auto")
MAIN = Cell(1, CONTEXTS[0])
Grid = Literal["one", "several", "full"]
_FULL = ((1, 0), (4, 0), (1, 1), (8, 0), (2, 0), (1, 2), (4, 1), (8, 1), (2, 1), (4, 2), (8, 2), (2, 2))
GRIDS: Mapping[Grid, tuple[Cell, ...]] = {
    "one": (MAIN,),
    "several": (MAIN, Cell(4, CONTEXTS[0])),
    "full": tuple(Cell(rows, CONTEXTS[context]) for rows, context in _FULL),
}
"""What may be measured, in this order."""


def cells(wanted: Sequence[Cell], *, max_rows: int, max_context_tokens: int, tokens: int) -> list[Cell]:
    """Those that a model can run, the main one always: `tokens` more have to fit behind the prompt, even where a
    tokenizer makes a token of each character."""

    def can_run(cell: Cell) -> bool:
        return cell.rows <= max_rows and cell.context * CHARACTERS_PER_TOKEN + tokens <= max_context_tokens

    return [cell for cell in wanted if cell == MAIN or can_run(cell)]


def lengths_up_to(longest: int) -> tuple[int, ...]:
    """The draft lengths of a method; its longest one is among them."""
    longest = min(longest, LENGTHS[-1])
    return tuple(sorted({length for length in LENGTHS if length <= longest} | {longest}))


def choices(methods: Mapping[str, int], best: Mapping[str, int]) -> list[tuple[Setting, ...]]:
    """Settings of one cell from all to few; `methods` tell their longest draft, `best` the best one known so far.

    Plain decoding and the governor are in each, plain first.
    """
    found = []
    for pick in (_all, _every_second, _around, _one):
        drafting = [
            Setting(method, length)
            for method, longest in methods.items()
            for length in pick(lengths_up_to(longest), best.get(method))
        ]
        settings = (PLAIN, *((GOVERNOR, *drafting) if methods else ()))
        if settings not in found:
            found.append(settings)
    return found


def _all(lengths: Sequence[int], _best: int | None) -> Sequence[int]:
    return lengths


def _every_second(lengths: Sequence[int], best: int | None) -> Sequence[int]:
    kept = set(lengths[::-1][::2])
    return [length for length in lengths if length in kept or length == best]


def _around(lengths: Sequence[int], best: int | None) -> Sequence[int]:
    place = _place(lengths, best)
    return lengths[max(0, place - 1) : place + 2]


def _one(lengths: Sequence[int], best: int | None) -> Sequence[int]:
    return [lengths[_place(lengths, best)]]


def _place(lengths: Sequence[int], best: int | None) -> int:
    wanted = USUAL_LENGTH if best is None else best
    return min(range(len(lengths)), key=lambda place: abs(lengths[place] - wanted))
