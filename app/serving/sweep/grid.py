"""What a measurement may cover, the most telling first: cells (rows, context) and settings (method, drafts).

Pure, and the same for every model and every amount of time.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TOKENS = 64
WARM_UP_TOKENS = 20
FEWEST_TOKENS = 24
"""Answers that end sooner go on behind their end, in every setting alike."""
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
"""Fewer than any usual tokenizer takes of the notes, so that a prompt stays below its context."""
SUBJECTS = ("The heron", "A courier", "The old mill", "Our neighbour", "The night train", "The harbour")
ACTIONS = ("reached", "passed", "described", "left behind", "was painted near", "looked for", "measured")
PLACES = ("the birch grove", "a narrow bridge", "the eastern gate", "the fjord", "an empty market", "the lighthouse")


def behind_notes(task: str, seed: str, context: int) -> str:
    """`task` behind so many notes that both together have about `context` tokens; another seed begins otherwise."""
    chooser, lines = random.Random(seed), [""]
    room = context * CHARACTERS_PER_TOKEN - len(task)
    while room > 0:
        lines.append(
            f"{chooser.choice(SUBJECTS)} {chooser.choice(ACTIONS)} {chooser.choice(PLACES)} "
            f"at {chooser.randrange(24)}:{chooser.randrange(10, 60)}."
        )
        room -= len(lines[-1])
    return "\n".join([*lines[1:], "", task])


LENGTHS = (4, 2, 8, 1, 16, 6, 3, 12)
"""Draft lengths, the most telling first; of a method, those up to its longest."""
CONTEXTS = (128, 1024, 4096)
"""Prompt tokens; prompts of the first one stay as short as they are."""


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


def settings_of(methods: Mapping[str, int]) -> list[Setting]:
    """Everything that is compared in a cell, the most telling first; `methods` tell their longest draft."""
    drafting = {
        Setting(method, min(length, longest)): None for length in LENGTHS for method, longest in methods.items()
    }
    return [PLAIN, *((GOVERNOR, *drafting) if methods else ())]
