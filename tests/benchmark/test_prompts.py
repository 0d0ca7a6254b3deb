"""Prompts of about the wanted length, the same every time."""

import pytest
from tokenizers import Tokenizer

from app.serving.sweep.grid import TASKS, long_prompt
from tests.published import tokenizer_folder


@pytest.mark.system("npm")
@pytest.mark.parametrize("context", [1024, 4096])
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "gptoss"])
def test_notes_fill_a_longer_context_and_never_more_than_it(name: str, context: int) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder(name) / "tokenizer.json"))
    for number, task in enumerate(TASKS):
        tokens = len(tokenizer.encode(long_prompt(task, str(number), context)).ids)
        assert 0.6 * context <= tokens <= context


def test_notes_depend_on_their_seed_only_and_another_one_begins_otherwise() -> None:
    assert long_prompt("Go.", "a", 1024) == long_prompt("Go.", "a", 1024)
    assert len({long_prompt("Go.", str(seed), 1024)[:60] for seed in range(24)}) == 24
    assert long_prompt("Go.", "a", 1024).endswith("\n\nGo.")
