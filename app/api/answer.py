"""Run worker commands and return their output as one HTTP response, whole or streamed, in any wire format.

A streamed response starts once the worker has accepted every prompt, so that a refusal can still set the HTTP status,
or after `keep_alive_seconds` if that takes longer. A client that disconnects cancels the generation, streamed or not;
the chat page has a grace period to reconnect.
"""

import asyncio
import json
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from app.api.commands import GenerationBody
from app.core.errors import CONTEXT_OVERFLOW, InvalidRequest, PacelineError
from app.core.messages import Accepted, Delta, Finished, Generate, TokenText, ToolCallDelta
from app.core.request import Notice
from app.core.statistics import Statistics
from app.i18n.catalogs import Words
from app.models.prompt_size import check_prompt
from app.serving.auth import identity_of
from app.serving.context import Context, context_of
from app.serving.errors import error_object, words_for
from app.serving.record import Record
from app.serving.speed import speculation_object, timings_object
from app.serving.sse import DONE, EventStream, ReplayableFrames, comment, frame
from app.supervision.stream import RequestStream, StreamEvent

MANY_CHOICES = 64
"""Number of choices at which an answer is encoded in a thread, so that other streams are not delayed."""
DASHBOARD = "/admin/"
"""Path prefix of requests whose streams continue for a grace period without a reader."""

OnEvent = Callable[[StreamEvent | PacelineError], None]
Value = TypeVar("Value")


@dataclass(slots=True)
class FinishedChoice:
    """Everything that one choice produced."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    finish_reason: str = ""
    stop: str = ""
    unfinished_call: int | None = None
    embedding: Sequence[float] = ()
    usage: Statistics = field(default_factory=Statistics)
    notices: Sequence[Notice] = ()

    @property
    def text(self) -> str:
        """The whole text, without reasoning and tool calls."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """Reasoning that the model wrote before its answer."""
        return "".join(self.reasonings)

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """Complete tool calls, in order; a call that was cut off is left out."""
        calls: dict[int, ToolCallDelta] = {}
        for delta in self.calls:
            begun = calls.get(delta.index)
            calls[delta.index] = (
                delta if begun is None else msgspec.structs.replace(begun, arguments=begun.arguments + delta.arguments)
            )
        return [call for index, call in calls.items() if index != self.unfinished_call]

    def add(self, event: Delta | Finished) -> None:
        """Add the content of one event."""
        if isinstance(event, Finished):
            self.finish_reason, self.usage, self.stop = event.finish_reason, event.usage, event.stop
            self.unfinished_call, self.notices = event.unfinished_call, event.notices
            self.embedding = array("f", event.embedding)
            return
        self.texts.append(event.text)
        self.reasonings.append(event.reasoning)
        self.calls.extend(event.tool_calls)
        self.logprobs.extend(event.logprobs)


def call_arguments(call: ToolCallDelta) -> dict[str, Any]:
    """Parse a complete call's arguments. Raises PacelineError if they are not a JSON object, rather than guess them."""
    try:
        arguments = json.loads(call.arguments or "{}", strict=False, parse_int=_integer, parse_float=_finite)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        message = f"The model called {call.name} with arguments that are not a JSON object: send the request again."
        raise PacelineError(message, code="unreadable_call")
    return arguments


def _finite(text: str) -> float:
    """Parse a number. Raises ValueError for one that is infinite as a float, which JSON cannot express."""
    if math.isinf(value := float(text)):
        raise ValueError(text)
    return value


def _integer(text: str) -> float:
    """Parse an integer; one of more than 64 bits becomes a float, as in JavaScript, since requests allow no other."""
    return value if -(2**63) <= (value := int(text)) < 2**64 else _finite(text)


class Renderer:
    """Renders one answer in one wire format, as the objects of a stream or as one object. Choices count from 0."""

    media_type = "text/event-stream"
    end = DONE
    """The last bytes of a stream that did not fail."""
    streamed_refusals: frozenset[str] = frozenset()
    """Codes of refusals that are sent as a stream, not as an HTTP error, because clients look for them there."""
    prompt_parameter = "messages"
    """Name of the request field with the prompt."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        """Id of the answer, as the client sees it."""

    def frame(self, payload: dict[str, Any]) -> bytes:
        """Encode one object of a stream."""
        return frame(payload)

    def keep_alive_frame(self, text: str) -> bytes:
        """Return bytes that keep a silent stream open; empty if the format has no frame that clients ignore."""
        return comment(text)

    def opening(self) -> Iterable[dict[str, Any]]:
        """Return the objects to send before the first token."""
        return ()

    def accepted(self, prompt_tokens: int) -> Iterable[dict[str, Any]]:  # noqa: ARG002
        """Return the objects that follow the worker's acceptance of a prompt."""
        return ()

    def render_event(self, choice: int, event: Delta | Finished) -> Iterable[dict[str, Any]]:
        """Render one event of a choice as objects of the stream; a choice's last event is its only `Finished`."""
        raise NotImplementedError

    def closing(self, usages: Sequence[Statistics]) -> Iterable[dict[str, Any]]:  # noqa: ARG002
        """Return the last objects of a stream, once every choice has finished; `usages` has one entry per choice."""
        return ()

    def failed(self, error: PacelineError, words: Words | None) -> dict[str, Any]:
        """Return the last object of a stream that fails."""
        return error_object(error, words)

    def render_whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        """Return the answer as one object."""
        raise NotImplementedError


