"""Headers of gpt-oss's messages, such as `<|start|>assistant<|channel|>commentary to=functions.NAME<|message|>`."""

import re
from typing import NamedTuple

import regex

from app.text.dialect import HARMONY_ENDS, compiled

ENDS = "|".join(map(regex.escape, HARMONY_ENDS))
HEADER = compiled(
    r"\s*(?P<header>(?:<\|start\|>\s*(?P<author>(?!to=)[^\s<]{1,256})?|assistant(?=\s*(?:<\||to=))|(?=<\||to=))"
    r"(?:[^<]|<\|(?:channel|constrain)\|>){0,1024})<\|message\|>"
)
"""Header of a message. A model may write the channel twice, or leave out the first marker."""
BROKEN_HEADER = compiled(r"\s*<\|channel\|>[^<]{0,256}(?=<\|(?:end|start|call|return)\|>)")
"""Header that no message follows."""
UNENDED_HEADER = compiled(
    r"\s*(?:(?:<\|start\|>\s*)?assistant)?\s*<\|channel\|>\s*final"
    r"(?:\s*<\|constrain\|>\w{0,64}){1,8}\s*(?=[^\s\w<]|<[^|])"
)
"""Header of an answer whose last marker the model left out."""
FINAL_HEADER = re.compile(rb"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
"""Header of the answer, in bytes; it may name a format, such as `final <|constrain|>json`."""
MARKER = compiled(rf"\s*(?:{ENDS}|<\|message\|>)")
EMPTY = compiled(rf"\s*(?:{ENDS})")
_CHANNEL = regex.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = regex.compile(r"\bto=\s*(?:functions[.:])?([^\s<]+)")


class Header(NamedTuple):
    """Parts of a header."""

    channel: str
    recipient: str
    is_own: bool
    """Whether the model speaks for itself; it may also invent a turn of the user or a tool."""


def read_header(text: str, author: str | None = None) -> Header:
    """Return the parts of a header; of a part that is written twice, the last one counts."""
    channels, recipients = _CHANNEL.findall(text), _RECIPIENT.findall(text)
    return Header(
        channel=channels[-1] if channels else "",
        recipient=recipients[-1] if recipients else "",
        is_own=author is None or author.lower().startswith("assistant"),
    )
