"""Parses arguments as Gemma writes them, `{key:value,…}` with special quotes around strings, and slips of these."""

import re
from collections.abc import Mapping
from typing import Any

import regex

from app.text.answer.calls import PYTHON_STRING, json_types, parse_parameter, parse_python_string
from app.text.answer.json_text import parse_literal
from app.text.dialect import compiled

_MARK = re.compile(r"<(?:\|\"\|>|escape>|\|tool_call>|tool_call\|>|(?:start|end)_function_call>)")
"""Markers and quotes."""
_FIRST_BRACKET = re.compile(r"\A\s*\(")
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^,\]}]*")
_KEY = re.compile(r"""([^:=,{}\[\]<>'"]+)[:=]""")
_UNOPENED = re.compile(
    r"""((?:(?!<\|"\|>|<escape>|,\s*[^\s:=,]+\s*[:=]).)*[^\s:=,\[{])(?:<\|"\|>|<escape>)(?=\s*[,\]}])""", re.DOTALL
)
"""String whose first special quote the model left out."""
_IN_ROUND_BRACKETS = re.compile(r"\A\s*\((.*)\)\s*\Z", re.DOTALL)
_QUOTED = re.compile(rf"({PYTHON_STRING.pattern})\s*(?=[,\]}}:])", re.DOTALL)
"""String in ordinary quotes, which some models write instead of their special ones."""


def parse_gemma_arguments(text: str, quote: str, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Parse `{key:value,…}` with strings between two `quote`; return it and the rest. Brackets at the end may be
    missing. Raises ValueError for anything else."""
    text = _IN_ROUND_BRACKETS.sub(r"{\1}", text)
    if not text.lstrip().startswith("{"):
        raise ValueError("no object")
    value, position = _Arguments(text, quote, schemas).parse_value(0, schemas)
    return value, text[position:]


def close_last_string(text: str, quote: str) -> str:
    """Add what is missing at the end of arguments whose last value is a string: its quote, the bracket, or both."""
    is_open, last = text.count(quote) % 2, text.rpartition(quote)[2]
    if text.rstrip().endswith((":", "=", ",", "{", "(", *([quote] * is_open))) or (is_open and _MARK.search(last)):
        return text  # the value is missing, too, or runs into another call
    return _FIRST_BRACKET.sub("{", text.rstrip().removesuffix("}")) + quote * is_open + "}"


def _without_marks(text: str) -> str:
    """Return a text without quotes. Raises ValueError if it contains markers of calls: it runs into another call."""
    if _MARK.search(text):
        raise ValueError("another call")
    return text


class _Arguments:
    """Parser of the arguments in one text. Each method returns the value at a position, and its end position."""

    def __init__(self, text: str, quote: str, schemas: Mapping[str, Any]) -> None:
        self._text, self._quote = text, quote
        keys = "|".join(map(regex.escape, schemas)) or "(?!)"
        edge = rf"""(?:{regex.escape(quote)}|["'])?"""
        self._parameter = compiled(rf"{edge}(?:{keys}){edge}\s*[:=]")
        """Pattern of the beginning of any parameter of the tool."""
        self._unquoted = {
            separator: compiled(
                rf"(?P<text>.*?)(?P<quote>{regex.escape(quote)})?"
                rf"(?=\s*(?:,\s*{edge}(?:{keys}){edge}\s*[:{separator}]|\}}\s*\Z))"
            )
            for separator in ":="
        }
        """Patterns of a text up to the next parameter or the end, by what the model writes after keys."""

    def parse_value(self, position: int, schemas: Mapping[str, Any]) -> tuple[Any, int]:
        """Parse any value; `schemas`: those of its members."""
        text, position = self._text, self._skip_space(position)
        if text.startswith(self._quote, position):
            end = text.index(self._quote, position + len(self._quote))
            return text[position + len(self._quote) : end], end + len(self._quote)
        if text[position : position + 1] in {"{", "["}:
            return self._parse_container(position, schemas)
        if quoted := _QUOTED.match(text, position):
            return parse_python_string(quoted[1]), quoted.end(1)
        bare = _BARE.match(text, position)
        written = bare.group() if bare else ""
        try:
            return parse_literal(written), position + len(written)
        except ValueError:
            if unopened := _UNOPENED.match(text, position):
                return _without_marks(unopened[1]), unopened.end()
            if position + len(written) == len(text):
                raise
            return _without_marks(written), position + len(written)

    def _parse_container(self, position: int, schemas: Mapping[str, Any]) -> tuple[Any, int]:
        text = self._text
        closer, items, members = "}" if text[position] == "{" else "]", list[Any](), dict[str, Any]()
        position = self._skip_space(position + 1)
        while not text.startswith(closer, position):
            if closer == "}":
                key, position = self._parse_key(position)
                members[key], position = self._parse_member(position, schemas.get(key))
            else:
                item, position = self.parse_value(position, {})
                items.append(item)
            position = self._skip_space(position)
            if position == len(text):  # the closing bracket is missing
                return (members if closer == "}" else items), position
            if text.startswith(",", position):
                position = self._skip_space(position + 1)
            elif not text.startswith(closer, position) and not (schemas and self._parameter.match(text, position)):
                raise ValueError("neither a comma, nor another parameter, nor the end")
        return (members if closer == "}" else items), position + 1

    def _parse_key(self, position: int) -> tuple[str, int]:
        """Parse a key and what separates it from its value."""
        if self._text.startswith(self._quote, position) or _QUOTED.match(self._text, position):
            key, position = self.parse_value(position, {})
            return key, self._text.index(":", position) + 1
        if head := _KEY.match(self._text, position):
            return head[1].strip(), head.end()
        raise ValueError("no key")

    def _parse_member(self, position: int, schema: Any) -> tuple[Any, int]:
        """Parse the value of a member; where the tool takes a text, one without special quotes is a text, too."""
        separator, start = self._text[position - 1], self._skip_space(position)
        if "string" not in json_types(schema) or self._text.startswith(self._quote, start):
            return self.parse_value(start, {})
        written = self._unquoted[separator].match(self._text, start)
        if written is not None and written["text"].startswith(("{", "[")) and self._quote in written["text"]:
            return self.parse_value(start, {})
        if written is None or self._quote in written["text"]:
            raise ValueError("no end")
        value, mark = _without_marks(written["text"]), written["text"][:1]
        if written["quote"]:
            is_quoted = mark in {"'", '"'} and value.find(mark, 1) == len(value) - 1 > 0
            return (value[1:-1] if is_quoted else value), written.end()
        value = value.strip()
        value = parse_python_string(value) if PYTHON_STRING.fullmatch(value) else parse_parameter(value, schema)
        return value, written.end()

    def _skip_space(self, position: int) -> int:
        space = _SPACE.match(self._text, position)
        return space.end() if space else position
