"""Imperfect output of real models: calls with small faults, examples that are no calls, and truncated calls.

Each test is named after what its user sees; the outputs come from public bug reports or are variants of them.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from app.text.answer.call_reader import MAX_FAILED
from app.text.answer.calls import call_ids, parameter_schemas, usable_call_id
from app.text.answer.json_text import JsonReader
from app.text.answer.splitter import AnswerSplitter
from app.text.dialect import BARE_JSON, HARMONY, JSON_CALLS, NO_DIALECT, Dialect

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        ("log_event", {"day": {"type": "integer"}, "sure": {"type": "boolean"}, "rate": {"type": "number"}}),
        ("write_file", {"code": {"type": "string"}, "tags": {"type": "array"}, "where": {"type": "object"}}),
    )
]


def speaking(parser: str) -> Dialect:
    return Dialect(opening="<think>", closing="</think>", parser=parser)


JSON, CODER, MISTRAL, KIMI = (speaking(name) for name in (JSON_CALLS, "qwen3_coder", "mistral", "kimi_k2"))
MINIMAX, DEEPSEEK, LLAMA, GLM = (speaking(name) for name in ("minimax_m2", "deepseek", BARE_JSON, "glm47"))
GEMMA = speaking("gemma4")
GPT_OSS = Dialect(opening="<|channel|>analysis", closing="<|channel|>final<|message|>", parser=HARMONY)
PARIS = ("get_weather", {"city": "Paris"})
PARIS_JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PARIS_CALL = f"<tool_call>\n{PARIS_JSON}\n</tool_call>"
PARIS_CODER = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"


class StreamedAnswer:
    """A streamed answer as a client puts it together: text, reasoning and calls."""

    def __init__(self, dialect: Dialect, pieces: Sequence[str], *, truncated: bool = True, **options: Any) -> None:
        self.splitter = AnswerSplitter(dialect, **{"tools": TOOLS} | options)
        self.text = self.reasoning = ""
        self._calls: dict[int, list[str]] = {}
        for index in range(len(pieces) + 1):
            is_last = index == len(pieces)
            self.splitter.feed("" if is_last else pieces[index], final=is_last, truncated=truncated)
            for part in self.splitter.take():
                self.text, self.reasoning = self.text + part.text, self.reasoning + part.reasoning
                for piece in part.calls:
                    call = self._calls.setdefault(piece.index, [piece.name, piece.id, ""])
                    call[2] += piece.arguments

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """The complete calls, with their arguments parsed."""
        unfinished = self.splitter.unfinished_call
        return [(name, json.loads(text)) for index, (name, _, text) in self._calls.items() if index != unfinished]

    @property
    def ids(self) -> list[str]:
        return [identifier for _, identifier, _ in self._calls.values()]

    @property
    def unfinished(self) -> str | None:
        index = self.splitter.unfinished_call
        return None if index is None else self._calls[index][2]


def read(dialect: Dialect, written: str, **options: Any) -> StreamedAnswer:
    """Read an answer whole, letter by letter and cut in two at every third place; all must give the same."""
    whole = StreamedAnswer(dialect, [written], **options)
    for pieces in (list(written), *([written[:index], written[index:]] for index in range(0, len(written), 3))):
        other = StreamedAnswer(dialect, pieces, **options)
        assert (other.text, other.reasoning, other.calls) == (whole.text, whole.reasoning, whole.calls)
        assert (other.unfinished, other.splitter.matched_stop) == (whole.unfinished, whole.splitter.matched_stop)
    return whole


@pytest.mark.parametrize("tag", ["answer", "response"])
def test_tags_around_an_answer_are_no_part_of_it(tag: str) -> None:
    dialect = Dialect(opening="<think>", closing="</think>", wrapper=tag)
    answer = read(dialect, f"<think>\nHm\n</think>\n<{tag}>\nHello <{tag}>\n</{tag}>")
    assert (answer.reasoning, answer.text) == ("Hm", f"Hello <{tag}>")
    plain = f"Use <{tag}>x</{tag}>."
    assert read(dialect, plain).text == read(dialect, f"<think>Hm</think>{plain}").text == plain


# --- stop strings ------------------------------------------------------------------------------------------------


def test_a_stop_string_inside_reasoning_does_not_end_the_answer() -> None:
    written = "<think>\nLet me see. Question: what?\n</think>\n\nThe answer is 42. Question: next"
    answer = read(JSON, written, stop=["Question:"])
    assert (answer.reasoning, answer.text) == ("Let me see. Question: what?", "The answer is 42. ")
    assert answer.splitter.matched_stop == "Question:"
    inside = read(JSON, "so Question: it\n</think>Yes", stop=["Question:"], inside=True)
    assert (inside.reasoning, inside.text, inside.splitter.matched_stop) == ("so Question: it", "Yes", "")


def test_a_stop_string_in_the_analysis_of_gpt_oss_does_not_end_the_answer() -> None:
    written = "<|channel|>analysis<|message|>END of it<|end|><|start|>assistant<|channel|>final<|message|>Hello END no"
    answer = read(GPT_OSS, written, stop=["END"])
    assert (answer.reasoning, answer.text, answer.splitter.matched_stop) == ("END of it", "Hello ", "END")


@pytest.mark.parametrize(
    ("dialect", "written"),
    [
        (JSON, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "New\\n\\nYork STOP"}}\n</tool_call>'),
        (CODER, "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n\nYork STOP\n</parameter>\n</function>"),
        (MISTRAL, '[TOOL_CALLS]get_weather[ARGS]{"city": "New\n\nYork STOP"}'),
    ],
)
def test_a_stop_string_inside_arguments_does_not_cut_the_call(dialect: Dialect, written: str) -> None:
    answer = read(dialect, written, stop=["\n\n", "STOP", "York"])
    assert answer.calls == [("get_weather", {"city": "New\n\nYork STOP"})]
    assert not answer.splitter.matched_stop


def test_a_stop_string_that_would_span_reasoning_and_text_does_not_match() -> None:
    answer = read(JSON, "<think>so ST</think>OP it", stop=["STOP"])
    assert (answer.reasoning, answer.text) == ("so ST", "OP it")
    around = read(JSON, f"a ST{PARIS_CALL}OP b", stop=["STOP"])
    assert (around.text, around.calls) == ("a STOP b", [PARIS])


@settings(max_examples=200, deadline=None)
@given(
    text=some.text(alphabet="ab <tol_c>\n", max_size=40),
    stop=some.lists(some.text(alphabet="ab \n", min_size=1, max_size=3), max_size=3),
)
def test_text_ends_at_the_first_stop_string_with_tools_and_without(text: str, stop: list[str]) -> None:
    ends = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    expected = text[: min(ends)[1]] if ends else text
    for tools in ((), TOOLS):
        for pieces in ([text], list(text)):
            assert StreamedAnswer(Dialect(parser=JSON_CALLS), pieces, tools=tools, stop=stop).text == expected


# --- arguments that are not quite JSON -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "before", "after"),
    [
        (JSON, '<tool_call>\n{"name": "write_file", "arguments": ', "}\n</tool_call>"),
        (JSON, '<tool_call>\n[{"arguments": ', ', "name": "write_file"}]\n</tool_call>'),
        (MISTRAL, "[TOOL_CALLS]write_file[ARGS]", ""),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write_file<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        (GPT_OSS, "<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>", "<|call|>"),
        (LLAMA, '{"name": "write_file", "parameters": ', "}"),
        (KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0<|tool_call_argument_begin|>", ""),
    ],
)
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"code": "a\tb\nc"}', {"code": "a\tb\nc"}),
        ('{"code": "\\d+ it\\\'s \x00",}', {"code": "\\d+ it's \x00"}),
        (
            '{"tags": [1, 2, ], "where": {"sure": True, "rest": None,}}',
            {"tags": [1, 2], "where": {"sure": True, "rest": None}},
        ),
        ('{"code": "\\ud83d\\ude42 \\ud83d"}', {"code": "🙂 \ufffd"}),
    ],
)
def test_arguments_with_control_characters_and_trailing_commas_arrive(
    dialect: Dialect, before: str, after: str, written: str, meant: Any
) -> None:
    answer = read(dialect, before + written + after)
    assert (answer.calls, answer.text) == ([("write_file", meant)], "")


@pytest.mark.parametrize("body", ["not json", "print(1)", "[1, 2]", '"Paris"', "{'city': 'Paris'}"])
def test_arguments_that_are_no_object_are_text_and_never_empty_ones(body: str) -> None:
    for dialect, written in (
        (GPT_OSS, f"<|channel|>commentary to=functions.get_weather<|message|>{body}<|call|>"),
        (JSON, f'<tool_call>\n{{"name": "get_weather", "arguments": {body}}}\n</tool_call>'),
        (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{body}"),
    ):
        answer = read(dialect, written)
        assert (answer.calls, answer.ids) == ([], [])
        assert body in answer.text


@pytest.mark.parametrize("broken", ['{"city": Paris}', '{"city": "Paris" "days": 3}', '{"city": "He said "hi" to me"}'])
def test_a_call_whose_arguments_break_off_is_never_whole(broken: str) -> None:
    for dialect, written in (
        (JSON, f'<tool_call>\n{{"name": "get_weather", "arguments": {broken}}}\n</tool_call>\n{PARIS_CALL}'),
        (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{broken}"),
        (GPT_OSS, f"<|channel|>commentary to=functions.get_weather<|message|>{broken}<|call|>"),
    ):
        answer = read(dialect, written)
        assert answer.calls == []
        assert answer.unfinished is not None
        assert answer.splitter.ended, "nothing is told behind it"


@pytest.mark.parametrize("stray", ["}", "\n}", "}}", " ] }"])
def test_brackets_too_many_behind_a_call_belong_to_it(stray: str) -> None:
    answer = read(JSON, f"<tool_call>\n{PARIS_JSON}{stray}\n</tool_call>\nDone }}")
    assert (answer.calls, answer.text) == ([PARIS], "Done }")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ("{city: 'Paris'}", {"city": "Paris"}),
        ('{city:"Paris, France"}', {"city": "Paris, France"}),
        ('{where:{"a": ["x, y", 1, true]}}', {"where": {"a": ["x, y", 1, True]}}),
        ('{city:<|"|>"quoted"<|"|>,days:2}', {"city": '"quoted"', "days": 2}),
        ("{city:it's}", {"city": "it's"}),
        ('{city:Paris<|"|>}', {"city": "Paris"}),
        ('{city:Paris, France<|"|>,days:2}', {"city": "Paris, France", "days": 2}),
        ('{days:2,city:Paris<|"|>}', {"days": 2, "city": "Paris"}),
        ('{a:x,city:<|"|>Paris<|"|>}', {"a": "x", "city": "Paris"}),
        ("{city='Paris',days:2}", {"city": "Paris", "days": 2}),
        ("{city='Paris'}", {"city": "Paris"}),
        ('(city:<|"|>Paris (France)<|"|>,days:2)', {"city": "Paris (France)", "days": 2}),
    ],
)
def test_ordinary_quotes_of_gemma_are_quotes(written: str, arguments: Any) -> None:
    answer = read(GEMMA, f"<|tool_call>call:get_weather{written}<tool_call|>")
    assert (answer.calls, answer.text) == ([("get_weather", arguments)], "")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("<parameter=code>\nls\n<parameter=where>\n{}\n</parameter>\n", {"code": "ls", "where": {}}),
        ("<parameter=code>\nls\n", {"code": "ls"}),
        ("<parameter=tags>\n[]\n</parameter>\n<parameter=code>\nls\n\n", {"tags": [], "code": "ls\n"}),
        ("<parameter=code>\na\n<parameter=other>\nb\n</parameter>\n", {"code": "a\n<parameter=other>\nb"}),
        (
            "<parameter=code>\na\n<parameter=where>\nb\n</parameter>\n<parameter=where>\n{}\n</parameter>\n",
            {"code": "a\n<parameter=where>\nb", "where": {}},
        ),
        (
            "<parameter=code>\n<parameter=where>\n/a\n</parameter>\n</function>\nDone\n</parameter>\n",
            {"code": "<parameter=where>\n/a\n</parameter>\n</function>\nDone"},
        ),
    ],
)
def test_a_parameter_of_qwen_that_is_not_closed_ends_where_the_next_one_begins(written: str, arguments: Any) -> None:
    call = f"<tool_call>\n<function=write_file>\n{written}</function>\n</tool_call>"
    answer = read(CODER, call, truncated=False)
    assert (answer.calls, answer.text) == ([("write_file", arguments)], "")
    if "</parameter>" not in written:
        assert read(CODER, f"{call}\n{call}", truncated=False).calls == [("write_file", arguments)] * 2


@pytest.mark.parametrize("closing", ["\n", "\n</parameter1>\n"])
def test_a_parameter_of_qwen_that_is_not_closed_swallows_no_later_call(closing: str) -> None:
    broken = f"<tool_call>\n<function=write_file>\n<parameter=code>\nls{closing}</function>\n</tool_call>\n"
    answer = read(CODER, f"{broken}<tool_call>\n{PARIS_CODER}\n</tool_call>")
    assert answer.calls == [("write_file", {"code": "ls"}), PARIS]


@pytest.mark.parametrize("examples", [1, 2])
def test_calls_that_qwen_writes_into_a_file_stay_in_the_file(examples: int) -> None:
    code = "Use:" + f"\n<tool_call>\n{PARIS_CODER}\n</tool_call>" * examples
    written = f"<function=write_file>\n<parameter=code>\n{code}\n</parameter>\n</function>"
    answer = read(CODER, f"<tool_call>\n{written}\n</tool_call>\n<tool_call>\n{PARIS_CODER}\n</tool_call>")
    assert answer.calls == [("write_file", {"code": code}), PARIS]
    open_end = "<function=bash>\n<parameter=x>"
    assert read(CODER, f"<tool_call>\n{written.replace(code, open_end)}\n</tool_call>").calls == [
        ("write_file", {"code": open_end})
    ]


def test_a_file_full_of_calls_costs_no_more_than_its_length() -> None:
    def seconds(examples: int) -> float:
        code = "Use:" + f"\n{PARIS_CODER}" * examples
        written = (
            f"<tool_call>\n<function=write_file>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>"
        )
        began = time.process_time()
        assert StreamedAnswer(CODER, [written]).calls == [("write_file", {"code": code})]
        return time.process_time() - began

    assert min(seconds(1600) for _ in range(3)) < 20 * min(seconds(200) for _ in range(3))


@pytest.mark.parametrize("surplus", ["</function>", "</function_invocation>", "</function>\n</function>"])
def test_a_second_end_of_a_function_of_qwen_swallows_no_later_call(surplus: str) -> None:
    written = "<function=write_file>\n<parameter=code>\nx\n</parameter>\n</function>"
    calls = f"<tool_call>\n{written}\n{surplus}\n</tool_call>\n<tool_call>\n{PARIS_CODER}\n</tool_call>"
    answer = read(CODER, calls)
    assert (answer.calls, answer.text) == ([("write_file", {"code": "x"}), PARIS], "")
    alone = read(CODER, f"<tool_call>\n{PARIS_CODER}\n{surplus}\n</tool_call>")
    assert (alone.calls, alone.text) == ([PARIS], "")


@pytest.mark.parametrize(
    "written",
    [
        '<function=get_weather>\n<parameter="city">\nParis\n</parameter>\n</function>',
        "<function=get_weather>\n<parameter= 'city' >\nParis\n</parameter>\n</function>",
        '<function="get_weather">\n<parameter=city>\nParis\n</parameter>\n</function>',
        '<function="get_weather">\n{"city": "Paris"}\n</function>',
        "<function=get_weather>\n<parameter=city\nParis\n</parameter>\n</function>",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter/>\n</function>",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter_city>\n</function>",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter\n</function>",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter_function>",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter_function>\n</function>",
    ],
)
def test_marks_of_qwen_that_are_slightly_off_are_marks(written: str) -> None:
    answer = read(CODER, f"<tool_call>\n{written}\n</tool_call>", truncated=False)
    assert (answer.calls, answer.text) == ([PARIS], "")


def test_a_parameter_of_qwen_that_is_closed_twice_does_not_end_in_a_mark() -> None:
    written = (
        "<function=write_file>\n<parameter=code>\nls /mnt\n</parameter>\n</parameter>\n"
        "<parameter=tags>\n[1]\n</parameter>\n</parameter>\n</function>"
    )
    answer = read(CODER, f"<tool_call>\n{written}\n</tool_call>")
    assert (answer.calls, answer.text) == ([("write_file", {"code": "ls /mnt", "tags": [1]})], "")
    for code in ("<parameter=a>\n1\n</parameter>", "</parameter>"):
        written = f"<function=write_file>\n<parameter=code>\n{code}\n</parameter>\n</function>"
        assert read(CODER, f"<tool_call>\n{written}\n</tool_call>").calls == [("write_file", {"code": code})]


def test_a_call_of_qwen_without_the_end_of_its_function_is_a_call() -> None:
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>"
    for written in (call, f"{call}\n{call}", f"{call}\n<tool_call>\n{PARIS_CODER}\n</tool_call>"):
        answer = read(CODER, written)
        assert (answer.calls, answer.text) == ([PARIS] * written.count("Paris"), "")
    nothing = read(CODER, "<tool_call>\n<function=get_weather>\n</tool_call>")
    assert (nothing.calls, nothing.text) == ([("get_weather", {})], "")


@pytest.mark.parametrize("start", ["<|tool_call>:", "<tool_call:", "<|tool_call>call:"])
def test_a_call_of_gemma_with_an_imperfect_beginning_is_a_call(start: str) -> None:
    answer = read(GEMMA, f'{start}get_weather{{city:<|"|>Paris<|"|>}}<tool_call|>')
    assert (answer.calls, answer.text) == ([PARIS], "")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("get_weather</arg_value>", {}),
        ("get_weather<tool_call>city</arg_key><arg_value>Paris</arg_value>", {"city": "Paris"}),
        ("get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n", {"city": "Paris"}),
    ],
)
def test_a_wrong_mark_in_a_call_of_glm_is_read_as_the_right_one(written: str, arguments: Any) -> None:
    answer = read(GLM, f"<tool_call>{written}</tool_call>")
    assert (answer.calls, answer.text) == ([("get_weather", arguments)], "")


@pytest.mark.parametrize(
    ("written", "code"),
    [
        (r"'plt.plot(x, \'red\', label=\'sin\')'", "plt.plot(x, 'red', label='sin')"),
        ('"plt.plot(x, "red", label="sin")"', 'plt.plot(x, "red", label="sin")'),
        ("'f(a=1, b=2)', tags=['x']", "f(a=1, b=2)"),
    ],
)
def test_a_string_of_python_does_not_end_at_what_looks_like_a_parameter(written: str, code: str) -> None:
    answer = read(speaking("pythonic"), f"<|tool_call_start|>[write_file(code={written})]<|tool_call_end|>")
    (call,) = answer.calls
    assert (call[0], call[1]["code"], call[1].keys() - {"code", "tags"}) == ("write_file", code, set())


@pytest.mark.parametrize("space", ["\u00a0", "\u202f", "\u3000", "\x0b", "\x1f", "\u2028"])
def test_white_space_that_json_does_not_know_is_told_as_a_space(space: str) -> None:
    answer = read(JSON, PARIS_CALL.replace(": ", f":{space}").replace('"}}', f'",{space}"days":{space}2}}}}'))
    assert answer.calls == [("get_weather", {"city": "Paris", "days": 2})]


@pytest.mark.parametrize("more", ['"id": "call_1"', '"id": null, "type": "function"', '"index": 0'])
def test_members_behind_the_arguments_of_a_call_belong_to_it(more: str) -> None:
    for dialect, start, end in ((JSON, "<tool_call>\n", "\n</tool_call>"), (MISTRAL, "[TOOL_CALLS]", "")):
        answer = read(dialect, f"{start}{PARIS_JSON[:-1]}, {more}}}{end}")
        assert (answer.calls, answer.text) == ([PARIS], "")


def test_a_tool_may_have_the_longest_name_that_a_request_may_give_it() -> None:
    name = "n" * 300
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    written = f"<tool_call>\n<function={name}>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert read(CODER, written, tools=[tool]).calls == [(name, {"a": 1})]


def test_a_value_of_glm_without_its_opening_mark_is_a_value() -> None:
    written = "<tool_call>get_weather<arg_key>city</arg_key>Paris</arg_value></tool_call>"
    assert read(GLM, written).calls == [PARIS]


def test_a_parameter_has_the_type_that_its_reference_names() -> None:
    definitions = {"$defs": {"Zip": {"type": "string"}, "Many": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}}}
    references = {"zip": "#/$defs/Zip", "others": "#/$defs/Many", "self": "#/properties/self"}
    properties = {name: {"$ref": reference} for name, reference in references.items()}
    schema = {"type": "object", "properties": properties, **definitions}
    for parameters in (schema, {"$ref": "#/$defs/All", "$defs": {**definitions["$defs"], "All": schema}}):
        tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
        written = "<function=find>" + "".join(
            f"\n<parameter={name}>\n0123\n</parameter>" for name in ("zip", "others", "self")
        )
        (call,) = read(CODER, f"<tool_call>\n{written}\n</function>\n</tool_call>", tools=[tool]).calls
        assert call == ("find", {"zip": "0123", "others": "0123", "self": "0123"})


def test_a_small_schema_that_refers_to_large_ones_is_read_in_no_time() -> None:
    def tool(size: int) -> dict[str, Any]:
        parts = {"d": {"anyOf": [{"$ref": "#/t", "title": "x"}] * size}, "t": dict.fromkeys(map(str, range(size)), 0)}
        properties = {f"a{number}": {"$ref": "#/d", "title": "x"} for number in range(size)}
        return {"function": {"name": "f", "parameters": {"properties": properties, **parts}}}

    def seconds(size: int) -> float:
        tools, began = [tool(size)], time.process_time()
        assert len(parameter_schemas(tools)["f"]) == size
        return time.process_time() - began

    assert min(seconds(800) for _ in range(3)) < 20 * min(seconds(100) for _ in range(3)), "grows with its size alone"


def test_a_bracket_that_is_missing_before_the_mark_is_added() -> None:
    answer = read(JSON, '<tool_call>\n{"name": "write_file", "arguments": {"tags": ["a", "b"\n</tool_call>')
    assert answer.calls == [("write_file", {"tags": ["a", "b"]})]
    cut = read(JSON, '<tool_call>\n{"name": "write_file", "arguments": {"tags": ["a", "b"')
    assert (cut.calls, cut.unfinished) == ([], '{"tags": ["a", "b"')


@pytest.mark.parametrize(
    "written",
    [
        '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Paris"}}',
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}',
        '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Paris"',
    ],
)
def test_brackets_that_are_missing_around_a_whole_call_are_added(written: str) -> None:
    answer = read(JSON, f"<tool_call>\n{written}\n</tool_call>")
    assert (answer.calls, answer.text) == ([PARIS], "")


@pytest.mark.parametrize(
    ("dialect", "written"),
    [
        (JSON, f"<tool_call>\n{PARIS_JSON[:-2]}"),
        (LLAMA, PARIS_JSON[:-1]),
        (LLAMA, f"[{PARIS_JSON}"),
        (MISTRAL, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"'),
        (MISTRAL, f"[TOOL_CALLS][{PARIS_JSON[:-1]}"),
        (GPT_OSS, '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"'),
    ],
)
def test_brackets_that_a_model_forgets_at_the_end_of_its_answer_are_added_and_where_it_is_cut_they_are_not(
    dialect: Dialect, written: str
) -> None:
    assert read(dialect, written, truncated=False).calls == [PARIS]
    assert not read(dialect, written).calls
    assert not read(dialect, written.rpartition("is")[0], truncated=False).calls


@pytest.mark.parametrize(
    "members",
    [
        *(f'"{name}": {{"city": "Paris"}}' for name in ("args", "params", "input", "tool_input", "kwargs")),
        '"city": "Paris"',
        '"arguments": {}, "city": "Paris"',
    ],
)
def test_arguments_under_another_name_or_beside_the_name_of_the_tool_are_its_arguments(members: str) -> None:
    written = f'{{"name": "get_weather", {members}}}'
    for dialect, text in ((JSON, f"<tool_call>\n{written}\n</tool_call>"), (LLAMA, written)):
        assert read(dialect, text).calls == [PARIS]
    unknown = written.replace('"city"', '"town"').replace('"arg', '"gra').replace('"p', '"q').replace("input", "put")
    assert not [arguments for _, arguments in read(LLAMA, unknown.replace("kw", "wk")).calls if arguments]


@pytest.mark.parametrize(
    "wrap", ["%s", "[%s]", "```json\n%s\n```", '<tools>{"type": "function", "function": %s}</tools>']
)
def test_the_definition_of_a_tool_is_no_call_of_it(wrap: str) -> None:
    definition = {"name": "get_weather", "description": "Tells it.", "parameters": TOOLS[0]["function"]["parameters"]}
    for dialect in (JSON, LLAMA):
        answer = read(dialect, wrap % json.dumps(definition))
        assert (answer.calls, answer.unfinished) == ([], None)


def test_the_quotes_of_a_text_that_may_be_null_are_part_of_it() -> None:
    properties = {"query": {"type": ["string", "null"]}}
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"properties": properties}}}]
    for written, query in (('"exact phrase"', '"exact phrase"'), ("null", None), ("plain", "plain")):
        call = f"<tool_call>\n<function=search>\n<parameter=query>\n{written}\n</parameter>\n</function>\n</tool_call>"
        assert read(CODER, call, tools=tools).calls == [("search", {"query": query})]


def test_a_call_of_gpt_oss_without_a_body_has_no_arguments() -> None:
    assert read(GPT_OSS, "<|channel|>commentary to=functions.get_weather<|message|><|call|>").calls == [
        ("get_weather", {})
    ]
    cut = read(GPT_OSS, "<|channel|>commentary to=functions.get_weather<|message|>")
    assert (cut.calls, cut.ids, cut.text) == ([], [], "")


# --- calls written parameter by parameter ------------------------------------------------------------------------


def coder(name: str, **parameters: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def glm(name: str, **parameters: str) -> str:
    written = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters.items()
    )
    return f"<tool_call>{name}\n{written}</tool_call>"


def minimax(name: str, **parameters: str) -> str:
    written = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{written}</invoke>\n</minimax:tool_call>'


TAGGED = [(CODER, coder), (GLM, glm), (MINIMAX, minimax)]


@pytest.mark.parametrize(("dialect", "write"), TAGGED)
@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("day", "2026-01-15", "2026-01-15"),
        ("day", "3.5", "3.5"),
        ("day", "4.0", 4),
        ("day", "null", None),
        ("sure", "yes", "yes"),
        ("sure", "True", True),
        ("rate", "much", "much"),
        ("rate", "1e400", "1e400"),
        ("rate", "7", 7),
    ],
)
def test_a_parameter_that_does_not_fit_its_type_stays_text(
    dialect: Dialect, write: Any, key: str, written: str, meant: Any
) -> None:
    answer = read(dialect, write("log_event", **{key: written}))
    assert (answer.calls, answer.text) == ([("log_event", {key: meant})], "")


@pytest.mark.parametrize(("dialect", "write"), TAGGED)
def test_lists_and_objects_that_do_not_parse_stay_text(dialect: Dialect, write: Any) -> None:
    answer = read(dialect, write("write_file", tags="[a, b", where="{'x': None}"))
    assert answer.calls == [("write_file", {"tags": "[a, b", "where": {"x": None}})]


@pytest.mark.parametrize(("dialect", "write"), TAGGED)
@pytest.mark.parametrize(
    "code",
    [
        'print("</parameter>")',
        "</function>",
        "<tool_call>\n</tool_call>",
        "a </arg_value> b",
        "</invoke></minimax:tool_call>",
        "  kept\n",
        "null",
        "3",
        "",
    ],
)
def test_marks_inside_a_parameter_do_not_end_it(dialect: Dialect, write: Any, code: str) -> None:
    answer = read(dialect, write("write_file", code=code, tags="[]"))
    assert (answer.calls, answer.text) == ([("write_file", {"code": code, "tags": []})], "")


# --- misplaced calls -----------------------------------------------------------------------------------------------


UNMARKED = [
    (CODER, PARIS_CODER, "</tool_call>"),
    (speaking("seed"), "<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>", "</seed:tool_call>"),
    (LLAMA, '<function=get_weather>{"city": "Paris"}</function>', ""),
    (
        MINIMAX,
        '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>',
        "</minimax:tool_call>",
    ),
    (
        DEEPSEEK,
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>',
        "<｜tool▁calls▁end｜>",
    ),
    (
        KIMI,
        '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>',
        "<|tool_calls_section_end|>",
    ),
]


@pytest.mark.parametrize(("dialect", "call", "end"), UNMARKED)
def test_a_call_without_its_opening_mark_is_a_call(dialect: Dialect, call: str, end: str) -> None:
    for written in (call, f"{call}\n{end}"):
        answer = read(dialect, f"I will look.\n\n{written}")
        assert (answer.text, answer.calls) == ("I will look.", [PARIS])
    assert read(dialect, f"{call}\n{call}").calls == [PARIS] * 2
    assert read(dialect, f"plan\n{call}", inside=True).calls == [PARIS]
    nobody = call.replace("get_weather", "no_such_tool")
    assert (read(dialect, nobody).text, read(dialect, nobody).calls) == (nobody, [])


@pytest.mark.parametrize(
    "written", [PARIS_JSON, f"```json\n{PARIS_JSON}\n```", f"<tools>\n{PARIS_JSON}\n</tools>", f"[{PARIS_JSON}]"]
)
def test_json_that_is_the_whole_answer_is_a_call(written: str) -> None:
    for dialect in (JSON, CODER, MISTRAL, LLAMA):
        assert read(dialect, written).calls == [PARIS]
        assert read(dialect, f"<think>hm</think>\n\n{written}").calls == [PARIS]
        for text in (f"Like so: {written}", f"{written}\nThat is it."):
            if not (dialect is LLAMA and text[0] in "[{"):
                assert (read(dialect, text).calls, read(dialect, text).text) == ([], text)
        assert read(dialect, written, by_grammar=True).text == written


@pytest.mark.parametrize("written", [PARIS_JSON, f"[{PARIS_JSON}]", f"{PARIS_JSON}; {PARIS_JSON}"])
def test_a_sentence_behind_a_call_of_llama_is_text(written: str) -> None:
    answer = read(LLAMA, f"{written} \n\nWould you like to know more?")
    assert (answer.calls, answer.text) == ([PARIS] * written.count("Paris"), "Would you like to know more?")
    cut = f'{PARIS_JSON}; {{"name": "get_wea'
    assert (read(LLAMA, cut).calls, read(LLAMA, cut).text) == ([], cut)


def test_json_that_names_no_tool_is_streamed_as_text() -> None:
    splitter = AnswerSplitter(JSON, tools=TOOLS)
    splitter.feed('{"name": "Bob", ')
    assert [part.text for part in splitter.take()] == ['{"name": "Bob",']


@pytest.mark.parametrize(
    ("dialect", "call"),
    [
        (CODER, f"<tool_call>\n{PARIS_CODER}\n</tool_call>"),
        (JSON, PARIS_CALL),
        (MINIMAX, minimax("get_weather", city="Paris")),
        (
            KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        ),
    ],
)
def test_a_call_at_the_end_of_reasoning_is_a_call(dialect: Dialect, call: str) -> None:
    answer = read(dialect, f"plan: call it\n{call}", inside=True)
    assert (answer.reasoning, answer.calls, answer.text) == ("plan: call it", [PARIS], "")
    ended = read(dialect, f"plan: call it\n{call}\n</think>\n\n", inside=True)
    assert (ended.reasoning, ended.calls, ended.text) == ("plan: call it", [PARIS], "")
    assert read(dialect, f"<think>plan {call}\n{call}").calls == [PARIS] * 2
    for thought in (f"plan {call} or not", call[:-30], call[:12], f"{call}\nor {call[:20]}"):
        answer = read(dialect, f"plan {thought}", inside=True)
        assert (answer.reasoning, answer.calls, answer.text) == (f"plan {thought}".rstrip(), [], "")
    closed = read(dialect, f"plan {call}</think>\n\nHello", inside=True)
    assert (closed.reasoning, closed.calls, closed.text) == (f"plan {call}", [], "Hello")


# --- tools that were not offered -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "written"),
    [
        (JSON, 'Example:\n```xml\n<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>\n```\nThat was it.'),
        (JSON, '<tool_call>\n[{"name": "x", "arguments": {}}]\n</tool_call> no'),
        (CODER, "<tool_call>\n<function=no_such_tool>\n</function>\n</tool_call>"),
        (MISTRAL, '[TOOL_CALLS]abc123DEF[ARGS]{"city": "Paris"}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "no_such_tool", "arguments": {}}]'),
        (GLM, "<tool_call>no_such_tool\n</tool_call>"),
        (MINIMAX, '<minimax:tool_call>\n<invoke name="no_such_tool">\n</invoke>\n</minimax:tool_call>'),
        (
            KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.none:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>none<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (LLAMA, '{"name": "no_such_tool", "parameters": {}}'),
        (speaking("pythonic"), "<|tool_call_start|>[none(city='Paris')]<|tool_call_end|>"),
        (speaking("gemma4"), "<|tool_call>call:none{}<tool_call|>"),
    ],
)
def test_a_call_of_a_tool_that_nobody_offered_is_text(dialect: Dialect, written: str) -> None:
    answer = read(dialect, written)
    assert (answer.text, answer.calls) == (written, [])


def test_a_call_behind_an_example_is_still_found() -> None:
    example = '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>'
    answer = read(JSON, f"Like\n{example}\n\n{PARIS_CALL}")
    assert (answer.text, answer.calls) == (f"Like\n{example}", [PARIS])


def test_messages_of_gpt_oss_to_nobody_are_text() -> None:
    final = "<|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    for recipient, body in (
        ("assistant", "note to self"),
        ("python code", "print(1)"),
        ("browser.search", '{"query": "x"}'),
    ):
        answer = read(GPT_OSS, f"<|channel|>commentary to={recipient}<|message|>{body}<|end|>{final}")
        assert (answer.text, answer.calls) == (f"{body}\n\nHello", [])
        thought = read(GPT_OSS, f"<|channel|>analysis to={recipient}<|message|>{body}<|call|>{final}")
        assert (thought.reasoning, thought.text, thought.calls) == (body, "Hello", [])


def test_a_header_of_gpt_oss_that_no_message_follows_is_dropped() -> None:
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    answer = read(GPT_OSS, f"<|channel|>commentary?commentary?<|end|>{thought}{final}")
    assert (answer.reasoning, answer.text) == ("Hm", "Hello")


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("<|constrain|>", "<DAFNY_CODE>\nfunction Sum()"),
        ("<|constrain|>answer<|constrain|>", '{"joke": "x"}'),
        ("<|constrain|>json", '\n{"joke": "x"}'),
    ],
)
def test_a_header_of_gpt_oss_whose_last_mark_is_missing_begins_the_answer(header: str, body: str) -> None:
    thought = "<|channel|>analysis<|message|>Hm<|end|>"
    answer = read(GPT_OSS, f"{thought}<|start|>assistant<|channel|>final {header}{body}<|return|>")
    assert (answer.reasoning, answer.text) == ("Hm", body.strip())


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather<|channel|>commentary json",
        "<|channel|>commentary<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|channel|>commentary to=functions.get_weatherjson",
    ],
)
def test_a_header_of_gpt_oss_that_is_written_twice_or_glued_names_its_tool(header: str) -> None:
    answer = read(GPT_OSS, f'{header}<|message|>{{"city": "Paris"}}<|call|>')
    assert (answer.calls, answer.text) == ([PARIS], "")


def test_the_recipient_of_gpt_oss_may_stand_before_its_channel() -> None:
    written = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "<|end|>"}<|call|>'
    assert read(GPT_OSS, written).calls == [("get_weather", {"city": "<|end|>"})]


# --- ids -----------------------------------------------------------------------------------------------------------


def test_ids_fit_every_template_and_those_of_the_model_are_kept() -> None:
    ids = {usable_call_id("") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(identifier) == 9 and identifier.isascii() and identifier.isalnum() for identifier in ids)
    written = '[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{"city": "Paris"}'
    answer = read(MISTRAL, written)
    assert (answer.calls, answer.ids) == ([PARIS], ["abc123DEF"])
    listed = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "XYZ987abc"}]'
    assert read(MISTRAL, listed).ids == ["XYZ987abc"]
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:4<|tool_call_argument_begin|>{}"
    assert read(KIMI, kimi).ids == ["functions.get_weather:4"]


def test_an_id_that_the_model_writes_again_is_told_as_another_one() -> None:
    """Claude Code takes a second call with the same id for an interrupted call, and gives up."""
    written = '[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{"city": "Paris"}'
    first, second = read(MISTRAL, written + written).ids
    assert (first, second != first, len(second)) == ("abc123DEF", True, 9)
    before = [{"role": "assistant", "content": None, "tool_calls": [{"id": "abc123DEF", "type": "function"}]}]
    [again] = read(MISTRAL, written, used_ids=call_ids(before)).ids
    assert (again != "abc123DEF", len(again)) == (True, 9)
    listed = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abc123DEF"}]'
    assert read(MISTRAL, listed, used_ids=call_ids([{"role": "user", "content": "Hi"}, *before])).ids != ["abc123DEF"]


# --- truncated calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [PARIS_CALL, f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(PARIS[1])}"])
def test_a_call_that_is_cut_anywhere_is_never_told_as_whole(call: str) -> None:
    dialect = JSON if call == PARIS_CALL else MISTRAL
    whole = call.index('"Paris"}') + len('"Paris"}')
    for end in range(len(call)):
        answer = read(dialect, call[:end])
        assert (answer.calls == [PARIS]) == (end >= whole)
        assert answer.calls or answer.unfinished is not None or answer.text == call[:end]


@pytest.mark.parametrize(("dialect", "write"), TAGGED)
def test_a_call_of_parameters_that_is_cut_is_text(dialect: Dialect, write: Any) -> None:
    call = write("get_weather", city="Paris", days="3")
    for end in range(0, len(call) - 30, 5):
        answer = read(dialect, call[:end])
        assert (answer.calls, answer.unfinished, answer.text) == ([], None, call[:end])


# --- white space ---------------------------------------------------------------------------------------------------


def test_white_space_around_calls_is_as_it_was_written() -> None:
    assert read(JSON, f"I will check.\n\n{PARIS_CALL}\n\nNow I wait.").text == "I will check.\n\n\n\nNow I wait."
    assert read(JSON, f"I will check.\n\n{PARIS_CALL}\n").text == "I will check."
    assert read(JSON, f"I will check.{PARIS_CALL} Now I wait.").text == "I will check. Now I wait."
    assert read(JSON, f"{PARIS_CALL}\n\nNow I wait.\n").text == "Now I wait.\n"
    for text in ("Let me look.\n<tool_call>", "Let me look.\n\n<tool_call> it is \n", " \n x \n"):
        assert read(JSON, text).text == text
    two = f"{coder('get_weather', city='Paris')}\n{coder('get_weather')}"
    assert read(CODER, f"Look\n\n{two} !").text == "Look\n\n\n !"


# --- costs ---------------------------------------------------------------------------------------------------------


def test_an_answer_of_beginnings_costs_no_more_than_its_length() -> None:
    begun = "<tool_call>\n<function=write_file>\n<parameter=code>\n"
    answer = StreamedAnswer(CODER, [begun] * 2000)
    assert (answer.text, answer.calls) == (begun * 2000, [])
    assert answer.splitter._reader.failed == MAX_FAILED
    blank = StreamedAnswer(JSON, [" \n"] * 5000)
    assert blank.text == " \n" * 5000


VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False, allow_infinity=False) | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    value=some.dictionaries(some.text(max_size=4), VALUES) | some.lists(VALUES),
    ascii_only=some.booleans(),
    data=some.data(),
)
def test_json_is_read_letter_by_letter_as_it_is(value: Any, ascii_only: bool, data: some.DataObject) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only, indent=data.draw(some.sampled_from([None, 1])))
    reader, told_text, held = JsonReader(), "", ""
    for letter in f"{written} rest":
        held += letter
        count, text = reader.read(held)
        told_text, held = told_text + text, held[count:]
    assert (told_text, held, reader.complete) == (written, " rest", True)


def test_a_plain_text_is_untouched() -> None:
    text = f"  {PARIS_CALL} {PARIS_JSON}\n"
    assert read(NO_DIALECT, text, tools=()).text == text
