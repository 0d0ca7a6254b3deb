"""A client's messages in the shape that chat templates expect; nothing in them may steer the rendering itself.

Templates disagree on two things: the arguments of a tool call are an object to some and JSON text to others, and an
assistant message with only calls has no content, which some test for and others would print as "None".
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from app.core.errors import InvalidRequest
from app.core.messages import MAX_TEMPLATE_ARGUMENTS, RESERVED_TEMPLATE_NAMES

MAX_ARGUMENT_CHARACTERS = 4096
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_COMMA_BEFORE_END = re.compile(r'("(?:[^"\\]|\\.)*(?:"|\Z))|,(?=\s*[}\]])', re.DOTALL)
"""Matches whole strings, to preserve them, or a trailing comma, which JSON does not allow."""

Messages = list[dict[str, Any]]


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object to templates that access it as one, the client's JSON text to all others."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Any) -> str:
        return self.text + str(other)

    def __radd__(self, other: Any) -> str:
        return str(other) + self.text


def plain_messages(messages: Iterable[Mapping[str, Any]]) -> Messages:
    """Copy messages with text parts joined, tool arguments as `Arguments` and reasoning under one name.

    Raises `InvalidRequest` for a message without a role and for parts that are not text.
    """
    return [_plain_message(message) for message in messages]


def mapped_arguments(arguments: Any) -> Arguments:
    """Return arguments as an object: parsed leniently, or else the whole text under `raw`."""
    if arguments is None:
        return Arguments({}, "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    values = _read_object(_COMMA_BEFORE_END.sub(lambda match: match.group(1) or "", text))
    values = {"raw": text} if values is None else values
    return Arguments(values, json.dumps(values, ensure_ascii=False))


def _read_object(text: str) -> dict[str, Any] | None:
    """Parse an object, whose strings may contain control characters; {} for blank text, None for anything else."""
    if not text.strip():
        return {}
    try:
        parsed = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def checked_arguments(arguments: Mapping[str, Any], reserved: Iterable[str] = ()) -> dict[str, Any]:
    """Check a request's `template_arguments`: a few scalars, under names that neither server nor template reserves.

    Raises `InvalidRequest` (see CVE-2025-62426: such arguments must not override what the server decides).
    """
    if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        raise _invalid(f"template_arguments may contain at most {MAX_TEMPLATE_ARGUMENTS} names")
    for name, value in arguments.items():
        if not (isinstance(name, str) and name.isidentifier() and len(name) <= 64) or name.startswith("_"):
            raise _invalid("a name in template_arguments is not a plain identifier")
        if name in RESERVED_TEMPLATE_NAMES or name in reserved:
            raise _invalid(f"template_arguments may not set {name!r}: the server decides it")
        if not (value is None or isinstance(value, str | int | float)):
            raise _invalid(f"template_arguments[{name!r}] must be a string, a number, true, false or null")
        if isinstance(value, str) and len(value) > MAX_ARGUMENT_CHARACTERS:
            raise _invalid(f"template_arguments[{name!r}] is longer than {MAX_ARGUMENT_CHARACTERS} characters")
    return dict(arguments)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("every message needs a role", parameter="messages")
    plain = {**message, "content": _text(message.get("content"))}
    reasoning = next((message[name] for name in REASONING_NAMES if isinstance(message.get(name), str)), None)
    if reasoning is not None:
        plain |= {"reasoning_content": reasoning}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if not calls:  # some templates fail on an empty list
        plain.pop("tool_calls", None)
    return plain


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    raise InvalidRequest("this model reads text only: send content as a string or as text parts", parameter="messages")


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or type(arguments := function.get("arguments")) not in {str, dict}:
        return call
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = text if text.strip() else "{}"
    values = _read_object(text)
    if values is None:
        return call
    return {**call, "function": {**function, "arguments": Arguments(values, text)}}


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, parameter="template_arguments")
