"""The objects that chat and completions share in their answers: usage and log probs."""

from collections.abc import Sequence
from typing import Any

from app.core.messages import TokenText
from app.core.step import Statistics


def usage_object(usage: Statistics) -> dict[str, Any]:
    """OpenAI's `usage`, with its own fields for drafts: accepted and rejected prediction tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def _chat_token(token: TokenText) -> dict[str, Any]:
    entry = {"token": token.token, "logprob": token.logprob, "bytes": list(token.token_bytes)}
    top = [{"token": text, "logprob": logprob, "bytes": list(raw)} for text, logprob, raw in token.top]
    return entry | {"top_logprobs": top}


def legacy_logprobs(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
    """`logprobs` of a completion choice; `text_offset` counts characters of the answer from `offset`."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else {text: logprob for text, logprob, _ in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }
