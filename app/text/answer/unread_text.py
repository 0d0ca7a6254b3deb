"""Buffer of model output that has not been parsed yet, for scans that wait for more text until they can decide."""

from collections.abc import Generator
from typing import Any

import regex

from app.text.answer.stops import FlaggedText

MAX_CALL_CHARACTERS = 256 * 1024
"""Length limit, in characters, of a call that is buffered as a whole; a longer one is sent as text."""

Match = Any
"""Match of `regex`, which has no types."""
MatchSearch = Generator[None, None, Match | None]
"""Generator that scans text step by step; each `yield` waits for more."""


class UnreadText(FlaggedText):
    """Text buffer: appended at its end, consumed from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.final = False
        """Whether the text is complete: nothing more will be appended."""
        self.truncated = False
        """Whether it ends because the answer was cut off, not because the model ended it."""

    @property
    def ended(self) -> bool:
        """Whether the model has ended the text: brackets that are missing then were forgotten."""
        return self.final and not self.truncated

    def wait_for_more(self) -> Generator[None, None, bool]:
        """Wait for more text; return False, without waiting, if no more is expected or the buffer is full."""
        if self.final or len(self.text) > MAX_CALL_CHARACTERS:
            return False
        yield
        return True

    def match(self, pattern: "regex.Pattern[str]", position: int = 0) -> MatchSearch:
        """Match a pattern at `position`, waiting for more text while the match is only partial."""
        while True:
            match = pattern.match(self.text, position, partial=True)
            if match is None or not match.partial:
                return match
            if not (yield from self.wait_for_more()):
                return pattern.match(self.text, position)

    def search(self, pattern: "regex.Pattern[str]", position: int = 0) -> MatchSearch:
        """Return the first match from `position` on, or None."""
        while True:
            match = pattern.search(self.text, position, partial=True)
            if match is not None and not match.partial:
                return match
            position = match.start() if match is not None else len(self.text)
            if not (yield from self.wait_for_more()):
                return None
