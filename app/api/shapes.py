"""Schemas of the answers, for the OpenAPI document; tests check the renderers against them."""

from typing import Any, Literal

from app.serving.document import shape

Object = dict[str, Any]
Counts = dict[str, int]
Fields = dict[str, Any]

DRAFTED: Fields = dict.fromkeys(("drafted", "accepted", "cycles", "close_calls", "replayed_tokens"), int)
Drafts = shape(
    "Speculation",
    {"method": str, "reason": str, "reason_code": str, **DRAFTED, "tokens_per_cycle": float},
    "Which method ran, the outcome of its drafts, and why nothing, or not everything, was drafted.",
)
Warned = shape(
    "Warning",
    {"code": str, "message": str, "parameter": str},
    "A repair that the request needed, or a part of it that was ignored; `parameter` names the field, if any.",
)
WARNED: Fields = {"warnings": list[Warned] | None}  # type: ignore[valid-type]
NUMBERS: Fields = {"timings": dict[str, float], "speculation": Drafts}
"""Fields with the speed of an answer (llama.cpp's `timings`) and the figures of its speculation."""
DETAILS: Fields = {"prompt_tokens_details": Counts, "completion_tokens_details": Counts}
Usage = shape("Usage", {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int, **DETAILS})
ANSWER: Fields = {"id": str, "created": int, "model": str, "usage": Usage, "seed": int, **NUMBERS, **WARNED}
FINISH_REASONS = Literal["stop", "length", "tool_calls", "cancelled"]
CHOICE: Fields = {"index": int, "finish_reason": FINISH_REASONS, "logprobs": Object | None}
TEXTS: Fields = dict.fromkeys(("content", "reasoning_content"), str | None)
Message = shape(
    "ChatMessage",
    {"role": Literal["assistant"], **TEXTS, "tool_calls": list[Object] | None},
    "Arguments of calls are JSON as text.",
)
ChatChoice = shape("ChatChoice", {"message": Message, **CHOICE})
ChatCompletion = shape(
    "ChatCompletion",
    {"object": Literal["chat.completion"], "choices": list[ChatChoice], **ANSWER},  # type: ignore[valid-type]
    "As a stream: `chat.completion.chunk`s, each with the `delta` of a choice.",
)
TextChoice = shape("TextChoice", {"text": str, **CHOICE})
TextCompletion = shape(
    "TextCompletion",
    {"object": Literal["text_completion"], "choices": list[TextChoice], **ANSWER},  # type: ignore[valid-type]
    "As a stream: the same, piece by piece.",
)
RESPONSE: Fields = {"id": str, "object": Literal["response"]}
ENDED: Fields = {"status": Literal["completed", "incomplete"], "output": list[Object], "usage": Object, **WARNED}
ResponseObject = shape(
    "Response",
    {**RESPONSE, "created_at": int, "model": str, **ENDED},
    "As a stream: OpenAI's `response.…` events, the last of which carries this.",
)
LIST: Fields = {"object": Literal["list"]}
ENDS: Fields = {"first_id": str | None, "last_id": str | None, "has_more": bool}
ResponseItems = shape("ResponseItems", {**LIST, "data": list[Object], **ENDS})
Deleted = shape("Deleted", {**RESPONSE, "deleted": bool})
STOPPED: Fields = {
    "stop_reason": Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
    "stop_sequence": str | None,
}
MESSAGE: Fields = {"id": str, "type": Literal["message"], "role": Literal["assistant"], "content": list[Object]}
AnthropicMessage = shape(
    "AnthropicMessage",
    {**MESSAGE, "model": str, **STOPPED, "usage": Counts, **NUMBERS, **WARNED},
    "As a stream: `message_start`, blocks one after another, `message_delta` and `message_stop`.",
)
TokenCount = shape("TokenCount", {"input_tokens": int, **WARNED})
InputTokens = shape("InputTokens", {"object": Literal["response.input_tokens"], "input_tokens": int, **WARNED})
VECTOR: Fields = {"index": int, "embedding": list[float] | str}
Embedding = shape("Embedding", VECTOR, "Numbers, or 32-bit floats in base64.")
VECTORS: Fields = {"data": list[Embedding], "usage": Counts, **WARNED}  # type: ignore[valid-type]
EmbeddingList = shape("EmbeddingList", {**LIST, **VECTORS, "model": str, "pooling": str})
SCORED: Fields = {"index": int, "relevance_score": float}
Scored = shape("RerankResult", SCORED, "`document` with its `text` if requested.")
Reranking = shape("Reranking", {"id": str, "model": str, "results": list[Scored], "usage": Counts, **WARNED})  # type: ignore[valid-type]
PROFILED: Fields = {"alias": str | None, "profile_of": str | None}
MODEL_STATE: Fields = {"state": str, **PROFILED, "context_length": int | None, "capabilities": list[str]}
Model = shape(
    "Model",
    {"id": str, "object": Literal["model"], "created": int, "owned_by": str, "display_name": str, **MODEL_STATE},
)
ModelList = shape("ModelList", {**LIST, "data": list[Model]})  # type: ignore[valid-type]
Tokens = shape("Tokens", {"tokens": list[int], "count": int, "max_model_len": int, **WARNED})
TokensText = shape("TokensText", {"content": str, "prompt": str}, "Both are the same.")
RenderedPrompt = shape("RenderedPrompt", {"prompt": str, **WARNED})
DONE: Fields = {"done": bool, "done_reason": Literal["stop", "length", "load", "unload"], **WARNED}
OLLAMA_CHUNK: Fields = {"model": str, "created_at": str, **DONE}
LINES = "As a stream (the default there): a line of JSON for each piece, the last with `done`."
OllamaChatAnswer = shape("OllamaChatAnswer", {"message": Object, **OLLAMA_CHUNK}, LINES)
OllamaText = shape("OllamaText", {"response": str, **OLLAMA_CHUNK}, LINES)
OllamaVectors = shape("OllamaVectors", {"model": str, "embeddings": list[list[float]], **WARNED})
OllamaVector = shape("OllamaVector", {"model": str, "embedding": list[float], **WARNED})
OllamaModels = shape("OllamaModels", {"models": list[Object]}, "Models on disk, or models in memory.")
OllamaModel = shape("OllamaModel", {"details": Object, "model_info": Object, "capabilities": list[str]})
