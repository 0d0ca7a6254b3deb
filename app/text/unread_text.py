"""Unread text of a model, for readers that wait for more until they can decide."""

from collections.abc import Generator
from typing import Any

import regex

from app.text.stops import MarkedText

MAX_CALL_CHARACTERS = 256 * 1024
"""Longest call that is read as a whole, in characters; a longer one is text."""

Match = Any
"""Match of `regex`, which has no types."""
Reading = Generator[None, None, Match | None]
"""Reader whose every `yield` asks for more text."""


class UnreadText(MarkedText):
    """Text that grows at its end while it is read from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.final = False
        """Whether no more text will come."""

    def more(self) -> Generator[None, None, bool]:
        """Wait for more text, and return whether any may have come."""
        if self.final or len(self.text) > MAX_CALL_CHARACTERS:
            return False
        yield
        return True

    def match(self, pattern: "regex.Pattern[str]", place: int = 0) -> Reading:
        """Match an expression at `place`, as soon as the match is certain."""
        while True:
            match = pattern.match(self.text, place, partial=True)
            if match is None or not match.partial:
                return match
            if not (yield from self.more()):
                return pattern.match(self.text, place)

    def search(self, pattern: "regex.Pattern[str]", place: int = 0) -> Reading:
        """Return the first match from `place` on, or None."""
        while True:
            match = pattern.search(self.text, place, partial=True)
            if match is not None and not match.partial:
                return match
            place = match.start() if match is not None else len(self.text)
            if not (yield from self.more()):
                return None
