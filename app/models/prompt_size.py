"""Refuses a prompt that is too long however it is tokenized.

The server checks before it forwards a prompt, the text process before it tokenizes one.
"""

from collections.abc import Mapping
from typing import Any

from app.core.errors import context_overflow
from app.core.messages import Generate

COMPOSED_BYTES = 4
"""Maximum number of bytes that a tokenizer's normalizer turns into one."""
USUAL_TOKEN_BYTES = 4
"""Bytes per token of typical text, for the estimate in the error message."""


def text_bytes(value: Any) -> int:
    """Return the number of UTF-8 bytes in all strings of a JSON value."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    if isinstance(value, Mapping):
        return sum(text_bytes(part) for pair in value.items() for part in pair)
    return sum(text_bytes(entry) for entry in value) if isinstance(value, list | tuple) else 0


def check_bytes(size: int, context_tokens: int, longest_token_bytes: int) -> None:
    """Raise `InvalidRequest` for text of `size` bytes that cannot fit the context."""
    if size > context_tokens * longest_token_bytes * COMPOSED_BYTES:
        estimate = size // USUAL_TOKEN_BYTES
        raise context_overflow(estimate, context_tokens, f"{size} bytes, more than {context_tokens}")


def check_prompt(command: Generate) -> None:
    """Raise `InvalidRequest` for a prompt that cannot fit its model's context; unknown limits are not checked."""
    context_tokens, longest_token_bytes = command.model.live.context_tokens, command.model.live.longest_token_bytes
    if command.tokens is not None and len(command.tokens) + (not command.embeds) > context_tokens > 0:
        raise context_overflow(len(command.tokens), context_tokens)
    if longest_token_bytes:
        check_bytes(
            text_bytes([command.text, command.suffix, command.messages, command.tools]),
            context_tokens,
            longest_token_bytes,
        )
