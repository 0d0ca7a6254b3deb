"""Ollama's `/api/chat`, `generate`, `embed` and `embeddings`, for clients that support no other API.

Streams are lines of JSON instead of events; a tool call is sent once it is complete. `num_ctx` and other options of
Ollama's own engine are ignored. A request without a prompt or messages loads the model, as in Ollama; with `keep_alive`
0 it unloads the model.
"""

import asyncio
import json
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from app.api.answer import (
    FinishedChoice,
    Renderer,
    all_warnings,
    answer,
    call_arguments,
    cancel_on_disconnect,
    warnings_object,
)
from app.api.chat import MAX_MESSAGES, ChatBody, Images, chat_command
from app.api.commands import (
    NO_LIMIT,
    GenerationBody,
    ModelName,
    StayBody,
    allowed_stay,
    max_tokens,
    shared_command,
)
from app.api.completions import prompts
from app.api.embeddings import MAX_INPUTS, EmbeddingsBody, embedding_commands, encode_vector, truncated
from app.api.ignored import ignored_fields, ignored_notice
from app.api.ollama_models import plain_name
from app.api.shapes import OllamaChatAnswer, OllamaText, OllamaVector, OllamaVectors
from app.api.thinking import ThinkingBody
from app.core.errors import InvalidRequest, PacelineError
from app.core.messages import Delta, Finished, Generate, ToolCallDelta
from app.core.request import Notice
from app.core.statistics import Statistics
from app.i18n.catalogs import Words
from app.serving.auth import authorize_operator
from app.serving.context import context_of
from app.serving.document import ANSWERED, success
from app.serving.errors import error_object
from app.serving.gate import Body, JsonBody, validated, where_parsed
from app.serving.speed import speculation_object

NDJSON = "application/x-ndjson"
LOADED_ANSWER = {"done": True, "done_reason": "load"}

router = APIRouter()


class OllamaOptions(Body):
    """Model options that have an effect here; the bounds of OpenAI's fields apply."""

    model_config = ConfigDict(extra="allow")

    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repeat_penalty: Any = None
    num_predict: Any = None

    def as_openai(self) -> dict[str, Any]:
        """Return the equivalent fields of OpenAI."""
        fields = self.model_dump(include={*OllamaOptions.model_fields} - {"repeat_penalty", "num_predict"})
        limit = self.num_predict or None
        # Negative: no limit; -2 means up to the end of the context, which is a limit anyway.
        fields["max_tokens"] = NO_LIMIT if type(limit) is int and limit < 0 else limit
        return fields | {"repetition_penalty": self.repeat_penalty or None}


SENT_AS = {name: f"options.{name}" for name in OllamaOptions.model_fields} | {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "guided_json": "format",
}
"""Ollama's field names, by OpenAI's: errors name the field that the client sent."""


class OllamaBody(ThinkingBody, StayBody):
    """Fields that chat and generate share; both stream by default."""

    model_config = ConfigDict(extra="allow")

    model: ModelName
    stream: bool | None = True
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    speculation: dict[str, Any] | None = None

    def as_openai(self) -> dict[str, Any]:
        """Return the equivalent fields of OpenAI."""
        fields = (self.options or OllamaOptions()).as_openai() | self.thinking_fields()
        fields |= {"model": plain_name(self.model), self.stay_field: self.stay_seconds, "speculation": self.speculation}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["guided_json"] = self.format
        return fields


class OllamaFunction(Body):
    """Name and arguments of a called function."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(Body):
    """One tool call."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    """One message."""

    role: str
    content: str | None = None
    images: Images = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None


class OllamaChat(OllamaBody):
    """`POST /api/chat`."""

    messages: list[OllamaMessage] | None = Field(None, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(OllamaBody):
    """`POST /api/generate`; `raw` skips the chat template, and so does a `suffix`."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    images: Images = None


class OllamaEmbed(StayBody):
    """`POST /api/embed`, and `/api/embeddings` with one `prompt`."""

    model: ModelName
    input: Annotated[Any, prompts(MAX_INPUTS, or_null=True)] = None
    prompt: str | None = None
    dimensions: int | None = None


