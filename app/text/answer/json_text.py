"""JSON as models write it: parsed incrementally, and repaired where the meaning is beyond doubt.

Control characters and stray backslashes in strings are escaped, trailing commas are dropped, Python's constants become
JSON's, and lone surrogates become U+FFFD. Anything else that is not JSON is left unread.
"""

import ast
import json
import re
from typing import Any

import regex

_PLAIN_CHARACTERS = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"\s+")
_OTHER_SPACE = re.compile(r"[^ \t\r\n]")
_SCALAR = regex.compile(r"(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|True|False|None)(?=[\s,\]}])")
_SURROGATE_PAIR = regex.compile(r"\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}")
_ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_SURROGATE = re.compile(r"\\u[Dd][89A-Fa-f]")
_JSON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_JSON_CONSTANT_OR_STRING = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(true|false|null)\b""", re.DOTALL)
_PYTHON_CONSTANTS = {"true": "True", "false": "False", "null": "None"}
MAX_DEPTH = 200
"""Deepest nesting of brackets; beyond it nothing is read."""

KEY, COLON, MEMBER, ITEM, NEXT = "key", "colon", "member", "item", "next"
"""Parts that may come next: a key or `}`, the colon, a value, a value or `]`, a comma or the closing bracket."""


class JsonReader:
    """Incremental reader of one object or list: finds its end and repairs its text."""

    def __init__(self) -> None:
        self.complete = self.broken = False
        self._closers: list[str] = []
        self._expects = MEMBER
        self._in_string = False
        self._comma = ""
        """Comma with the white space after it, withheld until something follows."""

    def read(self, text: str) -> tuple[int, str]:
        """Return how many characters were consumed, and their JSON; pass the rest again with more text."""
        position, output = 0, list[str]()
        while position < len(text) and not (self.complete or self.broken):
            result = self._read_string(text, position) if self._in_string else self._read_structure(text, position)
            if result is None:
                break
            output.append(result[1])
            position += result[0]
        return position, "".join(output)

    @property
    def missing(self) -> str | None:
        """Closing brackets that are missing; None if more than these is missing."""
        return "".join(reversed(self._closers)) if self._expects == NEXT and not self._in_string else None

    # --- each returns the number of characters read and their JSON; None: more text is needed, or it is broken --

    def _read_string(self, text: str, position: int) -> tuple[int, str] | None:
        if plain := _PLAIN_CHARACTERS.match(text, position):
            return len(plain.group()), plain.group()
        if text[position] == '"':
            self._in_string = False
            return 1, '"'
        if text[position] != "\\":
            return 1, json.dumps(text[position])[1:-1]
        for pattern in (_SURROGATE_PAIR, _ESCAPE):
            escape = pattern.match(text, position, partial=True)
            if escape is not None and escape.partial:
                return None
            if escape is not None:
                return len(escape.group()), "\\ufffd" if self._is_lone_surrogate(escape.group()) else escape.group()
        return (2, "'") if text[position + 1] == "'" else (1, "\\\\")

    def _is_lone_surrogate(self, escape: str) -> bool:
        return len(escape) == 6 and _SURROGATE.match(escape) is not None

    def _read_structure(self, text: str, position: int) -> tuple[int, str] | None:
        if space := _SPACE.match(text, position):
            written = _OTHER_SPACE.sub(" ", space.group())
            if self._comma:
                self._comma += written
                return len(written), ""
            return len(written), written
        letter = text[position]
        if letter in "}]":
            return self._read_closer(letter)
        if letter == "," and self._expects == NEXT:
            self._comma, self._expects = ",", KEY if self._closers[-1] == "}" else ITEM
            return 1, ""
        if letter == ":" and self._expects == COLON:
            self._expects = MEMBER
            return 1, ":"
        return self._read_value_start(text, position)

    def _read_closer(self, letter: str) -> tuple[int, str] | None:
        if not self._closers or self._closers[-1] != letter or self._expects not in {KEY, ITEM, NEXT}:
            self.broken = True
            return None
        self._closers.pop()
        space, self._comma, self._expects = self._comma[1:], "", NEXT
        self.complete = not self._closers
        return 1, space + letter

    def _read_value_start(self, text: str, position: int) -> tuple[int, str] | None:
        """Read the beginning of a key or of a value."""
        letter, comma = text[position], self._comma
        if letter == '"' and self._expects in {KEY, MEMBER, ITEM} and self._closers:
            self._expects, self._in_string, self._comma = COLON if self._expects == KEY else NEXT, True, ""
            return 1, f'{comma}"'
        if self._expects in {MEMBER, ITEM}:
            if letter in "{[" and len(self._closers) < MAX_DEPTH:
                self._closers.append("}" if letter == "{" else "]")
                self._expects, self._comma = KEY if letter == "{" else ITEM, ""
                return 1, comma + letter
            scalar = _SCALAR.match(text, position, partial=True) if self._closers else None
            if scalar is not None and scalar.partial:
                return None
            if scalar is not None:
                self._expects, self._comma = NEXT, ""
                return len(scalar.group()), comma + _JSON_CONSTANTS.get(scalar.group(), scalar.group())
        self.broken = True
        return None


def parse_literal(text: str) -> Any:
    """Parse a value written as JSON or as a Python literal. Raises ValueError for anything else."""
    text = text.strip()
    value = _parse_container(text) if text[:1] in {"{", "["} else json.loads(_JSON_CONSTANTS.get(text, text))
    json.dumps(value, allow_nan=False)
    return value


def parse_python(text: str) -> Any:
    """Parse a Python literal, or else any value that `parse_literal` parses. Raises ValueError for anything else."""
    try:
        return _parse_python(text.strip())
    except ValueError:
        return parse_literal(text)


def _parse_container(text: str) -> Any:
    json_text = JsonReader()
    count, repaired = json_text.read(text)
    is_json = json_text.complete and count == len(text)
    return json.loads(repaired) if is_json and not _is_by_python(text) else _parse_python(text)


def _is_by_python(text: str) -> bool:
    """Return whether Python's `repr` wrote `text`: JSON lacks its escapes `\\x1b` and `\\U0001195a`."""
    try:
        return "\\" in text and repr(ast.literal_eval(text)) == text
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _parse_python(text: str) -> Any:
    as_python = _JSON_CONSTANT_OR_STRING.sub(lambda match: match.group(1) or _PYTHON_CONSTANTS[match.group(2)], text)
    try:
        return json.loads(json.dumps(ast.literal_eval(as_python), allow_nan=False))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"no value: {error}") from error


def to_json(value: Any) -> str:
    """Write a value as JSON, with escapes for non-ASCII characters only if some cannot be encoded."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value)
    return text
