"""Text on its way to the client: up to a stop string, and without white space that only surrounds calls."""

from collections.abc import Sequence
from itertools import groupby

from app.text.dialect import MAX_SPACE


class StopMatcher:
    """Finds stop strings in a stream: no part of one is ever sent, and no text that cannot become one is held back.

    The first match to complete wins; of two that end together, the one that starts first. So the answer depends on the
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


class MarkedText:
    """Text with a mark for each character: 1 if it was drafted."""

    def __init__(self, text: str = "", marks: bytes | bytearray = b"") -> None:
        self.text = text
        self.marks = bytearray(marks)

    def __bool__(self) -> bool:
        return bool(self.text)

    def add(self, other: "MarkedText") -> None:
        """Append `other`."""
        self.text += other.text
        self.marks += other.marks

    def take(self, count: int) -> "MarkedText":
        """Cut off and return the first `count` characters."""
        taken = MarkedText(self.text[:count], self.marks[:count])
        self.text, self.marks = self.text[count:], self.marks[count:]
        return taken


def spans_of(marks: bytes | bytearray) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) of each run of 1."""
    spans, position = [], 0
    for marked, run in groupby(marks):
        end = position + len(tuple(run))
        if marked:
            spans.append((position, end))
        position = end
    return tuple(spans)


class OutgoingText:
    """Text of an answer up to a stop string. White space beside calls is released only when text follows it."""

    def __init__(self, stop: Sequence[str], *, calls: bool) -> None:
        self._stops = StopMatcher(stop)
        self._calls = calls
        """Whether there may be calls."""
        self._unsure = MarkedText()
        """Text that may still become a stop string."""
        self._space = MarkedText()
        self._beside_call = False
        self.began = False
        """Whether any text other than white space was released."""
        self.trims = False
        """Whether white space before the next text is dropped."""
        self.met = ""
        """Stop string that ended the text; empty if none did."""

    def add(self, more: MarkedText) -> MarkedText:
        """Add `more`, and release the text that is certain."""
        if self.trims:
            more.take(len(more.text) - len(more.text.lstrip()))
            self.trims = not more
        self._unsure.add(more)
        match = self._stops.find(self._unsure.text)
        if match is None:
            return self._sure(self._stops.safe_length(self._unsure.text))
        released = self._sure(match[0])
        self.met = match[1]
        released.add(self._space)
        return released

    def end(self) -> MarkedText:
        """Release the rest when no more text will come."""
        released = self._sure(len(self._unsure.text))
        if not self._beside_call:
            released.add(self._space)
        return released

    def begin_call(self) -> MarkedText:
        """Release the rest of the text before a call."""
        released = self._sure(len(self._unsure.text))
        self._beside_call = True
        if not self.began:
            self._space, self.trims = MarkedText(), True
        return released

    def begin_part(self, between: str) -> None:
        """Begin another text, separated by `between` from a previous one."""
        if self.began:
            self._space.add(MarkedText(between, bytes(len(between))))

    def _sure(self, count: int) -> MarkedText:
        """Release `count` characters and the white space held before them; hold that behind them if calls may come."""
        text = self._unsure.take(count)
        if not self._calls and not self._space:
            self.began |= bool(text.text.strip())
            return text
        self._space.add(text)
        held = min(MAX_SPACE, len(self._space.text) - len(self._space.text.rstrip()))
        released = self._space.take(len(self._space.text) - held)
        if released:
            self.began, self._beside_call = True, False
        return released
