"""Imperfect calls whose arguments follow the name as literals: Gemma's, and those of models that write Python.

Each test is named after what its user sees; the outputs come from public bug reports or are variants of them.
"""

from typing import Any

import pytest

from app.text.dialect import Dialect
from app.text.prompt.history_calls import calls_as_text
from tests.text.test_imperfect_calls import GEMMA, PARIS, StreamedAnswer, read, speaking

PYTHONIC = speaking("pythonic")
FUNCTION_GEMMA = speaking("function_gemma")
START, END = "<|tool_call>call:", "<tool_call|>"
PARIS_GEMMA = 'get_weather{city:<|"|>Paris<|"|>}'
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "properties": {
                "command": {"type": "string"},
                "timeout": {"type": "integer"},
                "shell": {"type": ["string", "null"]},
                "environment": {"type": "object"},
            }
        },
    },
}


def read_bash(written: str, dialect: Dialect = GEMMA, **options: Any) -> StreamedAnswer:
    """Read an answer that may call `bash`; `q` stands for the special quote."""
    return read(dialect, written.replace("°", '<|"|>'), tools=[BASH], **options)


# --- Gemma: strings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{command:'ls -la'°}", {"command": "ls -la"}),
        ('{command:"ls -la"°,timeout:3}', {"command": "ls -la", "timeout": 3}),
        (r"{timeout:3,command:':\s*\b\w+'°}", {"timeout": 3, "command": r":\s*\b\w+"}),
        ("{command:'ls' -la 'x'°}", {"command": "'ls' -la 'x'"}),
        ("{command:it's 'x'°}", {"command": "it's 'x'"}),
    ],
)
def test_a_string_of_gemma_that_begins_with_an_ordinary_quote_and_ends_with_its_own_has_neither(
    written: str, arguments: Any
) -> None:
    answer = read_bash(f"{START}bash{written}{END}")
    assert (answer.calls, answer.text) == ([("bash", arguments)], "")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{command:°ls}", {"command": "ls"}),
        ("{timeout:3,command:°awk '{print $1}'}", {"timeout": 3, "command": "awk '{print $1}'"}),
        ("{shell:°sh°,command:°echo a, b\n}", {"shell": "sh", "command": "echo a, b\n"}),
        ("{command:°ls", {"command": "ls"}),
        ("(command:°ls°", {"command": "ls"}),
    ],
)
def test_a_last_string_of_gemma_that_is_not_closed_ends_with_its_call(written: str, arguments: Any) -> None:
    answer = read_bash(f"{START}bash{written}{END}")
    assert (answer.calls, answer.text) == ([("bash", arguments)], "")
    later = read_bash(f"{START}bash{written}{END}{START}bash{{command:°pwd°}}{END}")
    assert later.calls == [("bash", arguments), ("bash", {"command": "pwd"})]
    both = f"{START}bash{written}{END}\n{START}bash{{command:°pwd}}{END}"
    assert read_bash(both).calls == [("bash", arguments), ("bash", {"command": "pwd"})]
    marked = read_bash(f"{START}bash{{shell:°a {END} b°,command:°ls}}{END}")
    assert marked.calls == [("bash", {"shell": f"a {END} b", "command": "ls"})]
    cut = f"{START}bash{written}".replace("°", '<|"|>')
    assert (read_bash(cut).calls, read_bash(cut).text) == ([], cut)


@pytest.mark.parametrize(
    "written",
    ["{", "{command:", "{environment:", "{command:°ls°,", "{command:l°s°3}", "{environment:°", "{x:l°s}", "("],
)
def test_arguments_of_gemma_that_cannot_be_read_are_text(written: str) -> None:
    for call in (f"{START}bash{written}{END}", f"{START}bash{written}{START}nobody{{}}{END}"):
        answer = read_bash(call, truncated=False)
        assert (answer.calls, answer.text) == ([], call.replace("°", '<|"|>'))


