"""Chat requests of the attackers and the honest stream."""

from typing import Any

CHAT = "/v1/chat/completions"
MODEL = "demo-assistant"
END_OF_TEXT = "2"
"""Id of the token with which this model ends its answers."""


def chat(text: str, **more: Any) -> dict[str, Any]:
    """Return a request for a streamed chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True, **more}


def long_chat(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    """Return a request whose answer has exactly `tokens` tokens, since it may not end earlier."""
    return chat(text, max_tokens=tokens, logit_bias={END_OF_TEXT: -100}, **more)
