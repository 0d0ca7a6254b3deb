"""Ends of answers with reasoning and calls: stop strings, limits, cancels. Loop and scheduler are real."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.core.messages import Cancel, Delta, Finished, Generate
from app.core.request import Grammar, SpeculationRequest
from app.text.dialect import HARMONY, JSON_CALLS, Dialect
from app.worker.texts import PromptFuture
from tests.worker.fakes import END, FakeEngine, fake_read
from tests.worker.pair import Pair

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
QWEN = Dialect(opening="<think>", closing="</think>", parser=JSON_CALLS)
GPT_OSS = Dialect(opening="<|channel|>analysis", closing="<|channel|>final<|message|>", parser=HARMONY)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "New\n\nYork"}}\n</tool_call>'


def reading(dialect: Dialect) -> Callable[[Generate], PromptFuture]:
    """Return a prompt reader for a model with this dialect, whose prompts end by opening the reasoning."""

    def read(command: Generate) -> PromptFuture:
        prompt = fake_read(command).result()
        table = msgspec.structs.replace(prompt.table, dialect=dialect)
        made: PromptFuture = Future()
        made.set_result(replace(prompt, table=table, end=dialect.opening))
        return made

    return read


class StreamedAnswer:
    """The events that a client receives while the model writes `answer`."""

    def __init__(self, folder: Path, answer: str, dialect: Dialect = QWEN, **changes: Any) -> None:
        engine = FakeEngine(answer.encode() + bytes([END]), context_tokens=2000)
        self.pair = Pair(folder, make_engine=lambda: engine, read=reading(dialect))
        asked = {"text": None, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 1000}
        self.pair.say(self.pair.ask(**asked | changes))

    def settle(self) -> "StreamedAnswer":
        self.pair.settle(300)
        return self

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.pair.of("r") if isinstance(event, Delta)]

    @property
    def finished(self) -> Finished:
        (finished,) = self.pair.finished()
        return finished

    @property
    def reasoning(self) -> str:
        return "".join(delta.reasoning for delta in self.deltas)

    @property
    def arguments(self) -> dict[int, str]:
        pieces = [piece for delta in self.deltas for piece in delta.tool_calls]
        return {index: "".join(p.arguments for p in pieces if p.index == index) for index in {p.index for p in pieces}}


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_a_stop_string_ends_the_text_and_not_the_reasoning_and_counts_exactly(tmp_path: Path, method: str) -> None:
    before = "Let me see. Question: what?</think>\n\nThe answer is 42. Question:"
    answer = StreamedAnswer(
        tmp_path, f"{before} more", stop=("Question:",), speculation=SpeculationRequest(method=method)
    ).settle()
    assert answer.reasoning == "Let me see. Question: what?"
    assert answer.pair.text() == "The answer is 42. "
    finished = answer.finished
    assert (finished.finish_reason, finished.stop) == ("stop", "Question:")
    assert finished.usage.completion_tokens == len(before) == sum(delta.tokens for delta in answer.deltas)
    assert finished.usage.reasoning_tokens == len("Let me see. Question: what?</think>")
    assert answer.pair.leases == 0


def test_a_stop_string_in_the_analysis_channel_loses_nothing(tmp_path: Path) -> None:
    final = "<|start|>assistant<|channel|>final<|message|>It is. Question: y"
    written = f"<|channel|>analysis<|message|>Question: x<|end|>{final}"
    answer = StreamedAnswer(tmp_path, written, GPT_OSS, stop=("Question:",)).settle()
    assert (answer.reasoning, answer.pair.text(), answer.finished.stop) == ("Question: x", "It is. ", "Question:")


def test_a_stop_string_inside_arguments_leaves_the_call_whole(tmp_path: Path) -> None:
    answer = StreamedAnswer(tmp_path, f"</think>{CALL}", stop=("\n\n", "York")).settle()
    assert answer.arguments == {0: '{"city": "New\\n\\nYork"}'}
    finished = answer.finished
    assert (finished.finish_reason, finished.stop, finished.unfinished_call) == ("tool_calls", "", None)


def test_a_stop_string_behind_a_call_ends_the_answer(tmp_path: Path) -> None:
    answer = StreamedAnswer(tmp_path, f"</think>{CALL}\nDone. STOP", stop=("STOP",)).settle()
    finished = answer.finished
    assert (finished.finish_reason, finished.stop, finished.unfinished_call) == ("tool_calls", "STOP", None)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_call_that_the_limit_cuts_is_named_as_unfinished(tmp_path: Path, drafts: int) -> None:
    written = f"</think>{CALL}\n{CALL}"
    method = "ngram" if drafts else "off"
    for cut, calls, unfinished in (
        (written.index("New") + 2, 1, 0),
        (len(written) - 30, 2, 1),
        (len(written), 2, None),
    ):
        answer = StreamedAnswer(
            tmp_path, written, max_tokens=cut, speculation=SpeculationRequest(method=method)
        ).settle()
        assert len(answer.arguments) == calls
        assert (answer.finished.finish_reason, answer.finished.unfinished_call) == ("length", unfinished)


def test_a_call_is_named_as_unfinished_when_the_client_leaves(tmp_path: Path) -> None:
    answer = StreamedAnswer(tmp_path, f"</think>{CALL}", speculation=SpeculationRequest(method="off"))
    while not answer.arguments.get(0):
        answer.pair.turn()
    answer.pair.say(Cancel(id="r"))
    answer.settle()
    assert (answer.finished.finish_reason, answer.finished.unfinished_call) == ("cancelled", 0)


def test_a_call_that_cannot_be_read_ends_the_answer_unfinished(tmp_path: Path) -> None:
    whole = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    broken = whole.replace("{}", '{"city": Paris}')
    for written, reason, index in ((broken, "stop", 0), (f"{whole}\n{broken}", "tool_calls", 1)):
        answer = StreamedAnswer(tmp_path, f"</think>{written} and much more").settle()
        assert (answer.finished.finish_reason, answer.finished.unfinished_call) == (reason, index)
        assert [notice.code for notice in answer.finished.notices] == ["unfinished_call"]
        assert answer.pair.text() == ""
        assert answer.finished.usage.completion_tokens == len(f"</think>{written}") - len("aris}}\n</tool_call>")
        assert not answer.pair.schedulers[0].has_work


def test_a_call_at_the_end_of_reasoning_is_told_as_a_call(tmp_path: Path) -> None:
    answer = StreamedAnswer(tmp_path, f"I call it.\n{CALL}").settle()
    assert answer.arguments == {0: '{"city": "New\\n\\nYork"}'}
    assert (answer.reasoning, answer.finished.finish_reason) == ("I call it.", "tool_calls")


@pytest.mark.parametrize(
    ("choice", "grammar", "calls"),
    [
        ("auto", Grammar(kind="json_schema", text="{}"), {0: '{"city": "Oslo"}'}),
        ("required", None, {0: '{"city": "Oslo"}'}),
        ("function:weather", None, {}),
    ],
)
def test_gpt_oss_may_call_in_its_own_words_before_what_a_grammar_holds(
    tmp_path: Path, choice: str, grammar: Grammar | None, calls: dict[int, str]
) -> None:
    written = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    written += '<|constrain|>json<|message|>{"city": "Oslo"}'
    answer = StreamedAnswer(tmp_path, written, GPT_OSS, tool_choice=choice, grammar=grammar).settle()
    assert (answer.arguments, answer.reasoning) == (calls, "Hm")
    assert answer.finished.finish_reason == ("tool_calls" if calls else "stop")


def test_one_call_is_told_where_one_was_asked_for_and_reasoning_is_counted(tmp_path: Path) -> None:
    """Pythonic calls are read as a block, which may hold several."""
    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    pythonic = Dialect(opening="<think>", closing="</think>", parser="pythonic")
    for parallel, calls in ((True, 2), (False, 1)):
        written = f"hm</think>{start}[weather(city='Oslo'), weather(city='Rome')]{end}"
        answer = StreamedAnswer(tmp_path, written, pythonic, parallel_tool_calls=parallel).settle()
        assert list(answer.arguments) == list(range(calls))
        assert answer.finished.usage.reasoning_tokens == len("hm</think>")
        assert (answer.finished.finish_reason, answer.finished.unfinished_call) == ("tool_calls", None)


def test_one_call_that_is_written_piece_by_piece_ends_the_answer(tmp_path: Path) -> None:
    answer = StreamedAnswer(tmp_path, f"</think>{CALL}\n{CALL} more", parallel_tool_calls=False).settle()
    assert list(answer.arguments) == [0]
    assert (answer.finished.finish_reason, answer.finished.unfinished_call) == ("tool_calls", None)
    assert answer.finished.usage.completion_tokens == len(f"</think>{CALL}") - len("}\n</tool_call>")
