"""Calls whose marks are those of another form, or none, and slips in the JSON around arguments.

Each test is named after what its user sees; the outputs come from public bug reports or are variants of them.
"""

import json

import pytest

from app.text.answer.splitter import AnswerSplitter
from app.text.dialect import Dialect
from tests.text.test_imperfect_calls import (
    CODER,
    GPT_OSS,
    JSON,
    LLAMA,
    MISTRAL,
    PARIS,
    PARIS_CALL,
    PARIS_JSON,
    StreamedAnswer,
    read,
    speaking,
)

GRANITE = speaking("granite")
FORMS = [JSON, CODER, MISTRAL, LLAMA, GRANITE]
NOW = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]

# --- whole answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        PARIS_CALL,
        f"<tool_call>[{PARIS_JSON}]",
        f"functools[{PARIS_JSON}]",
        f"<|tool_call|>[{PARIS_JSON}]<|/tool_call|>",
        f"<function_call>\n{PARIS_JSON}\n</function_call>",
        f"<tool_calls>\n{PARIS_JSON}\n{PARIS_JSON}\n</tool_calls>",
        f"```xml\n{PARIS_CALL}\n```",
    ],
)
@pytest.mark.parametrize("dialect", [MISTRAL, LLAMA, GRANITE])
def test_a_call_between_the_marks_of_another_form_is_a_call_if_it_is_the_whole_answer(
    dialect: Dialect, written: str
) -> None:
    if dialect is GRANITE and "<|tool_call|>" in written:
        return  # its own mark
    answer = read(dialect, f"<think>hm</think>\n\n{written}")
    assert (answer.calls, answer.text) == ([PARIS] * written.count("Paris"), "")
    for text in (
        written.replace("get_weather", "no_such_tool"),
        f"Like so: {written}",
        f"{written}\nThat is how.",
        written[: written.index("Paris")],
    ):
        assert (read(dialect, text).calls, read(dialect, text).text) == ([], text)


@pytest.mark.parametrize(
    "written",
    [
        f"```json\n{PARIS_JSON}\n```\n\n```json\n{PARIS_JSON}\n```",
        f"<tools>\n{PARIS_JSON}\n</tools>\n<tools>\n{PARIS_JSON}\n</tools>",
        f"{PARIS_JSON}\n</tool_call>\n{PARIS_CALL}",
        f"{PARIS_JSON}\n\n```\n{PARIS_JSON}\n```",
    ],
)
def test_two_calls_of_which_each_has_its_own_fence_or_marks_are_both_made(written: str) -> None:
    for dialect in FORMS:
        answer = read(dialect, written)
        assert (answer.calls, answer.text) == ([PARIS, PARIS], "")
        for text in (f"{written}\nThat is how.", written.replace("get_weather", "no_such_tool", 1), f"Or {written}"):
            if "</tool_call>" not in text and not (dialect is LLAMA and text[0] == "{"):
                assert (read(dialect, text).calls, read(dialect, text).text) == ([], text)


def test_the_arguments_of_a_call_in_its_own_marks_are_still_streamed() -> None:
    for dialect, start in ((JSON, "<tool_call>\n"), (CODER, "<tool_call>"), (GRANITE, "<|tool_call|>")):
        answer = StreamedAnswer(dialect, [start, PARIS_JSON[:-3]])
        assert answer.unfinished == '{"city": "Paris'


@pytest.mark.parametrize("separator", ["[ARGS]", "[ARGS] ", "\n"])
def test_a_name_before_its_arguments_is_a_call_if_they_are_the_whole_answer(separator: str) -> None:
    call = f'get_weather{separator}{{"city": "Paris"}}'
    for dialect in FORMS:
        answer = read(dialect, call)
        assert (answer.calls, answer.text) == ([PARIS], "")
        assert read(dialect, f"{call}\n{call}").calls == [PARIS] * 2
        for text in (f"{call} is how.", f"no_{call}", f"I look.\n\n{call}", call[:-1], call.replace("{", "[{")):
            assert (read(dialect, text).calls, read(dialect, text).text) == ([], text)


