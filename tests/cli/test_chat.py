"""Parts of a chat that need no server over HTTP: marks, Ctrl-C, figures, results of calls, and files."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.command.chat import ACCEPTED_STYLE, Chat, Reply, mark_accepted, output_constraints, summary_of
from app.core.errors import CommandError
from tests.cli.fake_server import chunk


class InterruptedServer:
    """Sends one word, then the user presses Ctrl-C."""

    def __init__(self) -> None:
        self.closed = 0
        self.asked: list[Any] = []

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        self.asked.append(body["messages"])
        try:
            yield chunk("Well, ")
            raise KeyboardInterrupt
        finally:
            self.closed += 1


def test_ctrl_c_stops_the_reply_and_keeps_what_was_said() -> None:
    server, console = InterruptedServer(), Console(record=True, width=100, force_terminal=True)
    chat = Chat(server, {"model": "big"}, console)
    assert chat.send_message("Hi").stopped
    chat.send_message("Go on")
    assert server.closed == 2
    assert [message["content"] for message in server.asked[1]] == ["Hi", "Well, ", "Go on"]
    assert "Stopped." in console.export_text()


def test_ctrl_d_leaves_and_ctrl_c_at_the_prompt_does_not() -> None:
    keys = iter([KeyboardInterrupt, EOFError])

    def read_line(_prompt: str) -> str:
        raise next(keys)

    assert Chat(InterruptedServer(), {"model": "big"}, Console(record=True)).converse(read_line) == 0
    assert next(keys, None) is None


def test_accepted_spans_are_marked() -> None:
    text = mark_accepted("one two three", [[4, 7]])
    assert [(span.start, span.end, span.style) for span in text.spans] == [(4, 7, ACCEPTED_STYLE)]


@pytest.mark.parametrize(
    ("speculation", "ending"),
    [
        ({"method": "off", "reason": "two requests ran"}, "no drafting · two requests ran"),
        (
            {"method": "ngram", "drafted": 8, "accepted": 4, "tokens_per_cycle": 3.0},
            "ngram: 4 of 8 drafts accepted (50%) · 3.00 tokens per step",
        ),
    ],
)
def test_the_numbers_say_why(speculation: dict[str, Any], ending: str) -> None:
    reply = Reply(timings={"predicted_n": 12, "predicted_per_second": 40.0}, speculation=speculation)
    assert summary_of(reply) == f"12 tokens · 40.0 tokens/s · {ending}"


def test_one_token_is_counted_as_one() -> None:
    assert summary_of(Reply(timings={"predicted_n": 1}, speculation={})).startswith("1 token · ")


class ScriptedServer:
    """Answers with the deltas of one reply after another."""

    def __init__(self, *replies: list[dict[str, Any]]) -> None:
        self.replies = iter(replies)
        self.asked: list[Any] = []

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        self.asked.append(body["messages"])
        for delta in next(self.replies):
            yield {"choices": [{"index": 0, "delta": delta}]}


def talk(server: ScriptedServer, *lines: str) -> str:
    """Type the lines into a chat; return what the screen then shows."""
    console, typed = Console(record=True, width=100), iter(lines)

    def read_line(prompt: str) -> str:
        console.print(prompt)
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    assert Chat(server, {"model": "big"}, console).converse(read_line) == 0
    return console.export_text()


def call(index: int, name: str) -> list[dict[str, Any]]:
    first = {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": '{"at":'}}
    return [{"tool_calls": [first]}, {"tool_calls": [{"index": index, "function": {"arguments": " 1}"}}]}]


def test_a_person_gives_the_results_of_calls_and_the_reply_goes_on() -> None:
    thought = {"reasoning_content": "Two."}
    server = ScriptedServer([thought, *call(0, "look"), *call(1, "hear")], [{"content": "A bell."}])
    shown = talk(server, "What is there?", "nothing", "a bell")
    for text in ('look {"at": 1}', 'hear {"at": 1}', "Result of look> ", "Result of hear> ", "A bell."):
        assert text in shown
    question, reply, *results = server.asked[1]
    assert question["content"] == "What is there?"
    assert reply["reasoning_content"] == "Two."
    assert [tool_call["function"]["arguments"] for tool_call in reply["tool_calls"]] == ['{"at": 1}'] * 2
    assert [(result["tool_call_id"], result["content"]) for result in results] == [
        ("call_0", "nothing"),
        ("call_1", "a bell"),
    ]


def test_a_call_without_a_result_says_so_to_the_model() -> None:
    server = ScriptedServer(call(0, "look"), [{"content": "Well."}])
    assert "Well." in talk(server, "What is there?")
    assert server.asked[1][-1]["content"] == "no result"


def test_thoughts_can_be_folded() -> None:
    reply = [{"reasoning_content": "Hm, "}, {"reasoning_content": "so."}, {"content": "Yes."}]
    assert "Hm, so.\n\nYes." in talk(ScriptedServer(reply), "Is it?")
    folded = talk(ScriptedServer(reply), "/thoughts", "Is it?")
    assert "Hm" not in folded
    assert "Thinking…" in folded


def test_a_file_goes_along_with_the_next_message_only(tmp_path: Path) -> None:
    notes, picture = tmp_path / "my notes.txt", tmp_path / "picture.png"
    notes.write_text("one\n")
    picture.write_bytes(b"\x89PNG")
    server = ScriptedServer([{"content": "Read."}], [{"content": "Yes."}])
    shown = talk(server, f"/file '{notes}'", f"/file {picture}", "Read this.", "Read?")
    assert "cannot be read as a text file" in " ".join(shown.split())
    assert "/file needs the path of a file" in talk(ScriptedServer(), "/file")
    assert server.asked[0][-1]["content"] == 'Read this.\n\n<file name="my notes.txt">\none\n\n</file>'
    assert server.asked[1][-1]["content"] == "Read?"


def test_a_file_that_is_dropped_on_the_terminal_goes_along_and_what_names_none_is_a_message(tmp_path: Path) -> None:
    notes = tmp_path / "my notes.txt"
    notes.write_text("one")
    server = ScriptedServer([{"content": "Read."}], [{"content": "Yes."}])
    talk(server, str(notes).replace(" ", "\\ "), "It's read?", f"/{'x' * 5000}", "my notes.txt")
    assert server.asked[0][-1]["content"] == 'It\'s read?\n\n<file name="my notes.txt">\none\n</file>'
    assert server.asked[1][-1]["content"] == "my notes.txt"


def test_schema_and_tools_come_from_files_and_what_they_are_not_is_said(tmp_path: Path) -> None:
    schema, tools, odd = tmp_path / "schema.json", tmp_path / "tools.json", tmp_path / "odd.json"
    schema.write_text('{"type": "object"}')
    tools.write_text('[{"name": "look"}, {"type": "function", "function": {"name": "hear"}}]')
    held = output_constraints(schema, tools)
    assert held["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert [tool["function"]["name"] for tool in held["tools"]] == ["look", "hear"]
    assert output_constraints(None, None) == {}
    odd.write_text("[1")
    with pytest.raises(CommandError, match=r"odd\.json is not valid JSON"):
        output_constraints(odd, None)
    odd.write_text("[1]")
    with pytest.raises(CommandError, match=r"odd\.json does not contain a list of functions"):
        output_constraints(None, odd)
