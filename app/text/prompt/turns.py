"""Repairs of a conversation's turns, roles and contents: pure functions from one conversation to another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.text.prompt.messages import REASONING_NAMES, Messages

PARAGRAPH = "\n\n"
"""Separator of texts that are joined."""
SYSTEM = frozenset({"system", "developer"})
"""Roles that instruct the model."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation as a chat template gets it."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None


def calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the calls of a message, without entries that are not objects."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a call, or the call itself if it is written without one."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def with_messages(conversation: Conversation, messages: Messages) -> Conversation:
    """Return the conversation with other messages."""
    return replace(conversation, messages=messages)


def each_message(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Conversation], Conversation]:
    """Turn a change of one message into a repair of a conversation."""
    return lambda conversation: with_messages(conversation, [change(message) for message in conversation.messages])


def user_turn(text: str | None) -> dict[str, Any]:
    """Return `text` as a turn of the user."""
    return {"role": "user", "content": text or ""}


def joined_texts(*messages: Mapping[str, Any], name: str = "content") -> str:
    """Join the texts that messages have under `name`, without empty ones."""
    return PARAGRAPH.join(filter(None, [message.get(name) for message in messages]))


# --- system messages ----------------------------------------------------------------------------------------------


def count_leading_systems(messages: Messages) -> int:
    """Count the system messages at the beginning."""
    return next((position for position, message in enumerate(messages) if message["role"] not in SYSTEM), len(messages))


def developer_as_system(message: dict[str, Any]) -> dict[str, Any]:
    """Rename the role `developer` to `system`, as older templates call it."""
    return message | {"role": "system"} if message["role"] == "developer" else message


def systems_joined(conversation: Conversation) -> Conversation:
    """Join the system messages at the beginning into one."""
    messages = conversation.messages
    count = count_leading_systems(messages)
    if count < 2:
        return conversation
    return with_messages(conversation, [messages[0] | {"content": joined_texts(*messages[:count])}, *messages[count:]])


def systems_moved(conversation: Conversation) -> Conversation:
    """Turn later system messages into user messages at their positions, but never between a call and its result."""
    count = count_leading_systems(conversation.messages)
    moved = conversation.messages[:count]
    deferred: Messages = []
    for message in conversation.messages[count:]:
        if message["role"] in SYSTEM:
            deferred.append(user_turn(message["content"]))
            continue
        if message["role"] != "tool":
            moved += deferred
            deferred = []
        moved.append(message)
    return with_messages(conversation, moved + deferred)


def system_folded(conversation: Conversation) -> Conversation:
    """Merge the system text into the first turn if it is the user's, else move it into a new user turn."""
    messages = conversation.messages
    count = count_leading_systems(messages)
    if not count:
        return conversation
    if messages[count:] and messages[count]["role"] == "user":
        count += 1
    return with_messages(conversation, [user_turn(joined_texts(*messages[:count])), *messages[count:]])


# --- contents, reasoning and turns ----------------------------------------------------------------------------------


def null_to_empty(message: dict[str, Any]) -> dict[str, Any]:
    """Replace null content with an empty text."""
    return message | {"content": ""} if message["content"] is None else message


def empty_to_null(message: dict[str, Any]) -> dict[str, Any]:
    """Replace empty content next to calls with null, which some templates test for."""
    return message | {"content": None} if calls_of(message) and not message["content"] else message


def with_reasoning_as(name: str) -> Callable[[Conversation], Conversation]:
    """Create the repair that copies reasoning to a second field `name`."""
    return each_message(
        lambda message: message | {name: message["reasoning_content"]} if _has_reasoning(message) else message
    )


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    return bool(message.get("reasoning_content"))


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Drop the reasoning of a message that has both text and calls."""
    if not (message["content"] and calls_of(message)):
        return message
    return {name: value for name, value in message.items() if name not in REASONING_NAMES}


def empty_left_out(conversation: Conversation) -> Conversation:
    """Drop empty messages of the assistant."""
    non_empty = [
        message
        for message in conversation.messages
        if message["role"] != "assistant" or calls_of(message) or (message["content"] or "").strip()
    ]
    return with_messages(conversation, non_empty)


def roles_joined(conversation: Conversation) -> Conversation:
    """Join neighbouring messages of the user or of the assistant, unless the first one has calls."""
    joined: Messages = []
    for message in conversation.messages:
        before = joined[-1] if joined else {}
        if message["role"] in {"user", "assistant"} and before.get("role") == message["role"] and not calls_of(before):
            joined[-1] = before | message | _joined_parts(before, message)
        else:
            joined.append(message)
    return with_messages(conversation, joined)


def _joined_parts(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    names = ("content", *(name for name in REASONING_NAMES if name in before))
    return {name: joined_texts(before, after, name=name) for name in names}


def results_joined(conversation: Conversation) -> Conversation:
    """Merge a user message that directly follows a tool result into that result."""
    joined: Messages = []
    for message in conversation.messages:
        if message["role"] == "user" and joined and joined[-1]["role"] == "tool":
            joined[-1] = joined[-1] | {"content": joined_texts(joined[-1], message)}
        else:
            joined.append(message)
    return with_messages(conversation, joined)


def user_added(conversation: Conversation) -> Conversation:
    """Insert an empty user turn after the leading system messages, unless a user turn follows them already."""
    messages = conversation.messages
    count = count_leading_systems(messages)
    if messages[count:] and messages[count]["role"] == "user":
        return conversation
    return with_messages(conversation, [*messages[:count], user_turn(""), *messages[count:]])