@pytest.mark.parametrize("comment", ["**Note:** it rains.", "(This works.)", '"Done"', "- a\n- b", "你好", "1. Done"])
def test_a_comment_behind_a_call_of_llama_is_text_whatever_it_begins_with(comment: str) -> None:
    answer = read(LLAMA, f"{PARIS_JSON}\n\n{comment}")
    assert (answer.calls, answer.text) == ([PARIS], comment)
    for rest in ('{"name": "get_wea', "[1]", "}", ']: "x"', f"{{{comment}"):
        text = f"{PARIS_JSON}\n{rest}"
        assert (read(LLAMA, text).calls, read(LLAMA, text).text) == ([], text)


# --- gpt-oss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", ["[%s]", "```json\n%s\n```", "```\n%s```", "```json\n[%s]\n```", " [ %s ] ", "```json\n%s"]
)
def test_a_list_or_a_fence_around_the_arguments_of_gpt_oss_is_no_part_of_them(body: str) -> None:
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    body %= '{"city": "Paris"}'
    for end in ("<|call|>", "<|end|><|start|>assistant<|channel|>final<|message|>Hi"):
        answer = read(GPT_OSS, f"{header}{body}{end}")
        assert (answer.calls, answer.text) == ([PARIS], "Hi" if "Hi" in end else "")
    assert read(GPT_OSS, header + body, truncated=False).calls == [PARIS]
    cut = f"{header}{body[: body.index('Paris')]}"
    assert not read(GPT_OSS, cut).calls


@pytest.mark.parametrize("body", ['[{"city": "Paris"}, {"city": "Rome"}]', '[{"city"}]', "```python\nx = {}\n```"])
def test_another_body_of_gpt_oss_is_text(body: str) -> None:
    answer = read(GPT_OSS, f"<|channel|>commentary to=functions.get_weather<|message|>{body}<|call|>")
    assert (answer.calls, answer.unfinished, answer.text) == ([], None, body)


# --- slips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        f"{{{PARIS_JSON}}}",
        f"{{{PARIS_JSON}",
        PARIS_JSON.replace('"name": ', '"name='),
        PARIS_JSON.replace("get_weather", "functions.get_weather"),
        json.dumps({"function": "functions.get_weather", "arguments": PARIS[1]}),
        json.dumps({"arguments": PARIS[1], "name": "functions.get_weather"}),
        str(json.loads(PARIS_JSON)),
        str([json.loads(PARIS_JSON)]),
        '{"name": "get_weather", "arguments": [{"city": "Paris"}]}',
    ],
)
def test_a_slip_in_the_json_of_a_call_is_repaired(written: str) -> None:
    for dialect in (JSON, CODER):
        answer = read(dialect, f"I look.\n<tool_call>\n{written}\n</tool_call>")
        assert (answer.calls, answer.text) == ([PARIS], "I look.")
        nobody = f"<tool_call>\n{written}\n</tool_call>".replace("get_weather", "weather")
        assert (read(dialect, nobody).calls, read(dialect, nobody).text) == ([], nobody)
        cut = f"<tool_call>\n{written[: written.index('Paris')]}"
        assert not read(dialect, cut).calls


def test_an_empty_list_is_no_arguments_to_a_tool_without_parameters() -> None:
    written = '<tool_call>\n{"name": "now", "arguments": []}\n</tool_call>'
    assert read(JSON, written, tools=NOW).calls == [("now", {})]
    for arguments in ("[]", "[null]", "[[]]", "[1]"):
        other = written.replace("now", "get_weather").replace("[]", arguments)
        assert (read(JSON, other).calls, read(JSON, other).text) == ([], other)


def test_the_first_words_of_an_answer_are_not_withheld() -> None:
    for text in ("I will", "你好", "get_weather is"):
        answer = AnswerSplitter(MISTRAL, tools=NOW)
        answer.feed(text)
        assert [part.text for part in answer.take()] == [text]


def test_python_in_quotes_that_is_the_whole_answer_is_a_call() -> None:
    for dialect in FORMS:
        assert read(dialect, str(json.loads(PARIS_JSON))).calls == [PARIS]
        other = "{'name': 'Bob', 'arguments': {}}"
        assert (read(dialect, other).calls, read(dialect, other).text) == ([], other)
