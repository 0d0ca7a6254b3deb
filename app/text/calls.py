"""Parses the text between the marks of calls: names of offered tools, and arguments as an object.

Text that cannot be read is not a call. A parameter that does not fit its type is kept as text: the tool can say more
about it than this code.
"""

import ast
import re
import secrets
import string
from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from app.text.json_text import JsonText, as_json, read_literal, read_python

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Length of generated ids, in letters and digits: Mistral's templates accept no other, and all others accept these."""
_OWN_ID = re.compile(r"[A-Za-z0-9]{9}|[\w.:-]+:\d+")
"""Ids that a model writes itself and refers to later: Mistral's and Kimi's."""

Tools = Mapping[str, Mapping[str, Any]]
"""Schemas of the parameters of each offered tool, by its name."""


class Call(msgspec.Struct, frozen=True):
    """A complete call."""

    name: str
    arguments: str
    """Object of the arguments, as JSON."""
    id: str = ""
    """Id as the model wrote it."""


def offered(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Map the name of each tool of a request to the schemas of its parameters."""
    schemas = {}
    for tool in tools:
        function = tool.get("function") or tool
        properties = (function.get("parameters") or {}).get("properties")
        schemas[str(function.get("name"))] = properties if isinstance(properties, Mapping) else {}
    return schemas


def id_of(written: str | None, taken: Container[str] = ()) -> str:
    """Return the id that the model wrote for a call, if it is valid and not `taken`, or else a new one."""
    if written and _OWN_ID.fullmatch(written) and written not in taken:
        return written
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


def ids_of(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Collect the ids of a conversation's calls: agents give up if one is repeated."""
    return {str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()}


# --- JSON with the names in it -------------------------------------------------------------------------------------


def listed_calls(text: str, tools: Tools) -> list[Call]:
    """Parse objects one after another, or lists of them, as calls; empty unless each calls an offered tool."""
    calls: list[Call | None] = []
    while text := text.strip(" \t\r\n;,"):
        reader = JsonText()
        count, _ = reader.read(text)
        try:
            value = read_literal(text[:count])
        except ValueError:
            return []
        calls += [_named(entry, tools) for entry in (value if isinstance(value, list) else [value])]
        text = text[count:]
    return [call for call in calls if call] if all(calls) else []


def _named(value: Any, tools: Tools) -> Call | None:
    if not isinstance(value, dict):
        return None
    if len(value) == 1 and (name := next(iter(value))) in tools:
        return _call(name, value[name])
    inner = value.get("function")
    if isinstance(inner, dict):
        return _named({"id": value.get("id")} | inner, tools)
    name = next((value[key] for key in ("name", "tool_name", "function") if isinstance(value.get(key), str)), "")
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    return _call(name, arguments, value.get("id")) if name in tools else None


def _call(name: str, arguments: Any, written_id: Any = "") -> Call | None:
    """Read arguments as an object, an empty one if there are none; None if they are anything else."""
    if isinstance(arguments, str):
        try:
            arguments = read_literal(arguments) if arguments.strip() else None
        except ValueError:
            return None
    arguments = {} if arguments is None else arguments
    identifier = written_id if isinstance(written_id, str) else ""
    return Call(name, as_json(arguments), identifier) if isinstance(arguments, dict) else None


# --- one text per parameter ----------------------------------------------------------------------------------------

_KINDS: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"[,\s]*")


def parameter_value(text: str, schema: Any, kind: str | None = None) -> Any:
    """Convert `text` by the schema of its parameter; `kind`: the type that the model wrote beside it.

    It is kept as text if it fits none of the types, so that nothing is lost and the tool can complain.
    """
    if kind in {"string", "true"}:
        return text
    kinds = set() if kind else kinds_of(schema)
    if kinds == {"string"}:
        return text
    try:
        value = read_literal(text.strip().lower() if text.strip().lower() in {"true", "false", "null"} else text)
    except ValueError:
        return text
    own = _KINDS[type(value)]
    if not kinds or own in kinds or (own == "null" and "string" not in kinds):
        return value
    if own == "integer" and "number" in kinds:
        return value
    return int(value) if own == "number" and "integer" in kinds and value.is_integer() else text


