"""`POST /v1/chat/completions`, streamed or whole.

Additions to OpenAI's format: `seed` is always returned; the finish chunk and the whole answer carry `timings` and
`speculation`; a choice of a chunk may carry `method` and `accepted_spans`, the parts of its text that were drafted.
"""

import secrets
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from app.api.answer import FinishedChoice, OpenAIRenderer, answer
from app.api.commands import (
    MAX_TOP_LOGPROBS,
    GenerationBody,
    MaxTokens,
    json_schema_as,
    max_tokens,
    object_of,
    shared_command,
)
from app.api.ignored import ignored_notice
from app.api.shapes import ChatCompletion
from app.api.structured import TOO_LARGE, is_too_large
from app.api.thinking import ThinkingBody
from app.api.tools import CUSTOM, FUNCTION, CustomInput, ToolsBody, custom_arguments, custom_input
from app.core.messages import Delta, Finished, Generate, TokenText, ToolCallDelta
from app.core.request import Notice
from app.serving.context import context_of
from app.serving.document import ANSWERED, EVENTS, success
from app.serving.gate import Body, JsonBody

MAX_MESSAGES = 8192
TEXT_ONLY = "this model reads text only, no images, sound or files"
LEFT_OUT = f"[left out: {TEXT_ONLY}]"
"""Text in place of a picture, a sound or a file in the result of a tool: an agent cannot take a result back."""
PART_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Name of the field with the text of a part, by type of part."""

THOUGHTS = ("thinking", "redacted_thinking")
"""Types of parts with a model's thoughts, as gateways pass them on from Anthropic's format; only one is legible."""

Name = Annotated[str, Field(max_length=256)]
CallId = Annotated[str, Field(max_length=4096)]
"""Id of a tool call, made by any server: some gateways put a signature into it, some servers leave it empty."""


def _no_images(images: Any) -> None:
    if images not in (None, []):
        raise ValueError(TEXT_ONLY)


Images = Annotated[Any, AfterValidator(_no_images), json_schema_as({"type": "array", "maxItems": 0})]
"""Images of a message; only null or an empty list is accepted."""

PART = object_of(type={"const": "text"}, text={"type": "string"})


class Message(Body):
    """One message; several text parts are joined into one string."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, json_schema_as({"type": "string"}, {"type": "array", "items": PART})] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Alias of `reasoning_content`."""
    name: Name | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: CallId | None = None
    prefix: bool | None = None
    """Whether the answer continues this message, if it is the last; used by DeepSeek and Mistral."""
    partial: bool | None = None
    """Alias of `prefix`, used by Moonshot and Qwen."""
    images: Images = None

    @model_validator(mode="before")
    @classmethod
    def _separate_thoughts(cls, message: Any) -> Any:
        parts = message.get("content") if isinstance(message, dict) else None
        if not isinstance(parts, list):
            return message
        is_thought = [isinstance(part, dict) and part.get("type") in THOUGHTS for part in parts]
        if not any(is_thought):
            return message
        texts = [part.get("thinking") for part in compress(parts, is_thought)]
        thought = "\n".join(text for text in texts if isinstance(text, str))
        reasoning = message.get("reasoning_content") or message.get("reasoning") or thought or None
        content = [part for part, is_one in zip(parts, is_thought, strict=True) if not is_one]
        return {**message, "content": content, "reasoning_content": reasoning}

    @model_validator(mode="before")
    @classmethod
    def _read_other_forms(cls, message: Any) -> Any:
        """Read a refusal as what was said, and OpenAI's functions, which tools have replaced, as tools."""
        if not isinstance(message, dict):
            return message
        read, call = dict(message), message.get("function_call")
        if read.get("content") is None and isinstance(read.get("refusal"), str):
            read["content"] = read["refusal"]
        if isinstance(call, dict) and not read.get("tool_calls"):
            read["tool_calls"] = [{"type": FUNCTION, FUNCTION: call}]
        if read.get("role") == FUNCTION:
            read["role"] = "tool"
        return read

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any, others: ValidationInfo) -> Any:
        if not isinstance(content, list):
            return content
        is_result = others.data.get("role") == "tool"
        texts = [_part_text(part, is_result=is_result) for part in content]
        return ("" if others.data.get("role") == "assistant" else "\n").join(texts)

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and self.role not in {"assistant", "tool"}:
            raise ValueError("content is required")
        return self

    @property
    def can_be_continued(self) -> bool:
        """Whether an answer can continue this message."""
        return self.role == "assistant" and bool(self.content) and not self.tool_calls

    @property
    def reasoning_text(self) -> str | None:
        """Reasoning of this message, by either name."""
        return self.reasoning_content or self.reasoning

    def render(self) -> dict[str, Any]:
        """Return the message as chat templates expect it; `developer` becomes `system`, which all templates know."""
        role = "system" if self.role == "developer" else self.role
        optional = self.model_dump(include={"name", "tool_call_id"})
        optional |= {"name": self.name or None, "tool_call_id": self.tool_call_id or None}
        optional["reasoning_content"] = self.reasoning_text
        optional["tool_calls"] = None if self.tool_calls is None else [_plain_call(call) for call in self.tool_calls]
        content = self.content if self.content is not None or self.tool_calls else ""
        message: dict[str, Any] = {"role": role, "content": content}
        return message | {name: value for name, value in optional.items() if value is not None}


