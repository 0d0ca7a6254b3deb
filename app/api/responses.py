"""OpenAI's `/v1/responses`: items in, items out, every streamed event in order; conversations are kept for a while.

Items become the messages of a chat, so that the core is the same. What is kept lies in memory, bounded in time and
bytes, each owner's apart. Tools that OpenAI runs itself (web search, files, code) are left out of the list of tools.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from app.api.answer import FinishedChoice, Renderer, answer, warnings_object
from app.api.chat import MAX_TOOLS, ChatBody, chat_command
from app.api.commands import MAX_TOKEN_ID, ModelName, SpeculationOptions, StayBody
from app.api.shapes import Deleted, ResponseItems, ResponseObject
from app.core.errors import InvalidRequest, PacelineError
from app.core.messages import Delta, Finished, Generate
from app.core.request import Notice
from app.core.statistics import Statistics
from app.i18n import Words
from app.serving.auth import identity_of
from app.serving.document import ANSWERED, EVENTS, told
from app.serving.errors import Rejected, error_object
from app.serving.gate import Body, Sent, checked

KEPT_SECONDS = 24 * 3600.0
KEPT_BYTES = 64 * 1024 * 1024
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")

Item = dict[str, Any]

router = APIRouter()


class ReasoningOptions(Body):
    """How much to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class TextOptions(Body):
    """What the text must match."""

    format: dict[str, Any] | None = None


