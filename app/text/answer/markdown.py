"""Follows the Markdown of an answer: examples in code fences are no calls, and reasoning begins on its own line."""

import re
from functools import reduce

_FENCE = re.compile(r"[\s>*+\-.\d)]*+(?P<fence>`{3,}|~{3,})(?P<rest>.*)", re.DOTALL)
_BACKTICKS = re.compile("`+")
LINE_CHARACTERS = 4096
"""Number of characters, from the start of a line, that are searched for marks of code."""


class Markdown:
    """Place in an answer's Markdown where the text so far ends."""

    def __init__(self) -> None:
        self._line = ""
        """Beginning of the last line."""
        self._fence = ""
        """Fence that was open before the last line."""

    def add(self, text: str) -> None:
        """Add more text of the answer."""
        *lines, rest = (self._line + text).split("\n")
        self._fence = reduce(_fence_after, lines, self._fence)
        self._line = rest[:LINE_CHARACTERS]

    @property
    def fence(self) -> str:
        """Code fence inside which the text ends; empty if it ends in none."""
        return _fence_after(self._fence, self._line)

    def in_code_after(self, text: str) -> bool:
        """Return whether what follows `text` is inside a code fence, or between backticks."""
        *lines, rest = (self._line + text).split("\n")
        fence = reduce(_fence_after, lines, self._fence)
        return bool(_fence_after(fence, rest)) or len(_BACKTICKS.findall(rest)) % 2 == 1

    @property
    def at_line_start(self) -> bool:
        """Whether the last line has nothing but white space so far."""
        return not self._line.strip()


def _fence_after(fence: str, line: str) -> str:
    """Return the fence that is open after a line, given the one before it. Only a bare fence that is at least as long
    closes another."""
    found = _FENCE.match(line)
    if found is None:
        return fence
    if not fence:
        return "" if "`" in found["rest"] else found["fence"]
    return "" if found["fence"].startswith(fence) and not found["rest"].strip() else fence