def test_an_end_mark_inside_a_string_of_gemma_does_not_end_the_call() -> None:
    for code in (f"a {END} b", f"{START}bash{{command:{END}}}{END}", f"{{{END}}}"):
        assert read_bash(f"{START}bash{{command:°{code}°}}{END}").calls == [("bash", {"command": code})]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{command:echo a, b && ls}", {"command": "echo a, b && ls"}),
        (
            "{command:for i in {1..3}; do echo $i; done,timeout:2}",
            {"command": "for i in {1..3}; do echo $i; done", "timeout": 2},
        ),
        (
            "{timeout:2,command:\n\n# Title\n\nText, more: yes",
            {"timeout": 2, "command": "# Title\n\nText, more: yes"},
        ),
        ("{command:A=1 b=2, c=3 make,shell:°sh°}", {"command": "A=1 b=2, c=3 make", "shell": "sh"}),
        ("{command:[ -f x ] && echo y}", {"command": "[ -f x ] && echo y"}),
        ("{command:'a', 'b'}", {"command": "'a', 'b'"}),
    ],
)
def test_a_string_of_gemma_without_quotes_ends_with_its_call_or_before_another_parameter(
    written: str, arguments: Any
) -> None:
    answer = read_bash(f"{START}bash{written}{END}")
    assert (answer.calls, answer.text) == ([("bash", arguments)], "")
    cut = f"{START}bash{written}"[:-1]
    assert read_bash(cut).calls == []


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{command:12345}", {"command": "12345"}),
        ("{command:true,timeout:12}", {"command": "true", "timeout": 12}),
        ("{shell:1.50}", {"shell": "1.50"}),
        ("{shell:null,command:{a}}", {"shell": None, "command": "{a}"}),
        ("{command:[°a°,{b:°c°}]}", {"command": ["a", {"b": "c"}]}),
        ("{environment:{command:12,b:true}}", {"environment": {"command": 12, "b": True}}),
    ],
)
def test_a_literal_of_gemma_is_text_where_a_parameter_takes_text(written: str, arguments: Any) -> None:
    assert read_bash(f"{START}bash{written}{END}").calls == [("bash", arguments)]


# --- Gemma: marks, names and separators ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{command:°ls°timeout:2}", {"command": "ls", "timeout": 2}),
        ("{command:°ls° shell:°sh°\ntimeout:2}", {"command": "ls", "shell": "sh", "timeout": 2}),
        ("{environment:{a:1}command:°ls°}", {"environment": {"a": 1}, "command": "ls"}),
    ],
)
def test_a_comma_that_gemma_leaves_out_before_a_parameter_is_added(written: str, arguments: Any) -> None:
    assert read_bash(f"{START}bash{written}{END}").calls == [("bash", arguments)]


@pytest.mark.parametrize("written", ["{command:°ls°", "{environment:{a:°x°"])
def test_brackets_that_gemma_leaves_out_at_the_end_are_added(written: str) -> None:
    arguments = {"environment": {"a": "x"}} if "env" in written else {"command": "ls"}
    assert read_bash(f"{START}bash{written}{END}").calls == [("bash", arguments)]
    assert read_bash(f"{START}bash{written}", truncated=False).calls == [("bash", arguments)]
    assert read_bash(f"{START}bash{written}").calls == []


@pytest.mark.parametrize("prefix", ["google:mcp:x:", "default_api.", "functions.", "default_api:"])
def test_a_namespace_before_the_name_of_a_tool_is_no_part_of_it(prefix: str) -> None:
    assert read(GEMMA, f"{START}{prefix}{PARIS_GEMMA}{END}").calls == [PARIS]
    nobody = f"{START}{prefix}{PARIS_GEMMA}{END}".replace("get_weather", "weather")
    assert (read(GEMMA, nobody).calls, read(GEMMA, nobody).text) == ([], nobody)


def test_a_call_of_gemma_without_its_end_mark_is_a_call() -> None:
    call = f"{START}{PARIS_GEMMA}"
    assert read(GEMMA, f"{call}{call}{END}").calls == [PARIS] * 2
    assert read(GEMMA, f"{call}{call}", truncated=False).calls == [PARIS] * 2
    assert read(GEMMA, f"{call}\n{call}{END}{END}").calls == [PARIS] * 2
    waiting = read(GEMMA, f"{call}\nI wait.", truncated=False)
    assert (waiting.calls, waiting.text) == ([PARIS], "I wait.")
    example = f"{call} is how to call it."
    assert (read(GEMMA, example).calls, read(GEMMA, example).text) == ([], example)


def test_function_gemma_is_repaired_like_gemma() -> None:
    for written in ("{city:'Paris'<escape>}", "{city:<escape>Paris}", "{city:<escape>Paris<escape>", "{city:Paris}"):
        call = f"<start_function_call>call:get_weather{written}<end_function_call>"
        assert read(FUNCTION_GEMMA, call).calls == [PARIS]


@pytest.mark.parametrize(
    "written", ["{}", "{command:°ls°}", "{timeout:3,command:°echo {a}, '°}", "{command:°ls°,x:[1,°b°]}"]
)
def test_a_call_of_gemma_that_is_cut_anywhere_is_text(written: str) -> None:
    call = f"{START}bash{written}".replace("°", '<|"|>')
    for end in range(len(call) + 1):
        answer = StreamedAnswer(GEMMA, [call[:end]], tools=[BASH])
        assert (answer.calls, answer.text) == ([], call[:end])


