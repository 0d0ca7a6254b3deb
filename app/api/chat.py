"""`POST /v1/chat/completions`, streamed or whole.

Beyond OpenAI: `seed` is always told; the finish chunk and the whole answer carry `timings` and `speculation`; a choice
of a chunk may carry `method` and `accepted_spans`, the parts of its text that a drafter proposed.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.answer import FinishedChoice, answer
from app.api.chat_schemas import ChatBody
from app.api.commands import Plan, max_tokens, plan
from app.api.replies import chat_logprobs, usage_object
from app.core.messages import Delta, Finished, Generate
from app.core.step import Statistics
from app.serving.body import read_json
from app.serving.context import context_of
from app.serving.figures import add_usages, speculation_object, timings_object

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_json(request, ChatBody)
    planned = await plan(context, body, top_logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    command = chat_command(body, planned)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    renderer = ChatRenderer(command, planned, include_usage=include_usage)
    return await answer(request, context, [command], renderer, stream=bool(body.stream), include_usage=include_usage)


def chat_command(body: ChatBody, planned: Plan) -> Generate:
    """The command for a checked body."""
    return Generate(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        model=planned.model,
        messages=messages_of(body, planned.usual.system_prompt),
        tools=body.shown_tools(),
        template_arguments=dict(body.chat_template_kwargs or {}),
        max_tokens=max_tokens(body.max_completion_tokens or body.max_tokens, planned.usual.max_tokens),
        stop=body.stop,
        n=body.n or 1,
        sampling=planned.sampling,
        speculation=planned.speculation,
    )


def messages_of(body: ChatBody, system_prompt: str | None) -> list[dict[str, Any]]:
    """The messages as templates expect them; the model's system prompt goes first unless the request brings one."""
    messages = [message.render() for message in body.messages]
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


class ChatRenderer:
    """OpenAI's `chat.completion` and `chat.completion.chunk` objects."""

    def __init__(self, command: Generate, planned: Plan, *, include_usage: bool) -> None:
        self.id = command.id
        self._base = {"id": command.id, "created": int(time.time()), "model": planned.model.id}
        self._command_choices = command.n
        self._planned = planned
        self._extra = {"usage": None} if include_usage else {}

    def opening(self) -> list[dict[str, Any]]:
        """The role, once for each choice."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk(index, role) for index in range(self._command_choices)]

    def delta(self, choice: int, event: Delta) -> dict[str, Any] | None:
        """The text of one step."""
        if not event.text and not event.logprobs:
            return None
        chunk = self._chunk(choice, {"content": event.text})
        entry = chunk["choices"][0]
        if event.logprobs:
            entry["logprobs"] = chat_logprobs(event.logprobs)
        if event.accepted_spans:
            entry["accepted_spans"] = event.accepted_spans
            entry["method"] = event.method
        return chunk

    def finish(self, choice: int, event: Finished) -> dict[str, Any]:
        """The reason, and the numbers of this choice."""
        return self._chunk(choice, {}, event.finish_reason) | self._numbers(event.usage)

    def usage(self, usages: Sequence[Statistics]) -> dict[str, Any]:
        """The usage of all choices."""
        total = add_usages(usages, choices_per_prompt=self._command_choices)
        return self._base | {"object": "chat.completion.chunk", "choices": [], "usage": usage_object(total)}

    def whole(self, outcomes: Sequence[FinishedChoice]) -> dict[str, Any]:
        """The answer in one piece."""
        total = add_usages([each.usage for each in outcomes], choices_per_prompt=self._command_choices)
        choices = [self._whole_choice(index, outcome) for index, outcome in enumerate(outcomes)]
        named = self._base | {"object": "chat.completion", "choices": choices, "usage": usage_object(total)}
        return named | self._numbers(total)

    def _whole_choice(self, index: int, outcome: FinishedChoice) -> dict[str, Any]:
        wants_logprobs = self._planned.sampling.top_logprobs is not None
        return {
            "index": index,
            "message": {"role": "assistant", "content": outcome.text, "refusal": None},
            "logprobs": chat_logprobs(outcome.logprobs) if wants_logprobs else None,
            "finish_reason": outcome.finish_reason,
        }

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._base | {"object": "chat.completion.chunk", "choices": [choice]} | self._extra

    def _numbers(self, usage: Statistics) -> dict[str, Any]:
        speculation = speculation_object(usage, self._planned.model.draft_unavailable)
        return {"timings": timings_object(usage), "speculation": speculation, "seed": self._planned.seed}
