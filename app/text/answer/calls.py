"""Parses the text between the markers of calls: names of offered tools, and arguments as an object.

Text that cannot be parsed is not a call. A parameter that does not fit its type stays text: the tool can report
the error better than this code.
"""

import ast
import re
import secrets
import string
from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from app.text.answer.json_text import parse_literal, parse_python, to_json

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Length of generated ids, in letters and digits: Mistral's templates accept only this length, others accept any."""
_MODEL_CALL_ID = re.compile(r"[A-Za-z0-9]{9}|[\w.:-]+:\d+")
"""Ids that a model writes itself and refers to later: Mistral's and Kimi's."""

_NAMESPACE = re.compile(r"\A(?:(?:functions|default_api)\.|(?:[\w.-]+:)+)")
"""Prefixes that models of every kind have seen before the names of tools."""
MAX_REFERENCES = 8
"""Maximum number of references in a schema that are followed one after another."""
READ_MEMBERS = ("type", "enum", "anyOf", "oneOf", "allOf", "nullable", "properties", "items")
"""Members of a schema that say how a value is read."""
Tools = Mapping[str, Mapping[str, Any]]
"""Schemas of the parameters of each offered tool, by its name."""


class Call(msgspec.Struct, frozen=True):
    """A complete call."""

    name: str
    arguments: str
    """Object of the arguments, as JSON."""
    id: str = ""
    """Id as the model wrote it."""


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Map the name of each tool of a request to the schemas of its parameters."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") or tool
        references = _References(function.get("parameters") or {})
        properties = references.resolved(references.root).get("properties")
        schemas[str(function.get("name"))] = (
            {name: references.with_alternatives(schema) for name, schema in properties.items()}
            if isinstance(properties, Mapping)
            else {}
        )
    return schemas


class _References:
    """Resolves references to parts of `root`, each once: a small schema may refer to a large one thousands of times."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._targets: dict[str, Any] = {}
        self._alternatives: dict[int, list[Mapping[str, Any]]] = {}
        """Resolved alternatives by the identity of their list in `root`."""

    def with_alternatives(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema with its references and those of its alternatives resolved."""
        schema = self.resolved(schema)
        lists = {key: schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)}
        for parts in lists.values():
            if id(parts) not in self._alternatives:
                self._alternatives[id(parts)] = [self.resolved(part) for part in parts]
        return {**schema, **{key: self._alternatives[id(parts)] for key, parts in lists.items()}}

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return the members of a schema that say how a value is read, after up to `MAX_REFERENCES` references."""
        own: dict[str, Any] = {}
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                break
            own = {name: schema[name] for name in READ_MEMBERS if name in schema} | own
            if not isinstance(reference := schema.get("$ref"), str):
                break
            if reference not in self._targets:
                self._targets[reference] = self._target(reference)
            schema = self._targets[reference]
        return own

    def _target(self, reference: str) -> Any:
        target = self.root
        for part in reference.removeprefix("#").split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return target


def usable_call_id(written: str | None, used_ids: Container[str] = ()) -> str:
    """Return the id that the model wrote for a call, if it is valid and not in `used_ids`, else a new one."""
    if written and _MODEL_CALL_ID.fullmatch(written) and written not in used_ids:
        return written
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


def call_ids(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Collect the ids of a conversation's calls: agents give up if an id is repeated."""
    return {str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()}


def offered_name(written: str, tools: Container[str]) -> str:
    """Return the offered tool that a model names, with or without a namespace before it; empty if there is none."""
    return next((name for name in (written, _NAMESPACE.sub("", written)) if name in tools), "")


# --- one text per parameter ----------------------------------------------------------------------------------------

_JSON_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def parse_parameter(text: str, schema: Any, type_name: str | None = None) -> Any:
    """Convert `text` by the schema of its parameter; `type_name`: the type that the model stated.

    It stays text if it fits none of the types, so that nothing is lost and the tool can report the error.
    """
    if type_name in {"string", "true"}:
        return text
    types = set() if type_name else json_types(schema)
    if types == {"string"}:
        return text
    try:
        value = _parse_value(text.strip().lower() if text.strip().lower() in {"true", "false", "null"} else text, types)
    except ValueError:
        return text
    value_type = _JSON_TYPES[type(value)]
    if value_type == "string" and "string" in types:
        return text  # its quotes are part of it
    if not types or value_type in types or (value_type == "null" and "string" not in types):
        return value
    if value_type == "integer" and "number" in types:
        return value
    return int(value) if value_type == "number" and "integer" in types and value.is_integer() else text


def _parse_value(text: str, types: Container[str]) -> Any:
    """Parse a value. Where no string is allowed, a JSON string, with or without its quotes, stands for what is in it.
    Raises ValueError."""
    may_be_string = not types or "string" in types
    try:
        value = parse_literal(text)
    except ValueError:
        if may_be_string or '\\"' not in text:
            raise
        value = parse_literal(f'"{text}"')
    return value if may_be_string or not isinstance(value, str) else parse_literal(value)


