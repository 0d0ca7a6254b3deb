"""The prompts of `paceline bench MODEL`: a small mixed set or the user's own, behind notes where a long context is due.

Text through the model's chat template when it has one; round n starts with task n, and each row has the next one.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.core.errors import InvalidRequest
from app.serving.sweep.grid import CONTEXTS
from app.serving.sweep.tasks import TASKS

SUBJECTS = ("The heron", "A courier", "The old mill", "Our neighbour", "The night train", "The harbour")
ACTIONS = ("reached", "passed", "described", "left behind", "was painted near", "looked for", "measured")
PLACES = ("the birch grove", "a narrow bridge", "the eastern gate", "the fjord", "an empty market", "the lighthouse")
SAMPLE_LINES = 16


class TextSide(Protocol):
    """The tokenizer and the chat template of a model."""

    @property
    def has_chat_template(self) -> bool: ...

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...


class Prompts:
    """Prompts by round, row and context; the same question gets the same tokens every time."""

    def __init__(self, text: TextSide, tasks: Sequence[str] = ()) -> None:
        self._text = text
        self._tasks = tuple(tasks) or TASKS
        self._made: dict[tuple[int, int, int], list[int]] = {}

    def tokens(self, number: int, row: int, context: int) -> list[int]:
        """About `context` tokens; in the shortest context just the task."""
        key = (number, row, context)
        if key not in self._made:
            task = self._tasks[(number + row) % len(self._tasks)]
            self._made[key] = self._encode(task) if context <= CONTEXTS[0] else self._padded(task, f"{key}", context)
        return self._made[key]

    def _padded(self, task: str, seed: str, context: int) -> list[int]:
        bare = len(self._encode(task))
        per_line = max(1, len(self._text.encode(notes(seed, SAMPLE_LINES))) / SAMPLE_LINES)
        lines = max(1, int((context - bare) / per_line))
        while len(tokens := self._encode(f"{notes(seed, lines)}\n\n{task}")) > context and lines > 1:
            lines -= max(1, int((len(tokens) - context) / per_line))
        return tokens

    def _encode(self, text: str) -> list[int]:
        if self._text.has_chat_template:
            try:
                return self._text.render([{"role": "user", "content": text}])
            except InvalidRequest:  # a template that wants something else: the bare text still is text
                pass
        return self._text.encode(text)


def notes(seed: str, lines: int) -> str:
    """Plain sentences; another seed begins otherwise."""
    chooser = random.Random(seed)
    return "\n".join(
        f"{chooser.choice(SUBJECTS)} {chooser.choice(ACTIONS)} {chooser.choice(PLACES)} "
        f"at {chooser.randrange(24)}:{chooser.randrange(10, 60)}."
        for _ in range(lines)
    )
