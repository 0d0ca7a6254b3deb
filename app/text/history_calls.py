"""Repairs of tools, tool calls and results: pure functions from one conversation to another."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import groupby
from typing import Any

from app.text.dialect import NO_DIALECT, Dialect, with_json_calls, written_marks
from app.text.messages import Arguments, Messages, mapped_arguments
from app.text.turns import (
    Conversation,
    calls_of,
    each_message,
    function_of,
    joined_texts,
    leading_systems,
    user_turn,
    with_messages,
)

PYTHONIC = "pythonic"
"""Name of mlx-lm's parser for calls in Python syntax (LFM2)."""
NO_RESULT = "(no result)"
"""Placeholder for a missing tool result."""
TOOLS_IN_WORDS = "You may call these functions:\n{tools}"
CALLS_IN_WORDS = """

To call one, answer with nothing but
<tool_call>
{"name": "its name", "arguments": {"of": "the function"}}
</tool_call>"""


def tools_listed(conversation: Conversation) -> Conversation:
    """Replace missing tools with an empty list."""
    return replace(conversation, tools=conversation.tools or [])


def tools_described(conversation: Conversation) -> Conversation:
    """Add an empty description and empty parameters to tools that lack them."""
    return _each_tool(
        conversation,
        lambda function: {
            **function,
            "description": function.get("description") or "",
            "parameters": {"type": "object", "properties": {}} | (function.get("parameters") or {}),
        },
    )


def tools_detailed(conversation: Conversation) -> Conversation:
    """Write out the schema keywords that old templates expect in tool parameters."""
    return _each_tool(conversation, lambda function: {**function, "parameters": _detailed(function.get("parameters"))})


