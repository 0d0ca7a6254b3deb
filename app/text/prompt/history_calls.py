"""Repairs of tools, tool calls and results: pure functions from one conversation to another."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import chain, groupby
from typing import Any

from app.text.dialect import NO_DIALECT, Dialect, literal_markers, with_json_calls
from app.text.prompt.messages import Arguments, Messages, mapped_arguments
from app.text.prompt.turns import (
    Conversation,
    calls_of,
    count_leading_systems,
    each_message,
    function_of,
    joined_texts,
    user_turn,
    with_messages,
)

PYTHON_CALLS = {"pythonic": "[{}]", "olmo3": "\n{}\n"}
"""Surroundings of a call between its markers, by the forms whose calls are Python."""
NO_RESULT = "(no result)"
"""Placeholder for a missing tool result."""
TOOLS_TEXT = "You may call these functions:\n{tools}"
CALL_INSTRUCTIONS = """

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
    return _each_tool(
        conversation, lambda function: {**function, "parameters": _detailed_schema(function.get("parameters"))}
    )


def _each_tool(conversation: Conversation, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Conversation:
    if not conversation.tools:
        return conversation
    return replace(conversation, tools=[{**tool, "function": change(function_of(tool))} for tool in conversation.tools])


def _detailed_schema(schema: Any) -> Any:
    """Give each part of a schema a description and a single type."""
    if not isinstance(schema, Mapping):
        return {"description": ""}
    detailed = {"description": "", **schema}
    if isinstance(detailed.get("type"), list):
        detailed |= {"anyOf": [{"type": kind} for kind in detailed.pop("type")]}
    if isinstance(detailed.get("properties"), Mapping):
        detailed["properties"] = {name: _detailed_schema(part) for name, part in detailed["properties"].items()}
    if detailed.get("type") == "object":
        detailed = {"properties": {}, "additionalProperties": False} | detailed
    if "items" in detailed:
        detailed["items"] = _detailed_schema(detailed["items"])
    return detailed


def each_call(change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[Conversation], Conversation]:
    """Turn a change of one called function into a repair of a conversation."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        calls = [{**call, "function": change(function_of(call))} for call in calls_of(message)]
        return message | {"tool_calls": calls} if calls else message

    return each_message(changed)


def argument_mapping(function: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of any type to an object."""
    arguments = function.get("arguments")
    return {**function, "arguments": arguments if isinstance(arguments, dict) else mapped_arguments(arguments)}


def argument_text(function: Mapping[str, Any]) -> dict[str, Any]:
    """Restore arguments to the text that was sent."""
    arguments = function.get("arguments")
    return {**function, "arguments": str(arguments) if isinstance(arguments, Arguments) else arguments}


def short_identifiers(conversation: Conversation) -> Conversation:
    """Replace call ids with nine letters and digits, which every template accepts; equal ids remain equal."""
    return _with_call_ids(conversation, lambda identifier, _, position: _short_id(identifier or position))


def _short_id(identifier: Any) -> str:
    if isinstance(identifier, str) and re.fullmatch(r"[A-Za-z0-9]{9}", identifier):
        return identifier
    return sha256(str(identifier).encode("utf-8", "replace")).hexdigest()[:9]


def numbered_identifiers(conversation: Conversation) -> Conversation:
    """Rename calls as Kimi does, `functions.<name>:<number>`, unless they already are."""

    def new_id(identifier: Any, function: Mapping[str, Any], position: str) -> str:
        if re.fullmatch(r"functions\..+:\d+", str(identifier)) or not function:
            return str(identifier)
        return f"functions.{function.get('name')}:{position.rpartition('.')[2]}"

    return _with_call_ids(conversation, new_id)


def _with_call_ids(conversation: Conversation, new_id: Callable[[Any, Mapping[str, Any], str], str]) -> Conversation:
    """Replace each call's id by `new_id` of its id, function and position, and the ids of its results to match.

    A result without an id belongs to the next call that has no result yet.
    """
    renamed: Messages = []
    names: dict[str, str] = {}
    pending_ids: list[str] = []
    for position, message in enumerate(conversation.messages):
        if calls := calls_of(message):
            pending_ids = [new_id(call.get("id"), function_of(call), f"{position}.{n}") for n, call in enumerate(calls)]
            names |= {str(call.get("id")): name for call, name in zip(calls, pending_ids, strict=True)}
            called = [{**call, "id": name} for call, name in zip(calls, pending_ids, strict=True)]
            renamed.append(message | {"tool_calls": called})
        elif message["role"] == "tool":
            result_id = message.get("tool_call_id")
            name = names.get(str(result_id)) if result_id else next(iter(pending_ids), None)
            name = name or new_id(result_id, {}, str(position))
            pending_ids = [other for other in pending_ids if other != name]
            renamed.append(message | {"tool_call_id": name})
        else:
            renamed.append(message)
    return with_messages(conversation, renamed)


def calls_split(conversation: Conversation) -> Conversation:
    """Split parallel calls into one message per call, each followed by its result."""
    messages = conversation.messages
    results_by_caller = _results_by_caller(messages)
    result_positions = set(chain.from_iterable(results_by_caller.values()))
    split: Messages = []
    for position, message in enumerate(messages):
        calls = calls_of(message)
        if position in result_positions:
            continue
        if len(calls) < 2:
            split += [message, *(messages[index] for index in results_by_caller.get(position, ()))]
            continue
        results = [messages[index] for index in results_by_caller[position]]
        for number, call in enumerate(calls):
            bare = {"role": message["role"], "content": None if message["content"] is None else ""}
            split.append((bare if number else message) | {"tool_calls": [call]})
            own_results = results if number == len(calls) - 1 else _results_for(call, results)
            split += own_results
            results = _without(results, own_results)
    return with_messages(conversation, split)


def texts_apart(conversation: Conversation) -> Conversation:
    """Move text next to calls into a separate message before them."""
    separated: Messages = []
    for message in conversation.messages:
        if calls_of(message) and message["content"]:
            separated.append({name: value for name, value in message.items() if name != "tool_calls"})
            separated.append({"role": message["role"], "content": None, "tool_calls": message["tool_calls"]})
        else:
            separated.append(message)
    return with_messages(conversation, separated)


def calls_and_results_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Write calls and results as text."""
    return (
        _result_as_text(message) if message["role"] == "tool" else calls_as_text(message, with_json_calls(NO_DIALECT))
    )


def calls_as_text(message: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Write calls as text, as a model of this dialect would."""
    texts = [_call_text(function_of(call), dialect) for call in calls_of(message)]
    if not texts:
        return message
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *texts]))}


