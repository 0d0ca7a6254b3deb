"""Calls in code fences: examples are text, whatever their model; calls with marks to spare leave nothing behind."""

import pytest

from app.text.dialect import Dialect
from tests.text.test_imperfect_calls import (
    CODER,
    DEEPSEEK,
    GEMMA,
    JSON,
    KIMI,
    MINIMAX,
    PARIS,
    PARIS_CALL,
    PARIS_CODER,
    UNMARKED,
    coder,
    glm,
    minimax,
    read,
    speaking,
)

MARKED: list[tuple[Dialect, str]] = [
    (JSON, PARIS_CALL),
    (CODER, f"<tool_call>\n{PARIS_CODER}\n</tool_call>"),
    (MINIMAX, minimax("get_weather", city="Paris")),
    (speaking("glm47"), glm("get_weather", city="Paris")),
    (GEMMA, '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'),
]


@pytest.mark.parametrize(("dialect", "call"), MARKED)
@pytest.mark.parametrize("fence", ["```", "```xml", "  ```json", "~~~", "> ```", "1. ````"])
def test_an_example_of_a_call_in_a_code_fence_is_text(dialect: Dialect, call: str, fence: str) -> None:
    written = f"Like so:\n{fence}\n{call}\n{fence.strip('xmljson')}\nThat is how."
    answer = read(dialect, written)
    assert (answer.text, answer.calls) == (written, [])
    after = read(dialect, f"{written}\n\n{call}")
    assert (after.text, after.calls) == (written, [PARIS])


@pytest.mark.parametrize(("dialect", "call", "end"), UNMARKED)
def test_an_example_of_a_call_without_its_opening_mark_is_text(dialect: Dialect, call: str, end: str) -> None:
    for written in (f"Like so:\n```xml\n{call}\n{end}\n```", f"```\n{call}\n```\n", f"```\n{call}\n```\nAs I said."):
        answer = read(dialect, written)
        assert (answer.text, answer.calls) == (written, [])
    unclosed = read(dialect, f"Like so:\n```\nx\n{call}")
    assert (unclosed.text, unclosed.calls) == ("Like so:\n```\nx", [PARIS]), "nobody closes an example with a call"


@pytest.mark.parametrize(("dialect", "call"), MARKED)
def test_a_call_that_ends_the_answer_in_a_code_fence_is_a_call(dialect: Dialect, call: str) -> None:
    for fenced in (f"```xml\n{call}\n```", f"```\n{call}\n{call}\n```\n", f"```\n{call}"):
        answer = read(dialect, f"I look.\n\n{fenced}")
        assert (answer.text, answer.calls) == ("I look.", [PARIS] * fenced.count("Paris"))
    behind_code = read(dialect, f"I ran:\n```bash\nls\n```\n{call}\nMore")
    assert (behind_code.text.split(), behind_code.calls) == (["I", "ran:", "```bash", "ls", "```", "More"], [PARIS])


def test_a_fence_in_the_arguments_of_a_fenced_call_does_not_end_it() -> None:
    code = "# Title\n```python\nx\n```\nEnd"
    answer = read(CODER, f"Here:\n```xml\n{coder('write_file', code=code)}\n```")
    assert (answer.text, answer.calls) == ("Here:", [("write_file", {"code": code})])


@pytest.mark.parametrize(("dialect", "call"), MARKED)
@pytest.mark.parametrize("spare", ["%(end)s", "\n%(end)s\n%(end)s", "\n%(start)s", "\n%(start)s\n", ",\n%(end)s"])
def test_marks_to_spare_behind_a_call_are_no_text(dialect: Dialect, call: str, spare: str) -> None:
    marks = {
        MINIMAX: {"start": "<minimax:tool_call>", "end": "</minimax:tool_call>"},
        GEMMA: {"start": "<|tool_call>", "end": "<tool_call|>"},
    }.get(dialect, {"start": "<tool_call>", "end": "</tool_call>"})
    answer = read(dialect, f"I look.\n{call}{spare % marks}")
    assert (answer.text, answer.calls) == ("I look.", [PARIS])
    text = f"{marks['start']} begins a call."
    more = read(dialect, f"{call}\n{text}")
    assert (more.text, more.calls) == (text, [PARIS])


@pytest.mark.parametrize("end", [",\n</tool_call>", "\n<tool_call>", "\n</tool_call>\n</tool_call>"])
def test_a_wrong_mark_at_the_end_of_a_call_is_no_text(end: str) -> None:
    for dialect, call in ((JSON, PARIS_CALL), (CODER, f"<tool_call>\n{PARIS_CODER}\n</tool_call>")):
        answer = read(dialect, call.replace("\n</tool_call>", end))
        assert (answer.text, answer.calls) == ("", [PARIS])


def test_calls_of_minimax_between_marks_of_another_model_are_calls() -> None:
    invoke = minimax("get_weather", city="Paris").replace("minimax:tool_call", "function_calls")
    answer = read(MINIMAX, f"I look.\n{invoke}\n")
    assert (answer.text, answer.calls) == ("I look.", [PARIS])


def test_special_marks_without_a_start_are_examples_in_a_fence_too() -> None:
    call = '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
    for dialect, written in ((KIMI, call), (DEEPSEEK, "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}")):
        text = f"```\n{written}\n```"
        assert (read(dialect, text).text, read(dialect, text).calls) == (text, [])
