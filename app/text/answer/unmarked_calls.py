"""Parses answers that are nothing but calls, without the markers of their model's form: bare, fenced, or between the
markers of another form."""

import re

from app.text.answer.calls import WRAPS, Call, Tools, first_json_calls, parse_python_calls
from app.text.dialect import compiled

_WRAP = rf"(?:\s*(?:{WRAPS})){{0,2}}"
BEGINNINGS = (
    compiled(
        _WRAP + r"""\s*\[?\s*\{\s*["'](?:(?:name|tool_name|function)["']\s*:\s*["'](?P<name>[^"']*)["']"""
        r'|(?:arguments|parameters|function)"\s*:\s*\{|type"\s*:\s*"function")'
    ),
    compiled(_WRAP + r"\s*\[\s*(?P<name>[\w.:/-]+)\s*\("),
    compiled(_WRAP + r"\s*(?P<name>[\w.:/-]{1,300})(?:\[ARGS\]|\n)\s*(?=\{)"),
)
"""Patterns of the beginning of such an answer."""
_WRAPS_AROUND = re.compile(rf"\A(?:\s*(?:{WRAPS}))+|(?:{WRAPS})\Z")


def parse_unmarked_calls(text: str, tools: Tools, *, ended: bool, may_comment: bool) -> tuple[list[Call], str]:
    """Parse an answer as calls; return them and the rest: a comment on bare JSON calls, if it `may_comment`.

    `ended`: the model has ended the text, so brackets that are missing at its end are added.
    """
    calls, rest = first_json_calls(text, tools, ended=ended)
    if rest and not (may_comment and text.lstrip()[0] in "[{" and rest[0] not in "[{}]:"):
        return parse_python_calls(_WRAPS_AROUND.sub("", text.rstrip()), tools), ""
    return calls, rest
