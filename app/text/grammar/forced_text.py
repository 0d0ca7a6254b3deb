"""Finds the text that a grammar forces next, byte by byte.

llguidance would find all of it in one call. If it forces half a megabyte, that call blocks the interpreter for half a
second; if the text exceeds its limits, it breaks the matcher. Here, the number of bytes requested and the time that
they take bound the work. Forced text is only drafted, so the answer is the same wherever it ends.
"""

import time
from functools import cache

import llguidance

FORCED_SECONDS = 0.02
"""Processor time, in seconds, that a call may take; after a longer one, the grammar forces nothing more. 128 bytes of a
plain grammar take 2 ms."""


class ForcedText:
    """Forced continuation of an answer, consumed incrementally. Bytes found are cached until consumed."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        forced: bytes = b"",
        *,
        is_violated: bool = False,
        is_at_choice: bool = False,
        is_slow: bool = False,
    ) -> None:
        """Take a matcher over `byte_tokenizer` that is ahead of the answer by the bytes `forced`."""
        self._matcher = matcher
        self._forced = forced
        self._is_violated = is_violated
        self._is_at_choice = is_at_choice
        """Whether nothing is forced after `_forced`."""
        self.is_slow = is_slow
        """Whether the grammar has taken too long."""

    def copy(self) -> "ForcedText":
        """Return an independent copy at the same position of the answer."""
        return ForcedText(
            self._matcher.deep_copy(),
            self._forced,
            is_violated=self._is_violated,
            is_at_choice=self._is_at_choice,
            is_slow=self.is_slow,
        )

    def consume(self, data: bytes) -> None:
        """Advance past `data`. Nothing is forced after bytes that the grammar forbids."""
        if self._is_violated or self.is_slow:
            return
        ends = time.thread_time() + FORCED_SECONDS
        expected_bytes = min(len(data), len(self._forced))
        self._is_violated |= data[:expected_bytes] != self._forced[:expected_bytes] or not self._matcher.consume_tokens(
            list(data[expected_bytes:])
        )
        self._forced = self._forced[expected_bytes:]
        self._is_at_choice &= expected_bytes == len(data)
        self.is_slow = time.thread_time() > ends

    def next(self, max_bytes: int) -> bytes:
        """Return the bytes that must come next, at most `max_bytes`."""
        ends = time.thread_time() + FORCED_SECONDS
        while len(self._forced) < max_bytes and not (self._is_violated or self._is_at_choice or self.is_slow):
            allowed = int.from_bytes(self._matcher.compute_bitmask(), "little")
            byte = allowed.bit_length() - 1
            self._is_at_choice = allowed.bit_count() != 1 or byte > 255
            if not self._is_at_choice:
                self._matcher.consume_token(byte)
                self._forced += bytes([byte])
            self.is_slow = time.thread_time() > ends
        return b"" if self._is_violated or self.is_slow else self._forced[:max_bytes]


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """Make the tokenizer whose tokens are the 256 bytes."""
    return llguidance.LLTokenizer("byte")
