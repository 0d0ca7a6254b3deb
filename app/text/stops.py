"""Words in a stream of text: where one stands, and what may still become one."""

from collections.abc import Sequence


class StopMatcher:
    """Stop strings in a stream of text: nothing of one is ever told, and nothing that can no longer become one is held.

    The match that is complete first wins; of two that end together, the one that starts first. So the answer depends
    on the text alone, never on how it was cut into tokens or steps. Empty strings never match.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(dict.fromkeys(word for word in stop if word))
        self._longest = max((len(word) for word in self._stop), default=0)

    def find(self, text: str) -> tuple[int, str] | None:
        """Where the first complete stop string starts in `text`, and which it is; or None."""
        matches = [(start + len(word), start, word) for word in self._stop if (start := text.find(word)) >= 0]
        return min(matches)[1:] if matches else None

    def safe_length(self, text: str) -> int:
        """How many characters of `text` cannot be the beginning of a stop string, whatever comes next."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(word.startswith(text[start:]) for word in self._stop):
                return start
        return len(text)
