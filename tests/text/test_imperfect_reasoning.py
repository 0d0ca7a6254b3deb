"""Imperfect reasoning of real models: sections that are repeated, marks that are doubled, headers that are incomplete.

Each test is named after what its user sees; `read` also cuts every answer at many places and into letters.
"""

import time

import pytest

from app.text.dialect import JSON_CALLS, Dialect, read_dialect
from app.text.grammar.request_grammar import closes_reasoning, opens_reasoning
from tests.text.test_dialect import FakeTokenizer
from tests.text.test_imperfect_calls import GPT_OSS, JSON, PARIS, PARIS_CALL, PARIS_JSON, StreamedAnswer, read

GEMMA = Dialect(opening="<|channel>thought", closing="<channel|>", parser="gemma4")
MISTRAL = Dialect(opening="[THINK]", closing="[/THINK]", parser="mistral")
GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello<|return|>"


@pytest.mark.parametrize(
    ("dialect", "written", "text", "calls"),
    [
        (GEMMA, f"<|channel>thought\nA<channel|>Text.<|channel>thought\nB\n<channel|>{GEMMA_CALL}", "Text.", [PARIS]),
        (GEMMA, "<|channel>thought\nA<channel|><|channel>thought\nB<channel|>Done", "Done", []),
        (JSON, f"<think>\nA\n</think>\n\n{PARIS_CALL}\n<think>\nB\n</think>\n\nDone", "Done", [PARIS]),
        (JSON, f"<think>A</think>\n\nI look.\n\n<think>B</think>\n\n{PARIS_CALL}", "I look.", [PARIS]),
        (JSON, f"<think>A</think>{PARIS_CALL}<think>B</think>{PARIS_CALL}", "", [PARIS, PARIS]),
        (MISTRAL, "[THINK]A[/THINK]Text.\n[THINK]B[/THINK]\nMore", "Text.\nMore", []),
    ],
)
def test_every_section_of_reasoning_is_reasoning(
    dialect: Dialect, written: str, text: str, calls: list[tuple[str, object]]
) -> None:
    answer = read(dialect, written)
    assert (answer.reasoning, answer.text, answer.calls) == ("A\n\nB", text, calls)
    cut = read(dialect, written.partition("B")[0] + "B")
    assert cut.reasoning == "A\n\nB"
    without_tools = read(dialect, written.replace(PARIS_CALL, "").replace(GEMMA_CALL, ""), tools=())
    assert (without_tools.reasoning, without_tools.text.strip()) == ("A\n\nB", text)


def test_empty_sections_of_reasoning_leave_nothing_behind() -> None:
    answer = read(GEMMA, "<|channel>thought\n<channel|><|channel>thought\n<channel|>Done")
    assert (answer.reasoning, answer.text) == ("", "Done")


@pytest.mark.parametrize("closings", ["</think>\n\n</think>", "</think></think>", "\n</think>\n</think>\n</think>"])
def test_a_closing_mark_that_is_repeated_is_no_text(closings: str) -> None:
    for begun, inside in (("plan", True), ("<think>plan", False), ("<think>plan", True)):
        answer = read(JSON, f"{begun}{closings}\n\nHi", inside=inside)
        assert (answer.reasoning, answer.text) == ("plan", "Hi")


@pytest.mark.parametrize("dialect", [JSON, GEMMA, MISTRAL])
def test_an_opening_mark_that_the_prompt_already_has_is_no_reasoning(dialect: Dialect) -> None:
    answer = read(dialect, f"\n{dialect.opening}\nplan\n{dialect.closing}\nHi", inside=True)
    assert (answer.reasoning, answer.text) == ("plan", "Hi")


@pytest.mark.parametrize(
    "text",
    [
        "Put thoughts between <think> and </think> tags.",
        "`<think>` opens it.",
        "It writes:\n```xml\n<think>\nHm\n</think>\n```\nand answers.",
        "1. It writes:\n   ~~~\n   <think>\n   Hm\n   ~~~\n",
        "````markdown\n```\n<think>\n```\n````",
    ],
)
def test_a_mark_of_reasoning_that_the_text_mentions_is_text(text: str) -> None:
    answer = read(JSON, f"<think>Hm</think>{text}")
    assert (answer.reasoning, answer.text) == ("Hm", text)


def test_a_sentence_that_opens_reasoning_is_text_elsewhere() -> None:
    dialect = Dialect(opening="Here are my reasoning steps:", closing="[BEGIN FINAL RESPONSE]", parser=JSON_CALLS)
    text = "Hi.\nHere are my reasoning steps:\n1. none"
    answer = read(dialect, f"plan\n[BEGIN FINAL RESPONSE]\n{text}", inside=True)
    assert (answer.reasoning, answer.text) == ("plan", text)


