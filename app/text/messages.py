"""What a client sent, in the shape that chat templates expect; nothing of it may steer the rendering itself."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from app.core.errors import InvalidRequest

MAX_ARGUMENTS = 32
MAX_ARGUMENT_CHARACTERS = 4096
# fmt: off
SERVER_NAMES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "cycler", "dict",
    "documents", "joiner", "loop", "max_length", "messages", "namespace", "padding", "raise_exception", "range",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "strftime_now", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})
# fmt: on
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


def plain_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies with text parts joined, null content empty, tool arguments as objects and reasoning under one name.

    Raises `InvalidRequest` for a message without a role and for parts that are not text.
    """
    return [_plain_message(message) for message in messages]


def checked_arguments(arguments: Mapping[str, Any], reserved: Iterable[str] = ()) -> dict[str, Any]:
    """`template_arguments` of a request: a few scalars under names that neither the server nor the template owns.

    Raises `InvalidRequest` (see CVE-2025-62426: such arguments must not switch off what the server decides).
    """
    if len(arguments) > MAX_ARGUMENTS:
        raise _invalid(f"template_arguments may hold at most {MAX_ARGUMENTS} names")
    for name, value in arguments.items():
        if not (isinstance(name, str) and name.isidentifier() and len(name) <= 64) or name.startswith("_"):
            raise _invalid("a name in template_arguments is not a plain identifier")
        if name in SERVER_NAMES or name in reserved:
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
    return plain


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    raise InvalidRequest("this model reads text only: send content as a string or as text parts", parameter="messages")


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain_call(call: Any) -> Any:
    """OpenAI sends tool arguments as JSON text; templates write them as JSON themselves and want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, parameter="template_arguments")
