"""Finds which parts of a JSON schema can be enforced. Those that cannot are named by JSON pointer; those that would
lead llguidance into a dead end are rewritten. llguidance itself is the judge, on bytes instead of tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import llguidance

from app.text.grammar.forced_text import byte_tokenizer

Schema = Mapping[str, Any]
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DEFINITIONS = ("$defs", "definitions")
SCHEMA_MAPS = frozenset({*DEFINITIONS, "properties", "patternProperties"})
"""Keywords whose value maps names to schemas."""
VALUE_KEYWORDS = frozenset({"const", "default", "enum", "example", "examples", "x-guidance"})
"""Keywords whose value is not a schema."""
MAX_REASON_CHARACTERS = 300
DEAD_END_ERRORS = ("NoExtension", "NoExtensionBias")
"""Errors that llguidance reports at a dead end."""


class UnsupportedPart(NamedTuple):
    """A part of a schema that cannot be enforced."""

    pointer: str
    reason: str


def with_guidance(schema: Schema, **options: bool) -> Schema:
    """Add llguidance's options to a schema: JSON on one line, and `options`."""
    return {**schema, "x-guidance": ONE_LINE | options}


def reason_of(error: object) -> str:
    """Shorten an error of llguidance to one line, without the parser state that follows it."""
    first, *rest = str(error).strip().splitlines() or [""]
    if first in DEAD_END_ERRORS:
        return "no text can satisfy it"
    if first.endswith("parse error:"):
        first = next((line.removeprefix("error: ") for line in rest if line.startswith("error: ")), first)
    return first[:MAX_REASON_CHARACTERS]


def find_unsupported(schema: Schema) -> UnsupportedPart | None:
    """Find the smallest part that alone causes the whole schema's error; None if all of it can be enforced."""
    reason = _error(schema)
    if not reason:
        return None
    shared = {name: schema[name] for name in (*DEFINITIONS, "x-guidance") if name in schema}
    parts: dict[str, Schema] = {}

    def record(part: Schema, pointer: str) -> Schema:
        parts[pointer] = part
        return part

    _transformed(schema, record)
    ordered = sorted(parts, key=lambda pointer: not pointer.startswith(("/$defs/", "/definitions/")))
    failing_pointer = next(pointer for pointer in ordered if _error({**shared, **parts[pointer]}) == reason)
    return UnsupportedPart(failing_pointer + _broken_pattern(parts[failing_pointer]), reason)


def without_broken_patterns(schema: Schema) -> tuple[Schema, Sequence[UnsupportedPart]]:
    """Remove the string patterns that cannot be enforced; return the new schema and the removed patterns."""
    dropped: list[UnsupportedPart] = []

    def transform(part: Schema, pointer: str) -> Schema:
        pattern = part.get("pattern")
        reason = _error({"type": "string", "pattern": pattern}) if isinstance(pattern, str) else ""
        if not reason:
            return part
        dropped.append(UnsupportedPart(f"{pointer}/pattern", reason))
        return {name: value for name, value in part.items() if name != "pattern"}

    return _transformed(schema, transform), dropped


def with_patterns_as_properties(schema: Schema) -> Schema:
    """Replace name patterns that match only listed or required names with properties of these names. Otherwise,
    llguidance would begin another property after them, for which no name is left. It also refuses the statement that
    names are strings, which Zod makes for every record: that is dropped."""
    return _transformed(schema, _patterns_as_properties)


def _patterns_as_properties(part: Schema, _: str) -> Schema:
    if part.get("propertyNames") == {"type": "string"}:
        part = {name: value for name, value in part.items() if name != "propertyNames"}
    patterns, listed, required = (part.get(name) for name in ("patternProperties", "properties", "required"))
    if not isinstance(patterns, dict):
        return part
    listed, required = listed if isinstance(listed, dict) else {}, required if isinstance(required, list) else []
    names = dict.fromkeys([*listed, *(name for name in required if isinstance(name, str))])
    redundant = {
        pattern: subschema for pattern, subschema in patterns.items() if not _matches_other_names(pattern, tuple(names))
    }
    properties = dict(listed)
    for name in names if redundant else ():
        subschema = [subschema for pattern, subschema in redundant.items() if _matches(pattern, name)]
        if subschema:
            properties[name] = {"allOf": [*([listed[name]] if name in listed else []), *subschema]}
    return {
        **part,
        "properties": properties,
        "patternProperties": {
            pattern: subschema for pattern, subschema in patterns.items() if pattern not in redundant
        },
    }


def _transformed(part: Schema, transform: Callable[[Schema, str], Schema], pointer: str = "") -> Schema:
    """Apply `transform` to every part and its JSON pointer, innermost first."""

    def transform_member(value: Any, name: object, pointer_to_parent: str) -> Any:
        nested_pointer = "{}/{}".format(pointer_to_parent, str(name).replace("~", "~0").replace("/", "~1"))
        return _transformed(value, transform, nested_pointer) if isinstance(value, dict) else value

    def transformed(keyword: str, value: Any) -> Any:
        nested_pointer = f"{pointer}/{keyword}"
        if keyword in SCHEMA_MAPS and isinstance(value, dict):
            return {name: transform_member(member, name, nested_pointer) for name, member in value.items()}
        if isinstance(value, list):
            return [transform_member(entry, index, nested_pointer) for index, entry in enumerate(value)]
        return transform_member(value, keyword, pointer)

    return transform(
        {word: value if word in VALUE_KEYWORDS else transformed(word, value) for word, value in part.items()}, pointer
    )


def _broken_pattern(part: Schema) -> str:
    """Return the pointer from a part to its first pattern that cannot be enforced; empty if there is none."""
    if isinstance(part.get("pattern"), str) and _error({"type": "string", "pattern": part["pattern"]}):
        return "/pattern"
    broken = [
        pattern for pattern in part.get("patternProperties") or () if _error({"type": "string", "pattern": pattern})
    ]
    return f"/patternProperties/{broken[0]}" if broken else ""


def _matches_other_names(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a name pattern matches a name other than `names`; True also if that cannot be determined."""
    zero = {"const": 0}
    listed = {"properties": dict.fromkeys(names, zero), "required": list(names)}
    matcher = _matcher(
        {"type": "object", **listed, "patternProperties": {pattern: zero}, "additionalProperties": False}
    )
    if matcher.is_error():
        return True
    opening_text = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}: 0, " for name in names) + '"'
    return _consumes(matcher, opening_text)


def _matches(pattern: str, name: str) -> bool:
    matcher = _matcher({"type": "string", "pattern": pattern})
    return _consumes(matcher, json.dumps(name, ensure_ascii=False)) and matcher.is_accepting()


def _consumes(matcher: llguidance.LLMatcher, text: str) -> bool:
    data = list(text.encode())
    return int(matcher.try_consume_tokens(data)) == len(data)


def _error(schema: Schema) -> str:
    """Return why a schema cannot be enforced; empty if it can."""
    matcher = _matcher(schema)
    return reason_of(matcher.get_error()) if matcher.is_error() else ""


def _matcher(schema: Schema) -> llguidance.LLMatcher:
    grammar = {"grammars": [{"json_schema": {"x-guidance": ONE_LINE, **schema}}]}
    return llguidance.LLMatcher(byte_tokenizer(), json.dumps(grammar), log_level=0)