class ResponsesBody(StayBody):
    """`POST /v1/responses`."""

    model: ModelName | None = None
    input: str | list[Item] = Field(max_length=64 * 1024 * 1024)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    seed: int | None = None
    speculation: SpeculationOptions | None = None

    @property
    def functions(self) -> list[Item]:
        """The tools that a client runs itself."""
        return [tool for tool in self.tools or () if tool.get("type") == "function"]

    def as_chat(self, before: Sequence[Item]) -> dict[str, Any]:
        """The conversation in the words of chat, behind the messages `before`."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages += [*before, *messages_of_items(self.input_items)]
        same = ("model", "temperature", "top_p", "parallel_tool_calls", "seed", "keep_alive", "ttl")
        chat: dict[str, Any] = {name: getattr(self, name) for name in same}
        chat |= {"messages": messages, "max_tokens": self.max_output_tokens}
        if self.functions:
            named = ("name", "description", "parameters", "strict")
            functions = [{name: tool[name] for name in named if tool.get(name) is not None} for tool in self.functions]
            chat["tools"] = [{"type": "function", "function": function} for function in functions]
            choice = self.tool_choice
            is_named = isinstance(choice, dict) and choice.get("type") == "function"
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}} if is_named else choice
        if self.reasoning is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            wanted = self.text.format
            chat["response_format"] = {"type": wanted.get("type"), "json_schema": wanted}
        if self.speculation is not None:
            chat["speculation"] = self.speculation.model_dump()
        return chat

    @property
    def input_items(self) -> list[Item]:
        """The input as items."""
        return (
            [{"type": "message", "role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        )


def messages_of_items(items: Sequence[Item]) -> list[Item]:
    """Chat messages of items; calls and reasoning join the assistant's message that they belong to.

    Raises InvalidRequest for items that mean nothing here.
    """
    messages: list[Item] = []

    def assistant() -> Item:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for item in items:
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                message = assistant()
                message["content"] = (message["content"] or "") + _text(item.get("content"))
            case "message":
                messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
                message = assistant()
                message["tool_calls"] = [*message.get("tool_calls", ()), call]
            case "function_call_output":
                content, call_id = _text(item.get("output")), item.get("call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "reasoning":
                parts = item.get("content") or item.get("summary")
                if parts:
                    assistant()["reasoning_content"] = _text(parts)
            case other:
                raise InvalidRequest(f"input: there are no items of type {str(other)[:60]!r} here", parameter="input")
    return [each for each in messages if each["content"] is not None or each.get("tool_calls")]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in parts):
        raise InvalidRequest("input: this model reads text only: send parts of type input_text", parameter="input")
    return "".join(str(part.get("text") or "") for part in parts)


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """One response, and what a conversation goes on with."""

    response: Item
    input_items: list[Item]
    messages: list[Item]
    size_bytes: int
    kept_at: float


class KeptResponses:
    """By owner and id; the oldest go when they are too old, or too many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept: OrderedDict[tuple[str, str], KeptResponse] = OrderedDict()
        self._size_bytes = 0
        self._clock = clock

    def keep(self, owner: str, response: Item, input_items: list[Item], messages: list[Item]) -> None:
        """Keep a response that has ended."""
        size = len(msgspec.json.encode([response, input_items, messages]))
        kept = KeptResponse(response, input_items, messages, size, self._clock())
        self._kept[owner, response["id"]] = kept
        self._size_bytes += size
        while self._kept and (
            self._size_bytes > KEPT_BYTES or next(iter(self._kept.values())).kept_at < self._clock() - KEPT_SECONDS
        ):
            self._size_bytes -= self._kept.popitem(last=False)[1].size_bytes

    def find(self, owner: str, response_id: str) -> KeptResponse:
        """Raises Rejected (404) for one that is not kept, or another owner's."""
        kept = self._kept.get((owner, response_id))
        if kept is None or kept.kept_at < self._clock() - KEPT_SECONDS:
            hours = int(KEPT_SECONDS // 3600)
            message = f"There is no response of this id: they are kept for {hours} hours, until the server stops."
            raise Rejected(404, message, "response_not_found")
        return kept

    def forget(self, owner: str, response_id: str) -> None:
        """Raises Rejected (404) as `find` does."""
        self._size_bytes -= self.find(owner, response_id).size_bytes
        del self._kept[owner, response_id]


def kept_responses(request: Request) -> KeptResponses:
    """Those of this server."""
    kept: KeptResponses = request.app.state.responses
    return kept


@router.post("/v1/responses", responses=told(ResponseObject, EVENTS) | ANSWERED)
async def create_response(request: Request, body: Sent[ResponsesBody]) -> Response:
    """Answer items with items."""
    if body.background:
        raise InvalidRequest("background responses are not available: leave `background` out", parameter="background")
    owner, kept = identity_of(request).owner, kept_responses(request)
    before = kept.find(owner, body.previous_response_id).messages if body.previous_response_id else []
    chat = checked(body.as_chat(before), ChatBody)
    command = await chat_command(request, chat, f"resp_{secrets.token_hex(24)}")

    def keep(response: Item) -> None:
        if body.store is not False:
            own = messages_of_items([*body.input_items, *response["output"]])
            kept.keep(owner, response, body.input_items, [*before, *own])

    return await answer(request, [command], ResponseRenderer(command, body, keep), stream=bool(body.stream))


@router.get("/v1/responses/{response_id}", responses=told(ResponseObject))
async def get_response(request: Request, response_id: str) -> JSONResponse:
    """A response that is kept."""
    return JSONResponse(kept_responses(request).find(identity_of(request).owner, response_id).response)


@router.get("/v1/responses/{response_id}/input_items", responses=told(ResponseItems))
async def get_input_items(request: Request, response_id: str) -> JSONResponse:
    """What a kept response answered."""
    found = kept_responses(request).find(identity_of(request).owner, response_id).input_items
    items = [
        {"type": "message", "id": f"msg_{place}", "status": "completed"} | each for place, each in enumerate(found)
    ]
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return JSONResponse({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})


@router.delete("/v1/responses/{response_id}", responses=told(Deleted))
async def delete_response(request: Request, response_id: str) -> JSONResponse:
    """Forget a response."""
    kept_responses(request).forget(identity_of(request).owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


class ResponseRenderer(Renderer):
    """OpenAI's response and its stream: items one after another, each opened, written and closed."""

    end = b""

    def __init__(self, command: Generate, body: ResponsesBody, keep: Callable[[Item], None]) -> None:
        super().__init__(command.id)
        self._no_drafter = command.model.no_drafter
        self._keep = keep
        self._number = 0
        self._output: list[Item] = []
        self._open = ""
        """What the last item is, while it is open; of a call, its number too."""
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
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store is not False,
            "temperature": command.sampling.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.functions,
            "top_p": command.sampling.top_p,
            "truncation": "disabled",
            "background": False,
        }

    def frame(self, told: Item) -> bytes:
        told["sequence_number"] = self._number
        self._number += 1
        return f"event: {told['type']}\n".encode() + super().frame(told)

    def opening(self) -> Iterable[Item]:
        response = self._base | {"status": "in_progress", "output": [], "usage": None}
        return [{"type": f"response.{event}", "response": response} for event in ("created", "in_progress")]

    def tell(self, choice: int, event: Delta | Finished) -> Iterable[Item]:  # noqa: ARG002 - there is one
        if isinstance(event, Finished):
            yield from self._close()
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
            item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
            yield from self._begin(f"call {call.index}", item)
            if call.arguments:
                self._output[-1]["arguments"] += call.arguments
                yield self._event("function_call_arguments.delta", delta=call.arguments)

    def failed(self, error: PacelineError, words: Words | None) -> Item:
        told = error_object(error, words)["error"]
        failure = {"code": error.code if error.status < 500 else "server_error", "message": told["message"]}
        response = self._base | {"status": "failed", "output": self._output, "error": failure, "usage": None}
        return {"type": "response.failed", "response": response}

    def whole(self, finished: Sequence[FinishedChoice]) -> Item:
        [one] = finished
        calls = tuple(one.tool_calls)
        told = Delta(id="", index=0, text=one.text, tokens=0, reasoning=one.reasoning, tool_calls=calls)
        for _ in (*self.tell(0, told), *self._close()):
            pass
        return self._ended(one.finish_reason, one.usage, one.notices)

    def _ended(self, finish_reason: str, usage: Statistics, notices: Sequence[Notice]) -> Item:
        is_cut = finish_reason == "length"
        response = self._base | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": _usage(usage),
            "timings": usage.timings(),
            "speculation": usage.speculation(self._no_drafter),
            **warnings_object(notices),
        }
        self._keep(response)
        return response

    def _begin(self, kind: str, item: Item) -> Iterable[Item]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        prefix = {"message": "msg", "reasoning": "rs"}.get(kind, "fc")
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

    def _close(self) -> Iterable[Item]:
        if not self._open:
            return
        item, self._open = self._output[-1], ""
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            for part in item["content"]:
                more: Item = {"logprobs": []} if part["type"] == "output_text" else {}
                yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **more)
                yield self._event("content_part.done", content_index=0, part=dict(part))
        item["status"] = "completed"
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": dict(item)}

    def _event(self, event: str, **values: Any) -> Item:
        of = {} if "item" in values else {"item_id": self._output[-1]["id"]}
        return {"type": f"response.{event}", "output_index": len(self._output) - 1} | of | values


def _usage(usage: Statistics) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
