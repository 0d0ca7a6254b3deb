"""What the server asks of the worker, as asyncio calls: generate, load, unload, and what is known of its state.

Runs on the event loop of the server process and never imports the engine. Every request ends in exactly one way:
all choices finished, one error, or its reader left (which cancels it in the worker).
"""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, get_args

import msgspec

from app.core.clock import Alarm
from app.core.errors import ModelUnavailable, PacelineError, WorkerGone
from app.core.messages import (
    Accepted,
    Cancel,
    ClearPrefixes,
    Delta,
    Event,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    KeepModel,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    ModelSpecification,
    ModelUnloaded,
    PromptTold,
    ReadPrompt,
    Ready,
    Snapshot,
    UnloadModel,
    error_of,
    failed_frame,
)
from app.core.reason import Reason
from app.worker.supervisor import Supervisor

StreamEvent = Accepted | Delta | Finished

BUFFER_EVENTS = 4096
MOST_IN_FLIGHT = 64
"""Choices of one request that the worker has at once: two batches of an encoder; others of its owner go in between."""
INTERNAL_ERROR = "Internal error: see the log of the server."
READY_SECONDS = 20.0
LOAD_ENDED = frozenset({"ready", "failed", "abandoned"})
"""The phases of the last `LoadProgress` of a load."""

_logger = logging.getLogger("paceline.client")