def _messages(body: OllamaChat) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's. Calls without an id get one; results without one match by tool name or order."""
    messages: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}
    for message in body.messages or ():
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                (call.id or f"call_{len(messages)}_{index}", call.function)
                for index, call in enumerate(message.tool_calls)
            ]
            open_calls = {call_id: function.name for call_id, function in calls}
            plain["tool_calls"] = [_openai_call(*call) for call in calls]
        if plain["role"] == "tool":
            answered = [call_id for call_id, name in open_calls.items() if name == message.tool_name]
            plain["tool_call_id"] = message.tool_call_id or next(iter([*answered, *open_calls]), "call_0")
            open_calls.pop(plain["tool_call_id"], None)
        messages.append(plain)
    return messages


def _chat(body: OllamaChat) -> ChatBody:
    return validated(body.as_openai() | {"messages": _messages(body), "tools": body.tools}, ChatBody, SENT_AS)


def _openai_call(call_id: str, function: OllamaFunction) -> dict[str, Any]:
    arguments = json.dumps(function.arguments or {}, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


@router.post("/api/chat", responses=success(OllamaChatAnswer, NDJSON) | ANSWERED)
async def ollama_chat(request: Request, body: JsonBody[OllamaChat]) -> Response:
    """Answer a conversation in Ollama's format."""
    if not body.messages:
        return await _load(request, body, {"message": {"role": "assistant", "content": ""}})
    chat = await where_parsed(request, _chat, body)
    command = await chat_command(request, chat, f"ollama-{secrets.token_hex(12)}", ignored_fields(body))
    renderer = OllamaRenderer(command, _chat_content)
    return await answer(request, [command], renderer, stream=body.stream is not False)


@router.post("/api/generate", responses=success(OllamaText, NDJSON) | ANSWERED)
async def ollama_generate(request: Request, body: JsonBody[OllamaGenerate]) -> Response:
    """Answer a prompt in Ollama's format."""
    if not body.prompt:
        return await _load(request, body, {"response": ""})
    if body.raw and body.system:
        raise InvalidRequest("raw sends the prompt as it is: put system into it, or leave raw out", parameter="system")
    request_id = f"ollama-{secrets.token_hex(12)}"
    if body.raw or body.suffix:
        plain = await where_parsed(request, validated, body.as_openai(), GenerationBody, SENT_AS)
        shared = await shared_command(request, plain, top_logprobs=None)
        limit = max_tokens(
            plain.max_tokens, context_of(request).live.request_defaults(plain.model, shared.model.id).max_tokens
        )
        middle = {"text": body.prompt, "suffix": body.suffix or None}
        system = [ignored_notice("system", "a suffix is completed without a chat template")] if body.system else []
        notices = (*shared.notices, *system, *ignored_fields(body))
        command = msgspec.structs.replace(shared, id=request_id, max_tokens=limit, notices=notices, **middle)
    else:
        instructions = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*instructions, {"role": "user", "content": body.prompt}]
        chat = await where_parsed(request, validated, body.as_openai() | {"messages": messages}, ChatBody, SENT_AS)
        command = await chat_command(request, chat, request_id, ignored_fields(body))
    renderer = OllamaRenderer(command, _generate_content)
    return await answer(request, [command], renderer, stream=body.stream is not False)


async def _load(request: Request, body: OllamaBody, empty: dict[str, Any]) -> Response:
    """Answer a request without a prompt: load the model, or unload it if `keep_alive` is 0."""
    context = context_of(request)
    if body.stay_seconds == 0:
        await authorize_operator(request)
        model_id = await asyncio.to_thread(context.resolver.id_of, plain_name(body.model))
        await context.worker.unload(model_id)
        return JSONResponse(_base(model_id) | empty | {"done": True, "done_reason": "unload"})
    context.activity.check_open()
    unit = await asyncio.to_thread(context.resolver.resolve, plain_name(body.model))
    stay, notices = await allowed_stay(request, body)
    await cancel_on_disconnect(request, context.worker.load(unit, stay))
    return JSONResponse(_base(unit.id) | empty | LOADED_ANSWER | warnings_object(notices))


@router.post("/api/embed", responses=success(OllamaVectors) | ANSWERED)
async def ollama_embed(request: Request, body: JsonBody[OllamaEmbed]) -> Response:
    """Return embeddings in Ollama's format."""
    return await _embed(request, body, "input", lambda vectors: {"embeddings": vectors})