def _part_text(part: Any, *, is_result: bool) -> str:
    """Return the text of a part of a message, `LEFT_OUT` for other parts of a tool's result. Raises ValueError."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in PART_TEXTS:
        if is_result:
            return LEFT_OUT
        raise ValueError(f"{TEXT_ONLY}: send parts of type text")
    text = part.get(PART_TEXTS[kind]) if isinstance(kind, str) else None
    if isinstance(text, str):
        return text
    raise ValueError("give a string, or parts of type text with their text")


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """Convert a call of a custom tool to a function call; return other calls unchanged."""
    custom = call.get(CUSTOM)
    if not isinstance(custom, dict):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(str(custom.get("input") or ""))}
    return {"id": call.get("id"), "type": FUNCTION, FUNCTION: function}


class ChatBody(ToolsBody, ThinkingBody, GenerationBody):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(extra="allow")

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot be combined")
        if self.continue_final_message and not self.messages[-1].can_be_continued:
            raise ValueError("continue_final_message needs a last message of the assistant that has text")
        return self

    @model_validator(mode="after")
    def _check_held_schemas(self) -> "ChatBody":
        """Bound the schemas that calls may be held to; the others are only shown to the model, and may be large."""
        for tool in self.held_tools(has_grammar=self.grammar is not None):
            if is_too_large(tool.function.parameters):
                raise ValueError(f"tools: the parameters of {tool.name}: {TOO_LARGE}")
        return self

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message: if it can, and unless only a new turn is requested."""
        last = self.messages[-1]
        requested = self.continue_final_message or last.prefix or last.partial
        wants_new_turn = self.add_generation_prompt or self.continue_final_message is False
        return last.can_be_continued and bool(requested or not wants_new_turn)

    def notices(self) -> list[Notice]:
        """Return notices about options that cannot be honoured; unknown fields are reported elsewhere."""
        notices = self.tool_notices()
        if self.add_generation_prompt is False and not self.continues:
            notices.append(ignored_notice("add_generation_prompt", "an answer begins a turn of its own"))
        if any(message.role == "tool" and LEFT_OUT in (message.content or "") for message in self.messages):
            text = f"what is not text is left out of the results of tools: {TEXT_ONLY}"
            notices.append(Notice(code="left_out_part", message=text, parameter="messages"))
        return notices


router = APIRouter()


@router.post("/v1/chat/completions", responses=success(ChatCompletion, EVENTS) | ANSWERED)
async def create_chat_completion(request: Request, body: JsonBody[ChatBody]) -> Response:
    """Answer a conversation."""
    command = await chat_command(request, body, f"chatcmpl-{secrets.token_hex(12)}")
    return await answer(request, [command], ChatRenderer(command.id, command, body), stream=bool(body.stream))


