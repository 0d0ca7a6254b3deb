"""Convert OpenAI's items to chat messages, and their tools to chat tools.

Items may concern tools that the client runs, that OpenAI runs, or that are unknown. Items that a model can use become
messages; others are left out with a notice, so that a session begun elsewhere can go on. Images and files are refused.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from app.api.chat import LEFT_OUT, PART_TEXTS, TEXT_ONLY
from app.api.tools import CUSTOM, FUNCTION, custom_arguments
from app.core.errors import InvalidRequest
from app.core.request import Notice

Item = dict[str, Any]

NAMESPACE = "namespace"
DEFAULT_NAMESPACE = "functions"
"""Namespace whose tools are called by their bare names."""
TEXTS: Mapping[str, str] = PART_TEXTS | {"reasoning_text": "text", "summary_text": "text"}
ENCRYPTED = "encrypted_content"
"""Type of a part that only its sender can read."""
CALL_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "apply_patch_call": ("apply_patch", "operation"),
    "code_interpreter_call": ("code_interpreter", "code"),
    "file_search_call": ("file_search", "queries"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
"""Name of the tool, and the field that holds its arguments, by type of call."""
RESULTS: Mapping[str, Sequence[str]] = {
    "code_interpreter_call": ("outputs",),
    "file_search_call": ("results",),
    "mcp_call": ("output", "error"),
}
"""Fields that may hold the result of a call that ran elsewhere, by its type; a call without a result is left out."""
MAX_NAMED_ITEMS = 8
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
           "apply_patch_call_output", "mcp_tool_call_output", "tool_search_output")  # fmt: skip


def flat_name(item: Mapping[str, Any]) -> str:
    """Return the name of a tool or a called tool as models see it; a namespace other than the default is prefixed."""
    name, namespace = str(item.get("name") or ""), item.get(NAMESPACE)
    if not isinstance(namespace, str) or namespace in {"", DEFAULT_NAMESPACE}:
        return name
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


class ItemReader:
    """Reads items in order; calls and reasoning join the assistant's message that they belong to.

    `find` looks an item up by its id.
    """

    def __init__(self, find: Callable[[str], Item | None]) -> None:
        self._messages: list[Item] = []
        """Messages so far; those of the assistant with a list of texts for each field."""
        self.tools: list[Item] = []
        """Tools that the items define."""
        self._find = find
        self._open_calls: dict[str, str] = {}
        """Names of the calls that have no result yet, by id."""
        self._not_found: list[str] = []
        self._left_out: dict[str, None] = {}
        self._referenced: set[str] = set()

    def read(self, items: Iterable[Item]) -> "ItemReader":
        """Add items. Raises InvalidRequest for images, files, invalid items, and an item that is referenced twice."""
        resolved = [self._resolved(item) for item in items]
        answered = {_call_id(item) for item in resolved if item is not None and item.get("type") in OUTPUTS}
        for item in resolved:
            if item is not None and not self._add(item, _call_id(item) in answered):
                self._leave_out(item)
        return self

    @property
    def messages(self) -> list[Item]:
        """Messages of the items read so far."""
        joined = map(_joined, self._messages)
        return [message for message in joined if message["content"] is not None or message.get("tool_calls")]

    def notices(self) -> list[Notice]:
        """Return notices about the items that were left out."""
        notices = []
        if self._left_out:
            message = f"items of type {', '.join(self._left_out)} are left out: this model cannot use them"
            notices.append(Notice(code="left_out_item", message=message, parameter="input"))
        if self._not_found:
            names = ", ".join(self._not_found[:MAX_NAMED_ITEMS])
            message = f"{len(self._not_found)} of the items are not stored, or no longer: send them whole ({names})"
            notices.append(Notice(code="item_not_found", message=message, parameter="input"))
        return notices

    def _resolved(self, item: Item) -> Item | None:
        """Return the item, or the stored item that it references; None if there is no such item."""
        is_reference = item.get("type") == "item_reference" or ("id" in item and not {"type", "role"} & item.keys())
        if not is_reference:
            return item
        name = str(item.get("id"))
        if name in self._referenced:  # else short references could expand to a huge prompt
            raise InvalidRequest(f"input: item {name[:60]} is referenced twice: reference it once", parameter="input")
        self._referenced.add(name)
        referenced = self._find(name)
        if referenced is None:
            self._not_found.append(name[:60])
        return referenced

    def _leave_out(self, item: Item) -> None:
        self._left_out[str(item.get("type"))[:60]] = None

    def _assistant(self) -> Item:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant"})
        return self._messages[-1]

    def _assistant_before_text(self) -> Item:
        """Return the assistant's message for more thoughts or text: a new one where the last ended with text."""
        last = self._assistant()
        if any(last.get("content", ())) and "tool_calls" not in last:
            self._messages.append({"role": "assistant"})
        return self._messages[-1]

    def _add(self, item: Item, is_answered: bool) -> bool:  # noqa: FBT001 - whether its result follows
        """Add one item; return whether the model can use it."""
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise InvalidRequest("input: the type of an item must be a string", parameter="input")
        if kind == "message":
            self._add_message(item)
        elif kind == "agent_message":
            text = self._text(item.get("content"))
            self._messages += [{"role": "user", "content": text}] if text else []
            return bool(text)
        elif kind == "reasoning":
            return self._add_reasoning(item)
        elif kind in OUTPUTS:
            self._add_output(item)
        elif kind == "additional_tools":
            self.tools += _objects(item.get("tools"))
        else:
            return self._add_call(item, is_answered)
        return True

    def _add_message(self, item: Item) -> None:
        role, content = item.get("role"), item.get("content")
        if role == "assistant":
            self._assistant_before_text().setdefault("content", []).append(self._text(content or ""))
        else:
            self._messages.append({"role": role, "content": self._text(content)})

    def _add_reasoning(self, item: Item) -> bool:
        text = self._text(item.get("content") or item.get("summary") or "")
        if not text:
            return not item.get(ENCRYPTED)
        self._assistant_before_text().setdefault("reasoning_content", []).append(text)
        return True

    def _add_output(self, item: Item) -> None:
        if item["type"] == "tool_search_output":
            self.tools += _objects(item.get("tools"))
        names = ("output", "result", "tools", "status")
        output = next((item[name] for name in names if item.get(name) is not None), "")
        content = self._output_text(output)
        self._messages.append({"role": "tool", "tool_call_id": self._answered_call(item), "content": content})

    def _answered_call(self, item: Item) -> str:
        """Return the id of the call that an output answers; if it has none, a call of its name, else the next one."""
        call_id = _call_id(item)
        if not item.get("call_id") and call_id not in self._open_calls:
            named = [name for name, called in self._open_calls.items() if called == flat_name(item)]
            call_id = next(iter([*named, *self._open_calls]), call_id)
        self._open_calls.pop(call_id, None)
        return call_id

    def _add_call(self, item: Item, is_answered: bool) -> bool:  # noqa: FBT001
        """Add a call, with its result if it ran elsewhere. A call that was cut off is used only if a result follows."""
        kind = item["type"]
        results = [item[name] for name in RESULTS.get(kind, ()) if item.get(name)]
        if (item.get("status") == "incomplete" and not is_answered) or (kind in RESULTS and not results):
            return False
        tool_call = _tool_call(item)
        if tool_call is None:
            return False
        name, arguments = tool_call
        function = {"name": name, "arguments": arguments}
        call_id = _call_id(item)
        call = {"id": call_id, "type": FUNCTION, FUNCTION: function}
        self._assistant().setdefault("tool_calls", []).append(call)
        if results:
            self._messages.append({"role": "tool", "tool_call_id": call_id, "content": self._output_text(results[0])})
        else:
            self._open_calls[call_id] = name
        return True

    def _output_text(self, output: Any) -> str:
        """Return a tool's output as text: a string or text parts as they are, any other value as JSON."""
        if isinstance(output, str):
            return output
        if isinstance(output, dict) and isinstance(output.get("content"), str):
            return str(output["content"])
        known = (*TEXTS, ENCRYPTED)
        has_parts = isinstance(output, list) and all(isinstance(part, dict) for part in output)
        if has_parts and any(part.get("type") in known or _is_media(part) for part in output):
            texts = (self._text(part if part.get("type") in known else LEFT_OUT) for part in output)
            return "\n".join(filter(None, texts))
        return _json(output)

    def _text(self, content: Any) -> str:
        if isinstance(content, str):
            return content
        texts = []
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == ENCRYPTED:
                self._leave_out(part)
            elif isinstance(kind, str) and kind in TEXTS:
                texts.append(str(part.get(TEXTS[kind]) or ""))
            else:
                raise InvalidRequest(f"input: {TEXT_ONLY}: send parts of type input_text", parameter="input")
        return "".join(texts)


