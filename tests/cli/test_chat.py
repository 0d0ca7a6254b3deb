"""The parts of a chat that a scripted server cannot reach: marks, Ctrl-C, numbers."""

from collections.abc import Generator, Mapping
from typing import Any

import pytest
from rich.console import Console

from app.command.chat import ACCEPTED_STYLE, Chat, Reply, marked, summary_of
from tests.cli.fake_server import chunk


class InterruptedServer:
    """Says one word, then the person presses Ctrl-C."""

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
    server, console = InterruptedServer(), Console(record=True, width=100)
    chat = Chat(server, {"model": "big"}, console)
    assert chat.say("Hi").stopped
    chat.say("Go on")
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
    text = marked("one two three", [[4, 7]])
    assert [(span.start, span.end, span.style) for span in text.spans] == [(4, 7, ACCEPTED_STYLE)]


@pytest.mark.parametrize(
    ("speculation", "told"),
    [
        ({"method": "off", "reason": "two requests ran"}, "no drafting · two requests ran"),
        (
            {"method": "ngram", "drafted": 8, "accepted": 4, "tokens_per_cycle": 3.0},
            "ngram: 4 of 8 drafts accepted (50 %) · 3.00 tokens per step",
        ),
    ],
)
def test_the_numbers_say_why(speculation: dict[str, Any], told: str) -> None:
    reply = Reply(timings={"predicted_n": 12, "predicted_per_second": 40.0}, speculation=speculation)
    assert summary_of(reply) == f"12 tokens · 40.0 tokens/s · {told}"
