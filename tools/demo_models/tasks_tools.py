"""Tool calls: fixed and made-up functions, their results, and requests that need no tool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from samples import Message, Sample, pick, polish
from tasks_talk import small_talk
from tasks_words import any_word
from words import CITIES, NAMES, NOUNS

Arguments = dict[str, Any]


def schema(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    """Return an OpenAI-style function description whose parameters are all required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    body = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


def _weather(rng: random.Random) -> tuple[str, Arguments, Any, str]:
    city, degrees = rng.choice(CITIES), rng.randint(-5, 35)
    text = pick(
        rng,
        "what is the weather in {c}",
        "weather in {c}",
        "how is the weather in {c}",
        "is it warm in {c}",
        "what's the weather like in {c}",
        "tell me the weather in {c}",
        "get the weather for {c}",
    ).format(c=city)
    return text, {"city": city}, {"temperature": degrees}, f"It is {degrees} degrees in {city}."


def _time(rng: random.Random) -> tuple[str, Arguments, Any, str]:
    city, clock = rng.choice(CITIES), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    text = pick(rng, "what time is it in {c}", "time in {c}", "what is the time in {c}", "tell me the time in {c}")
    return text.format(c=city), {"city": city}, {"time": clock}, f"It is {clock} in {city}."


def _calculator(rng: random.Random) -> tuple[str, Arguments, Any, str]:
    first, second, sign = rng.randint(2, 999), rng.randint(2, 999), rng.choice("+-*")
    expression = f"{first} {sign} {second}"
    result = {"+": first + second, "-": first - second, "*": first * second}[sign]
    text = pick(rng, "what is {e}", "calculate {e}", "use the calculator for {e}", "compute {e}").format(e=expression)
    return text, {"expression": expression}, {"result": result}, f"{expression} = {result}"


def _timer(rng: random.Random) -> tuple[str, Arguments, Any, str]:
    minutes = rng.randint(1, 90)
    text = pick(rng, "set a timer for {m} minutes", "timer for {m} minutes", "start a {m} minute timer")
    return text.format(m=minutes), {"minutes": minutes}, {"ok": True}, f"The timer is set for {minutes} minutes."


def _read_file(rng: random.Random) -> tuple[str, Arguments, Any, str]:
    path = any_word(rng) + rng.choice((".txt", ".py", ".md", ".json"))
    if rng.random() < 0.3:
        path = f"{any_word(rng)}/{path}"
    content = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(2, 5)))
    text = pick(rng, "read the file {p}", "read {p}", "open {p}", "show me {p}", "what is in {p}", "what does {p} say")
    return text.format(p=path), {"path": path}, {"content": content}, f"{path} says: {content}"


def _search(rng: random.Random) -> tuple[str, Arguments, Any, str]:
    query = " ".join(any_word(rng) for _ in range(rng.randint(1, 3)))
    title = " ".join(rng.choice(NOUNS) for _ in range(2))
    text = pick(rng, "search for {q}", "look up {q}", "find {q}", "search the web for {q}", "search {q}")
    return text.format(q=query), {"query": query}, {"title": title}, f"I found: {title}"


def _message(rng: random.Random) -> tuple[str, Arguments, Any, str]:
    person, words = rng.choice(NAMES), " ".join(any_word(rng) for _ in range(rng.randint(1, 4)))
    text = pick(rng, "send {p} the message {w}", "tell {p} {w}", "send a message to {p}: {w}", "message {p}: {w}")
    arguments = {"to": person, "text": words}
    return text.format(p=person, w=words), arguments, {"ok": True}, f"I sent the message to {person}."


def _add(rng: random.Random) -> tuple[str, Arguments, Any, str]:
    first, second = rng.randint(0, 99), rng.randint(0, 99)
    text = pick(rng, "add {a} and {b}", "what is {a} + {b}", "{a} plus {b}").format(a=first, b=second)
    return text, {"a": first, "b": second}, {"result": first + second}, f"{first} + {second} = {first + second}"


Maker = Callable[[random.Random], tuple[str, Arguments, Any, str]]

TOOLS: tuple[tuple[dict[str, Any], Maker], ...] = (
    (schema("get_weather", "Get the current weather for a city", {"city": "string"}), _weather),
    (schema("get_time", "Get the current time in a city", {"city": "string"}), _time),
    (schema("calculator", "Evaluate an arithmetic expression", {"expression": "string"}), _calculator),
    (schema("set_timer", "Set a timer", {"minutes": "integer"}), _timer),
    (schema("read_file", "Read a text file", {"path": "string"}), _read_file),
    (schema("search", "Search the web", {"query": "string"}), _search),
    (schema("send_message", "Send a message to a person", {"to": "string", "text": "string"}), _message),
    (schema("add", "Add two numbers", {"a": "integer", "b": "integer"}), _add),
)


def _made_up(rng: random.Random) -> tuple[dict[str, Any], Maker]:
    verb, noun = rng.choice(("get", "find", "open", "make", "check", "delete", "show", "play", "list")), any_word(rng)
    key, is_number = rng.choice(("name", "id", "value", "key", "title", "count", "item", "text")), rng.random() < 0.3
    tool = schema(f"{verb}_{noun}", f"{verb.capitalize()} a {noun}", {key: "integer" if is_number else "string"})

    def maker(inner: random.Random) -> tuple[str, Arguments, Any, str]:
        value: Any = inner.randint(0, 99) if is_number else any_word(inner)
        text = pick(
            inner,
            f"{verb} the {noun} {value}",
            f"{verb} {noun} {value}",
            f"{verb} a {noun} with {key} {value}",
            f"use {verb}_{noun} with {key} {value}",
            f"call {verb}_{noun} with {key} = {value}",
        )
        result = any_word(inner)
        return text, {key: value}, {"result": result}, f"The result is {result}."

    return tool, maker


def _vary_description(rng: random.Random, tool: dict[str, Any]) -> dict[str, Any]:
    copy = json.loads(json.dumps(tool))
    if rng.random() < 0.25:
        for key, entry in copy["function"]["parameters"]["properties"].items():
            entry["description"] = f"The {key}"
    if rng.random() < 0.1:
        del copy["function"]["parameters"]["required"]
    return copy


def _result_text(rng: random.Random, result: Any) -> str:
    if rng.random() < 0.3 and len(result) == 1 and "ok" not in result:
        return str(next(iter(result.values())))
    return json.dumps(result)


def tool_call(rng: random.Random) -> Sample:
    """Make a request with one to three tools on offer, the call unless none is needed, and often the final answer."""
    offered = rng.sample(TOOLS, rng.choice((1, 1, 2, 3)))
    if rng.random() < 0.4:
        offered[rng.randrange(len(offered))] = _made_up(rng)
    tools = [_vary_description(rng, tool) for tool, _ in offered]
    if rng.random() < 0.12:
        turn = small_talk(rng)
        messages: list[Message] = [{"role": "user", "content": turn.request}, _says(turn.answer)]
        return Sample("tool calls", messages, tools)
    tool, maker = rng.choice(offered)
    text, arguments, result, answer = maker(rng)
    call = {"type": "function", "function": {"name": tool["function"]["name"], "arguments": arguments}}
    request = polish(rng, text, imperative=not text.startswith(("wh", "how", "is", "time")))
    messages = [
        {"role": "user", "content": request},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    if rng.random() < 0.5:
        messages += [{"role": "tool", "content": _result_text(rng, result)}, _says(answer)]
    return Sample("tool calls", messages, tools)


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}
