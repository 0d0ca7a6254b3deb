"""Imperfect calls of the forms that write each parameter between marks, the same in all of them.

The outputs come from public bug reports or are variants of them. Each is read whole, letter by letter and cut in two.
"""

from typing import Any, NamedTuple

import pytest

from tests.text.test_imperfect_calls import read, speaking


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
        meant = ("write_file", {"code": code} | ({"tags": []} if "tags" in values else {}))
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
