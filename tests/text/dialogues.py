"""Conversations as clients send them: systems × turns, with tools, null content, results and consecutive calls."""

import json
from typing import Any

Message = dict[str, Any]

ARGUMENTS = ('{"city": "Köln", "days": 2}', "{}", '{"where": {"lat": 50.9, "tags": ["a", "b"]}, "metric": true}')
SYSTEMS: tuple[str | None, ...] = (None, "Be brief.", "  Sei höflich & genau.\n\nHeute: <b>Montag</b> 🙂 ")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer", "description": "How long."},
                },
                "required": ["city"],
            },
        },
    }
]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*arguments: str, content: str | None = None, first: int = 0) -> Message:
    """Return an assistant message that calls the tool once for each of `arguments`."""
    listed = [
        {"id": f"call{first + index:05}", "type": "function", "function": {"name": "weather", "arguments": text}}
        for index, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed}


def result(content: str, number: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": "weather", "content": content}


ONE, NONE, NESTED = ARGUMENTS
TURNS: tuple[list[Message], ...] = (
    [user("Hi")],
    [user("Was heißt 你好?\nZweite Zeile 🙂")],
    [user("")],
    [user("Hi"), said("Hello!"), user("Bye")],
    [user("1"), said("one"), user("2"), said("two "), user(" 3")],
    [user("Hi"), said(""), user("Again")],
    [user("Hi"), said("<think>hm</think>Hello"), user("More")],
    [user("Hi"), {**said("Hello"), "reasoning_content": "It greets."}, user("More")],
    [user("Hi"), user("Still there?")],
    [{"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}],
    [user("Weather?"), calls(ONE), result("sunny")],
    [user("Weather?"), calls(ONE, content=""), result("sunny"), said("Sunny."), user("Thanks")],
    [user("Weather?"), calls(ONE, content="I look."), result('{"sky": "clear", "t": [1, 2.5]}'), user("And?")],
    [user("Weather?"), calls(ONE), result("sunny"), said("Sunny."), user("Thanks")],
    [user("Weather?"), calls(NONE), result("where?"), said("Where?"), user("Köln")],
    [user("Weather?"), calls(NESTED), result("error: no such place"), user("Never mind")],
    [user("Both?"), calls(ONE, NESTED), result("sunny"), result("rain", 1), user("Thanks")],
    [user("Both?"), calls(ONE), result("sunny"), calls(NESTED, first=1), result("rain", 1), said("Ok"), user("Thanks")],
    [user("Weather?"), calls(ONE), result("sunny"), calls(NONE, content="Again.", first=1), result("", 1)],
    [user("Weather?"), calls('{"text": "a \\"quoted\\" 名"}'), result("ok"), user("Done")],
    [user("Hi"), said("None of it is null."), user("None?")],
)


def dialogues() -> list[tuple[list[Message], list[Message] | None]]:
    """Return conversations, with tools if they contain calls; the first two of `TURNS` come with and without tools."""
    cases: list[tuple[list[Message], list[Message] | None]] = []
    for system in SYSTEMS:
        start = [] if system is None else [{"role": "system", "content": system}]
        for number, turns in enumerate(TURNS):
            uses_tools = any("tool_calls" in message for message in turns)
            cases.append(([*start, *turns], TOOLS if uses_tools else None))
            if number < 2:
                cases.append(([*start, *turns], TOOLS))
    return cases


def variants(messages: list[Message]) -> list[tuple[list[Message], tuple[str, ...]]]:
    """Return all forms in which a client of transformers could pass messages, each with strings of a misreading."""
    made = []
    for as_objects in (True, False):
        for null in (None, ""):
            signs: set[str] = set()
            variant = [_variant(message, as_objects=as_objects, null=null, signs=signs) for message in messages]
            made.append((variant, tuple(signs)))
    return made


def _variant(message: Message, *, as_objects: bool, null: str | None, signs: set[str]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    changed = {**message, "content": null if content is None else content}
    if "tool_calls" in message:
        changed["tool_calls"] = []
        for call in message["tool_calls"]:
            text = call["function"]["arguments"]
            value = json.loads(text) if as_objects else text
            if value not in ({}, "{}"):
                signs.add(str(value) if as_objects else json.dumps(text, ensure_ascii=False)[1:-1])
            changed["tool_calls"].append({**call, "function": {**call["function"], "arguments": value}})
    return changed
