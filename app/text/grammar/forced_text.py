"""Finds the text that a grammar forces next, byte by byte.

llguidance would find all of it in one call. If it forces half a megabyte, that call blocks the interpreter for half a
second; if the text exceeds its limits, it breaks the matcher. Here, the number of bytes requested bounds the work.
"""

from functools import cache

import llguidance


class ForcedText:
    """Forced continuation of an answer, consumed incrementally. Bytes found are cached until consumed."""

    def __init__(self, matcher: llguidance.LLMatcher, forced: bytes = b"", *, is_violated: bool = False) -> None:
        """Take a matcher over `byte_tokenizer` that is ahead of the answer by the bytes `forced`."""
        self._matcher = matcher
        self._forced = forced
        self._is_violated = is_violated
        self._is_at_choice = False
        """Whether nothing is forced after `_forced`."""

    def copy(self) -> "ForcedText":
        """Return an independent copy at the same position of the answer."""
        return ForcedText(self._matcher.deep_copy(), self._forced, is_violated=self._is_violated)

    def consume(self, data: bytes) -> None:
        """Advance past `data`. Nothing is forced after bytes that the grammar forbids."""
        expected_bytes = min(len(data), len(self._forced))
        self._is_violated |= data[:expected_bytes] != self._forced[:expected_bytes] or not self._matcher.consume_tokens(
            list(data[expected_bytes:])
        )
        self._forced = self._forced[expected_bytes:]
        self._is_at_choice &= expected_bytes == len(data)

    def next(self, max_bytes: int) -> bytes:
        """Return the bytes that must come next, at most `max_bytes`."""
        while len(self._forced) < max_bytes and not self._is_violated and not self._is_at_choice:
            allowed = int.from_bytes(self._matcher.compute_bitmask(), "little")
            byte = allowed.bit_length() - 1
            self._is_at_choice = allowed.bit_count() != 1 or byte > 255
            if not self._is_at_choice:
                self._matcher.consume_token(byte)
                self._forced += bytes([byte])
        return b"" if self._is_violated else self._forced[:max_bytes]


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """Make the tokenizer whose tokens are the 256 bytes."""
    return llguidance.LLTokenizer("byte")
