"""The text that a grammar forces next, found byte by byte.

llguidance finds all of it in one call, which holds the interpreter for half a second where half a megabyte is forced,
and breaks the grammar where its limits end before the text. Here the work is bounded by the bytes that are wanted.
"""

from functools import cache

import llguidance


class ForcedText:
    """What must follow an answer that is shown to it piece by piece. What was found is kept until it was written."""

    def __init__(self, matcher: llguidance.LLMatcher, found: bytes = b"", *, is_lost: bool = False) -> None:
        """`matcher` reads the answer with `byte_tokenizer`, and has read `found` ahead of it."""
        self._matcher = matcher
        self._found = found
        self._is_lost = is_lost
        self._is_at_choice = False
        """Whether nothing is forced behind what was found."""

    def copy(self) -> "ForcedText":
        """Another one at the same place of the same answer."""
        return ForcedText(self._matcher.deep_copy(), self._found, is_lost=self._is_lost)

    def follow(self, piece: bytes) -> None:
        """Go on behind `piece`. Nothing is forced behind one that the grammar forbids."""
        known = min(len(piece), len(self._found))
        self._is_lost |= piece[:known] != self._found[:known] or not self._matcher.consume_tokens(list(piece[known:]))
        self._found = self._found[known:]
        self._is_at_choice &= known == len(piece)

    def next(self, most_bytes: int) -> bytes:
        """The bytes that must come next, `most_bytes` of them at most."""
        while len(self._found) < most_bytes and not self._is_lost and not self._is_at_choice:
            allowed = int.from_bytes(self._matcher.compute_bitmask(), "little")
            byte = allowed.bit_length() - 1
            self._is_at_choice = allowed.bit_count() != 1 or byte > 255
            if not self._is_at_choice:
                self._matcher.consume_token(byte)
                self._found += bytes([byte])
        return b"" if self._is_lost else self._found[:most_bytes]


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """Make the tokenizer whose tokens are the 256 bytes."""
    return llguidance.LLTokenizer("byte")
