"""Imperfect calls of the forms that write each parameter between marks, the same in all of them.

The outputs come from public bug reports or are variants of them. Each is read whole, letter by letter and cut in two.
"""

import time
from typing import Any, NamedTuple

import pytest

from tests.text.test_imperfect_calls import StreamedAnswer, read, speaking


class Form(NamedTuple):
    """The marks of a form as its template writes them."""

    parser: str
    head: str
    parameter: str
    closing: str
    finish: str
    end: str

    def parameters(self, **values: str) -> str:
        """Write closed parameters."""
        return "".join(f"{self.parameter.replace('KEY', key)}{value}{self.closing}" for key, value in values.items())

    def call(self, name: str, parameters: str) -> str:
        """Write a call around parameters."""
        return f"{self.head.replace('NAME', name)}{parameters}{self.finish}{self.end}"


BAR = "｜DSML｜"
FORMS = {
    "qwen": Form(
        "qwen3_coder",
        "<tool_call>\n<function=NAME>\n",
        "<parameter=KEY>\n",
        "\n</parameter>\n",
        "</function>\n",
        "</tool_call>",
    ),
    "qwen, one line": Form(
        "qwen3_coder", "<tool_call><function=NAME>", "<parameter=KEY>", "</parameter>", "</function>", "</tool_call>"
    ),
    "seed": Form(
        "seed",
        "<seed:tool_call>\n<function=NAME>\n",
        "<parameter=KEY>",
        "</parameter>\n",
        "</function>\n",
        "</seed:tool_call>",
    ),
    "glm 4.5": Form(
        "glm47",
        "<tool_call>NAME\n",
        "<arg_key>KEY</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "",
        "</tool_call>",
    ),
    "glm 4.7": Form(
        "glm47", "<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>", "</arg_value>", "", "</tool_call>"
    ),
    "longcat": Form(
        "longcat",
        "<longcat_tool_call>NAME\n",
        "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>",
        "</longcat_arg_value>\n",
        "",
        "</longcat_tool_call>",
    ),
    "minimax": Form(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        '<parameter name="KEY">',
        "</parameter>\n",
        "</invoke>\n",
        "</minimax:tool_call>",
    ),
    "dsml": Form(
        "dsml",
        f'<{BAR}tool_calls>\n<{BAR}invoke name="NAME">\n',
        f'<{BAR}parameter name="KEY">',
        f"</{BAR}parameter>\n",
        f"</{BAR}invoke>\n",
        f"</{BAR}tool_calls>",
    ),
    "hunyuan": Form(
        "hunyuan",
        "<tool_calls:opensource>\n<tool_call:opensource>NAME<tool_sep:opensource>\n",
        "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>",
        "</arg_value:opensource>\n",
        "</tool_call:opensource>\n",
        "</tool_calls:opensource>",
    ),
    "minicpm": Form("minicpm5", '<function name="NAME">', '<param name="KEY">', "</param>", "</function>", ""),
    "muse": Form(
        "muse_spark",
        '<atem:function_calls>\n<atem:invoke name="NAME">\n',
        '<atem:parameter name="KEY">',
        "</atem:parameter>\n",
        "</atem:invoke>\n",
        "</atem:function_calls>",
    ),
    "kimi k3": Form(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>',
        '<|open|>argument key="KEY"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
    ),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
PARIS, ROME = ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome", "days": 2})


def calls_of(form: Form, written: str, **options: Any) -> list[tuple[str, Any]]:
    """Return the calls of an answer that has nothing else."""
    answer = read(speaking(form.parser), written, **options)
    assert (answer.text, answer.unfinished) == ("", None)
    return answer.calls


def rome(form: Form) -> str:
    return form.call("get_weather", form.parameters(city="Rome", days="2"))


# --- values without their closing mark -----------------------------------------------------------------------------


@every_form
def test_a_value_that_is_not_closed_ends_where_the_next_parameter_begins(form: Form) -> None:
    city, _, days = form.parameters(city="Rome", days="2").partition(form.closing)
    for layout in ("\n" if form.closing.endswith("\n") else "", "\n"):
        call = form.call("get_weather", f"{city}{layout}{days}")
        assert calls_of(form, call) == [ROME]
        assert calls_of(form, f"{call}\n{rome(form)}") == [ROME, ROME]


@every_form
def test_a_value_that_is_not_closed_ends_with_its_call(form: Form) -> None:
    layout = "\n" if form.closing.endswith("\n") else ""
    call = form.call("get_weather", form.parameters(city="Paris").removesuffix(form.closing) + layout)
    assert calls_of(form, f"{call}\n{rome(form)}") == [PARIS, ROME]
    assert calls_of(form, call, truncated=False) == [PARIS]
    assert read(speaking(form.parser), call).calls == [], "the value may go on"


@every_form
def test_a_call_without_its_end_ends_where_the_next_one_begins(form: Form) -> None:
    call = form.head.replace("NAME", "get_weather") + form.parameters(city="Paris")
    assert calls_of(form, call + rome(form)) == [PARIS, ROME]
    assert calls_of(form, f"{call}{form.finish}{rome(form)}") == [PARIS, ROME]


@every_form
@pytest.mark.parametrize("examples", [1, 2])
def test_calls_that_a_value_quotes_are_part_of_it(form: Form, examples: int) -> None:
    code = f"Use:\n{rome(form)} so " * examples
    for values in ({"code": code}, {"code": code, "tags": "[]"}):
        call = form.call("write_file", form.parameters(**values))
        meant: tuple[str, Any] = ("write_file", {**values, "tags": []} if "tags" in values else values)
        assert calls_of(form, call) == [meant]
        assert calls_of(form, f"{call}\n{rome(form)}") == [meant, ROME]


@every_form
def test_a_value_that_names_a_parameter_of_another_tool_is_not_split(form: Form) -> None:
    code = f"a\n{form.parameter.replace('KEY', 'city')}\nb"
    assert calls_of(form, form.call("write_file", form.parameters(code=code))) == [("write_file", {"code": code})]
    given = f"a\n{form.parameter.replace('KEY', 'tags')}\nb"
    call = form.call("write_file", form.parameters(code=given, tags="[]"))
    assert calls_of(form, call) == [("write_file", {"code": given, "tags": []})]


# --- the end of the answer -----------------------------------------------------------------------------------------


@every_form
def test_a_call_whose_last_marks_are_missing_at_the_end_of_the_answer_is_a_call_unless_it_was_cut(form: Form) -> None:
    whole = rome(form)
    last_value = whole.rindex(form.closing.rstrip()) + len(form.closing.rstrip())
    for end in {last_value, whole.rindex(form.end) if form.end else last_value}:
        assert calls_of(form, whole[:end], truncated=False) == [ROME]
        assert calls_of(form, f"{rome(form)}\n{whole[:end]}\n", truncated=False) == [ROME, ROME]
    for written in (whole[:last_value], f"{whole[:last_value]}\n"):
        cut = read(speaking(form.parser), written)
        assert (cut.calls, cut.text) == ([], written)
    for end in (whole.index("Rome"), whole.index("Rome") + 4, whole.index(form.parameter.partition("KEY")[0])):
        begun = read(speaking(form.parser), whole[:end], truncated=False)
        assert (begun.calls, begun.text) == ([], whole[:end])


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "identifier",
    [
        "functions.get_weather:0",
        "functions_get_weather_1",
        "functionsget_weather5",
        "functions.get_weather5",
        "functions.get_weather.0",
        "get_weather_0",
        "get_weather:12",
        "get_weather",
    ],
)
@pytest.mark.parametrize("section", ["tool_calls_section", "tool_call_section"])
def test_an_id_of_kimi_that_is_slightly_off_names_its_tool(identifier: str, section: str) -> None:
    call = f'<|tool_call_begin|>{identifier}<|tool_call_argument_begin|>{{"city": "Paris"}}<|tool_call_end|>'
    answer = read(speaking("kimi_k2"), f"Look.<|{section}_begin|>{call}{call}<|{section}_end|>")
    assert (answer.calls, answer.text) == ([PARIS] * 2, "Look.")


