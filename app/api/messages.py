"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, served by the same core as the other formats.

Turns become chat messages (`app/api/message_blocks.py`), so that the worker gets an ordinary chat. A tool call is sent
only once it is complete, because clients run what they receive.
"""

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from app.api.answer import FinishedChoice, Renderer, answer, call_arguments, warnings_object
from app.api.chat import MAX_MESSAGES, ChatBody, chat_command
from app.api.commands import MAX_TOKEN_ID, ModelName, SpeculationOptions, StayBody
from app.api.ignored import ignored_fields
from app.api.message_blocks import (
    AnthropicTool,
    Blocks,
    Turn,
    left_out_kinds,
    offered_tools,
    shown_turns,
    system_messages,
    turn_messages,
)
from app.api.shapes import AnthropicMessage, TokenCount
from app.api.thinking import Effort, ThinkingBody
from app.api.tokens import read_prompt
from app.core.errors import PacelineError
from app.core.messages import Delta, Finished, Generate, ToolCallDelta
from app.core.request import Notice
from app.core.statistics import Statistics
from app.i18n.catalogs import Words
from app.serving.document import ANSWERED, EVENTS, problems, success
from app.serving.errors import ANTHROPIC, error_object
from app.serving.gate import Body, JsonBody, validated, where_parsed
from app.serving.speed import speculation_object, timings_object

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "cancelled": "end_turn"}
SIGNATURE = "paceline"
"""Signature of every thinking block. It proves nothing, but clients send unsigned thoughts back as text, or not at all.
"""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


router = APIRouter()


class AnthropicChoice(Body):
    """Whether a tool must be called, and which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    """A schema for the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Format of the answer, and reasoning effort."""

    model_config = ConfigDict(extra="allow")

    format: OutputFormat | None = None
    effort: Effort | None = None


class CountBody(ThinkingBody):
    """`POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow")

    model: ModelName | None = None
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Blocks | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Alias of `output_config.format`, from the beta of structured outputs."""

    def as_chat(self) -> dict[str, Any]:
        """Convert the body to OpenAI's chat format. Raises InvalidRequest for content other than text."""
        messages = system_messages(self.system)
        for turn in shown_turns(self.messages):
            messages += list(turn_messages(turn))
        chat: dict[str, Any] = {"model": self.model, "messages": messages} | self.thinking_fields()
        if tools := offered_tools(self.tools or (), self.messages):
            chat["tools"] = [tool.as_chat() for tool in tools]
        if self.tool_choice is not None:
            name = {"type": "function", "function": {"name": self.tool_choice.name or ""}}
            chat["tool_choice"] = CHOICES.get(self.tool_choice.type, name)
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        output = self.output_config or OutputConfig()
        efforts = [output.effort, *(turn.output_config.effort for turn in self.messages if turn.output_config)]
        if given := [effort for effort in efforts if effort is not None]:
            chat.setdefault("reasoning_effort", given[-1])
        if (output_format := output.format or self.output_format) is not None:
            schema = {"name": "answer", "schema": output_format.json_schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat

    def notices(self) -> list[Notice]:
        """Return notices about blocks that are left out and about ignored fields."""
        kinds = ", ".join(left_out_kinds((self.system, *(turn.content for turn in self.messages))))
        message = f"blocks of type {kinds} are left out: they belong to tools that do not run here"
        left_out = [Notice(code="left_out_block", message=message, parameter="messages")] if kinds else []
        return [*left_out, *ignored_fields(self, MessagesBody.model_fields)]  # what is sent to count them, too


SENT_AS = {"stop": "stop_sequences"}
"""Anthropic's field names, by OpenAI's: errors name the field that the client sent."""


class MessagesBody(CountBody, StayBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=0, le=MAX_TOKEN_ID)
    """Limit on the answer, in tokens; 0 reads the prompt, so that the prefix cache has it."""
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 20)
    seed: int | None = None
    speculation: SpeculationOptions | None = None

    def as_chat(self) -> dict[str, Any]:
        same = ("temperature", "top_p", "top_k", "seed", "keep_alive", "ttl")
        chat = super().as_chat() | {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}
        return chat | ({} if self.speculation is None else {"speculation": self.speculation.model_dump()})


def _converted(body: CountBody) -> tuple[ChatBody, list[Notice]]:
    return validated(body.as_chat(), ChatBody, SENT_AS), body.notices()


