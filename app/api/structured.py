"""Grammars that a request asks for, under any field name that clients use; refuses malformed and hostile schemas.

Nothing is compiled here: the text process compiles grammars, where that delays no other client.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from app.core.request import Grammar

MAX_SCHEMA_BYTES = 64 * 1024
TOO_LARGE = f"a schema that is enforced has at most {MAX_SCHEMA_BYTES} bytes"
MAX_SCHEMA_DEPTH = 32
MAX_PATTERN_CHARACTERS = 2048
GUIDED = ("json", "regex", "choice", "grammar")
"""Kinds of vLLM's `guided_…` fields."""
SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
VALUE_KEYWORDS = {"const", "default", "enum", "example", "examples"}
"""Keywords whose value maps names to schemas, and keywords whose value is no schema."""


def format_grammar(response_format: Any) -> Grammar | None:
    """Read OpenAI's `response_format`; None: any text. Raises ValueError if it is malformed."""
    kind = str(response_format.get("type")) if isinstance(response_format, dict) else ""
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar(response_format.get("schema", {"type": "object"}), "response_format")
    if kind != "json_schema":
        raise ValueError("give an object of type 'text', 'json_object' or 'json_schema'")
    named = response_format.get("json_schema")
    return schema_grammar(named.get("schema") if isinstance(named, dict) else None, "response_format")


def structured_grammar(kind: str, value: Any, parameter: str) -> Grammar:
    """Read one of vLLM's structured outputs. Raises ValueError if it is malformed."""
    if kind in {"json", "json_schema"}:
        return schema_grammar(value, parameter)
    if kind == "json_object":
        return schema_grammar({"type": "object"}, parameter)
    if kind == "choice":
        if not value or not all(value):
            raise ValueError("choice: give at least one string, and none that is empty")
        value = msgspec.json.encode(value).decode()
    if not 0 < len(value) <= MAX_SCHEMA_BYTES:
        raise ValueError(f"{kind}: give 1 to {MAX_SCHEMA_BYTES} characters")
    return Grammar(kind="lark" if kind == "grammar" else kind, text=value, parameter=parameter)


def schema_grammar(schema: Any, parameter: str) -> Grammar:
    """Build the grammar of a JSON schema or its text. Raises ValueError if it is too large or malformed."""
    try:
        schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except msgspec.DecodeError:
        raise ValueError("the schema is not valid JSON") from None
    check_schema(schema)
    if is_too_large(schema):
        raise ValueError(TOO_LARGE)
    return Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode(), parameter=parameter)


def is_too_large(schema: Any) -> bool:
    """Return whether a JSON schema is larger than one that can be enforced."""
    return len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES


def check_schema(schema: Any) -> None:
    """Raise ValueError if a JSON schema is malformed; patterns are not compiled here."""
    if not isinstance(schema, dict):
        raise ValueError("give a JSON schema: an object, as `schema`")  # noqa: TRY004 - pydantic expects a ValueError
    _check_part(schema, MAX_SCHEMA_DEPTH)


def _check_part(part: Any, levels: int) -> None:
    if levels == 0:
        raise ValueError(f"a schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    if isinstance(part, dict):
        kind, pattern = part.get("type"), part.get("pattern")
        kinds = kind if isinstance(kind, list) else [] if kind is None else [kind]
        if not all(isinstance(name, str) for name in kinds):
            raise ValueError("`type` in a schema is a string or a list of strings")
        if pattern is not None and (not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARACTERS):
            raise ValueError(f"`pattern` in a schema is a string of at most {MAX_PATTERN_CHARACTERS} characters")
    for subschema in _parts(part):
        _check_part(subschema, levels - 1)


def _parts(part: Any) -> Iterator[Any]:
    """Yield the direct subschemas."""
    if isinstance(part, list):
        yield from part
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in SCHEMA_MAPS and isinstance(value, dict):
                yield from value.values()
            elif key not in VALUE_KEYWORDS:
                yield value