def _joined(message: Item) -> Item:
    """Join the texts that several items added to an assistant message; return other messages unchanged."""
    if message["role"] != "assistant":
        return message
    thoughts = message.get("reasoning_content")
    content = "".join(message["content"]) if "content" in message else None
    return message | {"content": content} | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})


def _is_media(part: Mapping[str, Any]) -> bool:
    return str(part.get("type")).startswith(("input_", "image", "computer_screenshot"))


def _call_id(item: Mapping[str, Any]) -> str:
    return str(item.get("call_id") or item.get("id") or "-")


def _tool_call(item: Item) -> tuple[str, str] | None:
    """Return the tool's name and arguments; None if the item is not a tool call."""
    match item["type"]:
        case "function_call":
            return flat_name(item), _arguments(item)
        case "mcp_call":
            return flat_name(item | {NAMESPACE: item.get("server_label")}), _arguments(item)
        case "custom_tool_call":
            return flat_name(item), custom_arguments(str(item.get("input") or ""))
        case kind if kind in CALL_ARGUMENTS:
            name, field = CALL_ARGUMENTS[kind]
            given = item.get(field)
            return name, _json(given if isinstance(given, dict) else {field: given})
    return None


def _arguments(item: Item) -> str:
    arguments = item.get("arguments") or {}
    return arguments if isinstance(arguments, str) else _json(arguments)


