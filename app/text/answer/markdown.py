"""Follows the Markdown of an answer: examples in code fences are no calls, and reasoning begins on its own line."""

import re

_FENCE = re.compile(r"[\s>*+\-.\d)]*(?P<fence>`{3,}|~{3,})(?P<rest>.*)", re.DOTALL)
LINE_CHARACTERS = 256
"""Number of characters, from the start of a line, that are searched for a fence."""


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
        for line in lines:
            self._fence = self._fence_after(line)
        self._line = rest[:LINE_CHARACTERS]

    @property
    def in_fence(self) -> bool:
        """Whether what follows is inside a code fence."""
        return bool(self._fence_after(self._line))

    @property
    def at_line_start(self) -> bool:
        """Whether the last line has nothing but white space so far."""
        return not self._line.strip()

    def _fence_after(self, line: str) -> str:
        """Return the fence that is open after a line. Only a bare fence that is at least as long closes another."""
        found = _FENCE.match(line)
        if found is None:
            return self._fence
        if not self._fence:
            return "" if "`" in found["rest"] else found["fence"]
        return "" if found["fence"].startswith(self._fence) and not found["rest"].strip() else self._fence
