"""Chats as attackers and the honest stream ask for them."""

from typing import Any

CHAT = "/v1/chat/completions"
MODEL = "demo-assistant"
END_OF_TEXT = "2"
"""The token with which this model ends its answers."""


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A streamed chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True, **more}


def long_chat(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    """One whose answer has so many tokens, since it may not end before."""
    return chat(text, max_tokens=tokens, logit_bias={END_OF_TEXT: -100}, **more)