class OpenAIRenderer(Renderer):
    """Base for OpenAI's chat and completions; a subclass renders the choices."""

    whole_name: str
    chunk_name: str

    def __init__(self, request_id: str, command: Generate, body: GenerationBody) -> None:
        super().__init__(request_id)
        self.n = body.n or 1
        self.wants_logprobs = command.sampling.top_logprobs is not None
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        """Whether a stream ends with the usage of all choices."""
        self._no_drafter = command.model.no_drafter
        self._seed = command.sampling.seed if body.seed is None else body.seed
        self._base = {"id": request_id, "created": int(time.time()), "model": command.model.id}
        self._extra = {"usage": None} if self._include_usage else {}

    def render_event(self, choice: int, event: Delta | Finished) -> Iterable[dict[str, Any]]:
        """Return one chunk, or none for an empty event; a choice's last chunk carries timings, speculation and seed."""
        if isinstance(event, Finished):
            ended = self._chunk(self.chunk_choice(choice, event.finish_reason)) | self._numbers(event.usage)
            return [ended | warnings_object(event.notices)]
        if not (event.text or event.reasoning or event.tool_calls or event.logprobs):
            return ()
        rendered = self.chunk_choice(choice, event)
        if event.logprobs:
            rendered["logprobs"] = self.logprobs(choice, event.logprobs)
        if event.accepted_spans:
            rendered["accepted_spans"] = event.accepted_spans
            rendered["method"] = event.method
        return [self._chunk(rendered)]

    def closing(self, usages: Sequence[Statistics]) -> Iterable[dict[str, Any]]:
        """Return a chunk with the usage and no choices, if it was requested."""
        if not self._include_usage:
            return ()
        total = Statistics.combined(usages, choices_per_prompt=self.n)
        return [self._base | {"object": self.chunk_name, "choices": [], "usage": usage_object(total)}]

    def render_whole(self, finished: Sequence[FinishedChoice]) -> dict[str, Any]:
        total = Statistics.combined([choice.usage for choice in finished], choices_per_prompt=self.n)
        choices = [self.whole_choice(index, choice) for index, choice in enumerate(finished)]
        named = self._base | {"object": self.whole_name, "choices": choices, "usage": usage_object(total)}
        return named | self._numbers(total) | all_warnings(finished)

    def chunk_choice(self, index: int, update: Delta | str) -> dict[str, Any]:
        """Return one choice of a chunk: its delta, or its finish reason if `update` is a string."""
        raise NotImplementedError

    def logprobs(self, choice: int, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """Return the `logprobs` of the next tokens of a choice."""
        raise NotImplementedError

    def whole_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        raise NotImplementedError

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._base, "object": self.chunk_name, "choices": [choice], **self._extra}

    def _numbers(self, usage: Statistics) -> dict[str, Any]:
        speculation = speculation_object(usage, self._no_drafter)
        return {"timings": timings_object(usage), "speculation": speculation, "seed": self._seed}


def usage_object(usage: Statistics) -> dict[str, Any]:
    """Return OpenAI's `usage`; drafted tokens are reported as accepted and rejected prediction tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


def warnings_object(notices: Iterable[Notice]) -> dict[str, Any]:
    """Return the `warnings` of a response, each once: repairs of the request, and fields or parts of it that were
    ignored. {} if there are none."""
    warnings = [msgspec.to_builtins(notice) for notice in dict.fromkeys(notices)]
    return {"warnings": warnings} if warnings else {}


def all_warnings(finished: Sequence[FinishedChoice]) -> dict[str, Any]:
    """Return the `warnings` of all choices of a response."""
    return warnings_object(notice for choice in finished for notice in choice.notices)


async def answer(request: Request, commands: Sequence[Generate], renderer: Renderer, *, stream: bool) -> Response:
    """Run `commands` and answer in the format of `renderer`. Raises PacelineError if the request is refused."""
    _check_choices(commands[0])
    context = context_of(request)
    record = Record(
        context.journal,
        context.metrics,
        commands,
        id=renderer.id,
        endpoint=request.url.path,
        key_name=identity_of(request).name,
        is_streamed=stream,
    )
    events = context.worker.open(commands, on_event=_with_prompt_parameter(renderer, record.on_event))

    def close() -> None:
        events.close()
        record.close()
        context.activity.leave(events)

    try:
        context.activity.enter(events)
        record.begin(events.fail)
        _refuse_too_long(commands, events)
        if stream:
            try:
                await cancel_on_disconnect(request, events.wait_accepted(context.keep_alive_seconds))
            except InvalidRequest as error:
                if error.code not in renderer.streamed_refusals:
                    raise
            frames = _frames(context, events, renderer, words_for(request))
            return _streamed(request, renderer, frames, close)
        choices = await cancel_on_disconnect(request, _collect(events, sum(command.n for command in commands)))
    except BaseException:
        close()
        raise
    close()
    return Response(await _whole(renderer, choices), media_type="application/json")


def _with_prompt_parameter(renderer: Renderer, on_event: OnEvent) -> OnEvent:
    """Return `on_event` with one addition: the error for a prompt that is too long also names the prompt's field."""

    def name_and_forward(event: StreamEvent | PacelineError) -> None:
        if isinstance(event, PacelineError) and event.code == CONTEXT_OVERFLOW:
            event.parameter = renderer.prompt_parameter
        on_event(event)

    return name_and_forward


