"""Finds the text that a grammar forces next, byte by byte.

llguidance would find all of it in one call, which holds the interpreter for half a second if half a megabyte is forced,
and breaks the grammar if the text exceeds its limits. Here the work is bounded by the bytes that are asked for.
"""

from functools import cache

import llguidance


class ForcedText:
    """Forced continuation of an answer, fed piece by piece. Bytes found are kept until the answer contains them."""

    def __init__(self, matcher: llguidance.LLMatcher, forced: bytes = b"", *, is_lost: bool = False) -> None:
        """Take a matcher over `byte_tokenizer` that has read `forced` ahead of the answer."""
        self._matcher = matcher
        self._forced = forced
        self._is_lost = is_lost
        self._is_at_choice = False
        """Whether nothing is forced behind `_forced`."""

    def copy(self) -> "ForcedText":
        """Return an independent copy at the same place in the answer."""
        return ForcedText(self._matcher.deep_copy(), self._forced, is_lost=self._is_lost)

    def follow(self, piece: bytes) -> None:
        """Advance past `piece`. Nothing is forced behind a piece that the grammar forbids."""
        known = min(len(piece), len(self._forced))
        self._is_lost |= piece[:known] != self._forced[:known] or not self._matcher.consume_tokens(list(piece[known:]))
        self._forced = self._forced[known:]
        self._is_at_choice &= known == len(piece)

    def next(self, most_bytes: int) -> bytes:
        """Return the bytes that must come next, at most `most_bytes`."""
        while len(self._forced) < most_bytes and not self._is_lost and not self._is_at_choice:
            allowed = int.from_bytes(self._matcher.compute_bitmask(), "little")
            byte = allowed.bit_length() - 1
            self._is_at_choice = allowed.bit_count() != 1 or byte > 255
            if not self._is_at_choice:
                self._matcher.consume_token(byte)
                self._forced += bytes([byte])
        return b"" if self._is_lost else self._forced[:most_bytes]


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """Make the tokenizer whose tokens are the 256 bytes."""
    return llguidance.LLTokenizer("byte")
