"""Random conversations as agents send them: system messages anywhere, all kinds of calls, matching and stray results.

Texts and readable arguments contain unique words, by which a test finds them in a prompt.
"""

import json
from typing import Any

from hypothesis import strategies as st

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

FLAVOURS = (
    "{}",
    "  {} \n",
    '{}\n\n\tdef f(x):\r\n\t\treturn "é"',
    "<b>{}</b> & 'more' \\n 你好 🙂",
    '{{"sky": "{}", "t": [1, 2.5, null]}}',
    "<think>hm\nso</think>\n\n{}",
)
GOOD = (
    '{{"city": "{}"}}',
    '{{"city": "{}", "days": 2, "deep": {{"a": [null, true, "\\"x\\" 名"]}}}}',
    '{{"code": "{}\\n\\tx = 1\\n"}}',
)
BAD = (
    "",
    "  ",
    "null",
    "{{}}",
    '{{"city": "{}',
    '{{"city": "{}\n\t",}}',
    '["{}"]',
    "{}",
    "3",
    '{{"a": {{"b": "{}"}}, }}',
)
IDS = ("call_{:024x}", "call{:05}", "toolu_01{:022}", "functions.weather:{}", "{}", "chatcmpl-tool-{:032x}")


def _tool(name: str, **described: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **described}}


WEATHER = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]}
TOOLS: tuple[Tools, ...] = (
    None,
    [_tool("weather", description="The weather in a city.", parameters=WEATHER)],
    [_tool("weather"), _tool("read_file", description="Read.", parameters={"type": "object"})],
    [
        _tool(
            "weather",
            parameters={
                "type": "object",
                "properties": {
                    "city": {"type": ["string", "null"]},
                    "days": {"enum": [1, 2]},
                    "tags": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
                    "any": True,
                },
            },
        )
    ],
)


class _Writer:
    """Writes one conversation; Hypothesis draws every choice."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._words = 0
        self._calls = 0
        self.messages: list[Message] = []

    def choose(self, *choices: Any) -> Any:
        return self._draw(st.sampled_from(choices))

    def word(self) -> str:
        self._words += 1
        return f"zq{self._words}word"

    def text(self) -> str:
        return str(self.choose(*FLAVOURS)).format(self.word())

    def say(self, role: str, text: str | None = None, **more: Any) -> None:
        self.messages.append({"role": role, "content": self.text() if text is None else text, **more})

    def thoughts(self) -> Message:
        return self.choose({}, {}, {"reasoning_content": f"I think {self.word()}."})

    def call(self) -> None:
        calls = []
        for _ in range(self.choose(1, 1, 2, 3)):
            self._calls += 1
            arguments = str(self.choose(*GOOD, *BAD)).format(self.word())
            identifier = str(self.choose(*IDS)).format(self._calls)
            calls.append(
                {"id": identifier, "type": "function", "function": {"name": "weather", "arguments": arguments}}
            )
        content = self.choose(None, "", self.text())
        self.messages.append({"role": "assistant", "content": content, "tool_calls": calls, **self.thoughts()})
        for call in self._draw(st.permutations(calls)):
            for _ in range(self.choose(0, 1, 1, 1, 1, 2)):
                if self.choose(*[False] * 9, True):
                    self.say(self.choose("system", "user"))
                self.result(call["id"])

    def result(self, identifier: str) -> None:
        self.say("tool", self.choose("", "ok", self.text(), self.text(), self.text()), tool_call_id=identifier)

    def turn(self) -> None:
        match self.choose("user", "user", "assistant", "call", "call", "system", "developer", "orphan", "empty"):
            case "call":
                self.call()
            case "orphan":
                self.result("call_of_nobody")
            case "empty":
                self.say(self.choose("user", "assistant", "system"), "")
            case "assistant":
                self.say("assistant", **self.thoughts())
            case role:
                self.say(role)


@st.composite
def agent_dialogues(draw: Any) -> tuple[list[Message], Tools]:
    """Draw messages in OpenAI's chat format, and tools."""
    writer = _Writer(draw)
    for _ in range(draw(st.integers(0, 2))):
        writer.say(writer.choose("system", "developer"))
    for _ in range(draw(st.integers(1, 7))):
        writer.turn()
    return writer.messages, writer.choose(*TOOLS)


def word_in(text: str) -> str:
    """Return the unique word of a text; empty if it has none."""
    place = text.find("zq")
    return text[place : text.find("word", place) + 4] if place >= 0 else ""


def argument_words(message: Message) -> list[str]:
    """Return the unique words of those calls of a message whose arguments are a JSON object."""
    words = []
    for call in message.get("tool_calls", ()):
        try:
            if isinstance(json.loads(call["function"]["arguments"]), dict):
                words.append(word_in(call["function"]["arguments"]))
        except ValueError:
            continue
    return [word for word in words if word]


def readable(message: Message) -> Message:
    """Return the message with a JSON object as the arguments of each call; unreadable ones keep only their word."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        read = argument_words({"tool_calls": [call]}) != [] or arguments == "{}"
        given = arguments if read else json.dumps({"city": word_in(arguments)})
        calls.append({**call, "function": {**call["function"], "arguments": given}})
    return message | {"tool_calls": calls}
