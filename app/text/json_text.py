"""JSON as models write it: parsed incrementally, and repaired where the meaning is beyond doubt.

Control characters and stray backslashes in strings are escaped, trailing commas are dropped, Python's constants become
JSON's, and lone surrogates become U+FFFD. Anything else that is not JSON is left unread.
"""

import ast
import json
import re
from typing import Any

import regex

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"\s+")
_WORD = regex.compile(r"(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|True|False|None)(?=[\s,\]}])")
_PAIR = regex.compile(r"\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}")
_ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_SURROGATE = re.compile(r"\\u[Dd][89A-Fa-f]")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_WORDS = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(true|false|null)\b""", re.DOTALL)
_WORDS_OF_PYTHON = {"true": "True", "false": "False", "null": "None"}
MAX_DEPTH = 200
"""Deepest nesting of brackets; beyond it nothing is read."""

KEY, COLON, MEMBER, ITEM, NEXT = "key", "colon", "member", "item", "next"
"""Parts that may come next: a key or `}`, the colon, a value, a value or `]`, a comma or the closing bracket."""


class JsonText:
    """Incremental reader of one object or list: finds its end and repairs its text."""

    def __init__(self) -> None:
        self.complete = self.broken = False
        self._closers: list[str] = []
        self._expects = MEMBER
        self._in_string = False
        self._comma = ""
        """Comma, with the white space behind it, that is held until something follows."""

    def read(self, text: str) -> tuple[int, str]:
        """Return how many characters were read, and their JSON; pass the rest again with more text."""
        place, pieces = 0, list[str]()
        while place < len(text) and not (self.complete or self.broken):
            step = self._string(text, place) if self._in_string else self._structure(text, place)
            if step is None:
                break
            pieces.append(step[1])
            place += step[0]
        return place, "".join(pieces)

    @property
    def missing(self) -> str | None:
        """Closing brackets that are missing; None if more than these is missing."""
        return "".join(reversed(self._closers)) if self._expects == NEXT and not self._in_string else None

    # --- each returns the characters read and their JSON; None: more is needed, or it is broken -----------------

    def _string(self, text: str, place: int) -> tuple[int, str] | None:
        if plain := _PLAIN.match(text, place):
            return len(plain.group()), plain.group()
        if text[place] == '"':
            self._in_string = False
            return 1, '"'
        if text[place] != "\\":
            return 1, json.dumps(text[place])[1:-1]
        for pattern in (_PAIR, _ESCAPE):
            escape = pattern.match(text, place, partial=True)
            if escape is not None and escape.partial:
                return None
            if escape is not None:
                return len(escape.group()), "\\ufffd" if self._is_half(escape.group()) else escape.group()
        return (2, "'") if text[place + 1] == "'" else (1, "\\\\")

    def _is_half(self, escape: str) -> bool:
        return len(escape) == 6 and _SURROGATE.match(escape) is not None

    def _structure(self, text: str, place: int) -> tuple[int, str] | None:
        if space := _SPACE.match(text, place):
            if self._comma:
                self._comma += space.group()
                return len(space.group()), ""
            return len(space.group()), space.group()
        letter = text[place]
        if letter in "}]":
            return self._close(letter)
        if letter == "," and self._expects == NEXT:
            self._comma, self._expects = ",", KEY if self._closers[-1] == "}" else ITEM
            return 1, ""
        if letter == ":" and self._expects == COLON:
            self._expects = MEMBER
            return 1, ":"
        return self._begin(text, place)

    def _close(self, letter: str) -> tuple[int, str] | None:
        if not self._closers or self._closers[-1] != letter or self._expects not in {KEY, ITEM, NEXT}:
            self.broken = True
            return None
        self._closers.pop()
        space, self._comma, self._expects = self._comma[1:], "", NEXT
        self.complete = not self._closers
        return 1, space + letter

    def _begin(self, text: str, place: int) -> tuple[int, str] | None:
        """Read the beginning of a key or of a value."""
        letter, comma = text[place], self._comma
        if letter == '"' and self._expects in {KEY, MEMBER, ITEM} and self._closers:
            self._expects, self._in_string, self._comma = COLON if self._expects == KEY else NEXT, True, ""
            return 1, f'{comma}"'
        if self._expects in {MEMBER, ITEM}:
            if letter in "{[" and len(self._closers) < MAX_DEPTH:
                self._closers.append("}" if letter == "{" else "]")
                self._expects, self._comma = KEY if letter == "{" else ITEM, ""
                return 1, comma + letter
            word = _WORD.match(text, place, partial=True) if self._closers else None
            if word is not None and word.partial:
                return None
            if word is not None:
                self._expects, self._comma = NEXT, ""
                return len(word.group()), comma + _PYTHON_WORDS.get(word.group(), word.group())
        self.broken = True
        return None


def read_literal(text: str) -> Any:
    """Parse a value written as JSON or as a Python literal. Raises ValueError for anything else."""
    text = text.strip()
    value = _read_container(text) if text[:1] in {"{", "["} else json.loads(_PYTHON_WORDS.get(text, text))
    json.dumps(value, allow_nan=False)
    return value


def read_python(text: str) -> Any:
    """Parse a Python literal or, if it is none, what `read_literal` parses. Raises ValueError for anything else."""
    try:
        return _read_python(text.strip())
    except ValueError:
        return read_literal(text)


def _read_container(text: str) -> Any:
    json_text = JsonText()
    count, mended = json_text.read(text)
    return json.loads(mended) if json_text.complete and count == len(text) else _read_python(text)


def _read_python(text: str) -> Any:
    as_python = _JSON_WORDS.sub(lambda match: match.group(1) or _WORDS_OF_PYTHON[match.group(2)], text)
    try:
        return json.loads(json.dumps(ast.literal_eval(as_python), allow_nan=False))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"no value: {error}") from error


def as_json(value: Any) -> str:
    """Write a value as JSON, with escapes for non-ASCII characters only if some cannot be encoded."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value)
    return text