@pytest.mark.parametrize("name", ["read_2", "functions_list", "read", "list"])
def test_a_name_of_kimi_is_never_shortened_to_that_of_another_tool(name: str) -> None:
    tools = [
        {"type": "function", "function": {"name": known}} for known in ("read", "list", "read_2", "functions_list")
    ]
    for written in (f"functions.{name}:0", f"functions.{name}", name):
        call = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        assert read(speaking("kimi_k2"), call, tools=tools).calls == [(name, {})]
    nobody = "<|tool_call_begin|>functions.reader:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read(speaking("kimi_k2"), nobody, tools=tools).text == nobody


@pytest.mark.parametrize("mark", ["<tool_call>\n", "<tool_call>"])
def test_a_tool_that_qwen_writes_as_a_parameter_is_called(mark: str) -> None:
    form = FORMS["qwen"]
    written = rome(form).replace("<tool_call>\n", mark).replace("<function=", "<parameter=")
    assert calls_of(form, f"{written}\n{rome(form)}") == [ROME] * 2
    assert calls_of(form, f"{written}\n{written}") == [ROME] * 2
    for text in (written.replace("get_weather", "city"), written.removeprefix(mark)):
        assert (read(speaking(form.parser), text).text, read(speaking(form.parser), text).calls) == (text, [])


