"""What the answers look like, for the OpenAPI document; tests hold the renderers to it.

What may be null may be missing, and there may be more than is named.
"""

from types import NoneType
from typing import Any, Literal, get_args

from pydantic import ConfigDict, create_model

Object = dict[str, Any]


def shape(name: str, about: str = "", **fields: Any) -> Any:
    """The model of an object with these fields and their types."""
    kinds: Object = {field: (kind, None if NoneType in get_args(kind) else ...) for field, kind in fields.items()}
    return create_model(name, __config__=ConfigDict(extra="allow"), __doc__=about, **kinds)


Drafts = shape(
    "Speculation",
    "Which method ran, what came of its drafts, and why nothing was drafted, or not all the time.",
    method=str,
    reason=str,
    reason_code=str,
    drafted=int,
    accepted=int,
    cycles=int,
    tokens_per_cycle=float,
)
NUMBERS: Object = {"timings": dict[str, float], "speculation": Drafts}
"""How fast an answer came (llama.cpp's `timings`), and how its drafts fared."""
Counts = dict[str, int]
Usage = shape(
    "Usage",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=Counts,
    completion_tokens_details=Counts,
)
ANSWER: Object = {"id": str, "created": int, "model": str, "usage": Usage, "seed": int, **NUMBERS}
CHOICE: Object = {
    "index": int,
    "finish_reason": Literal["stop", "length", "tool_calls", "cancelled"],
    "logprobs": Object | None,
}
Message = shape(
    "ChatMessage",
    "The answer; `reasoning` is the same as `reasoning_content`. Arguments of calls are JSON as text.",
    role=Literal["assistant"],
    content=str | None,
    reasoning_content=str | None,
    reasoning=str | None,
    tool_calls=list[Object] | None,
)
ChatCompletion = shape(
    "ChatCompletion",
    "As a stream: `chat.completion.chunk`s, each with the `delta` of a choice.",
    object=Literal["chat.completion"],
    choices=list[shape("ChatChoice", message=Message, **CHOICE)],  # type: ignore[misc]
    **ANSWER,
)
TextCompletion = shape(
    "TextCompletion",
    "As a stream: the same, piece by piece.",
    object=Literal["text_completion"],
    choices=list[shape("TextChoice", text=str, **CHOICE)],  # type: ignore[misc]
    **ANSWER,
)
ResponseObject = shape(
    "Response",
    "As a stream: OpenAI's `response.…` events, the last of which carries this.",
    id=str,
    object=Literal["response"],
    status=Literal["completed", "incomplete"],
    created_at=int,
    model=str,
    output=list[Object],
    usage=Object,
)
ResponseItems = shape(
    "ResponseItems", object=Literal["list"], data=list[Object], first_id=str | None, last_id=str | None, has_more=bool
)
Deleted = shape("Deleted", id=str, object=Literal["response"], deleted=bool)
AnthropicMessage = shape(
    "AnthropicMessage",
    "As a stream: `message_start`, blocks one after another, `message_delta` and `message_stop`.",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=list[Object],
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
    stop_sequence=str | None,
    usage=Counts,
    **NUMBERS,
)
TokenCount = shape("TokenCount", input_tokens=int)
Embedding = shape(
    "Embedding",
    "Numbers, or the bytes of 32-bit floats in base64.",
    object=Literal["embedding"],
    index=int,
    embedding=list[float] | str,
)
EmbeddingList = shape(
    "EmbeddingList",
    object=Literal["list"],
    data=list[Embedding],  # type: ignore[valid-type]
    model=str,
    pooling=Literal["mean", "last"],
    usage=Counts,
)
Model = shape(
    "Model",
    id=str,
    object=Literal["model"],
    created=int,
    owned_by=str,
    state=str,
    alias=str | None,
    context_length=int | None,
    capabilities=list[str],
)
ModelList = shape("ModelList", object=Literal["list"], data=list[Model])  # type: ignore[valid-type]
Tokens = shape("Tokens", tokens=list[int], count=int, max_model_len=int)
TokensText = shape("TokensText", "Both are the same.", content=str, prompt=str)
RenderedPrompt = shape("RenderedPrompt", prompt=str)
PIECE: Object = {
    "model": str,
    "created_at": str,
    "done": bool,
    "done_reason": Literal["stop", "length", "load", "unload"],
}
LINES = "As a stream (the default there): a line of JSON for each piece, the last with `done`."
OllamaChatAnswer = shape("OllamaChatAnswer", LINES, message=Object, **PIECE)
OllamaText = shape("OllamaText", LINES, response=str, **PIECE)
OllamaVectors = shape("OllamaVectors", model=str, embeddings=list[list[float]])
OllamaVector = shape("OllamaVector", model=str, embedding=list[float])
OllamaModels = shape("OllamaModels", "What there is, or what is loaded.", models=list[Object])
OllamaModel = shape("OllamaModel", details=Object, model_info=Object, capabilities=list[str])
