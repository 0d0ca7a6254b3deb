"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: a conversation in its words, answered by the same core.

Fields that only steer Anthropic's own service (`cache_control`, `metadata`, `service_tier`) are ignored.
"""

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from app.api.answer import FinishedChoice, Renderer, answer, unless_client_leaves, warnings_object
from app.api.chat import MAX_MESSAGES, MAX_TOOLS, ChatBody, Thinking, chat_command
from app.api.commands import MAX_TOKEN_ID, ModelName, SpeculationOptions, StayBody
from app.api.shapes import AnthropicMessage, TokenCount
from app.core.errors import InvalidRequest, PacelineError
from app.core.messages import Delta, Finished, Generate
from app.core.prompt_size import check_prompt
from app.core.statistics import Statistics
from app.i18n import Words
from app.serving.context import context_of
from app.serving.document import ANSWERED, EVENTS, problems, told
from app.serving.errors import ANTHROPIC, error_object
from app.serving.gate import Body, Sent, checked

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "cancelled": "end_turn"}
BILLING_HEADER = "x-anthropic-billing-header:"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


router = APIRouter()


class Source(Body):
    """Of a document."""

    type: str | None = None
    data: str | None = None


class Block(Body):
    """A part of a message, with what its kind has."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    source: Source | None = None


Blocks = str | list[Block]


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(Body):
    """A tool that the client runs itself."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnthropicChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    """A schema for the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer should look."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    model: ModelName | None = None
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Blocks | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def as_chat(self) -> dict[str, Any]:
        """The same in the words of OpenAI's chat. Raises InvalidRequest for what these models cannot read."""
        messages = system_messages(self.system)
        for turn in self.messages:
            messages += list(_messages(turn))
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools:
            chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if self.tool_choice is not None:
            name = {"type": "function", "function": {"name": self.tool_choice.name or ""}}
            chat["tool_choice"] = CHOICES.get(self.tool_choice.type, name)
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            chat["thinking"] = self.thinking.model_dump()
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "answer", "schema": self.output_config.format.json_schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat


class MessagesBody(CountBody, StayBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, le=MAX_TOKEN_ID)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 20)
    seed: int | None = None
    speculation: SpeculationOptions | None = None

    def as_chat(self) -> dict[str, Any]:
        same = ("max_tokens", "temperature", "top_p", "top_k", "seed", "keep_alive", "ttl")
        chat = super().as_chat() | {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}
        return chat | ({} if self.speculation is None else {"speculation": self.speculation.model_dump()})


def system_messages(system: Blocks | None) -> list[dict[str, Any]]:
    """The system part, without the line for Anthropic's billing that Claude Code begins it with: it differs in each
    session, and nothing behind it would be found in the prefix cache again."""
    blocks = [Block(text=system)] if isinstance(system, str) else system or []
    texts = [_text([block]) for block in blocks]
    if texts and texts[0].startswith(BILLING_HEADER):
        rest = texts.pop(0).partition("\n")[2]
        texts = [rest, *texts] if rest else texts
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def _function(tool: AnthropicTool) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {name: value for name, value in described.items() if value is not None} | {"strict": tool.strict}