def json_types(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; empty if it states none."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = (
        {declared}
        if isinstance(declared, str)
        else {type_name for type_name in declared or () if isinstance(type_name, str)}
    )
    if not types and isinstance(schema.get("enum"), list):
        types = {_JSON_TYPES[type(choice)] for choice in schema["enum"] if type(choice) in _JSON_TYPES}
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            types |= json_types(part)
    return types | ({"null"} if schema.get("nullable") is True else set())


def parse_nested_value(text: str, marker: str, schema: Any) -> Any:
    """Read a value as MiniMax-M3 writes it: members and items are nested parameters, whose tags follow `marker`."""
    schema = schema if isinstance(schema, Mapping) else {}
    children, depth, start = list[tuple[str, str]](), 0, 0
    for tag in re.finditer(rf"{re.escape(marker)}<(/?)([^>]*)>", text):
        depth += -1 if tag[1] else 1
        if depth == 1 and not tag[1]:
            start = tag.end()
        elif depth == 0:
            children.append((tag[2], text[start : tag.start()]))
    if not children or depth:
        return parse_parameter(text, schema)
    if all(name == "item" for name, _ in children) and "object" not in json_types(schema):
        return [parse_nested_value(child, marker, schema.get("items")) for _, child in children]
    members = schema.get("properties")
    members = members if isinstance(members, Mapping) else {}
    return {name: parse_nested_value(child, marker, members.get(name)) for name, child in children}


# --- as Python writes calls ----------------------------------------------------------------------------------------

PYTHON_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_SEPARATOR = re.compile(r"[,\s]*")
_PYTHON_CALL = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*\(\s*")
_PYTHON_KEY = re.compile(r"\s*(?P<key>[\w-]+)\s*=\s*")
_VALUE_END = re.compile(
    r"\s*(?:,\s*(?P<key>[\w-]+)\s*=(?!=)|\)(?:(?:\s*,|[ \t]*\n)\s*(?P<name>[\w.:/-]+)\s*\(|\s*\]?\s*\Z))"
)
MOST_TRIES = 64
"""Maximum number of places where a value may seem to end: each is parsed from the beginning of the value."""


def parse_python_calls(text: str, tools: Tools) -> list[Call]:
    """Parse `[name(key=value, …), …]`, or the same calls in lines; strings may contain raw control characters, as
    templates write them."""
    text = text.strip().removeprefix("[").removesuffix("]")
    calls, position = [], 0
    while head := _PYTHON_CALL.match(text, position):
        position, values = head.end(), {}
        while key := _PYTHON_KEY.match(text, position):
            value = _parse_python_value(text, key.end(), tools.get(head["name"]) or {}, tools)
            if value is None:
                return []
            values[key["key"]], position = value
            position = _skip_separator(text, position)
        if head["name"] not in tools or text[position : position + 1] != ")":
            return []
        calls.append(Call(head["name"], to_json(values)))
        position = _skip_separator(text, position + 1)
    return calls if position == len(text) else []


def _parse_python_value(
    text: str, position: int, parameters: Container[str], tools: Container[str]
) -> tuple[Any, int] | None:
    """Return the shortest value at `position` and its end position; None if there is none. The value of a tool with
    `parameters` ends before the name of one of them, or of a tool: `, x=` and a line `f(` may also be part of a string
    whose quotes are not escaped.
    """
    whole = PYTHON_STRING.match(text, position)
    if whole is not None and _VALUE_END.match(text, whole.end()):
        return parse_python_string(whole.group()), whole.end()
    tries = 0
    for end in _VALUE_END.finditer(text, position):
        if (end["key"] and parameters and end["key"] not in parameters) or (end["name"] and end["name"] not in tools):
            continue
        written = text[position : end.start()].strip()
        if written[:1] in {"'", '"'}:
            if len(written) > 1 and written[-1] == written[0]:
                return parse_python_string(written), end.start()
            continue
        try:
            return parse_python(written), end.start()
        except ValueError:
            tries += 1
            if tries == MOST_TRIES:
                break
    return None


def _skip_separator(text: str, position: int) -> int:
    separator = _SEPARATOR.match(text, position)
    return separator.end() if separator else position


def parse_python_string(written: str) -> str:
    """Return the text of a quoted string: parsed as Python if it is one literal, else the text between the quotes."""
    escaped = "".join(rf"\x{ord(letter):02x}" if letter < " " else letter for letter in written)
    try:
        return str(ast.literal_eval(escaped)) if PYTHON_STRING.fullmatch(escaped) else written[1:-1]
    except (SyntaxError, ValueError):
        return written[1:-1]
