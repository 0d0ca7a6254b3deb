"""OpenAI's `/v1/responses`: items in, items out, streamed as numbered events; conversations are stored for a while.

Items become chat messages (`app/api/response_items.py`), so that the worker gets an ordinary chat.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from app.api.answer import FinishedChoice, Renderer, answer, warnings_object
from app.api.chat import ChatBody, chat_command
from app.api.commands import MAX_TOKEN_ID, Metadata, ModelName, SpeculationOptions, StayBody
from app.api.ignored import ignored_fields
from app.api.response_items import NAMESPACE, ItemReader, chat_choice, chat_tool, flat_name, flat_tools
from app.api.response_store import Item, ResponseStore
from app.api.shapes import Deleted, InputTokens, ResponseItems, ResponseObject
from app.api.thinking import ThinkingBody
from app.api.tokens import read_prompt
from app.api.tools import CUSTOM, CustomInput
from app.core.errors import CONTEXT_OVERFLOW, InvalidRequest, PacelineError
from app.core.messages import Delta, Finished, Generate, ToolCallDelta
from app.core.request import Notice
from app.core.statistics import Statistics
from app.i18n.catalogs import Words
from app.serving.auth import identity_of
from app.serving.document import ANSWERED, EVENTS, problems, success
from app.serving.errors import Rejected, error_object
from app.serving.gate import Body, JsonBody, validated, where_parsed
from app.serving.speed import speculation_object, timings_object

ID_PREFIXES = {"message": "msg", "reasoning": "rs", "custom_tool_call": "ctc"}

router = APIRouter()


class TextOptions(Body):
    """Format that the text must match."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None


SENT_AS = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
"""Field names of Responses, by those of chat completions: errors name the field that the client sent."""


class ResponsesBody(ThinkingBody, StayBody):
    """`POST /v1/responses`."""

    model_config = ConfigDict(extra="allow")

    model: ModelName | None = None
    input: str | list[Item] | None = Field(None, max_length=64 * 1024 * 1024)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: Metadata | None = None
    seed: int | None = None
    speculation: SpeculationOptions | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def as_chat(self, messages: Sequence[Item], tools: Sequence[Item]) -> dict[str, Any]:
        """Convert the request to chat format, with `messages` and flat `tools` as read from its items."""
        same = ["model", "temperature", "top_p", "parallel_tool_calls", "seed", "keep_alive", "ttl"]
        same += ["continue_final_message", "add_generation_prompt"]
        chat: dict[str, Any] = {name: getattr(self, name) for name in same} | self.thinking_fields()
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chat |= {"messages": [*system, *messages], "max_tokens": self.max_output_tokens}
        if tools:
            chat["tools"] = [chat_tool(tool) for tool in tools]
            chat["tool_choice"] = chat_choice(self.tool_choice, tools)
        if self.text is not None and self.text.format is not None:
            wanted = self.text.format
            chat["response_format"] = {"type": wanted.get("type"), "json_schema": wanted}
        if self.speculation is not None:
            chat["speculation"] = self.speculation.model_dump()
        return chat

    @property
    def input_items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []


def response_store(request: Request) -> ResponseStore:
    """Return the server's response store."""
    store: ResponseStore = request.app.state.responses
    return store


def _messages_before(store: ResponseStore, owner: str, previous_id: str) -> list[Item]:
    """Return the messages up to an earlier response. Raises InvalidRequest, with the code at which clients send the
    whole conversation again, if it is not stored."""
    try:
        messages: list[Item] = msgspec.json.decode(store.find(owner, previous_id).messages)
    except Rejected as error:
        code, parameter = "previous_response_not_found", "previous_response_id"
        raise InvalidRequest(error.message, parameter=parameter, code=code) from None
    return messages


async def _command(
    request: Request, body: ResponsesBody
) -> tuple[Generate, Sequence[Item], Callable[[Iterable[Item]], list[Item]]]:
    """Return the worker's command, the tools, and a function that returns all messages once output items were added."""
    if body.background:
        raise InvalidRequest("background responses are not available: leave `background` out", parameter="background")
    owner, store, previous_id = identity_of(request).owner, response_store(request), body.previous_response_id
    before = _messages_before(store, owner, previous_id) if previous_id else []
    reader = ItemReader(lambda item_id: store.item(owner, item_id))

    def messages_with(items: Iterable[Item]) -> list[Item]:
        return [*before, *reader.read(items).messages]

    def convert() -> tuple[ChatBody, Sequence[Item], list[Notice]]:
        if not (messages := messages_with(body.input_items)):
            why = "; ".join(notice.message for notice in reader.notices()) or "there is no message in it"
            raise InvalidRequest(f"input: {why}", parameter="input")
        tools = flat_tools(body.tools or (), reader.tools)
        chat = validated(body.as_chat(messages, tools), ChatBody, SENT_AS)
        return chat, tools, [*reader.notices(), *ignored_fields(body)]

    chat, tools, notices = await where_parsed(request, convert)
    command = await chat_command(request, chat, f"resp_{secrets.token_hex(24)}", notices)
    return command, tools, messages_with


