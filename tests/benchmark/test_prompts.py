"""Prompts of the wanted length, the same every time, through the chat template when there is one."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from app.benchmark.prompts import Prompts, notes
from app.core.errors import InvalidRequest
from app.serving.sweep.tasks import TASKS


class Words:
    """A token a word; the template adds one before and one behind."""

    def __init__(self, *, template: bool = True, refuses: bool = False) -> None:
        self.has_chat_template = template
        self.refuses = refuses

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self.refuses:
            raise InvalidRequest("the template wants a system message")
        return [1, *self.encode(messages[0]["content"]), 2]

    def encode(self, text: str) -> list[int]:
        return [hash(word) for word in text.split()]


def test_the_shortest_context_is_the_bare_task() -> None:
    prompts = Prompts(Words(), ["Say this now."])
    assert len(prompts.tokens(0, 0, 128)) == 3 + 2


@pytest.mark.parametrize("context", [1024, 4096])
def test_notes_fill_a_longer_context(context: int) -> None:
    tokens = Prompts(Words()).tokens(0, 0, context)
    assert 0.9 * context <= len(tokens) <= context


def test_the_same_question_gets_the_same_tokens_and_others_begin_otherwise() -> None:
    prompts = Prompts(Words())
    assert prompts.tokens(1, 2, 1024) == Prompts(Words()).tokens(1, 2, 1024)
    begins = {tuple(prompts.tokens(number, row, 1024)[:12]) for number in range(3) for row in range(8)}
    assert len(begins) == 24


def test_rounds_and_rows_go_through_the_tasks() -> None:
    prompts = Prompts(Words())
    assert len({tuple(prompts.tokens(number, 0, 128)) for number in range(len(TASKS))}) == len(TASKS)
    assert prompts.tokens(0, 1, 128) == prompts.tokens(1, 0, 128)


def test_without_a_template_or_with_one_that_refuses_the_text_stands_alone() -> None:
    for text in (Words(template=False), Words(refuses=True)):
        assert Prompts(text, ["Say this now."]).tokens(0, 0, 128) == text.encode("Say this now.")


def test_notes_depend_on_their_seed_only() -> None:
    assert notes("a", 3) == notes("a", 3) != notes("b", 3)
    assert len(notes("a", 3).splitlines()) == 3
