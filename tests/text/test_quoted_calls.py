"""Calls in code fences: examples are text, whatever their model; calls with marks to spare leave nothing behind."""

import json
import re
import time

import pytest

from app.text.answer.splitter import AnswerSplitter, feed_step
from app.text.detokenizer import TokenTable
from app.text.dialect import Dialect
from tests.text.test_imperfect_calls import (
    CODER,
    DEEPSEEK,
    GEMMA,
    GPT_OSS,
    JSON,
    KIMI,
    MINIMAX,
    PARIS,
    PARIS_CALL,
    PARIS_CODER,
    TOOLS,
    UNMARKED,
    StreamedAnswer,
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
    pair = f"~~~\n{call}\n{call}\n~~~\n"
    for fenced in (f"```xml\n{call}\n```", f"```\n{call}", f"````\n{call}\n````", pair):
        answer = read(dialect, f"I look.\n\n{fenced}")
        assert (answer.text, answer.calls) == ("I look.", [PARIS] * fenced.count("Paris"))
    behind_code = read(dialect, f"I ran:\n```bash\nls\n```\n{call}\nMore")
    assert (behind_code.text.split(), behind_code.calls) == (["I", "ran:", "```bash", "ls", "```", "More"], [PARIS])


@pytest.mark.parametrize("piece", ["```word", "~", "`", "```\n", "```xml\n<tool_call>", "\n<think>", "\n<think> "])
def test_fences_and_marks_without_end_cost_no_more_than_their_length(piece: str) -> None:
    def seconds(count: int) -> float:
        began = time.process_time()
        answer = StreamedAnswer(JSON, [f"```{piece}", *[piece] * count])
        assert not answer.calls
        return time.process_time() - began

    seconds(10)
    assert min(seconds(1600) for _ in range(2)) < 20 * max(0.02, min(seconds(400) for _ in range(2)))


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


SPECIAL = ["<|im_start|>", "<|fim_middle|>", "<｜User｜>"]
LETTERS = [chr(letter) for letter in range(256)]
TABLE = TokenTable(
    pieces=[text.encode() for text in [*LETTERS, *SPECIAL, "<|end|>"]],
    hidden_token_ids=frozenset(range(256, 260)),
    stop_token_ids=frozenset({259}),
    vocabulary_size=260,
)


def tokens(text: str) -> list[int]:
    parts = re.split("|".join(f"({re.escape(mark)})" for mark in [*SPECIAL, "<|end|>"]), text)
    names = [*LETTERS, *SPECIAL, "<|end|>"]
    return [names.index(token) for part in parts if part for token in ([part] if part in names[256:] else list(part))]


def said(dialect: Dialect, text: str) -> tuple[str, list[str]]:
    """Return the text and the arguments of an answer of these tokens, in steps of any size."""
    outcomes = []
    for size in (1, 2, 7, 1000):
        stream, splitter = TABLE.open_stream(), AnswerSplitter(dialect, tools=TOOLS)
        written = tokens(text)
        for start in range(0, len(written), size):
            feed_step(stream, splitter, written[start : start + size], 0)
        splitter.feed(stream.finish(), final=True)
        parts = splitter.take()
        calls = [piece for part in parts for piece in part.calls]
        heads = [piece.index for piece in calls if piece.name]
        arguments = ["".join(piece.arguments for piece in calls if piece.index == index) for index in heads]
        outcomes.append(("".join(part.text for part in parts), arguments))
    assert outcomes.count(outcomes[0]) == len(outcomes)
    return outcomes[0]


@pytest.mark.parametrize("mark", SPECIAL)
def test_special_tokens_that_a_model_writes_into_a_file_arrive(mark: str) -> None:
    code = f"A {mark}user prompt"
    written = f'{{"name": "write_file", "arguments": {{"code": "{code}"}}}}'
    for dialect, call in (
        (JSON, f"<tool_call>\n{mark}{written}\n</tool_call>{mark}"),
        (JSON, f'<tool_call>\n{{"name": "write_file", "parameters": {{"code": "{code}"}}}}\n</tool_call>'),
        (CODER, coder("write_file", code=code)),
        (speaking("glm47"), glm("write_file", code=code)),
        (MINIMAX, minimax("write_file", code=code)),
        (GPT_OSS, f'<|channel|>commentary to=write_file<|message|>{{"code": "{code}"}}'),
    ):
        text, arguments = said(dialect, f"I write.{mark}\n{call}")
        assert (text, [json.loads(call) for call in arguments]) == ("I write.", [{"code": code}])


@pytest.mark.parametrize("mark", SPECIAL)
@pytest.mark.parametrize(
    "text", ["```\n%suser\n```", "Use:\n~~~jinja\na\n%s", "Write `%s` first.", "```%s\n%s", "1. ``%s`` is it"]
)
def test_special_tokens_in_code_are_text(mark: str, text: str) -> None:
    quoted = text.replace("%s", mark)
    assert said(JSON, quoted) == (quoted.rstrip() if "`" not in text else quoted, [])
    assert said(JSON, f"{mark}Hi {mark}there.{mark}<|end|>") == ("Hi there.", [])
    assert said(JSON, "```\nx<|end|>") == ("```\nx", []), "a stop is no text"


def test_special_marks_without_a_start_are_examples_in_a_fence_too() -> None:
    call = '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
    for dialect, written in ((KIMI, call), (DEEPSEEK, "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}")):
        text = f"```\n{written}\n```"
        assert (read(dialect, text).text, read(dialect, text).calls) == (text, [])
