"""`POST /v1/chat/completions`, streamed or whole.

Beyond OpenAI: `seed` is always told; the finish chunk and the whole answer carry `timings` and `speculation`; a choice
of a chunk may carry `method` and `accepted_spans`, the parts of its text that a drafter proposed.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, field_validator, model_validator

from app.api.answer import FinishedChoice, OpenAIRenderer, answer
from app.api.commands import (
    MAX_TOKEN_ID,
    MAX_TOP_LOGPROBS,
    GenerationBody,
    MaxTokens,
    max_tokens,
    object_of,
    shared_command,
    told_as,
)
from app.api.shapes import ChatCompletion
from app.api.structured import check_schema
from app.core.messages import MAX_TEMPLATE_ARGUMENTS, SERVER_NAMES, Delta, Generate, TokenText, ToolCallDelta
from app.serving.context import context_of
from app.serving.document import ANSWERED, EVENTS, told
from app.serving.gate import Body, Sent

MAX_MESSAGES = 2000
MAX_TOOLS = 128
ARGUMENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")

EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
"""Of what clients ask, the nearest that templates know."""

Name = Annotated[str, Field(min_length=1, max_length=256)]


PART = object_of(type={"const": "text"}, text={"type": "string"})
NAMED = object_of(type={"const": "function"}, function=object_of(name={"type": "string"}))


class Message(Body):
    """One message; several text parts are joined into one string."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, told_as({"type": "string"}, {"type": "array", "items": PART})] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, by its other name."""
    name: Name | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: Name | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        if any(isinstance(part, dict) and part.get("type") not in (None, "text") for part in content):
            raise ValueError("this model reads text only: send parts of type text, no images, sound or files")
        texts = [part.get("text") if isinstance(part, dict) and "type" in part else None for part in content]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) < len(content):
            raise ValueError("give a string, or parts of type text with their text")
        return "".join(strings)

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required")
        return self

    def render(self) -> dict[str, Any]:
        """The message as chat templates expect it; `developer` is what older templates call `system`."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        optional = self.model_dump(include={"name", "tool_calls", "tool_call_id"})
        optional["reasoning_content"] = self.reasoning_content or self.reasoning
        return message | {name: value for name, value in optional.items() if value is not None}


class FunctionDefinition(Body):
    """A function that the model may call; `parameters` is a JSON schema, shown to the model as it is."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_schema(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters is not None:
            check_schema(parameters)
        return parameters


class Tool(Body):
    """One tool."""

    type: Literal["function"]
    function: FunctionDefinition


class Thinking(Body):
    """Whether to think before the answer, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, told_as({"enum": ["none", "auto", "required"]}, NAMED)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(
        None, max_length=MAX_TEMPLATE_ARGUMENTS
    )

    @field_validator("messages")
    @classmethod
    def _check_tail(cls, messages: list[Message]) -> list[Message]:
        if [message.role for message in messages[-2:]] == ["assistant", "assistant"]:
            raise ValueError("the last two messages are both from the assistant")
        return messages

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, choice: Any) -> str:
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return f"function:{function['name']}"
        if choice not in (None, "none", "auto", "required"):
            raise ValueError('give none, auto, required, or {"type": "function", "function": {"name": …}}')
        return choice or "auto"

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in arguments or ():
            if ARGUMENT_NAME.fullmatch(name) is None or name in SERVER_NAMES:
                raise ValueError("a name is not allowed: it is malformed or set by the server")
        return arguments

    @model_validator(mode="after")
    def _check_together(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice not in {None, "auto", "none"} and not names:
            raise ValueError("tool_choice asks for a call, but there are no tools")
        if (self.tool_choice or "").startswith("function:") and self.tool_choice[9:] not in names:
            raise ValueError("tool_choice names a function that is not among the tools")
        return self

    def template_arguments(self) -> dict[str, Any]:
        """What the template is told; templates know thinking by one of three names."""
        arguments: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            effort = EFFORTS.get(self.reasoning_effort, self.reasoning_effort)
            arguments |= {"reasoning_effort": effort, "enable_thinking": self.reasoning_effort != "none"}
        if self.thinking is not None and self.thinking.type is not None:
            arguments["enable_thinking"] = self.thinking.type != "disabled"
        if "enable_thinking" in arguments:
            arguments["thinking"] = arguments["enable_thinking"]
        return arguments | dict(self.chat_template_kwargs or {})

    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template shows, after `tool_choice`; None when there are none."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]


router = APIRouter()


@router.post("/v1/chat/completions", responses=told(ChatCompletion, EVENTS) | ANSWERED)
async def create_chat_completion(request: Request, body: Sent[ChatBody]) -> Response:
    """Answer a conversation."""
    command = await chat_command(request, body, f"chatcmpl-{secrets.token_hex(12)}")
    return await answer(request, [command], ChatRenderer(command.id, command, body), stream=bool(body.stream))


async def chat_command(request: Request, body: ChatBody, request_id: str) -> Generate:
    """What the worker is asked for a conversation, whatever wire format it came in. Raises what the resolver raises."""
    shared = await shared_command(request, body, top_logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    usual = context_of(request).live.usual(body.model, shared.model.id)
    return msgspec.structs.replace(
        shared,
        id=request_id,
        messages=messages_of(body, usual.system_prompt),
        tools=body.shown_tools(),
        tool_choice=body.tool_choice if body.shown_tools() and body.tool_choice else "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_tokens=body.thinking.budget_tokens if body.thinking else None,
        template_arguments=body.template_arguments(),
        max_tokens=max_tokens(body.max_completion_tokens or body.max_tokens, usual.max_tokens),
    )


def messages_of(body: ChatBody, system_prompt: str | None) -> list[dict[str, Any]]:
    """The messages as templates expect them; the model's system prompt goes first unless the request brings one."""
    messages = [message.render() for message in body.messages]
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


class ChatRenderer(OpenAIRenderer):
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """The role, once for each choice."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk(_choice(index, role)) for index in range(self.n)]

    def piece(self, index: int, told: Delta | str) -> dict[str, Any]:
        if isinstance(told, str):
            return _choice(index, {}, told)
        delta: dict[str, Any] = {}
        if told.reasoning:
            delta |= _reasoning(told.reasoning)
        if told.tool_calls:
            delta["tool_calls"] = [_call_piece(call) for call in told.tool_calls]
        if told.text or not delta:
            delta["content"] = told.text
        return _choice(index, delta)

    def logprobs(self, choice: int, tokens: Sequence[TokenText]) -> dict[str, Any]:  # noqa: ARG002 - all are alike
        return {"content": [_chat_token(token) for token in tokens], "refusal": None}

    def whole_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        calls = [{"id": call.id, "type": "function", "function": _function(call)} for call in finished.tool_calls]
        message: dict[str, Any] = {"role": "assistant", "content": finished.text or (None if calls else "")}
        message["refusal"] = None
        if finished.reasoning:
            message |= _reasoning(finished.reasoning)
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(index, finished.logprobs) if self.wants_logprobs else None,
            "finish_reason": finished.finish_reason,
        }


def _choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _function(call: ToolCallDelta) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _call_piece(call: ToolCallDelta) -> dict[str, Any]:
    if call.name:
        return {"index": call.index, "id": call.id, "type": "function", "function": _function(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _chat_token(token: TokenText) -> dict[str, Any]:
    entry = {"token": token.token, "logprob": token.logprob, "bytes": list(token.token_bytes)}
    top = [{"token": text, "logprob": logprob, "bytes": list(raw)} for text, logprob, raw in token.top]
    return entry | {"top_logprobs": top}