# --- headers of gpt-oss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["assistant", " assistant", "<|start|> assistant", ""])
def test_a_header_of_gpt_oss_without_its_first_mark_is_a_header(start: str) -> None:
    written = f"<|channel|>analysis<|message|>Hm<|end|>{start}<|channel|>final<|message|>Hello"
    answer = read(GPT_OSS, written)
    assert (answer.reasoning, answer.text) == ("Hm", "Hello")
    call = f'{start} to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "Paris"}}'
    assert read(GPT_OSS, f"<|channel|>analysis<|message|>Hm<|end|>{call}").calls == [PARIS]
    for text in ("assistant", "assistants are", "assistant to= x"):
        assert read(GPT_OSS, text).text == text


@pytest.mark.parametrize(
    "header",
    [
        "functions.get_weather to=assistant<|channel|>commentary",
        "functions.get_weather<|channel|>commentary to=functions.get_weather",
        "user",
        "tool<|channel|>analysis",
    ],
)
def test_a_turn_of_somebody_else_that_gpt_oss_invents_is_no_part_of_its_answer(header: str) -> None:
    thought = "<|channel|>analysis<|message|>Hm<|end|>"
    answer = read(GPT_OSS, f'{thought}<|start|>{header}<|message|>{{"city": "Rome"}}<|end|>{FINAL}')
    assert (answer.reasoning, answer.text, answer.calls) == ("Hm", "Hello", [])


@pytest.mark.parametrize("recipient", ["to= functions.get_weather", "to=functions:get_weather", "to=get_weather"])
def test_the_recipient_of_gpt_oss_may_be_slightly_off(recipient: str) -> None:
    written = f'<|channel|>commentary {recipient} <|constrain|>json<|message|>{{"city": "Paris"}}<|call|>'
    assert (read(GPT_OSS, written).calls, read(GPT_OSS, written).text) == ([PARIS], "")


@pytest.mark.parametrize(
    "piece",
    ["<|end|>", "<|start|>assistant", "<|channel|>final", "<|channel|>x to=y ", "<|constrain|>json", " to=a", "word "],
)
def test_a_header_of_gpt_oss_that_never_ends_costs_no_more_than_its_length(piece: str) -> None:
    def seconds(count: int) -> float:
        pieces, began = [piece] * count, time.process_time()
        StreamedAnswer(GPT_OSS, ["<|channel|>analysis ", *pieces])
        return time.process_time() - began

    seconds(10)
    assert min(seconds(1600) for _ in range(2)) < 20 * max(0.02, min(seconds(400) for _ in range(2)))


# --- marks of single models ----------------------------------------------------------------------------------------


def test_the_reasoning_of_apriel_ends_at_its_final_response() -> None:
    template = (
        "{{ '<tool_calls>' }}after [BEGIN FINAL RESPONSE]{{ '<|begin_assistant|>\nHere are my reasoning steps:\n' }}"
    )
    dialect = read_dialect(FakeTokenizer(template))
    assert opens_reasoning(dialect, "<|begin_assistant|>\nHere are my reasoning steps:\n")
    for end in ("", "\n[END FINAL RESPONSE]", "[END FINAL RESPONSE]\n"):
        answer = read(dialect, f"I add.\n[BEGIN FINAL RESPONSE]\nIt is 4.{end}", inside=True)
        assert (answer.reasoning, answer.text.strip()) == ("I add.", "It is 4.")
    call = f"<tool_calls>[{PARIS_JSON}]</tool_calls>"
    for written in (f"I ask.\n[BEGIN FINAL RESPONSE]\n{call}\n[END FINAL RESPONSE]", f"I ask.\n{call}"):
        answer = read(dialect, written, inside=True)
        assert (answer.reasoning, answer.text, answer.calls) == ("I ask.", "", [PARIS])


@pytest.mark.parametrize("closing", ["</think>", "</seed:think>", "[/THINK]"])
def test_a_template_that_only_removes_reasoning_from_earlier_answers_names_its_marks(closing: str) -> None:
    dialect = read_dialect(FakeTokenizer(f"{{{{ content.split('{closing}')[-1] }}}}"))
    answer = read(dialect, f"{closing.replace('/', '')}\nHm\n{closing}\n\nHi")
    assert (answer.reasoning, answer.text) == ("Hm", "Hi")
    both = read_dialect(FakeTokenizer(f"<longcat_think>{{{{ content.split('{closing}')[-1] }}}}"))
    assert both.opening == "<longcat_think>", "a mark that the template writes counts for more"


@pytest.mark.parametrize("tag", ["answer", "response"])
def test_tags_around_an_answer_behind_reasoning_that_the_prompt_closed_are_no_part_of_it(tag: str) -> None:
    dialect = Dialect(opening="<think>", closing="</think>", wrapper=tag)
    written = f"<{tag}>\nHello\n</{tag}>"
    assert read(dialect, f"\n{written}", reasoned=True).text == "Hello"
    assert read(dialect, written).text == written, "it may have been asked for"
    assert read(dialect, f"Use {written}", reasoned=True).text == f"Use {written}"
    assert closes_reasoning(dialect, "assistant<think>\n\n</think>\n")
    assert not closes_reasoning(dialect, "assistant<think>\n")
    assert not closes_reasoning(Dialect(), "assistant")