def _refuse_too_long(commands: Sequence[Generate], events: RequestStream) -> None:
    """Fail the request if a prompt cannot fit the context, before the worker sees it."""
    try:
        for command in commands:
            check_prompt(command)
    except InvalidRequest as error:
        events.fail(error)


async def _whole(renderer: Renderer, choices: Sequence[FinishedChoice]) -> bytes:
    def encode() -> bytes:
        return msgspec.json.encode(renderer.render_whole(choices))

    return encode() if len(choices) < MANY_CHOICES else await asyncio.to_thread(encode)


def _streamed(
    request: Request, renderer: Renderer, frames: AsyncGenerator[bytes, None], close: Callable[[], None]
) -> EventStream:
    """Return a stream that ends when its client disconnects; a client of the dashboard may leave and reconnect."""
    context = context_of(request)
    if not request.url.path.startswith(DASHBOARD):
        return EventStream(
            frames,
            on_close=close,
            write_timeout_seconds=context.write_timeout_seconds,
            media_type=renderer.media_type,
            keep_alive_frame=renderer.keep_alive_frame("are you there?"),
        )
    context.replies[renderer.id] = replayable = ReplayableFrames(
        frames,
        on_close=close,
        on_expired=lambda: context.replies.pop(renderer.id),
        grace_seconds=context.reply_grace_seconds,
    )
    return replayable.response(context.write_timeout_seconds)


def _check_choices(command: Generate) -> None:
    """Raise InvalidRequest if one prompt asks for more choices than the queue can hold: a retry would not help."""
    choices, limit = command.n, command.model.live.queue_limit
    if choices > limit:
        message = f"The request asks for {choices} choices, but a model's queue holds {limit}: ask for fewer at a time."
        raise InvalidRequest(message, code="too_many_choices", parameter="n")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of `work`; cancel it and raise `ClientDisconnect` if the client disconnects."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        disconnecting.cancel()


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _collect(events: RequestStream, choices: int) -> list[FinishedChoice]:
    outcomes = [FinishedChoice() for _ in range(choices)]
    while (event := await events.next()) is not None:
        if not isinstance(event, Accepted):
            outcomes[events.choice(event)].add(event)
    return outcomes


async def _frames(
    context: Context, events: RequestStream, renderer: Renderer, words: Words | None
) -> AsyncGenerator[bytes, None]:
    usages: dict[int, Statistics] = {}
    try:
        for payload in renderer.opening():
            yield renderer.frame(payload)
        sent_at = context.clock()
        while events.running:
            event = await events.next(context.keep_alive_seconds)
            if isinstance(event, Finished):
                usages[events.choice(event)] = event.usage
            frames = (
                [] if event is None else [renderer.frame(payload) for payload in _payloads(renderer, events, event)]
            )
            if event is None or (not frames and context.clock() - sent_at >= context.keep_alive_seconds):
                progress = context.worker.book.progress.get(events.model_id)
                frames = [
                    renderer.keep_alive_frame("waiting" if progress is None else f"loading {progress.fraction:.0%}")
                ]
            for encoded in frames:
                yield encoded
                sent_at = context.clock()
        for payload in renderer.closing([usages[choice] for choice in sorted(usages)]):
            yield renderer.frame(payload)
        yield renderer.end
    except PacelineError as error:
        context.metrics.stream_failed(error.code)
        yield renderer.frame(renderer.failed(error, words))


def _payloads(
    renderer: Renderer, events: RequestStream, event: Accepted | Delta | Finished
) -> Iterable[dict[str, Any]]:
    if isinstance(event, Accepted):
        return renderer.accepted(event.prompt_tokens)
    return renderer.render_event(events.choice(event), event)
