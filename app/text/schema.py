"""Finds what of a JSON schema can be enforced. Parts that cannot are named by JSON pointer; parts that would lead
llguidance into a dead end are rewritten. llguidance itself decides, on bytes in place of tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import llguidance

from app.text.forced_text import byte_tokenizer

Schema = Mapping[str, Any]
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DEFINITIONS = ("$defs", "definitions")
NAMING = frozenset({*DEFINITIONS, "properties", "patternProperties"})
"""Keywords whose value maps names to schemas."""
VALUES = frozenset({"const", "default", "enum", "example", "examples", "x-guidance"})
"""Keywords whose value is not a schema."""
MOST_REASON_CHARACTERS = 300
NO_TEXT = ("NoExtension", "NoExtensionBias")
"""Errors of llguidance when nothing can follow."""


class Misfit(NamedTuple):
    """A part of a schema that cannot be enforced."""

    pointer: str
    reason: str


def guided(schema: Schema, **options: bool) -> Schema:
    """Add to a schema that its JSON is written on one line, and llguidance's `options`."""
    return {**schema, "x-guidance": ONE_LINE | options}


def reason_of(error: object) -> str:
    """Shorten an error of llguidance to one line, without the parser state that follows it."""
    first, *rest = str(error).strip().splitlines() or [""]
    if first in NO_TEXT:
        return "no text can fulfil it"
    if first.endswith("parse error:"):
        first = next((line.removeprefix("error: ") for line in rest if line.startswith("error: ")), first)
    return first[:MOST_REASON_CHARACTERS]


def misfit(schema: Schema) -> Misfit | None:
    """Find the smallest part that alone fails as the whole does; None if all of it can be enforced."""
    reason = _error(schema)
    if not reason:
        return None
    shared = {name: schema[name] for name in (*DEFINITIONS, "x-guidance") if name in schema}
    parts: dict[str, Schema] = {}

    def note(part: Schema, pointer: str) -> Schema:
        parts[pointer] = part
        return part

    _rebuilt(schema, note)
    ordered = sorted(parts, key=lambda pointer: not pointer.startswith(("/$defs/", "/definitions/")))
    failing_pointer = next(pointer for pointer in ordered if _error({**shared, **parts[pointer]}) == reason)
    return Misfit(failing_pointer + _broken_pattern(parts[failing_pointer]), reason)


def without_broken_patterns(schema: Schema) -> tuple[Schema, Sequence[Misfit]]:
    """Remove the string patterns that cannot be enforced; return the schema and those removed."""
    dropped: list[Misfit] = []

    def change(part: Schema, pointer: str) -> Schema:
        pattern = part.get("pattern")
        reason = _error({"type": "string", "pattern": pattern}) if isinstance(pattern, str) else ""
        if not reason:
            return part
        dropped.append(Misfit(f"{pointer}/pattern", reason))
        return {name: value for name, value in part.items() if name != "pattern"}

    return _rebuilt(schema, change), dropped


def with_patterns_named(schema: Schema) -> Schema:
    """Replace name patterns that match only listed or required names by these names: behind them, llguidance would
    begin another property, and there is none."""
    return _rebuilt(schema, _patterns_named)


def _patterns_named(part: Schema, _: str) -> Schema:
    patterns, listed, required = (part.get(name) for name in ("patternProperties", "properties", "required"))
    if not isinstance(patterns, dict):
        return part
    listed, required = listed if isinstance(listed, dict) else {}, required if isinstance(required, list) else []
    names = dict.fromkeys([*listed, *(name for name in required if isinstance(name, str))])
    spent = {pattern: wanted for pattern, wanted in patterns.items() if not _names_others(pattern, tuple(names))}
    properties = dict(listed)
    for name in names if spent else ():
        wanted = [wanted for pattern, wanted in spent.items() if _matches(pattern, name)]
        if wanted:
            properties[name] = {"allOf": [*([listed[name]] if name in listed else []), *wanted]}
    return {
        **part,
        "properties": properties,
        "patternProperties": {pattern: wanted for pattern, wanted in patterns.items() if pattern not in spent},
    }


def _rebuilt(part: Schema, change: Callable[[Schema, str], Schema], pointer: str = "") -> Schema:
    """Change every part, inner ones first; `change` gets each part and its JSON pointer."""

    def inside(value: Any, name: object, within: str) -> Any:
        below = "{}/{}".format(within, str(name).replace("~", "~0").replace("/", "~1"))
        return _rebuilt(value, change, below) if isinstance(value, dict) else value

    def changed(keyword: str, value: Any) -> Any:
        below = f"{pointer}/{keyword}"
        if keyword in NAMING and isinstance(value, dict):
            return {name: inside(member, name, below) for name, member in value.items()}
        if isinstance(value, list):
            return [inside(entry, place, below) for place, entry in enumerate(value)]
        return inside(value, keyword, pointer)

    return change({word: value if word in VALUES else changed(word, value) for word, value in part.items()}, pointer)


def _broken_pattern(part: Schema) -> str:
    """Return the pointer from a part to its first pattern that cannot be enforced; empty if there is none."""
    if isinstance(part.get("pattern"), str) and _error({"type": "string", "pattern": part["pattern"]}):
        return "/pattern"
    broken = [
        pattern for pattern in part.get("patternProperties") or () if _error({"type": "string", "pattern": pattern})
    ]
    return f"/patternProperties/{broken[0]}" if broken else ""


def _names_others(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a name pattern matches a name other than `names`; True also if that cannot be determined."""
    zero = {"const": 0}
    listed = {"properties": dict.fromkeys(names, zero), "required": list(names)}
    matcher = _matcher(
        {"type": "object", **listed, "patternProperties": {pattern: zero}, "additionalProperties": False}
    )
    if matcher.is_error():
        return True
    begun = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}: 0, " for name in names) + '"'
    return _consumes(matcher, begun)


def _matches(pattern: str, name: str) -> bool:
    matcher = _matcher({"type": "string", "pattern": pattern})
    return _consumes(matcher, json.dumps(name, ensure_ascii=False)) and matcher.is_accepting()


def _consumes(matcher: llguidance.LLMatcher, text: str) -> bool:
    known = list(text.encode())
    return int(matcher.try_consume_tokens(known)) == len(known)


def _error(schema: Schema) -> str:
    """Return why a schema cannot be enforced; empty if it can."""
    matcher = _matcher(schema)
    return reason_of(matcher.get_error()) if matcher.is_error() else ""


def _matcher(schema: Schema) -> llguidance.LLMatcher:
    grammar = {"grammars": [{"json_schema": {"x-guidance": ONE_LINE, **schema}}]}
    return llguidance.LLMatcher(byte_tokenizer(), json.dumps(grammar), log_level=0)