def _call_text(function: Mapping[str, Any], dialect: Dialect) -> str:
    name, arguments = function.get("name"), function.get("arguments")
    start, end = literal_markers(dialect)
    if dialect.parser in PYTHON_CALLS and isinstance(arguments, Mapping):
        values = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()]
        return start + PYTHON_CALLS[dialect.parser].format(f"{name}({', '.join(values)})") + end
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return "\n".join(filter(None, (start, call, end)))


def tools_as_text(conversation: Conversation, instructions: str = "") -> Conversation:
    """Describe the tools in the first system message, followed by `instructions` for calling them."""
    if not conversation.tools:
        return conversation
    described = [json.dumps(tool, ensure_ascii=False) for tool in conversation.tools]
    system_message = {"role": "system", "content": TOOLS_TEXT.format(tools="\n".join(described)) + instructions}
    messages = conversation.messages
    if count_leading_systems(messages):
        return with_messages(
            conversation, [messages[0] | {"content": joined_texts(messages[0], system_message)}, *messages[1:]]
        )
    return with_messages(conversation, [system_message, *messages])


# --- results ------------------------------------------------------------------------------------------------------


def _results_by_caller(messages: Messages) -> dict[int, list[int]]:
    """Map the position of each message with calls to those of its results; without ids, results follow their calls."""
    results_by_caller: dict[int, list[int]] = {}
    callers: dict[str, int] = {}
    caller = -1
    for position, message in enumerate(messages):
        if message["role"] == "tool":
            owner = callers.get(str(message["tool_call_id"]), -1) if message.get("tool_call_id") else caller
            if owner >= 0:
                results_by_caller[owner].append(position)
            continue
        caller = position if calls_of(message) else -1
        if caller >= 0:
            results_by_caller[position] = []
            callers |= {str(call.get("id")): position for call in calls_of(message)}
    return results_by_caller


def _results_for(call: Mapping[str, Any], results: Messages) -> Messages:
    """Return the `results` with the call's id, or else the first one without an id."""
    matching = [result for result in results if result.get("tool_call_id") and result["tool_call_id"] == call.get("id")]
    return matching or [result for result in results if not result.get("tool_call_id")][:1]


def _without(results: Messages, own_results: Messages) -> Messages:
    return [result for result in results if not any(result is other for other in own_results)]


def results_ordered(conversation: Conversation) -> Conversation:
    """Put results in the order of their calls: most templates omit ids, so models match results by order alone."""
    ordered: Messages = []
    positions: dict[str, int] = {}
    for are_results, run in groupby(conversation.messages, key=lambda message: message["role"] == "tool"):
        messages = list(run)
        if are_results:
            messages.sort(key=lambda message: positions.get(str(message.get("tool_call_id")), len(positions)))
        positions = {str(call.get("id")): position for position, call in enumerate(calls_of(messages[-1]))}
        ordered += messages
    return with_messages(conversation, ordered)


def results_moved(conversation: Conversation) -> Conversation:
    """Move results directly after their calls."""
    messages = conversation.messages
    results_by_caller = _results_by_caller(messages)
    result_positions = set(chain.from_iterable(results_by_caller.values()))
    moved: Messages = []
    for position, message in enumerate(messages):
        if position not in result_positions:
            moved += [message, *(messages[index] for index in results_by_caller.get(position, ()))]
    return with_messages(conversation, moved)


def results_added(conversation: Conversation) -> Conversation:
    """Add a placeholder for each call without a result, after the existing results."""
    messages = conversation.messages
    results_by_caller = _results_by_caller(messages)
    added: dict[int, Messages] = {}
    for caller, positions in results_by_caller.items():
        results = [messages[position] for position in positions]
        placeholders: Messages = []
        for call in calls_of(messages[caller]):
            own_results = _results_for(call, results)
            results = _without(results, own_results)
            if not own_results:
                placeholders.append({"role": "tool", "tool_call_id": call.get("id"), "content": NO_RESULT})
        added[max([caller, *positions])] = placeholders
    groups = [[message, *added.get(position, ())] for position, message in enumerate(messages)]
    return with_messages(conversation, [message for part in groups for message in part])


def _result_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    return user_turn(f"<tool_response>\n{message['content'] or ''}\n</tool_response>")


def orphans_as_text(conversation: Conversation) -> Conversation:
    """Rewrite results without a call as user text."""
    result_positions = set(chain.from_iterable(_results_by_caller(conversation.messages).values()))
    return with_messages(
        conversation,
        [
            _result_as_text(message) if message["role"] == "tool" and position not in result_positions else message
            for position, message in enumerate(conversation.messages)
        ],
    )