def _text(blocks: Blocks) -> str:
    """Text blocks, joined. Raises InvalidRequest for others."""
    if isinstance(blocks, str):
        return blocks
    texts = [block.text if block.type == "text" else _document(block) for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        kinds = ", ".join(sorted({block.type[:60] for block in blocks} - {"text"}))
        raise InvalidRequest(
            f"messages: this model reads text only, no {kinds or 'other blocks'}", parameter="messages"
        )
    return "\n\n".join(str(text) for text in texts)


def _document(block: Block) -> str | None:
    is_text = block.type == "document" and block.source is not None and block.source.type == "text"
    return block.source.data if is_text and block.source is not None else None


def _messages(turn: Turn) -> Iterable[dict[str, Any]]:
    """A turn in OpenAI's words: results of tools are messages of their own, and come first."""
    blocks = [Block(text=turn.content)] if isinstance(turn.content, str) else turn.content
    calls, thoughts, rest = [], [], []
    for block in blocks:
        match block.type:
            case "tool_result":
                yield {"role": "tool", "tool_call_id": block.tool_use_id or "-", "content": _text(block.content or "")}
            case "tool_use":
                function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
                calls.append({"id": block.id or "-", "type": "function", "function": function})
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                continue
            case _:
                rest.append(block)
    if not (rest or calls):
        return
    message: dict[str, Any] = {"role": turn.role, "content": _text(rest) if rest else None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    yield message


@router.post("/v1/messages", responses=told(AnthropicMessage, EVENTS) | ANSWERED)
async def create_message(request: Request, body: Sent[MessagesBody]) -> Response:
    """Answer a conversation in Anthropic's format."""
    command = await chat_command(request, checked(body.as_chat(), ChatBody), f"msg_{secrets.token_hex(12)}")
    return await answer(request, [command], MessageRenderer(command), stream=bool(body.stream))


@router.post("/v1/messages/count_tokens", responses=told(TokenCount) | problems(429))
async def count_tokens(request: Request, body: Sent[CountBody]) -> Response:
    """How many tokens a conversation has; no model is loaded for it."""
    command = await chat_command(request, checked(body.as_chat(), ChatBody), f"count_{secrets.token_hex(12)}")
    check_prompt(command)
    told = await unless_client_leaves(request, context_of(request).worker.read_prompt(command))
    return JSONResponse({"input_tokens": len(told.tokens)} | warnings_object(told.notices))


class MessageRenderer(Renderer):
    """Anthropic's message and its stream of blocks: `thinking`, `text`, `tool_use`, one after another."""

    end = b""

    def __init__(self, command: Generate) -> None:
        super().__init__(command.id)
        self._no_drafter = command.model.no_drafter
        self._base = {"id": command.id, "type": "message", "role": "assistant", "model": command.model.id}
        self._block = ""
        """The kind of the one that is open, and of a call its number."""
        self._index = -1

    def frame(self, told: dict[str, Any]) -> bytes:
        return f"event: {told['type']}\n".encode() + super().frame(told)

    def beat(self, text: str) -> bytes:  # noqa: ARG002 - what it is called there
        return self.frame({"type": "ping"})

    def accepted(self, prompt_tokens: int) -> Iterable[dict[str, Any]]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": self._base | empty}]

    def tell(self, choice: int, event: Delta | Finished) -> Iterable[dict[str, Any]]:  # noqa: ARG002 - there is one
        if isinstance(event, Finished):
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
        for call in event.tool_calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._open(f"tool_use {call.index}", block)
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def failed(self, error: PacelineError, words: Words | None) -> dict[str, Any]:
        return error_object(error, words, ANTHROPIC)

    def whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        [one] = finished
        content: list[dict[str, Any]] = []
        if one.reasoning:
            content.append({"type": "thinking", "thinking": one.reasoning, "signature": ""})
        if one.text or not (content or one.tool_calls):
            content.append({"type": "text", "text": one.text})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            for call in one.tool_calls
        ]
        ended = {"stop_reason": _stop_reason(one.finish_reason, one.stop), "stop_sequence": one.stop or None}
        told = self._base | {"content": content} | ended | {"usage": _usage(one.usage)} | self._numbers(one.usage)
        return told | warnings_object(one.notices)

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if self._block == kind:
            return
        yield from self._close()
        self._block, self._index = kind, self._index + 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._block:
            self._block = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _numbers(self, usage: Statistics) -> dict[str, Any]:
        return {"timings": usage.timings(), "speculation": usage.speculation(self._no_drafter)}


def _stop_reason(finish_reason: str, stop: str) -> str:
    return "stop_sequence" if stop else STOP_REASONS.get(finish_reason, "end_turn")


def _usage(usage: Statistics) -> dict[str, Any]:
    """What was read from the cache is no input of its own there."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _input(arguments: str) -> Any:
    """An answer that was cut off may hold half an object."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}