@router.post("/v1/messages", responses=success(AnthropicMessage, EVENTS) | ANSWERED)
async def create_message(request: Request, body: JsonBody[MessagesBody]) -> Response:
    """Answer a conversation in Anthropic's format."""
    chat, notices = await where_parsed(request, _converted, body)
    command = await chat_command(request, chat, f"msg_{secrets.token_hex(12)}", notices)
    command = msgspec.structs.replace(command, max_tokens=body.max_tokens)
    return await answer(request, [command], MessageRenderer(command), stream=bool(body.stream))


@router.post("/v1/messages/count_tokens", responses=success(TokenCount) | problems(429))
async def count_tokens(request: Request, body: JsonBody[CountBody]) -> Response:
    """Count the tokens of a conversation, without loading a model."""
    chat, notices = await where_parsed(request, _converted, body)
    command = await chat_command(request, chat, f"count_{secrets.token_hex(12)}", notices)
    prompt = await read_prompt(request, command)
    return JSONResponse({"input_tokens": len(prompt.tokens)} | warnings_object(prompt.notices))


class MessageRenderer(Renderer):
    """Anthropic's message and its stream of blocks: `thinking`, `text`, `tool_use`, one after another."""

    end = b""

    def __init__(self, command: Generate) -> None:
        super().__init__(command.id)
        self._no_drafter = command.model.no_drafter
        self._only_reads = command.max_tokens == 0
        self._base = {"id": command.id, "type": "message", "role": "assistant", "model": command.model.id}
        self._block = ""
        """Kind of the open block, followed by the call's index if it is a tool call; empty if no block is open."""
        self._index = -1
        self._answer = FinishedChoice()
        """Content so far; tool calls are sent at the end."""

    def frame(self, payload: dict[str, Any]) -> bytes:
        return f"event: {payload['type']}\n".encode() + super().frame(payload)

    def keep_alive_frame(self, text: str) -> bytes:  # noqa: ARG002 - the base's signature
        return self.frame({"type": "ping"})

    def accepted(self, prompt_tokens: int) -> Iterable[dict[str, Any]]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": self._base | empty}]

    def render_event(self, choice: int, event: Delta | Finished) -> Iterable[dict[str, Any]]:  # noqa: ARG002 - one choice
        self._answer.add(event)
        if isinstance(event, Finished):
            for call in self._answer.tool_calls:
                yield from self._render_call(call)
            yield from self._close()
            delta = {"stop_reason": _stop_reason(event.finish_reason, event.stop), "stop_sequence": event.stop or None}
            ended: dict[str, Any] = {"type": "message_delta", "delta": delta, "usage": _usage(event.usage)}
            yield ended | self._numbers(event.usage) | warnings_object(event.notices)
            yield {"type": "message_stop"}
            return
        if event.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.reasoning})
        if event.text:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})

    def _render_call(self, call: ToolCallDelta) -> Iterable[dict[str, Any]]:
        arguments = json.dumps(call_arguments(call), ensure_ascii=False)
        yield from self._open(
            f"tool_use {call.index}", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        )
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def failed(self, error: PacelineError, words: Words | None) -> dict[str, Any]:
        return error_object(error, words, ANTHROPIC)

    def render_whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        [choice] = finished
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": SIGNATURE})
        if choice.text or not (content or choice.tool_calls or self._only_reads):
            content.append({"type": "text", "text": choice.text})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call_arguments(call)}
            for call in choice.tool_calls
        ]
        ended = {"stop_reason": _stop_reason(choice.finish_reason, choice.stop), "stop_sequence": choice.stop or None}
        message = (
            self._base | {"content": content} | ended | {"usage": _usage(choice.usage)} | self._numbers(choice.usage)
        )
        return message | warnings_object(choice.notices)

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if self._block == kind:
            return
        yield from self._close()
        self._block, self._index = kind, self._index + 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._block == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._block:
            self._block = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _numbers(self, usage: Statistics) -> dict[str, Any]:
        return {"timings": timings_object(usage), "speculation": speculation_object(usage, self._no_drafter)}


def _stop_reason(finish_reason: str, stop: str) -> str:
    """Return Anthropic's name of a reason; calls count for more than a stop string after them: agents run them."""
    return "stop_sequence" if stop and finish_reason == "stop" else STOP_REASONS.get(finish_reason, "end_turn")


def _usage(usage: Statistics) -> dict[str, Any]:
    """Return usage as Anthropic counts it: input tokens exclude those read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