def kinds_of(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else {kind for kind in named or () if isinstance(kind, str)}
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {_KINDS[type(choice)] for choice in schema["enum"] if type(choice) in _KINDS}
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            kinds |= kinds_of(part)
    return kinds | ({"null"} if schema.get("nullable") is True else set())


def nested_value(text: str, mark: str, schema: Any) -> Any:
    """Read a value as MiniMax-M3 writes it: members and items are parameters again, each tag behind `mark`."""
    schema = schema if isinstance(schema, Mapping) else {}
    children, depth, start = list[tuple[str, str]](), 0, 0
    for tag in re.finditer(rf"{re.escape(mark)}<(/?)([^>]*)>", text):
        depth += -1 if tag[1] else 1
        if depth == 1 and not tag[1]:
            start = tag.end()
        elif depth == 0:
            children.append((tag[2], text[start : tag.start()]))
    if not children or depth:
        return parameter_value(text, schema)
    if all(name == "item" for name, _ in children) and "object" not in kinds_of(schema):
        return [nested_value(child, mark, schema.get("items")) for _, child in children]
    members = schema.get("properties")
    members = members if isinstance(members, Mapping) else {}
    return {name: nested_value(child, mark, members.get(name)) for name, child in children}


# --- as Python writes calls ----------------------------------------------------------------------------------------

_PYTHON_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_PYTHON_CALL = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*\(\s*")
_PYTHON_KEY = re.compile(r"\s*(?P<key>[\w-]+)\s*=\s*")
_VALUE_END = re.compile(r"\s*(?:,\s*[\w-]+\s*=(?!=)|\)\s*(?:,\s*[\w.:/-]+\s*\(|\]?\s*\Z))")


def python_calls(text: str, tools: Tools) -> list[Call]:
    """Parse `[name(key=value, …), …]`; as templates write them, strings may hold characters that Python escapes."""
    text = text.strip().removeprefix("[").removesuffix("]")
    calls, place = [], 0
    while begun := _PYTHON_CALL.match(text, place):
        place, values = begun.end(), {}
        while key := _PYTHON_KEY.match(text, place):
            value = _python_value(text, key.end())
            if value is None:
                return []
            values[key["key"]], place = value
            place = _match_end(_SEPARATOR, text, place)
        if begun["name"] not in tools or text[place : place + 1] != ")":
            return []
        calls.append(Call(begun["name"], as_json(values)))
        place = _match_end(_SEPARATOR, text, place + 1)
    return calls if place == len(text) else []


def _python_value(text: str, place: int) -> tuple[Any, int] | None:
    """Return the shortest value at `place`, and where it ends; None if there is none."""
    for end in _VALUE_END.finditer(text, place):
        written = text[place : end.start()].strip()
        if written[:1] in {"'", '"'}:
            if len(written) > 1 and written[-1] == written[0]:
                return _python_string(written), end.start()
            continue
        try:
            return read_python(written), end.start()
        except ValueError:
            continue
    return None


def _python_string(written: str) -> str:
    """Return the text of a string in quotes: read as Python if it is one literal, else as it stands between them."""
    escaped = "".join(rf"\x{ord(letter):02x}" if letter < " " else letter for letter in written)
    try:
        return str(ast.literal_eval(escaped)) if _PYTHON_STRING.fullmatch(escaped) else written[1:-1]
    except (SyntaxError, ValueError):
        return written[1:-1]


# --- as Gemma writes arguments -------------------------------------------------------------------------------------

_BARE = re.compile(r"[^,\]}]*")


def gemma_arguments(text: str, quote: str) -> dict[str, Any]:
    """Parse `{key:value,…}` with strings between two `quote`. Raises ValueError for anything else."""
    value, place = _gemma_value(text, 0, quote)
    if not isinstance(value, dict) or text[place:].strip():
        raise ValueError("no object")
    return value


def _gemma_value(text: str, place: int, quote: str) -> tuple[Any, int]:
    place = _match_end(_SPACE, text, place)
    if text.startswith(quote, place):
        end = text.index(quote, place + len(quote))
        return text[place + len(quote) : end], end + len(quote)
    if text[place : place + 1] in {"{", "["}:
        return _gemma_container(text, place, quote)
    bare = _BARE.match(text, place)
    written = bare.group() if bare else ""
    try:
        return read_literal(written), place + len(written)
    except ValueError:
        return written, place + len(written)


def _gemma_container(text: str, place: int, quote: str) -> tuple[Any, int]:
    closer, items, members = "}" if text[place] == "{" else "]", list[Any](), dict[str, Any]()
    place = _match_end(_SPACE, text, place + 1)
    while not text.startswith(closer, place):
        if closer == "}":
            if text.startswith(quote, place):
                key, place = _gemma_value(text, place, quote)
                end = text.index(":", place)
            else:
                end = text.index(":", place)
                key = text[place:end].strip()
            members[key], place = _gemma_value(text, end + 1, quote)
        else:
            item, place = _gemma_value(text, place, quote)
            items.append(item)
        place = _match_end(_SPACE, text, place)
        if text.startswith(",", place):
            place = _match_end(_SPACE, text, place + 1)
        elif not text.startswith(closer, place):
            raise ValueError("neither a comma nor the end")
    return (members if closer == "}" else items), place + 1


def _match_end(what: "re.Pattern[str]", text: str, place: int) -> int:
    match = what.match(text, place)
    return match.end() if match else place
