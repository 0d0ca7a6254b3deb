"""`POST /v1/completions`: text or token ids in, text out; several prompts in one request run concurrently.

`max_tokens` defaults to the model's setting, else to 16, as in OpenAI's API. Choices are numbered across prompts:
prompt × n + index.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema, field_validator, model_validator

from app.api.answer import FinishedChoice, OpenAIRenderer, answer
from app.api.commands import (
    MAX_TOKEN_ID,
    MAX_TOP_LOGPROBS,
    NO_LIMIT,
    TEXT,
    GenerationBody,
    json_schema_as,
    max_tokens,
    shared_command,
)
from app.api.shapes import TextCompletion
from app.core.messages import Delta, Generate, TokenText
from app.serving.context import context_of
from app.serving.document import ANSWERED, EVENTS, success
from app.serving.gate import JsonBody

MAX_PROMPTS = 2048
DEFAULT_MAX_TOKENS = 16

router = APIRouter()

Prompt = str | list[int]
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, "minItems": 1}


def prompts(most: int, *, or_null: bool = False) -> WithJsonSchema:
    """Return the OpenAPI schema of one prompt or of up to `most` prompts, each a text or a list of token ids."""
    several = [{"type": "array", "items": schema, "minItems": 1, "maxItems": most} for schema in (TEXT, TOKENS)]
    return json_schema_as(TEXT, TOKENS, *several, or_null=or_null)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, prompts(MAX_PROMPTS)]
    max_tokens: int | None = Field(None, ge=NO_LIMIT, le=MAX_TOKEN_ID)
    """Limit on the answer, in tokens. With `echo`, 0 returns only the prompt, with log probs if `logprobs` is set."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=8)
    suffix: str | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> list[Prompt]:
        prompts = [prompt] if isinstance(prompt, str) or is_tokens(prompt) else prompt
        if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
            raise ValueError(f"give a string, token ids, or a list of 1 to {MAX_PROMPTS} of them")
        texts = all(isinstance(entry, str) and entry for entry in prompts)
        if not texts and not all(is_tokens(entry) for entry in prompts):
            raise ValueError("each prompt is a non-empty string, or each is a non-empty list of token ids")
        return prompts

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not available: leave it out, or make it equal to n")
        if self.suffix and (self.echo or not isinstance(self.prompt[0], str)):
            raise ValueError("suffix requires a text prompt and no echo")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 requires echo: true: give at least 1, or echo: true")
        return self


def is_tokens(value: Any) -> bool:
    """Whether `value` is a non-empty list of token ids."""
    is_whole = isinstance(value, list) and set(map(type, value)) == {int}
    return is_whole and min(value) >= 0 and max(value) <= MAX_TOKEN_ID


@router.post("/v1/completions", responses=success(TextCompletion, EVENTS) | ANSWERED)
async def create_completion(request: Request, body: JsonBody[CompletionBody]) -> Response:
    """Continue one or several prompts."""
    shared = await shared_command(request, body, top_logprobs=body.logprobs)
    defaults = context_of(request).live.request_defaults(body.model, shared.model.id)
    completion_id = f"cmpl-{secrets.token_hex(12)}"
    commands = [
        msgspec.structs.replace(
            shared,
            id=f"{completion_id}-{position}",
            text=prompt if isinstance(prompt, str) else None,
            tokens=None if isinstance(prompt, str) else prompt,
            max_tokens=max_tokens(body.max_tokens, defaults.max_tokens or DEFAULT_MAX_TOKENS),
            echo=bool(body.echo),
            suffix=body.suffix or None,
        )
        for position, prompt in enumerate(body.prompt)
    ]
    renderer = CompletionRenderer(completion_id, shared, body)
    return await answer(request, commands, renderer, stream=bool(body.stream))


class CompletionRenderer(OpenAIRenderer):
    """OpenAI's `text_completion`; the `text_offset` of a token counts the characters before it in its choice."""

    whole_name = chunk_name = "text_completion"
    prompt_parameter = "prompt"

    def __init__(self, request_id: str, command: Generate, body: GenerationBody) -> None:
        super().__init__(request_id, command, body)
        self._offsets: dict[int, int] = {}

    def chunk_choice(self, index: int, update: Delta | str) -> dict[str, Any]:
        return _choice(index, "", update) if isinstance(update, str) else _choice(index, update.text)

    def logprobs(self, choice: int, tokens: Sequence[TokenText]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(choice, 0))
            self._offsets[choice] = offsets[-1] + len(token.token)
        tops = [None if token.logprob is None else {text: value for text, value, _ in token.top} for token in tokens]
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def whole_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        logprobs = self.logprobs(index, finished.logprobs) if self.wants_logprobs else None
        return _choice(index, finished.text, finished.finish_reason) | {"logprobs": logprobs}


def _choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