def _objects(entries: Any) -> list[Item]:
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- tools ------------------------------------------------------------------------------------------------------


def flat_tools(tools: Iterable[Item], further: Iterable[Item] = ()) -> list[Item]:
    """Flatten namespaces; tools of `further` are added only if their names are new."""
    flat = [flat_tool for tool in tools for flat_tool in _flattened(tool)]
    names = {flat_name(tool) for tool in flat}
    for flat_tool in (flat_tool for tool in further for flat_tool in _flattened(tool)):
        if flat_name(flat_tool) not in names:
            names.add(flat_name(flat_tool))
            flat.append(flat_tool)
    return flat


def _flattened(tool: Item) -> list[Item]:
    """Flatten a namespace; its first tool also gets the description of the namespace."""
    if tool.get("type") != NAMESPACE:
        return [tool]
    members = [member | {NAMESPACE: tool.get("name")} for member in _objects(tool.get("tools"))]
    about = tool.get("description")
    if members and isinstance(about, str) and about.strip():
        members[0] |= {"description": "\n\n".join(filter(None, (about, members[0].get("description"))))}
    return members


def chat_tool(tool: Item) -> Item:
    """Convert a tool to chat format."""
    kind = tool.get("type")
    described = {"name": flat_name(tool)}
    if kind == FUNCTION:
        given = {name: tool.get(name) for name in ("description", "parameters", "strict")}
    elif kind == CUSTOM:
        given = {name: tool.get(name) for name in ("description", "format")}
    else:
        return {"type": kind, "name": tool.get("name") or tool.get("server_label")}
    return {"type": kind, kind: described | {name: value for name, value in given.items() if value is not None}}


def chat_choice(choice: Any, tools: Sequence[Item]) -> Any:
    """Convert a tool choice to chat format; `tools` are flat."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        wanted = {_reference(allowed) for allowed in _objects(choice.get("tools"))}
        named = [chat_tool(tool) for tool in tools if wanted & _references(tool)]
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": named}}
    if kind not in (FUNCTION, CUSTOM):
        return choice
    name = next((flat_name(tool) for tool in tools if _reference(choice) in _references(tool)), choice.get("name"))
    return {"type": kind, kind: {"name": name}}


def _reference(choice: Mapping[str, Any]) -> tuple[str, str]:
    """Return a key for what a choice names: a namespace, a tool in a namespace, or a tool by its bare or flat name."""
    if choice.get("type") == NAMESPACE:
        return NAMESPACE, str(choice.get("name"))
    return ("flat", flat_name(choice)) if choice.get(NAMESPACE) else ("name", str(choice.get("name")))


def _references(tool: Item) -> set[tuple[str, str]]:
    """Return the keys of all choices that name this tool."""
    flat = flat_name(tool)
    names = {("name", str(tool.get("name"))), ("name", flat), ("flat", flat)}
    return names | {(NAMESPACE, str(tool.get(NAMESPACE)))}
