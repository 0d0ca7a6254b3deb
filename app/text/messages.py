"""What a client sent, in the shape that chat templates expect; nothing of it may steer the rendering itself.

Templates disagree on two things: the arguments of a tool call are an object to some and JSON text to others, and an
assistant that only calls tools has no content, which some test for and others would print as "None".
"""

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from app.core.errors import InvalidRequest
from app.core.messages import MAX_TEMPLATE_ARGUMENTS, SERVER_NAMES

MAX_ARGUMENT_CHARACTERS = 4096
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
TOOLS_IN_WORDS = """You may call these functions:
{tools}

To call one, answer with nothing but
<tool_call>
{{"name": "its name", "arguments": {{"of": "the function"}}}}
</tool_call>"""
WRITTEN_NULLS = ("None", "null")

Messages = list[dict[str, Any]]


class Arguments(dict[str, Any]):
    """The arguments of a tool call: an object to templates that look into it, the client's JSON text to all others."""

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
    """Copies with text parts joined, tool arguments as `Arguments`, reasoning under one name, results as called.

    Raises `InvalidRequest` for a message without a role and for parts that are not text.
    """
    return _results_as_called([_plain_message(message) for message in messages])


def _results_as_called(messages: Messages) -> Messages:
    """Results in the order of their calls: most templates show no ids, so that a model knows them by nothing else."""
    told: Messages = []
    places: dict[str, int] = {}
    for are_results, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        found = list(run)
        if are_results:
            found.sort(key=lambda message: places.get(str(message.get("tool_call_id")), len(places)))
        calls = found[-1].get("tool_calls")
        called = [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        places = {str(identifier): place for place, identifier in enumerate(called)}
        told += found
    return told


def calls_in_words(messages: Messages) -> Messages:
    """Calls and results as text, for a template that knows none."""
    return [_call_in_words(message) for message in messages]


def tools_in_words(plain: Messages, tools: Iterable[Mapping[str, Any]]) -> Messages:
    """Tools as text, for a template that knows none."""
    described = [json.dumps(dict(tool), ensure_ascii=False) for tool in tools]
    if not described:
        return plain
    text = TOOLS_IN_WORDS.format(tools="\n".join(described))
    if plain and plain[0]["role"] == "system":
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _call_in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    written = [json.dumps({"name": each.get("name"), "arguments": each.get("arguments")}, ensure_ascii=False)
               for each in functions]  # fmt: skip
    content = "\n".join(
        [*filter(None, [message["content"]]), *(f"<tool_call>\n{call}\n</tool_call>" for call in written)]
    )
    return {"role": message["role"], "content": content}


def render_messages(messages: Messages, render: Callable[[Messages], str]) -> str:
    """The text as this template means it. Raises what `render` raises when nothing suits it."""
    try:
        return _without_nulls(messages, render)
    except Exception:
        textual = [_with_textual_arguments(message) for message in messages]
        if textual == messages:
            raise
        try:
            return _without_nulls(textual, render)
        except Exception:  # noqa: BLE001, S110 - the first refusal is the one to tell
            pass
        raise


def _without_nulls(messages: Messages, render: Callable[[Messages], str]) -> str:
    """Null content stays where the template tests for it; where it fails, or writes the word, it is empty."""
    empty = [message | {"content": ""} if message["content"] is None else message for message in messages]
    if empty == messages:
        return render(messages)
    try:
        kept = render(messages)
    except Exception:  # noqa: BLE001 - templates fail in any way they like
        return render(empty)
    try:
        filled = render(empty)
    except Exception:  # noqa: BLE001
        return kept
    return filled if any(kept.count(word) > filled.count(word) for word in WRITTEN_NULLS) else kept


def checked_arguments(arguments: Mapping[str, Any], reserved: Iterable[str] = ()) -> dict[str, Any]:
    """`template_arguments` of a request: a few scalars under names that neither the server nor the template owns.

    Raises `InvalidRequest` (see CVE-2025-62426: such arguments must not switch off what the server decides).
    """
    if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        raise _invalid(f"template_arguments may hold at most {MAX_TEMPLATE_ARGUMENTS} names")
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
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if isinstance(arguments, dict):
        arguments = Arguments(arguments, function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _with_textual_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return message | {"tool_calls": [_textual_call(call) for call in calls]} if isinstance(calls, list) else message


def _textual_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Arguments):
        return call
    return {**call, "function": {**function, "arguments": function["arguments"].text}}


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, parameter="template_arguments")
