"""Counts the reasoning tokens of an answer."""

from collections.abc import Iterable

from app.text.dialect import HARMONY, HARMONY_LAST, Dialect


class ReasoningCount:
    """Counts the reasoning tokens of an answer, drafted or not: those up to the closing marker, which is included."""

    def __init__(self, dialect: Dialect) -> None:
        self._closing = (HARMONY_LAST[0] if dialect.parser == HARMONY else dialect.closing).encode()
        self._tail = b""
        self._ended = not self._closing
        self.tokens = 0

    def feed(self, pieces: Iterable[bytes]) -> None:
        """Count further tokens, given the bytes of each."""
        for piece in pieces:
            if self._ended:
                return
            self.tokens += 1
            self._tail = self._tail[1 - len(self._closing) :] + piece
            self._ended = self._closing in self._tail