# --- Python --------------------------------------------------------------------------------------------------------

PARIS_PYTHON = 'get_weather(city="Paris")'
LFM_CALL = f"<|tool_call_start|>[{PARIS_PYTHON}]<|tool_call_end|>"


@pytest.mark.parametrize("space", ["", "\n"])
def test_a_call_that_lfm_repeats_behind_its_end_is_made_once(space: str) -> None:
    echo = f"[{PARIS_PYTHON}]"
    answer = read(PYTHONIC, f"{LFM_CALL}{space}{echo}")
    assert (answer.calls, answer.text) == ([PARIS], "")
    assert read(PYTHONIC, f"{LFM_CALL}{space}{echo}\nI look.").text == "I look."
    assert read(PYTHONIC, f"{LFM_CALL}{space}{LFM_CALL}").calls == [PARIS] * 2
    other = f"[{PARIS_PYTHON.replace('Paris', 'Rome')}]"
    answer = read(PYTHONIC, f"{LFM_CALL}{other}")
    assert (answer.calls, answer.text) == ([PARIS], other)


def test_a_call_of_lfm_without_its_square_brackets_is_a_call() -> None:
    for written in (PARIS_PYTHON, f" {PARIS_PYTHON}\n", f"{PARIS_PYTHON}, {PARIS_PYTHON}"):
        answer = read(PYTHONIC, f"I look.<|tool_call_start|>{written}<|tool_call_end|>")
        assert (answer.calls, answer.text) == ([PARIS] * written.count("Paris"), "I look.")
    nobody = "<|tool_call_start|>nobody(city='Paris')<|tool_call_end|>"
    assert (read(PYTHONIC, nobody).calls, read(PYTHONIC, nobody).text) == ([], nobody)


@pytest.mark.parametrize("mark", ["<|tool_call_start|>", "<|tool_call_start|>["])
def test_a_call_of_lfm_that_is_cut_is_text(mark: str) -> None:
    call = mark + PARIS_PYTHON
    for end in range(len(call) + 1):
        answer = StreamedAnswer(PYTHONIC, [call[:end]])
        assert (answer.calls, answer.text) == ([], call[:end])
    assert read(PYTHONIC, call, truncated=False).calls == [PARIS]


OLMO = speaking("olmo3")


def test_calls_of_olmo_are_lines_of_python() -> None:
    rome = 'get_weather(city="Rome", days=2)'
    for separator in ("\n", "\n\n", ", ", ",\n"):
        answer = read(OLMO, f"I look.\n<function_calls>\n{PARIS_PYTHON}{separator}{rome}\n</function_calls>")
        assert (answer.calls, answer.text) == ([PARIS, ("get_weather", {"city": "Rome", "days": 2})], "I look.")
    literals = "log_event(day=null, sure=true, rate=0.5)"
    assert read(OLMO, f"<function_calls>{literals}</function_calls>").calls == [
        ("log_event", {"day": None, "sure": True, "rate": 0.5})
    ]
    nobody = f"<function_calls>\n{PARIS_PYTHON}\nnobody()\n</function_calls>"
    assert (read(OLMO, nobody).calls, read(OLMO, nobody).text) == ([], nobody)
    cut = f"<function_calls>\n{PARIS_PYTHON}"
    assert (read(OLMO, cut).calls, read(OLMO, cut).text) == ([], cut)
    assert read(OLMO, cut, truncated=False).calls == [PARIS]


@pytest.mark.parametrize("code", ['print("a")\nnobody("b")', "f(x)\n\ng(y)", 'a = f("x"),\nb(1)'])
def test_lines_of_code_in_an_argument_of_python_are_no_calls(code: str) -> None:
    for dialect, start, end in (
        (OLMO, "<function_calls>\n", "\n</function_calls>"),
        (PYTHONIC, "<|tool_call_start|>[", "]<|tool_call_end|>"),
    ):
        for written in (f'"{code}"', repr(code)):
            answer = read(dialect, f"{start}write_file(code={written}){end}")
            assert answer.calls == [("write_file", {"code": code})]


@pytest.mark.parametrize("dialect", [PYTHONIC, OLMO])
def test_calls_that_a_history_tells_in_words_are_read_as_the_same_calls(dialect: Dialect) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": 'He said "Paris"', "days": 2}}}
    text = calls_as_text({"role": "assistant", "content": "", "tool_calls": [call, call]}, dialect)["content"]
    assert read(dialect, text).calls == [("get_weather", call["function"]["arguments"])] * 2