@pytest.mark.parametrize("between", ["", " ", "\n", "<arg_key>", "\\n<arg_key>"])
def test_a_key_of_glm_may_be_joined_to_the_name_of_its_tool(between: str) -> None:
    form = FORMS["glm 4.7"]
    written = rome(form).replace("<arg_key>", between, 1)
    assert calls_of(form, written) == [ROME]
    assert calls_of(form, f"{written}\n{rome(form)}{written}") == [ROME] * 3
    if not between:
        for name in ("get_weatherx", "get_wea", "log_event"):
            unknown = written.replace("get_weather", name)
            assert (read(speaking(form.parser), unknown).text, read(speaking(form.parser), unknown).calls) == (
                unknown,
                [],
            )


# --- marks that are slightly off -----------------------------------------------------------------------------------


def test_line_breaks_that_glm_writes_in_two_letters_are_layout() -> None:
    form = FORMS["glm 4.5"]
    for written in (
        rome(form).replace("\n", "\\n"),
        rome(form).replace(">\n<", ">\\n\n<"),
        rome(form).replace("weather\n", "weather\\n"),
    ):
        assert calls_of(form, f"{written}\n{rome(form)}") == [ROME] * 2
    tags = form.call("write_file", form.parameters(tags='[{\\"id\\": \\"1\\", \\"task\\": \\"a\\\\nb\\"}]'))
    assert calls_of(form, tags.replace("\n", "\\n")) == [("write_file", {"tags": [{"id": "1", "task": "a\nb"}]})]


@every_form
@pytest.mark.parametrize("written", ['"[{\\"id\\": 1}]"', '[{\\"id\\": 1}]', '[{"id": 1}]'])
def test_a_list_that_is_written_as_a_string_is_a_list(form: Form, written: str) -> None:
    call = form.call("write_file", form.parameters(tags=written, code=written))
    assert calls_of(form, call) == [("write_file", {"tags": [{"id": 1}], "code": written})]


@pytest.mark.parametrize("between", ["\n", "", " "])
def test_arguments_of_glm_may_be_json(between: str) -> None:
    form = FORMS["glm 4.7"]
    written = f'<tool_call>get_weather{between}{{"city": "Rome", "days": 2}}\n</tool_call>'
    assert calls_of(form, f"{written}\n{written}{rome(form)}") == [ROME] * 3
    unknown = written.replace("get_weather", "no_such_tool")
    assert read(speaking(form.parser), unknown).text == unknown


@pytest.mark.parametrize("bars", [(BAR, "｜｜DSML｜｜"), ("invoke", "invoke"), (f"<{BAR}parameter", "<parameter")])
@pytest.mark.parametrize("wrap", ["tool_calls", "toolcalls", "function_calls"])
def test_marks_of_deepseek_that_are_slightly_off_are_marks(bars: tuple[str, str], wrap: str) -> None:
    form = FORMS["dsml"]
    written = rome(form).replace(*bars).replace("tool_calls", wrap)
    answer = read(speaking("dsml"), f"Look.{written}")
    assert (answer.calls, answer.text) == ([ROME], "Look.")
    assert calls_of(form, f"{written}\n{rome(form)}") == [ROME] * 2


@pytest.mark.parametrize(
    "head",
    [
        "function<｜tool▁sep｜>get_weather\n```json\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n",
        "get_weather<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>",
    ],
)
def test_a_call_of_deepseek_needs_no_mark_of_its_own(head: str) -> None:
    fence = "\n```" if "```" in head else ""
    call = f'{head}{{"city": "Paris"}}{fence}<｜tool▁call▁end｜>'
    assert read(speaking("deepseek"), f"<｜tool▁calls▁begin｜>{call}{call}<｜tool▁calls▁end｜>").calls == [PARIS] * 2


# --- layout of values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [form for form in FORMS.values() if form is not FORMS["qwen"]])
def test_values_that_all_stand_on_lines_of_their_own_come_without_these_line_breaks(form: Form) -> None:
    padded = form.call("write_file", form.parameters(code="\n/a\n\n/b\n", tags="\n[]\n"))
    assert calls_of(form, padded) == [("write_file", {"code": "/a\n\n/b", "tags": []})]
    code = "\n/a\n"
    for values in ({"code": code, "tags": "[]"}, {"code": code, "tags": "\n[]"}, {"code": code, "tags": "[]\n"}):
        if form.parser != "qwen3_coder":  # whose template writes these line breaks
            call = form.call("write_file", form.parameters(**values))
            assert calls_of(form, call) == [("write_file", {"code": code, "tags": []})]


# --- costs ---------------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("flood", [" \n", "\\n", "word ", "get_weather"])
def test_a_call_that_goes_on_with_nothing_costs_no_more_than_its_length(form: Form, flood: str) -> None:
    head = form.head.replace("NAME", "get_weather")
    for begun in (head, head + form.parameters(city="Paris"), head + form.parameter.replace("KEY", "city")):
        pieces = [begun, *([flood] * 2000)]
        began = time.process_time()
        answer = StreamedAnswer(speaking(form.parser), pieces)
        assert time.process_time() - began < 5
        assert (answer.calls, answer.text) == ([], "".join(pieces))
