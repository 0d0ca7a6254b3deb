"""Filters outgoing text: ends it at a stop string and drops white space that only surrounds tool calls. Follows its
Markdown: examples in code fences are no calls, and reasoning begins on a line of its own."""

import re
from collections.abc import Sequence
from functools import reduce
from itertools import groupby

from app.text.dialect import MAX_WHITESPACE

_FENCE = re.compile(r"[\s>*+\-.\d)]*+(?P<fence>`{3,}|~{3,})(?P<rest>.*)", re.DOTALL)
_BACKTICKS = re.compile("`+")
LINE_CHARACTERS = 4096
"""Number of characters, from the start of a line, that are searched for marks of code."""


class StopMatcher:
    """Finds stop strings in a stream. No part of a stop string is ever sent; only text that may become one is withheld.

    The first match to complete wins; of two with the same end, the one that starts first. So the answer depends on the
    text alone, never on how it was cut into tokens or steps. Empty strings never match.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(dict.fromkeys(word for word in stop if word))
        self._longest = max((len(word) for word in self._stop), default=0)

    def find(self, text: str) -> tuple[int, str] | None:
        """Return the start of the first complete stop string in `text`, and that string; or None."""
        matches = [(start + len(word), start, word) for word in self._stop if (start := text.find(word)) >= 0]
        return min(matches)[1:] if matches else None

    def safe_length(self, text: str) -> int:
        """Return how many characters of `text` cannot belong to a stop string, whatever comes next."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(word.startswith(text[start:]) for word in self._stop):
                return start
        return len(text)


class FlaggedText:
    """Text with one flag for each character: 1 if it was drafted."""

    def __init__(self, text: str = "", drafted_flags: bytes | bytearray = b"") -> None:
        self.text = text
        self.drafted_flags = bytearray(drafted_flags)

    def __bool__(self) -> bool:
        return bool(self.text)

    def add(self, other: "FlaggedText") -> None:
        """Append `other`."""
        self.text += other.text
        self.drafted_flags += other.drafted_flags

    def take(self, count: int) -> "FlaggedText":
        """Remove the first `count` characters and return them."""
        taken = FlaggedText(self.text[:count], self.drafted_flags[:count])
        self.text, self.drafted_flags = self.text[count:], self.drafted_flags[count:]
        return taken


def spans_of(drafted_flags: bytes | bytearray) -> tuple[tuple[int, int], ...]:
    """Return (start, end) of each run of drafted characters."""
    spans, position = [], 0
    for is_drafted, run in groupby(drafted_flags):
        end = position + len(tuple(run))
        if is_drafted:
            spans.append((position, end))
        position = end
    return tuple(spans)


class OutgoingText:
    """Text of an answer up to a stop string. White space next to calls is released only once text follows it."""

    def __init__(self, stop: Sequence[str], *, calls: bool) -> None:
        self._stops = StopMatcher(stop)
        self._may_call = calls
        """Whether the answer may contain calls."""
        self._pending = FlaggedText()
        """Text that may still become a stop string."""
        self._held_whitespace = FlaggedText()
        self.follows_call = False
        """Whether nothing but white space was released since the last call."""
        self.has_text = False
        """Whether any text other than white space was released."""
        self.trims_leading = False
        """Whether leading white space of the next text is dropped."""
        self.matched_stop = ""
        """Stop string that ended the text; empty if none did."""

    def add(self, more: FlaggedText) -> FlaggedText:
        """Add more text, and release what is certain."""
        if self.trims_leading:
            more.take(len(more.text) - len(more.text.lstrip()))
            self.trims_leading = not more
        self._pending.add(more)
        match = self._stops.find(self._pending.text)
        if match is None:
            return self._release(self._stops.safe_length(self._pending.text))
        released = self._release(match[0])
        self.matched_stop = match[1]
        released.add(self._held_whitespace)
        return released

    def end(self) -> FlaggedText:
        """Release the remaining text at the end of the answer."""
        released = self._release(len(self._pending.text))
        if not self.follows_call:
            released.add(self._held_whitespace)
        return released

    def begin_call(self) -> FlaggedText:
        """Release the rest of the text before a call."""
        released = self._release(len(self._pending.text))
        self.follows_call = True
        if not self.has_text:
            self._held_whitespace, self.trims_leading = FlaggedText(), True
        return released

    def begin_segment(self, separator: str) -> None:
        """Begin another text segment, separated by `separator` from the previous one."""
        if self.has_text:
            self._held_whitespace.add(FlaggedText(separator, bytes(len(separator))))

    def _release(self, count: int) -> FlaggedText:
        """Release withheld white space and `count` more characters; withhold trailing space if calls may follow."""
        text = self._pending.take(count)
        if not self._may_call and not self._held_whitespace:
            self.has_text |= bool(text.text.strip())
            return text
        self._held_whitespace.add(text)
        held = min(MAX_WHITESPACE, len(self._held_whitespace.text) - len(self._held_whitespace.text.rstrip()))
        released = self._held_whitespace.take(len(self._held_whitespace.text) - held)
        if released:
            self.has_text, self.follows_call = True, False
        return released


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
    opened = _FENCE.match(line)
    if opened is None:
        return fence
    if not fence:
        return "" if "`" in opened["rest"] else opened["fence"]
    return "" if opened["fence"].startswith(fence) and not opened["rest"].strip() else fence
