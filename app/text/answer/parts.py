"""Parts of an answer: increments, whole calls, and the number of its reasoning tokens."""

from collections.abc import Iterable, Sequence

import msgspec

from app.core.messages import ToolCallDelta
from app.text.answer.calls import Call
from app.text.answer.stops import spans_of
from app.text.dialect import HARMONY, HARMONY_LAST, Dialect


class AnswerDelta(msgspec.Struct, kw_only=True):
    """Increment of an answer, in this order: reasoning, text, tool-call deltas."""

    reasoning: str = ""
    text: str = ""
    drafted_flags: bytearray = msgspec.field(default_factory=bytearray)
    """Flags of the characters of `text`, one byte each: 1 if drafted."""
    calls: list[ToolCallDelta] = []

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Spans (start, end) of `text` that were drafted."""
        return spans_of(self.drafted_flags)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


def assembled_calls(deltas: Sequence[ToolCallDelta]) -> list[Call]:
    """Assemble calls from their deltas."""
    heads = [delta for delta in deltas if delta.name]
    arguments = {
        head.index: "".join(delta.arguments for delta in deltas if delta.index == head.index) for head in heads
    }
    return [Call(head.name, arguments[head.index], head.id) for head in heads]


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
