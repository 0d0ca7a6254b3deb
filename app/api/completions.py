"""`POST /v1/completions`: text or token ids in, text out; several prompts in one request run side by side.

`max_tokens` defaults to what is set for the model, or 16, as OpenAI's does. Choices are numbered over prompts:
prompt × n + index.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, field_validator, model_validator

from app.api.answer import FinishedChoice, answer
from app.api.commands import Plan, max_tokens, plan
from app.api.replies import legacy_logprobs, usage_object
from app.api.schemas import MAX_TOKEN_ID, MAX_TOP_LOGPROBS, NO_LIMIT, GenerationBody
from app.core.messages import Delta, Finished, Generate
from app.core.step import Statistics
from app.serving.body import read_json
from app.serving.context import context_of
from app.serving.figures import add_usages, speculation_object, timings_object

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16

router = APIRouter()

Prompt = str | list[int]


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Any
    max_tokens: int | None = Field(None, ge=NO_LIMIT, le=MAX_TOKEN_ID)
    """With `echo`, 0 is fine: the prompt alone, and its scores where `logprobs` asks for them."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=8)
    suffix: str | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> list[Prompt]:
        prompts = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
        if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
            raise ValueError(f"give a string, token ids, or a list of 1 to {MAX_PROMPTS} of them")
        texts = all(isinstance(each, str) and each for each in prompts)
        if not texts and not all(_is_tokens(each) for each in prompts):
            raise ValueError("each prompt is a non-empty string, or each is a non-empty list of token ids")
        return prompts

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not available: leave it out, or make it equal to n")
        if self.suffix:
            raise ValueError("suffix is not available")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 tells nothing without echo: give at least 1, or echo: true")
        return self


def _is_tokens(value: Any) -> bool:
    is_whole = isinstance(value, list) and set(map(type, value)) == {int}
    return is_whole and min(value) >= 0 and max(value) <= MAX_TOKEN_ID


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    context = context_of(request)
    body = await read_json(request, CompletionBody)
    planned = await plan(context, body, top_logprobs=body.logprobs)
    completion_id = f"cmpl-{secrets.token_hex(12)}"
    commands = [
        completion_command(body, planned, f"{completion_id}-{position}", prompt)
        for position, prompt in enumerate(body.prompt)
    ]
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    renderer = CompletionRenderer(completion_id, planned, n=body.n or 1, include_usage=include_usage)
    return await answer(request, context, commands, renderer, stream=bool(body.stream), include_usage=include_usage)


def completion_command(body: CompletionBody, planned: Plan, command_id: str, prompt: Prompt) -> Generate:
    """The command for one prompt of a checked body."""
    return Generate(
        id=command_id,
        model=planned.model,
        text=prompt if isinstance(prompt, str) else None,
        tokens=None if isinstance(prompt, str) else prompt,
        max_tokens=max_tokens(body.max_tokens, planned.usual.max_tokens or DEFAULT_MAX_TOKENS),
        stop=body.stop,
        n=body.n or 1,
        echo=bool(body.echo),
        sampling=planned.sampling,
        speculation=planned.speculation,
    )


class CompletionRenderer:
    """OpenAI's `text_completion` objects."""

    def __init__(self, completion_id: str, planned: Plan, *, n: int, include_usage: bool) -> None:
        self.id = completion_id
        self._base = {
            "id": completion_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": planned.model.id,
        }
        self._n = n
        self._planned = planned
        self._extra = {"usage": None} if include_usage else {}
        self._offsets: dict[int, int] = {}

    def opening(self) -> list[dict[str, Any]]:
        """Nothing comes before the text."""
        return []

    def delta(self, choice: int, event: Delta) -> dict[str, Any] | None:
        """The text of one step."""
        if not event.text and not event.logprobs:
            return None
        chunk = self._chunk(choice, event.text)
        entry = chunk["choices"][0]
        if event.logprobs:
            offset = self._offsets.get(choice, 0)
            entry["logprobs"] = legacy_logprobs(event.logprobs, offset)
            self._offsets[choice] = offset + sum(len(token.token) for token in event.logprobs)
        if event.accepted_spans:
            entry["accepted_spans"] = event.accepted_spans
            entry["method"] = event.method
        return chunk

    def finish(self, choice: int, event: Finished) -> dict[str, Any]:
        """The reason, and the numbers of this choice."""
        return self._chunk(choice, "", event.finish_reason) | self._numbers(event.usage)

    def usage(self, usages: Sequence[Statistics]) -> dict[str, Any]:
        """The usage of all choices."""
        return self._base | {"choices": [], "usage": usage_object(add_usages(usages, choices_per_prompt=self._n))}

    def whole(self, outcomes: Sequence[FinishedChoice]) -> dict[str, Any]:
        """The answer in one piece."""
        total = add_usages([each.usage for each in outcomes], choices_per_prompt=self._n)
        choices = [self._whole_choice(index, outcome) for index, outcome in enumerate(outcomes)]
        return self._base | {"choices": choices, "usage": usage_object(total)} | self._numbers(total)

    def _whole_choice(self, index: int, outcome: FinishedChoice) -> dict[str, Any]:
        wants_logprobs = self._planned.sampling.top_logprobs is not None
        logprobs = legacy_logprobs(outcome.logprobs, 0) if wants_logprobs else None
        return {"index": index, "text": outcome.text, "logprobs": logprobs, "finish_reason": outcome.finish_reason}

    def _chunk(self, index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._base | {"choices": [choice]} | self._extra

    def _numbers(self, usage: Statistics) -> dict[str, Any]:
        speculation = speculation_object(usage, self._planned.model.draft_unavailable)
        return {"timings": timings_object(usage), "speculation": speculation, "seed": self._planned.seed}
