"""Parses calls as JSON that includes their names, with or without the markers of the model's form around it."""

import re
from typing import Any

from app.text.answer.calls import Call, Tools, offered_name, parse_python_calls
from app.text.answer.json_text import JsonReader, parse_literal, to_json
from app.text.dialect import compiled

NAMES = ("name", "tool_name", "function")
"""Members with the name of the tool."""
ARGUMENTS = ("arguments", "parameters", "args", "params", "input", "tool_input", "kwargs")
"""Members with the arguments: templates teach the first two, models write the others, too, or the bare arguments."""
MEMBERS = {*NAMES, *ARGUMENTS, "type", "id", "index", "call_id", "tool_call_id"}
_WRAPS = r"<\|python_tag\|>|functools(?=\s*\[)|</?\|?/?(?:tools|tool_calls?|function_calls?)\|?>|```\w*"
"""Pattern of what models write around JSON calls that lack the markers of their form."""
_BETWEEN = re.compile(rf"\A(?:[\s;,]|{_WRAPS})+")
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.:/-]{1,300})(?:\[ARGS\]|\n)\s*(?=\{)")
"""Name before arguments. Letters of other alphabets would withhold the first sentence of an answer."""
PYTHON_OBJECT = re.compile(r"\[?\s*\{\s*'")
"""Pattern of the beginning of calls as a Python object, which Hermes 2 and 3 were taught to write."""
_WRAP = rf"(?:\s*(?:{_WRAPS})){{0,2}}"
BEGINNINGS = (
    compiled(
        _WRAP + r"""\s*\[?\s*\{\s*["'](?:(?:name|tool_name|function)["']\s*:\s*["'](?P<name>[^"']*)["']"""
        r'|(?:arguments|parameters|function)"\s*:\s*\{|type"\s*:\s*"function")'
    ),
    compiled(_WRAP + r"\s*\[\s*(?P<name>[\w.:/-]+)\s*\("),
    compiled(_WRAP + r"\s*" + _NAMED.pattern),
)
"""Patterns of the beginning of an answer that may be nothing but calls without markers."""
_WRAPS_AROUND = re.compile(rf"\A(?:\s*(?:{_WRAPS}))+|(?:{_WRAPS})\Z")


def parse_json_calls(text: str, tools: Tools) -> list[Call]:
    """Parse objects one after another, or lists of them, as calls; empty unless each calls an offered tool."""
    calls, rest = first_json_calls(text, tools)
    return [] if rest else calls


def first_json_calls(text: str, tools: Tools, *, ended: bool = False) -> tuple[list[Call], str]:
    """Parse objects, or lists of them, up to the first that calls no offered tool; return them and the rest. `ended`:
    the model has ended the text, so brackets that are missing at its end are added."""
    calls: list[Call] = []
    while text := _BETWEEN.sub("", text).rstrip(" \t\r\n;,"):
        named = _NAMED.match(text)
        start = named.end() if named else 0
        reader = JsonReader()
        end = start + reader.read(text[start:])[0]
        missing = (reader.missing or "") if ended and end == len(text) else ""
        try:
            end = len(text) if PYTHON_OBJECT.match(text, start) else end
            value = parse_literal(text[start:end] + missing)
        except ValueError:
            break
        value = {named["name"]: value} if named else value
        read = [_call_from_object(entry, tools) for entry in (value if isinstance(value, list) else [value])]
        if not all(read):
            break
        calls += [call for call in read if call]
        text = text[end:]
    return calls, text


def _call_from_object(value: Any, tools: Tools) -> Call | None:
    if not isinstance(value, dict):
        return None
    if len(value) == 1 and (name := offered_name(next(iter(value)), tools)):
        return call_from_parts(name, next(iter(value.values())), tools)
    inner = value.get("function")
    if isinstance(inner, dict):
        return _call_from_object({"id": value.get("id")} | inner, tools)
    name = offered_name(next((value[key] for key in NAMES if isinstance(value.get(key), str)), ""), tools)
    if not name or ("description" in value and "description" not in tools[name]):
        return None  # of no offered tool, or the definition of one
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    others = {key: member for key, member in value.items() if key not in MEMBERS}
    if others and not arguments and others.keys() <= tools[name].keys():
        arguments = others
    elif others and arguments is None:
        return None
    return call_from_parts(name, arguments, tools, value.get("id"))


def call_from_parts(name: str, arguments: Any, tools: Tools, model_id: Any = "") -> Call | None:
    """Return a call, with an empty object if there are no arguments; None if they are anything but an object, which a
    list may contain. An empty list is an object to a tool without parameters."""
    if isinstance(arguments, str):
        try:
            arguments = parse_literal(arguments) if arguments.strip() else None
        except ValueError:
            return None
    if arguments is None or (arguments == [] and not tools[name]):
        arguments = {}
    elif isinstance(arguments, list) and len(arguments) == 1:
        [arguments] = arguments
    identifier = model_id if isinstance(model_id, str) else ""
    return Call(name, to_json(arguments), identifier) if isinstance(arguments, dict) else None


def parse_unmarked_calls(text: str, tools: Tools, *, ended: bool, may_comment: bool) -> tuple[list[Call], str]:
    """Parse an answer as calls without markers; return them and the rest: a comment on bare JSON, if it `may_comment`.

    `ended`: the model has ended the text, so brackets that are missing at its end are added.
    """
    calls, rest = first_json_calls(text, tools, ended=ended)
    if rest and not (may_comment and text.lstrip()[0] in "[{" and rest[0] not in "[{}]:"):
        return parse_python_calls(_WRAPS_AROUND.sub("", text.rstrip()), tools), ""
    return calls, rest
