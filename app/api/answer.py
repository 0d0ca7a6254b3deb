"""The way from a list of commands to an HTTP answer, whole or streamed, for chat and completions alike.

Streamed: the response starts when the worker took every prompt, so that a refusal still has its HTTP status, or
after `keep_alive_seconds` of waiting. A client that leaves cancels the generation in both forms; the chat page has some
time to come again.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from app.api.generation import ChoiceEvent, Generation
from app.core.errors import InvalidRequest, PacelineError
from app.core.messages import Delta, Finished, Generate, TokenText
from app.core.step import Statistics
from app.i18n import Words
from app.serving.auth import identity_of
from app.serving.context import Context, context_of
from app.serving.errors import error_object, words_for
from app.serving.record import Asked
from app.serving.sse import DONE, EventStream, KeptFrames, comment, frame

DASHBOARD = "/admin/"
"""Whose streams go on for a while without a reader."""

Value = TypeVar("Value")


@dataclass(slots=True)
class FinishedChoice:
    """Everything that one choice told."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    finish_reason: str = ""
    usage: Statistics = field(default_factory=Statistics)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    def take(self, event: Delta | Finished) -> None:
        """Add what one event told."""
        if isinstance(event, Finished):
            self.finish_reason, self.usage = event.finish_reason, event.usage
        else:
            self.texts.append(event.text)
            self.logprobs.extend(event.logprobs)


class Renderer(Protocol):
    """Makes the objects of one endpoint."""

    @property
    def id(self) -> str:
        """The id that the client is told."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before the first token."""
        ...

    def delta(self, choice: int, event: Delta) -> dict[str, Any] | None:
        """The chunk of one step; None when there is nothing to tell."""
        ...

    def finish(self, choice: int, event: Finished) -> dict[str, Any]:
        """The last chunk of a choice."""
        ...

    def usage(self, usages: Sequence[Statistics]) -> dict[str, Any]:
        """The chunk without choices at the end of a stream."""
        ...

    def whole(self, outcomes: Sequence[FinishedChoice]) -> dict[str, Any]:
        """The answer in one piece."""
        ...


async def answer(
    request: Request,
    context: Context,
    commands: Sequence[Generate],
    renderer: Renderer,
    *,
    stream: bool,
    include_usage: bool,
) -> Response:
    """Run `commands` and answer with what `renderer` makes of them. Raises what the worker refused."""
    _check_choices(commands)
    identity = identity_of(request)
    commands = [msgspec.structs.replace(each, owner=identity.owner) for each in commands]
    asked = Asked(
        id=renderer.id,
        endpoint=request.url.path,
        commands=commands,
        key_name=identity.name,
        is_streamed=stream,
    )
    record = context.journal.open(asked)
    generation = Generation(context.worker, commands, context.measurements, context.clock, record)
    context.activity.enter(generation)

    def close() -> None:
        generation.close()
        context.activity.leave(generation)

    try:
        generation.start()
        if stream:
            await unless_client_leaves(request, generation.wait_accepted(context.keep_alive_seconds))
            frames = _frames(context, generation, renderer, include_usage=include_usage, words=words_for(request))
            return _streamed(request, renderer.id, frames, close)
        outcomes = await unless_client_leaves(request, _collect(generation, sum(each.n for each in commands)))
    except BaseException:
        close()
        raise
    close()
    return Response(msgspec.json.encode(renderer.whole(outcomes)), media_type="application/json")


def _streamed(
    request: Request, request_id: str, frames: AsyncGenerator[bytes, None], close: Callable[[], None]
) -> EventStream:
    """A stream that ends with its client, or one of the chat page, which may leave and come again."""
    context = context_of(request)
    if not request.url.path.startswith(DASHBOARD):
        return EventStream(frames, on_close=close, write_timeout_seconds=context.write_timeout_seconds)
    context.replies[request_id] = kept = KeptFrames(
        frames,
        on_close=close,
        on_gone=lambda: context.replies.pop(request_id),
        patience_seconds=context.reply_patience_seconds,
    )
    return kept.response(context.write_timeout_seconds)


def _check_choices(commands: Sequence[Generate]) -> None:
    """Raise for more choices than may ever wait: coming back later would not help."""
    choices, limit = sum(command.n for command in commands), commands[0].model.queue_limit
    if choices > limit:
        message = f"{choices} choices are asked for, but only {limit} may wait for a model: ask for fewer at a time."
        raise InvalidRequest(message, code="too_many_choices", parameter="n")


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """The result of `work`; cancels it and raises `ClientDisconnect` as soon as the client is gone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _collect(generation: Generation, choices: int) -> list[FinishedChoice]:
    outcomes = [FinishedChoice() for _ in range(choices)]
    while generation.running:
        told = await generation.next()
        if told is not None:
            outcomes[told.choice].take(told.event)
    return outcomes


async def _frames(
    context: Context, generation: Generation, renderer: Renderer, *, include_usage: bool, words: Words | None
) -> AsyncGenerator[bytes, None]:
    usages: dict[int, Statistics] = {}
    try:
        for opening in renderer.opening():
            yield frame(opening)
        while generation.running:
            told = await generation.next(context.keep_alive_seconds)
            if told is None:
                yield comment(_waiting_for(context, generation.model_id))
                continue
            if isinstance(told.event, Finished):
                usages[told.choice] = told.event.usage
            chunk = _chunk(renderer, told)
            if chunk is not None:
                yield frame(chunk)
        if include_usage:
            yield frame(renderer.usage([usages[choice] for choice in sorted(usages)]))
        yield DONE
    except PacelineError as error:
        context.measurements.stream_failed(error.code)
        yield frame(error_object(error, words))


def _chunk(renderer: Renderer, told: ChoiceEvent) -> dict[str, Any] | None:
    if isinstance(told.event, Finished):
        return renderer.finish(told.choice, told.event)
    return renderer.delta(told.choice, told.event)


def _waiting_for(context: Context, model_id: str) -> str:
    progress = context.worker.progress.get(model_id)
    return "waiting" if progress is None else f"loading {progress.fraction:.0%}"