class RequestStream:
    """The events of one request, of all its prompts, in one queue of at most `limit` for one reader.

    Of many prompts the worker has a few at a time, so that neither its queue is full nor others wait for all of them.
    `on_event` is told each event when it comes, and the error that ends the request; `cancel` ends one prompt in the
    worker. Choices are numbered over prompts: prompt × n + index.
    """

    def __init__(
        self,
        commands: Sequence[Generate],
        *,
        cancel: Callable[[str], None],
        on_event: Callable[[StreamEvent | PacelineError], None] = lambda _event: None,
        limit: int = BUFFER_EVENTS,
    ) -> None:
        self.model_id = commands[0].model.id
        self._first_choices = {command.id: position * command.n for position, command in enumerate(commands)}
        self._open_choices = {command.id: command.n for command in commands}
        """Of the prompts that have not ended."""
        self._unaccepted = set(self._open_choices)
        self._cancel = cancel
        self._on_event = on_event
        self._limit = limit
        self._events: deque[StreamEvent] = deque()
        self._error: PacelineError | None = None
        self._changed = asyncio.Event()
        self._in_flight = 0
        """Choices that the worker has."""
        self._most_in_flight = min(MOST_IN_FLIGHT, max(1, commands[0].model.queue_limit // 2))
        self._left = asyncio.Event()
        """Set when the worker has less of it, or when nothing more is to be sent."""
        self._alarm = Alarm(self._wake_late)
        self._late = False
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether nothing more is put in: the last event or an error was, or the reader has left."""
        return self._closed or self._error is not None or not self._open_choices

    @property
    def running(self) -> bool:
        """Whether `next` has still something to tell."""
        return bool(self._events or self._open_choices or self._error)

    def is_open(self, request_id: str) -> bool:
        """Whether the end of this prompt is waited for."""
        return not self.ended and request_id in self._open_choices

    def choice(self, event: Delta | Finished) -> int:
        """Which choice of the request an event is about."""
        return self._first_choices[event.id] + event.index

    def put(self, event: StreamEvent) -> None:
        """Take one event of the worker; a reader that is too slow fails the request."""
        if self.ended:
            return
        if len(self._events) >= self._limit:
            _logger.warning("cancelled %s: its client does not read", event.id)
            self.fail(PacelineError("The client does not read its answer.", code="client_too_slow"))
            return
        try:
            self._on_event(event)
        except Exception:
            _logger.exception("%s: an event could not be counted", event.id)
            self.fail(PacelineError(INTERNAL_ERROR))
            return
        if isinstance(event, Accepted):
            self._unaccepted.discard(event.id)
        elif isinstance(event, Finished):
            self._open_choices[event.id] -= 1
            self._in_flight -= 1
            self._left.set()
            if not self._open_choices[event.id]:
                del self._open_choices[event.id]
        self._events.append(event)
        self._changed.set()

    def fail(self, error: PacelineError) -> None:
        """End with `error`, which the reader gets after the events that are already here; cancel what runs."""
        if not self.ended:
            self._error = error.with_traceback(None)  # which would keep the prompt
            self._on_event(error)
            self._cancel_open()
            self._changed.set()
            self._left.set()

    async def next(self, seconds: float | None = None) -> StreamEvent | None:
        """The next event; None after the last one, or when none came in time. Raises the error that ended it."""
        if not self._events:
            await self._wait(lambda: bool(self._events) or self.ended, seconds)
        if self._events:
            return self._events.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def wait_turn(self, choices: int) -> bool:
        """Reserve places for `choices` at the worker, waiting for them; False where nothing is to be sent."""
        while not self.ended and self._in_flight and self._in_flight + choices > self._most_in_flight:
            self._left.clear()
            await self._left.wait()
        self._in_flight += choices
        return not self.ended

    async def wait_accepted(self, seconds: float) -> None:
        """Return when the worker took every prompt, or after so long. Raises the error that came before."""
        await self._wait(lambda: not self._unaccepted or self.ended, seconds)
        if self._unaccepted and self._error is not None:
            raise self._error

    def close(self) -> None:
        """The reader leaves: cancel what still runs. Never waits, may be called twice."""
        if not self.ended:
            self._cancel_open()
        self._closed = True
        self._left.set()
        self._alarm.close()

    async def _wait(self, condition: Callable[[], bool], seconds: float | None) -> None:
        """Until it holds, or for so long."""
        self._late = False
        if seconds is not None:
            self._alarm.set(seconds)
        while not condition() and not self._late:
            self._changed.clear()
            await self._changed.wait()
        self._alarm.put_off()

    def _wake_late(self) -> None:
        self._late = True
        self._changed.set()

    def _cancel_open(self) -> None:
        for request_id in tuple(self._open_choices):
            self._cancel(request_id)


class WorkerClient(Supervisor):
    """One per server process; `options` are those of its `Supervisor`."""

    def __init__(
        self, *, buffer_events: int = BUFFER_EVENTS, ready_seconds: float = READY_SECONDS, **options: Any
    ) -> None:
        super().__init__(**options)
        self._buffer_events = buffer_events
        self._ready_seconds = ready_seconds
        self._streams: dict[str, RequestStream] = {}
        """By the id of each prompt whose end the worker has not told."""
        self._sending: set[asyncio.Task[None]] = set()
        self._answers: dict[str, tuple[str, asyncio.Future[Any]]] = {}
        """Of loads and unloads, by their id, with the model's."""
        self._listeners: dict[type[Event], list[Callable[[Any], None]]] = {kind: [] for kind in get_args(Event)}
        self._kept: dict[str, KeepModel] = {}
        """What the next worker has to be told: which models are pinned, and what no worker was there to hear."""
        self._used: dict[str, ModelSpecification] = {}
        """Model id -> how it was last asked for; the last one asked for is the last one here."""
        self._lost: frozenset[str] = frozenset()
        """Models that the next worker loads at once."""
        self.progress: dict[str, LoadProgress] = {}
        """Model id -> the last progress of a load that is under way."""
        self.snapshot = Snapshot()
        self.ready_info: Ready | None = None

    @property
    def in_flight(self) -> frozenset[str]:
        return frozenset(
            [stream.model_id for stream in self._streams.values()]
            + [model_id for model_id, future in self._answers.values() if not future.done()]
        )

    def subscribe(self, listener: Callable[[Any], None], *kinds: type[Event]) -> Callable[[], None]:
        """Call `listener` with every event of these kinds (none given: of all), also with a `Failed` for each request
        that a dead worker left. The answer ends the subscription. Listeners run on the event loop and must be quick.
        """
        kinds = kinds or get_args(Event)
        for kind in kinds:
            self._listeners[kind].append(listener)

        def unsubscribe() -> None:
            for kind in kinds:
                with contextlib.suppress(ValueError):
                    self._listeners[kind].remove(listener)

        return unsubscribe

    # --- requests -------------------------------------------------------------------------------------------

    def open(
        self,
        commands: Sequence[Generate],
        *,
        on_event: Callable[[StreamEvent | PacelineError], None] = lambda _event: None,
    ) -> RequestStream:
        """Send one request, prompt by prompt, as soon as a worker is ready; close the stream in the end.

        It tells `Accepted` of each prompt, `Delta`s, one `Finished` for each choice; or the PacelineError that ended
        it: ModelUnavailable for a quarantined model, WorkerGone when the worker dies or is not ready in time.
        """
        if any(command.id in self._streams for command in commands):
            raise ValueError(f"a request id of {[command.id for command in commands]} is in use")
        stream = RequestStream(commands, cancel=self._cancel_prompt, on_event=on_event, limit=self._buffer_events)
        task = asyncio.get_running_loop().create_task(self._send(stream, commands))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return stream

    async def generate(self, command: Generate) -> AsyncGenerator[StreamEvent, None]:
        """The events of one prompt, as `open` tells them. Leaving early (aclose, cancellation) cancels it."""
        stream = self.open([command])
        try:
            while (event := await stream.next()) is not None:
                yield event
        finally:
            stream.close()

    async def _send(self, stream: RequestStream, commands: Sequence[Generate]) -> None:
        try:
            await self._prepare(commands[0].model)
            for command in commands:
                if not await stream.wait_turn(command.n):
                    return
                self.send(command)
                self._streams[command.id] = stream
        except PacelineError as error:
            stream.fail(error)
        except Exception:
            _logger.exception("%s could not be sent", commands[0].id)
            stream.fail(PacelineError(INTERNAL_ERROR))

    def _cancel_prompt(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._cancel(request_id)

    async def load(self, model: ModelSpecification) -> ModelLoaded:
        """Load a unit and keep it; cancelling the caller cancels the load. Raises the PacelineError that ended it."""
        await self._prepare(model)
        loaded: ModelLoaded = await self._ask(_load(model), model.id)
        return loaded

    async def read_prompt(self, prompt: Generate) -> PromptTold:
        """The tokens of a prompt, without its model. Raises the PacelineError that refused it."""
        await self._prepare(None)
        told: PromptTold = await self._ask(ReadPrompt(id=prompt.id, prompt=prompt), "")
        return told

    def keep(self, model_id: str, *, pinned: bool | None, idle_seconds: float | None) -> None:
        """Say how long a model stays; None: as it was. Loads nothing. A worker that comes later hears it then, and one
        that comes after this one, what is pinned."""
        if pinned is None and model_id in self._kept:
            pinned = self._kept[model_id].pinned
        told = KeepModel(model_id=model_id, pinned=pinned, idle_seconds=idle_seconds)
        with contextlib.suppress(WorkerGone):
            self.send(told)
            told = msgspec.structs.replace(told, idle_seconds=None)
        self._kept[model_id] = told

    def clear_prefixes(self) -> None:
        """Let the worker forget every earlier prompt; one that is not there has none in memory."""
        with contextlib.suppress(WorkerGone):
            self.send(ClearPrefixes())

    async def unload(self, model_id: str) -> None:
        """Unload a unit. Raises ModelInUse while requests use it."""
        await self._prepare(None)
        await self._ask(UnloadModel(id=f"unload-{secrets.token_hex(8)}", model_id=model_id), model_id)

    async def _prepare(self, model: ModelSpecification | None) -> None:
        """Raises when the model may not run or no worker is there in time."""
        if model is not None:
            self._used.pop(model.id, None)
            self._used[model.id] = model
        if not self.ready and not await self.wait_ready(self._ready_seconds):
            seconds = self.retry_after_seconds
            message = f"The model worker is not running ({self.last_exit or 'it starts'}); try again in {seconds} s."
            raise WorkerGone(message, retry_after_seconds=seconds)
        reason = self.quarantined.get(model.id) if model is not None else None
        if model is not None and reason is not None:
            raise ModelUnavailable(
                f"{model.id} is quarantined: {reason}, or at once after `paceline release {model.id}`.",
                code="model_quarantined",
            )

    async def _ask(self, command: LoadModel | UnloadModel | ReadPrompt, model_id: str) -> Any:
        """What the worker answers. Raises the PacelineError that it answers instead, and when it dies."""
        future = asyncio.get_running_loop().create_future()
        self.send(command)
        self._answers[command.id] = model_id, future
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(command.id)
            raise
        finally:
            self._answers.pop(command.id, None)

    def _cancel(self, request_id: str) -> None:
        with contextlib.suppress(WorkerGone):
            self.send(Cancel(id=request_id))

    # --- what the supervisor tells ----------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case Accepted() | Delta() | Finished():
                self._put(event)
            case Failed():
                self._fail(event.id, error_of(event))
            case Heartbeat(snapshot=Snapshot() as snapshot):
                self.snapshot = snapshot
            case ModelLoaded() | ModelUnloaded() | PromptTold():
                _, future = self._answers.get(event.id, ("", None))
                if future is not None and not future.done():
                    future.set_result(event)
            case LoadProgress():
                self.progress.pop(event.model_id, None)
                if event.phase not in LOAD_ENDED:
                    self.progress[event.model_id] = event
            case Ready():
                self.ready_info = event
                self._restore()
        self._publish(event)

    def _restore(self) -> None:
        """Tell a new worker what the last one had heard of models that stay, and let it load what that one had."""
        for told in tuple(self._kept.values()):
            self.keep(told.model_id, pinned=told.pinned, idle_seconds=told.idle_seconds)
        for model in reversed(self._used.values()):
            if model.id in self._lost - self.quarantined.keys():
                self.send(_load(model))

    def _on_exit(self, cause: Reason) -> None:
        message = (
            f"The model worker ended while the request ran: {cause}. It is being restarted; send the request again."
        )
        for request_id in (*self._streams, *self._answers):
            error = WorkerGone(message, retry_after_seconds=self.retry_after_seconds)
            if self._fail(request_id, error):
                self._publish(failed_frame(request_id, error))
        # Where workers end one after the other, what they had may be why.
        loaded = () if self._pause_seconds else self.snapshot.models
        self._lost = frozenset(model.id for model in loaded if model.state == "ready")
        self.progress.clear()
        self.snapshot = Snapshot()
        self.ready_info = None

    def _put(self, event: StreamEvent) -> None:
        stream = self._streams.get(event.id)
        if stream is not None:
            stream.put(event)
            if not stream.is_open(event.id):
                self._streams.pop(event.id, None)

    def _fail(self, request_id: str, error: PacelineError) -> bool:
        """False when the request had ended, or is nobody's."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)
            return True
        _, future = self._answers.get(request_id, ("", None))
        if future is None or future.done():
            return False
        future.set_exception(error)
        return True

    def _publish(self, event: Event) -> None:
        for listener in tuple(self._listeners[type(event)]):
            try:
                listener(event)
            except Exception:  # a broken page must not stop the answers
                _logger.exception("a listener failed")


def _load(model: ModelSpecification) -> LoadModel:
    return LoadModel(id=f"load-{secrets.token_hex(8)}", model=model)