@router.post("/api/embeddings", responses=success(OllamaVector) | ANSWERED)
async def ollama_embeddings(request: Request, body: JsonBody[OllamaEmbed]) -> Response:
    """Return one embedding, in the format of Ollama's older endpoint."""
    return await _embed(request, body, "prompt", lambda vectors: {"embedding": vectors[0]})


async def _embed(request: Request, body: OllamaEmbed, field: str, render_vectors: Any) -> Response:
    wanted = {"model": plain_name(body.model), "input": getattr(body, field), "dimensions": body.dimensions}
    wanted[body.stay_field] = body.stay_seconds
    embeddings = await where_parsed(request, validated, wanted, EmbeddingsBody, {"input": field})
    commands = await embedding_commands(request, embeddings, f"ollama-{secrets.token_hex(12)}")
    first = msgspec.structs.replace(commands[0], notices=(*commands[0].notices, *ignored_fields(body)))
    renderer = OllamaEmbeddings(first, embeddings, render_vectors)
    return await answer(request, [first, *commands[1:]], renderer, stream=False)


def _base(model_id: str) -> dict[str, Any]:
    return {"model": model_id, "created_at": datetime.now(UTC).isoformat()}


def _chat_content(text: str, thinking: str, calls: Sequence[ToolCallDelta]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call_arguments(call)}} for call in calls
        ]
    return {"message": message}


def _generate_content(text: str, thinking: str, calls: Sequence[ToolCallDelta]) -> dict[str, Any]:  # noqa: ARG001 - no tools
    return {"response": text} | ({"thinking": thinking} if thinking else {})


class OllamaRenderer(Renderer):
    """Ollama's lines of a chat or a generation; `render_message` builds each from text, thinking and calls."""

    media_type = NDJSON
    end = b""

    def __init__(self, command: Generate, render_message: Any) -> None:
        super().__init__(command.id)
        self._model_id = command.model.id
        self._no_drafter = command.model.no_drafter
        self._render_message = render_message
        self._content = FinishedChoice()
        """Content so far; tool calls are sent at the end."""

    def frame(self, payload: dict[str, Any]) -> bytes:
        return msgspec.json.encode(payload) + b"\n"

    def keep_alive_frame(self, text: str) -> bytes:  # noqa: ARG002 - clients ignore no line
        return b""

    def render_event(self, choice: int, event: Delta | Finished) -> Iterable[dict[str, Any]]:  # noqa: ARG002 - one choice
        self._content.add(event)
        if isinstance(event, Delta):
            if event.text or event.reasoning:
                yield _base(self._model_id) | self._render_message(event.text, event.reasoning, ()) | {"done": False}
            return
        if calls := self._content.tool_calls:
            yield _base(self._model_id) | self._render_message("", "", calls) | {"done": False}
        yield (
            _base(self._model_id)
            | self._render_message("", "", ())
            | self._ended(event.finish_reason, event.usage, event.notices)
        )

    def failed(self, error: PacelineError, words: Words | None) -> dict[str, Any]:
        return error_object(error, words, "/api/chat")

    def render_whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        [choice] = finished
        content: dict[str, Any] = self._render_message(choice.text, choice.reasoning, choice.tool_calls)
        return _base(self._model_id) | content | self._ended(choice.finish_reason, choice.usage, choice.notices)

    def _ended(self, finish_reason: str, usage: Statistics, notices: Sequence[Notice]) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            **durations(usage),
            "speculation": speculation_object(usage, self._no_drafter),
            **warnings_object(notices),
        }


class OllamaEmbeddings(Renderer):
    """Ollama's answer to `/api/embed` and `/api/embeddings`."""

    def __init__(self, command: Generate, body: EmbeddingsBody, render_vectors: Any) -> None:
        super().__init__(command.id)
        self._model_id, self._body, self._render_vectors = command.model.id, body, render_vectors

    def render_whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        usage = Statistics.combined([choice.usage for choice in finished])
        vectors = [encode_vector(truncated(choice.embedding, self._body.dimensions)) for choice in finished]
        response = {"model": self._model_id, **self._render_vectors(vectors), **durations(usage)}
        return response | all_warnings(finished)


def durations(usage: Statistics) -> dict[str, int]:
    """Return token counts, and durations in nanoseconds, under Ollama's names."""
    total = usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds
    return {
        "total_duration": int(total * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(usage.prefill_seconds * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(usage.decode_seconds * 1e9),
    }
