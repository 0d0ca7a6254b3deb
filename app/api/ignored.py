"""Request fields that are not read: the answer names each one in `warnings`, with the reason where it is known.

No warning is given for fields that only steer other services and would not change an answer here, nor for values that
request nothing: null, false, zero and empty values.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from app.core.request import Notice

MAX_NOTICES = 32
MAX_NAME_CHARACTERS = 64

# fmt: off
IGNORED_SILENTLY = frozenset({
    "betas", "client_metadata", "diagnostics", "inference_geo", "metadata", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "provider", "safeguards", "safety_identifier", "service_tier",
    "store", "stream_options", "user",
    "cache_control", "cache_salt", "options.f16_kv", "options.low_vram", "options.main_gpu", "options.num_batch",
    "options.num_ctx", "options.num_gpu", "options.num_gqa", "options.num_keep", "options.num_thread", "options.numa",
    "options.use_mlock", "options.use_mmap", "options.vocab_only",
    "reasoning.summary", "reasoning.generate_summary", "shift", "truncate",
})
# fmt: on
"""Fields that steer other services or engines: ignored without a warning."""

NO_LOGPROBS = "log probabilities are returned by /v1/chat/completions and /v1/completions"
SEND_WHOLE = "send the whole conversation, or previous_response_id"
RAN_ELSEWHERE = "nothing is searched or run on this server"
WHY_IGNORED: Mapping[str, str] = {
    "audio": "answers are text",
    "chat_template": "the model's own template is used",
    "container": RAN_ELSEWHERE,
    "context": "send the whole conversation to /api/chat",
    "context_management": "conversations are never shortened",
    "conversation": SEND_WHOLE,
    "function_call": "use tool_choice",
    "functions": "use tools",
    "include": "there is nothing to include",
    "include_reasoning": "reasoning is always returned, in a field of its own",
    "logprobs": NO_LOGPROBS,
    "max_tool_calls": "the client runs the tools, and may stop",
    "mcp_servers": RAN_ELSEWHERE,
    "modalities": "answers are text",
    "prompt": "prompts are not kept here: send their text",
    "reasoning.exclude": "reasoning is always returned, in a field of its own",
    "template": "the model's own template is used",
    "top_logprobs": NO_LOGPROBS,
    "truncation": "input that is too long is refused, never truncated",
    "web_search_options": RAN_ELSEWHERE,
}
UNKNOWN = "this server has no such field"
DEFAULT_VALUES: Mapping[str, Sequence[Any]] = {
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "include": ([], ["reasoning.encrypted_content"]),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "reasoning.context": ("auto",),
    "reasoning.mode": ("standard",),
    "text.verbosity": ("medium",),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Values by field that request the default, and so need no warning. For other fields, these are all falsy values."""


def ignored_fields(body: BaseModel, harmless: Container[str] = ()) -> list[Notice]:
    """Return a notice for each field that was sent but is not read, at most MAX_NOTICES; none for `harmless` ones."""
    names = (
        name
        for name, value in _unknown_fields(body)
        if name not in IGNORED_SILENTLY and name not in harmless and not _is_default(name, value)
    )
    return [
        ignored_notice(name, WHY_IGNORED.get(name, UNKNOWN)) for name, _ in zip(names, range(MAX_NOTICES), strict=False)
    ]


def _is_default(name: str, value: Any) -> bool:
    return value is None or (value in DEFAULT_VALUES[name] if name in DEFAULT_VALUES else not value)


def ignored_notice(name: str, why: str) -> Notice:
    """Return the notice of one ignored field."""
    return Notice(code="ignored_field", message=f"{name[:MAX_NAME_CHARACTERS]} is ignored: {why}",
                  parameter=name[:MAX_NAME_CHARACTERS])  # fmt: skip


def _unknown_fields(body: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of fields that a body, or a body nested in it, does not define."""
    extra: Iterable[tuple[str, Any]] = (body.model_extra or {}).items()
    yield from ((prefix + name, value) for name, value in extra)
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, BaseModel):
            yield from _unknown_fields(value, f"{prefix}{name}.")