def _each_tool(conversation: Conversation, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Conversation:
    if not conversation.tools:
        return conversation
    return replace(conversation, tools=[{**tool, "function": change(function_of(tool))} for tool in conversation.tools])


def _detailed(schema: Any) -> Any:
    """Give each part of a schema a description and a single type."""
    if not isinstance(schema, Mapping):
        return {"description": ""}
    detailed = {"description": "", **schema}
    if isinstance(detailed.get("type"), list):
        detailed |= {"anyOf": [{"type": kind} for kind in detailed.pop("type")]}
    if isinstance(detailed.get("properties"), Mapping):
        detailed["properties"] = {name: _detailed(part) for name, part in detailed["properties"].items()}
    if detailed.get("type") == "object":
        detailed = {"properties": {}, "additionalProperties": False} | detailed
    if "items" in detailed:
        detailed["items"] = _detailed(detailed["items"])
    return detailed


def each_call(change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[Conversation], Conversation]:
    """Turn a change of one called function into a repair of a conversation."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        calls = [{**call, "function": change(function_of(call))} for call in calls_of(message)]
        return message | {"tool_calls": calls} if calls else message

    return each_message(changed)


def argument_mapping(function: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of any kind to an object."""
    arguments = function.get("arguments")
    return {**function, "arguments": arguments if isinstance(arguments, dict) else mapped_arguments(arguments)}


def argument_text(function: Mapping[str, Any]) -> dict[str, Any]:
    """Restore arguments to the text that was sent."""
    arguments = function.get("arguments")
    return {**function, "arguments": str(arguments) if isinstance(arguments, Arguments) else arguments}


def short_identifiers(conversation: Conversation) -> Conversation:
    """Replace call ids with nine letters and digits, which every template accepts; equal ids remain equal."""
    return _renamed(conversation, lambda identifier, _, place: _short(identifier or place))


def _short(identifier: Any) -> str:
    if isinstance(identifier, str) and re.fullmatch(r"[A-Za-z0-9]{9}", identifier):
        return identifier
    return sha256(str(identifier).encode("utf-8", "replace")).hexdigest()[:9]


def numbered_identifiers(conversation: Conversation) -> Conversation:
    """Rename calls as Kimi does, `functions.<name>:<number>`, unless they already are."""

    def named(identifier: Any, function: Mapping[str, Any], place: str) -> str:
        if re.fullmatch(r"functions\..+:\d+", str(identifier)) or not function:
            return str(identifier)
        return f"functions.{function.get('name')}:{place.rpartition('.')[2]}"

    return _renamed(conversation, named)


def _renamed(conversation: Conversation, named: Callable[[Any, Mapping[str, Any], str], str]) -> Conversation:
    """Rename each call by its id, function and place, and its results to match.

    A result without an id belongs to the next call that has no result yet.
    """
    renamed: Messages = []
    names: dict[str, str] = {}
    waiting: list[str] = []
    for place, message in enumerate(conversation.messages):
        if calls := calls_of(message):
            waiting = [named(call.get("id"), function_of(call), f"{place}.{n}") for n, call in enumerate(calls)]
            names |= {str(call.get("id")): name for call, name in zip(calls, waiting, strict=True)}
            called = [{**call, "id": name} for call, name in zip(calls, waiting, strict=True)]
            renamed.append(message | {"tool_calls": called})
        elif message["role"] == "tool":
            own = message.get("tool_call_id")
            name = names.get(str(own)) if own else next(iter(waiting), None)
            name = name or named(own, {}, str(place))
            waiting = [other for other in waiting if other != name]
            renamed.append(message | {"tool_call_id": name})
        else:
            renamed.append(message)
    return with_messages(conversation, renamed)


def calls_split(conversation: Conversation) -> Conversation:
    """Split parallel calls into one message per call, each followed by its result."""
    messages = conversation.messages
    owned = _results_of(messages)
    placed = {place for places in owned.values() for place in places}
    split: Messages = []
    for place, message in enumerate(messages):
        calls = calls_of(message)
        if place in placed:
            continue
        if len(calls) < 2:
            split += [message, *(messages[index] for index in owned.get(place, ()))]
            continue
        results = [messages[index] for index in owned[place]]
        for number, call in enumerate(calls):
            bare = {"role": message["role"], "content": None if message["content"] is None else ""}
            split.append((bare if number else message) | {"tool_calls": [call]})
            own = results if number == len(calls) - 1 else _results_for(call, results)
            split += own
            results = _others(results, own)
    return with_messages(conversation, split)


def texts_apart(conversation: Conversation) -> Conversation:
    """Move text beside calls into a message of its own before them."""
    apart: Messages = []
    for message in conversation.messages:
        if calls_of(message) and message["content"]:
            apart.append({name: value for name, value in message.items() if name != "tool_calls"})
            apart.append({"role": message["role"], "content": None, "tool_calls": message["tool_calls"]})
        else:
            apart.append(message)
    return with_messages(conversation, apart)


def call_in_words(message: dict[str, Any]) -> dict[str, Any]:
    """Write calls and results as text."""
    return (
        _result_in_words(message) if message["role"] == "tool" else calls_written(message, with_json_calls(NO_DIALECT))
    )


def calls_written(message: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Write calls as text, as a model of this dialect would."""
    written = [_written(function_of(call), dialect) for call in calls_of(message)]
    if not written:
        return message
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *written]))}


def _written(function: Mapping[str, Any], dialect: Dialect) -> str:
    name, arguments = function.get("name"), function.get("arguments")
    start, end = written_marks(dialect)
    if dialect.parser == PYTHONIC and isinstance(arguments, Mapping):
        values = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()]
        return f"{start}[{name}({', '.join(values)})]{end}"
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return "\n".join(filter(None, (start, call, end)))


def tools_in_words(conversation: Conversation, how: str = "") -> Conversation:
    """Describe the tools, and `how` to call them, in the first system message."""
    if not conversation.tools:
        return conversation
    described = [json.dumps(tool, ensure_ascii=False) for tool in conversation.tools]
    system_message = {"role": "system", "content": TOOLS_IN_WORDS.format(tools="\n".join(described)) + how}
    messages = conversation.messages
    if leading_systems(messages):
        return with_messages(
            conversation, [messages[0] | {"content": joined_texts(messages[0], system_message)}, *messages[1:]]
        )
    return with_messages(conversation, [system_message, *messages])


# --- results ------------------------------------------------------------------------------------------------------


def _results_of(messages: Messages) -> dict[int, list[int]]:
    """Map the place of each message with calls to those of its results; one without an id follows its calls."""
    owned: dict[int, list[int]] = {}
    callers: dict[str, int] = {}
    caller = -1
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            owner = callers.get(str(message["tool_call_id"]), -1) if message.get("tool_call_id") else caller
            if owner >= 0:
                owned[owner].append(place)
            continue
        caller = place if calls_of(message) else -1
        if caller >= 0:
            owned[place] = []
            callers |= {str(call.get("id")): place for call in calls_of(message)}
    return owned


def _results_for(call: Mapping[str, Any], results: Messages) -> Messages:
    """Return the `results` with the call's id, or else the first one without an id."""
    named = [result for result in results if result.get("tool_call_id") and result["tool_call_id"] == call.get("id")]
    return named or [result for result in results if not result.get("tool_call_id")][:1]


def _others(results: Messages, own: Messages) -> Messages:
    return [result for result in results if not any(result is taken for taken in own)]


def results_ordered(conversation: Conversation) -> Conversation:
    """Put results in the order of their calls: most templates omit ids, so models match results by order alone."""
    ordered: Messages = []
    places: dict[str, int] = {}
    for are_results, run in groupby(conversation.messages, key=lambda message: message["role"] == "tool"):
        messages = list(run)
        if are_results:
            messages.sort(key=lambda message: places.get(str(message.get("tool_call_id")), len(places)))
        places = {str(call.get("id")): place for place, call in enumerate(calls_of(messages[-1]))}
        ordered += messages
    return with_messages(conversation, ordered)


def results_moved(conversation: Conversation) -> Conversation:
    """Move results directly behind their calls."""
    messages = conversation.messages
    owned = _results_of(messages)
    placed = {place for places in owned.values() for place in places}
    moved: Messages = []
    for place, message in enumerate(messages):
        if place not in placed:
            moved += [message, *(messages[index] for index in owned.get(place, ()))]
    return with_messages(conversation, moved)


def results_added(conversation: Conversation) -> Conversation:
    """Add a placeholder for each call without a result, behind the existing results."""
    messages = conversation.messages
    owned = _results_of(messages)
    added: dict[int, Messages] = {}
    for caller, places in owned.items():
        results = [messages[place] for place in places]
        lacking: Messages = []
        for call in calls_of(messages[caller]):
            own = _results_for(call, results)
            results = _others(results, own)
            if not own:
                lacking.append({"role": "tool", "tool_call_id": call.get("id"), "content": NO_RESULT})
        added[max([caller, *places])] = lacking
    groups = [[message, *added.get(place, ())] for place, message in enumerate(messages)]
    return with_messages(conversation, [message for part in groups for message in part])


def _result_in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    return user_turn(f"<tool_response>\n{message['content'] or ''}\n</tool_response>")


def orphans_in_words(conversation: Conversation) -> Conversation:
    """Rewrite results without a call as user text."""
    owned = {place for places in _results_of(conversation.messages).values() for place in places}
    return with_messages(
        conversation,
        [
            _result_in_words(message) if message["role"] == "tool" and place not in owned else message
            for place, message in enumerate(conversation.messages)
        ],
    )