async def chat_command(request: Request, body: ChatBody, request_id: str, notices: Sequence[Notice] = ()) -> Generate:
    """Build the worker's command for a conversation in any wire format; `notices` concern fields of that format.
    Raises what the resolver raises."""
    shared = await shared_command(request, body, top_logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    defaults = context_of(request).live.request_defaults(body.model, shared.model.id)
    return msgspec.structs.replace(
        shared,
        id=request_id,
        messages=messages_of(body, defaults.system_prompt),
        tools=body.shown_tools(),
        tool_choice=body.call_mode,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        continues=body.continues,
        reasoning_tokens=body.budget_tokens,
        template_arguments=body.template_arguments(),
        max_tokens=max_tokens(body.max_completion_tokens or body.max_tokens, defaults.max_tokens),
        notices=(*notices, *shared.notices, *body.notices()),
    )


def messages_of(body: ChatBody, system_prompt: str | None) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them. An empty assistant message at the end is dropped, because the
    answer takes its place. The model's system prompt is put first unless the request has one."""
    *before, last = body.messages
    is_empty = last.role == "assistant" and not (last.content or last.tool_calls or last.reasoning_text)
    messages = [message.render() for message in (before if before and is_empty else body.messages)]
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


class ChatRenderer(OpenAIRenderer):
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, request_id: str, command: Generate, body: ChatBody) -> None:
        super().__init__(request_id, command, body)
        self._custom_names = body.custom_names
        self._inputs: dict[tuple[int, int], CustomInput] = {}
        """Input of each custom tool call, by choice and index of the call."""

    def opening(self) -> list[dict[str, Any]]:
        """Return one chunk for each choice, with the role."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk(_choice(index, role)) for index in range(self.n)]

    def render_event(self, choice: int, event: Delta | Finished) -> Iterable[dict[str, Any]]:
        if isinstance(event, Finished):
            yield from self._remaining_inputs(choice, event.unfinished_call)
        yield from super().render_event(choice, event)

    def chunk_choice(self, index: int, update: Delta | str) -> dict[str, Any]:
        if isinstance(update, str):
            return _choice(index, {}, update)
        delta: dict[str, Any] = {}
        if update.reasoning:
            delta |= _reasoning(update.reasoning)
        if update.tool_calls:
            delta["tool_calls"] = [self._call_delta(index, call) for call in update.tool_calls]
        if update.text or not delta:
            delta["content"] = update.text
        return _choice(index, delta)

    def _call_delta(self, choice: int, call: ToolCallDelta) -> dict[str, Any]:
        if call.name in self._custom_names:
            self._inputs[choice, call.index] = CustomInput()
        text = self._inputs.get((choice, call.index))
        if text is None:
            kind, more = FUNCTION, {"arguments": call.arguments}
        else:
            kind, more = CUSTOM, {"input": text.feed(call.arguments)}
        if call.name:
            return {"index": call.index, "id": call.id, "type": kind, kind: {"name": call.name} | more}
        return {"index": call.index, kind: more}

    def _remaining_inputs(self, choice: int, unfinished: int | None) -> Iterable[dict[str, Any]]:
        for (call_choice, index), text in self._inputs.items():
            if call_choice == choice and index != unfinished and (rest := text.finish()):
                yield self._chunk(_choice(choice, {"tool_calls": [{"index": index, CUSTOM: {"input": rest}}]}))

    def logprobs(self, choice: int, tokens: Sequence[TokenText]) -> dict[str, Any]:  # noqa: ARG002 - the same for all
        return {"content": [_chat_token(token) for token in tokens], "refusal": None}

    def whole_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        calls = [self._whole_call(call) for call in finished.tool_calls]
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

    def _whole_call(self, call: ToolCallDelta) -> dict[str, Any]:
        if call.name in self._custom_names:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call.id, "type": CUSTOM, CUSTOM: custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": FUNCTION, FUNCTION: function}


def _choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _reasoning(text: str) -> dict[str, str]:
    """Return the reasoning under one name: clients that know `reasoning`, too, would show it twice, or refuse both."""
    return {"reasoning_content": text}


def _chat_token(token: TokenText) -> dict[str, Any]:
    entry = {"token": token.token, "logprob": token.logprob, "bytes": list(token.token_bytes)}
    top = [{"token": text, "logprob": logprob, "bytes": list(raw)} for text, logprob, raw in token.top]
    return entry | {"top_logprobs": top}