@router.post("/v1/responses", responses=success(ResponseObject, EVENTS) | ANSWERED)
async def create_response(request: Request, body: JsonBody[ResponsesBody]) -> Response:
    """Answer input items with output items."""
    command, tools, messages_with = await _command(request, body)

    def save(response: Item) -> None:
        if body.store is not False:
            messages = messages_with(response["output"])
            response_store(request).save(identity_of(request).owner, response, body.input_items, messages)

    renderer = ResponseRenderer(command, body, tools, save)
    return await answer(request, [command], renderer, stream=bool(body.stream))


@router.post("/v1/responses/input_tokens", responses=success(InputTokens) | problems(404, 429))
async def count_input_tokens(request: Request, body: JsonBody[ResponsesBody]) -> JSONResponse:
    """Count the tokens of input items, without loading a model."""
    command, _, _ = await _command(request, body)
    prompt = await read_prompt(request, command)
    counted = {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
    return JSONResponse(counted | warnings_object(prompt.notices))


@router.get("/v1/responses/{response_id}", responses=success(ResponseObject))
async def get_response(request: Request, response_id: str) -> Response:
    """Return a stored response."""
    stored = response_store(request).find(identity_of(request).owner, response_id)
    return Response(stored.response, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items", responses=success(ResponseItems))
async def get_input_items(request: Request, response_id: str) -> JSONResponse:
    """List the input items of a stored response."""
    input_items = msgspec.json.decode(response_store(request).find(identity_of(request).owner, response_id).input_items)
    items = [
        {"type": "message", "id": f"msg_{index}", "status": "completed"} | input_item
        for index, input_item in enumerate(input_items)
    ]
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return JSONResponse({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})


@router.delete("/v1/responses/{response_id}", responses=success(Deleted))
async def delete_response(request: Request, response_id: str) -> JSONResponse:
    """Delete a stored response."""
    response_store(request).delete(identity_of(request).owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


class ResponseRenderer(Renderer):
    """OpenAI's response and its stream: items one after another, each opened, written and closed."""

    end = b""
    streamed_refusals = frozenset({CONTEXT_OVERFLOW})
    prompt_parameter = "input"

    def __init__(
        self, command: Generate, body: ResponsesBody, tools: Sequence[Item], save: Callable[[Item], None]
    ) -> None:
        super().__init__(command.id)
        self._no_drafter = command.model.no_drafter
        self._tools = {flat_name(tool): tool for tool in tools}
        self._save = save
        self._number = 0
        self._output: list[Item] = []
        self._open = ""
        """Kind of the last item while it is open, followed by the call's index for a call; empty if no item is open."""
        self._input = CustomInput()
        """Input of the last call of a custom tool."""
        self._base: Item = {
            "id": command.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": command.model.id,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": body.store is not False,
            "temperature": command.sampling.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": command.sampling.top_p,
            "truncation": "disabled",
            "background": False,
        }

    def frame(self, payload: Item) -> bytes:
        payload["sequence_number"] = self._number
        self._number += 1
        return f"event: {payload['type']}\n".encode() + super().frame(payload)

    def opening(self) -> Iterable[Item]:
        response = self._base | {"status": "in_progress", "output": [], "usage": None}
        return [{"type": f"response.{event}", "response": response} for event in ("created", "in_progress")]

    def render_event(self, choice: int, event: Delta | Finished) -> Iterable[Item]:  # noqa: ARG002 - one choice
        if isinstance(event, Finished):
            yield from self._close(is_cut=self._is_cut(event.finish_reason, event.unfinished_call))
            response = self._ended(event.finish_reason, event.usage, event.notices)
            yield {"type": f"response.{response['status']}", "response": response}
            return
        if event.reasoning:
            yield from self._begin("reasoning", {"type": "reasoning", "summary": [], "content": []})
            yield from self._write("reasoning_text", event.reasoning)
        if event.text:
            yield from self._begin("message", {"type": "message", "role": "assistant", "content": []})
            yield from self._write("output_text", event.text, logprobs=[])
        for call in event.tool_calls:
            yield from self._begin(f"call {call.index}", self._call_item(call))
            yield from self._write_call(call.arguments)

    def failed(self, error: PacelineError, words: Words | None) -> Item:
        problem = error_object(error, words)["error"]
        failure = {"code": error.code if error.status < 500 else "server_error", "message": problem["message"]}
        if self._open:
            self._output[-1]["status"] = "incomplete"
        response = self._base | {"status": "failed", "output": self._output, "error": failure, "usage": None}
        return {"type": "response.failed", "response": response}

    def render_whole(self, finished: Sequence[FinishedChoice]) -> Item:
        [choice] = finished
        delta = Delta(
            id="", index=0, text=choice.text, tokens=0, reasoning=choice.reasoning, tool_calls=tuple(choice.calls)
        )
        for _ in self.render_event(0, delta):
            pass
        for _ in self._close(is_cut=self._is_cut(choice.finish_reason, choice.unfinished_call)):
            pass
        return self._ended(choice.finish_reason, choice.usage, choice.notices)

    def _is_cut(self, finish_reason: str, unfinished_call: int | None) -> bool:
        """Return whether the open item was cut off."""
        if self._open.startswith("call "):
            return self._open == f"call {unfinished_call}"
        return finish_reason == "length"

    def _ended(self, finish_reason: str, usage: Statistics, notices: Sequence[Notice]) -> Item:
        is_cut = finish_reason == "length"
        response = self._base | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": _usage(usage),
            "timings": timings_object(usage),
            "speculation": speculation_object(usage, self._no_drafter),
            **warnings_object(notices),
        }
        self._save(response)
        return response

    def _call_item(self, call: ToolCallDelta) -> Item:
        """Return the item of a call, in the format that matches the client's definition of the tool."""
        tool = self._tools.get(call.name, {"name": call.name})
        named = {name: tool[name] for name in ("name", NAMESPACE) if name in tool}
        if tool.get("type") == CUSTOM:
            return {"type": "custom_tool_call", "call_id": call.id, **named, "input": ""}
        return {"type": "function_call", "call_id": call.id, **named, "arguments": ""}

    def _begin(self, kind: str, item: Item) -> Iterable[Item]:
        if self._open == kind:
            return
        yield from self._close()
        self._open, self._input = kind, CustomInput()
        prefix = ID_PREFIXES.get(item["type"], "fc")
        self._output.append(item | {"id": f"{prefix}_{secrets.token_hex(12)}", "status": "in_progress"})
        yield self._event("output_item.added", item=dict(self._output[-1]))

    def _write(self, part: str, text: str, **more: Any) -> Iterable[Item]:
        content = self._output[-1]["content"]
        if not content:
            empty: Item = {"type": part, "text": ""} | (
                {"annotations": [], "logprobs": []} if part == "output_text" else {}
            )
            content.append(empty)
            yield self._event("content_part.added", content_index=0, part=dict(empty))
        content[0]["text"] += text
        yield self._event(f"{part}.delta", content_index=0, delta=text, **more)

    def _write_call(self, arguments: str) -> Iterable[Item]:
        """Append to the open call: to its arguments, or to the input of a custom tool."""
        item = self._output[-1]
        if item["type"] == "custom_tool_call":
            yield from self._write_input(self._input.feed(arguments))
        elif arguments:
            item["arguments"] += arguments
            yield self._event("function_call_arguments.delta", delta=arguments)

    def _write_input(self, text: str) -> Iterable[Item]:
        if text:
            self._output[-1]["input"] += text
            yield self._event("custom_tool_call_input.delta", delta=text)

    def _close(self, *, is_cut: bool = False) -> Iterable[Item]:
        """Close the open item; a call that was cut off gets no `done` event for its arguments or input."""
        if not self._open:
            return
        item, self._open = self._output[-1], ""
        if "content" in item:
            for part in item["content"]:
                more: Item = {"logprobs": []} if part["type"] == "output_text" else {}
                yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **more)
                yield self._event("content_part.done", content_index=0, part=dict(part))
        elif not is_cut and item["type"] == "custom_tool_call":
            yield from self._write_input(self._input.finish())
            yield self._event("custom_tool_call_input.done", input=item["input"])
        elif not is_cut:
            yield self._event("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        item["status"] = "incomplete" if is_cut else "completed"
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": dict(item)}

    def _event(self, event: str, **values: Any) -> Item:
        item_reference = {} if "item" in values else {"item_id": self._output[-1]["id"]}
        return {"type": f"response.{event}", "output_index": len(self._output) - 1} | item_reference | values


def _usage(usage: Statistics) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
