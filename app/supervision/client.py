"""The worker's interface for the server, as asyncio calls: generate, load, unload, and its state.

Runs on the event loop of the server process and never imports the engine. Every request ends in exactly one way: all
choices finish, one error ends it, or its reader leaves (which cancels it in the worker).
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, get_args

from app.core.errors import ModelInUse, ModelUnavailable, PacelineError, WorkerGone
from app.core.messages import (
    Accepted,
    Cancel,
    ClearPrefixes,
    Command,
    Delta,
    Event,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    KeepModels,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    ModelUnloaded,
    PromptTokens,
    ReadPrompt,
    Ready,
    UnloadModel,
    error_of,
    failed_frame,
)
from app.core.reason import Reason
from app.core.unit import UNSPECIFIED_STAY, ModelSpecification, Stay
from app.supervision.book import ModelBook
from app.supervision.stream import BUFFER_EVENTS, RequestStream, StreamEvent
from app.supervision.supervisor import Supervisor

INTERNAL_ERROR = "Internal error: see the log of the server."
READY_SECONDS = 20.0

logger = logging.getLogger("paceline.client")


class WorkerClient(Supervisor):
    """The client of the worker, one per server process; `options` are those of `Supervisor`."""

    def __init__(
        self, *, buffer_events: int = BUFFER_EVENTS, ready_seconds: float = READY_SECONDS, **options: Any
    ) -> None:
        super().__init__(**options)
        self._buffer_events = buffer_events
        self._ready_seconds = ready_seconds
        self._streams: dict[str, RequestStream] = {}
        """Stream of each prompt that has not ended in the worker, by prompt id."""
        self._send_tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[str, tuple[str, asyncio.Future[Any]]] = {}
        """Model id and future of each load, unload and `ReadPrompt`, by command id."""
        self._listeners: dict[type[Event], list[Callable[[Any], None]]] = {kind: [] for kind in get_args(Event)}
        self._restoring: dict[str, str] = {}
        """Model id of each load with which a new worker restores a model, by command id."""
        self.book = ModelBook()
        self.ready_info: Ready | None = None

    @property
    def in_flight(self) -> frozenset[str]:
        """Ids of the models with requests in progress; also safe in other threads."""
        streams, pending = tuple(self._streams.values()), tuple(self._pending.values())
        return frozenset(
            [stream.model_id for stream in streams] + [model_id for model_id, future in pending if not future.done()]
        )

    def subscribe(self, listener: Callable[[Any], None], *kinds: type[Event]) -> Callable[[], None]:
        """Call `listener` with every event of these kinds (none given: all), and with a `Failed` for each request of a
        dead worker. Returns a function that unsubscribes. Listeners run on the event loop and must be quick.
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
        """Send one request, prompt by prompt, as soon as a worker is ready. The caller has to close the stream.

        The stream has one `Accepted` per prompt, `Delta`s, and one `Finished` per choice; or it raises the error
        that ended it: ModelUnavailable for a quarantined model, WorkerGone if the worker dies or is not ready in time.
        """
        if any(command.id in self._streams for command in commands):
            raise ValueError(f"a request id of {[command.id for command in commands]} is in use")
        stream = RequestStream(commands, cancel=self._cancel_prompt, on_event=on_event, limit=self._buffer_events)
        task = asyncio.get_running_loop().create_task(self._send(stream, commands))
        self._send_tasks.add(task)
        task.add_done_callback(self._send_tasks.discard)
        return stream

    async def generate(self, command: Generate) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events of one prompt, as `open` describes. Leaving early (aclose, cancellation) cancels it."""
        stream = self.open([command])
        try:
            while (event := await stream.next()) is not None:
                yield event
        finally:
            stream.close()

    async def _send(self, stream: RequestStream, commands: Sequence[Generate]) -> None:
        try:
            for command in commands:
                if not await stream.wait_turn(command.n):
                    return
                await self._prepare(command.model)  # while a worker drains, further prompts of a request wait
                if stream.ended:
                    return
                self.send(command)
                self._streams[command.id] = stream
        except PacelineError as error:
            stream.fail(error)
        except Exception:
            logger.exception("%s could not be sent", commands[0].id)
            stream.fail(PacelineError(INTERNAL_ERROR))

    def _cancel_prompt(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._cancel(request_id)

    def send(self, command: Command) -> None:
        """Queue a command, as `Supervisor.send` does; a model that an earlier worker had keeps its stay."""
        super().send(self.book.with_former_stay(command) if isinstance(command, Generate | LoadModel) else command)

    def unit(self, model_id: str) -> ModelSpecification | None:
        """Return the unit with which a model is, or soon will be, in memory, as defined by `ModelBook.unit`."""
        return self.book.unit(model_id, in_flight=model_id in self.in_flight)

    async def load(self, model: ModelSpecification, stay: Stay = UNSPECIFIED_STAY) -> ModelLoaded:
        """Load a unit and keep it for `stay`; cancelling the caller cancels the load. Raises the PacelineError that
        ended it."""
        await self._prepare(model)
        loaded: ModelLoaded = await self._request(_load(model, stay), model.id)
        return loaded

    async def read_prompt(self, prompt: Generate) -> PromptTokens:
        """Return the tokens of a prompt, without loading its model. Raises the PacelineError that refused it."""
        await self._prepare(None)
        answer: PromptTokens = await self._request(ReadPrompt(id=prompt.id, prompt=prompt), "")
        return answer

    def keep(self, settings: KeepModels) -> None:
        """Set how long models stay in memory, in this worker and in every later one. Loads nothing."""
        if self.book.keep(settings):
            with contextlib.suppress(WorkerGone):
                self.send(settings)

    def clear_prefixes(self) -> None:
        """Clear the worker's prefix cache; without a worker, there is no cache in memory."""
        with contextlib.suppress(WorkerGone):
            self.send(ClearPrefixes())

    async def unload(self, model_id: str) -> None:
        """Unload a unit. Raises ModelInUse while it is leased."""
        await self._prepare(None)
        self.book.forget(model_id)
        await self._request(UnloadModel(id=f"unload-{secrets.token_hex(8)}", model_id=model_id), model_id)

    async def _prepare(self, model: ModelSpecification | None) -> None:
        """Wait for the worker. Raises if the model is quarantined or no worker is ready in time."""
        if model is not None:
            self.book.request(model)
        if not self.ready and not await self.wait_ready(self._ready_seconds):
            seconds = self.retry_after_seconds
            state = "restarting" if self.draining else self.last_exit or "starting"
            message = f"The model worker is not running ({state}); try again in {seconds} s."
            raise WorkerGone(message, retry_after_seconds=seconds)
        reason = self.quarantined.get(model.id) if model is not None else None
        if model is not None and reason is not None:
            raise ModelUnavailable(
                f"{model.id} is quarantined: {reason}, or at once after `paceline release {model.id}`.",
                code="model_quarantined",
                retry_after_seconds=60 * int(reason.values["again"]),
            )

    async def _request(self, command: LoadModel | UnloadModel | ReadPrompt, model_id: str) -> Any:
        """Send a command and return the worker's answer. Raises its PacelineError, and WorkerGone if it dies."""
        future = asyncio.get_running_loop().create_future()
        self.send(command)
        self._pending[command.id] = model_id, future
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(command.id)
            raise
        finally:
            self._pending.pop(command.id, None)

    def _cancel(self, request_id: str) -> None:
        with contextlib.suppress(WorkerGone):
            self.send(Cancel(id=request_id))

    # --- events of the supervisor -----------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case Accepted() | Delta() | Finished():
                self._route(event)
            case Failed():
                self._fail(event.id, error_of(event))
                if model_id := self._restoring.pop(event.id, ""):
                    logger.warning("%s could not be loaded again: %s", model_id, error_of(event).message)
                    self.book.not_restored(model_id)
            case ModelLoaded() | ModelUnloaded() | PromptTokens():
                _, future = self._pending.get(event.id, ("", None))
                if future is not None and not future.done():
                    future.set_result(event)
            case Heartbeat() | LoadProgress():
                self.book.handle(event)
            case Ready():
                self.ready_info = event
                self._restore()
        self._publish(event)

    def _restore(self) -> None:
        """Send a new worker the settings for stays, and have it load the models that the last worker had."""
        self.send(self.book.settings)
        loads = [_load(unit, UNSPECIFIED_STAY) for unit in self.book.to_restore(self.quarantined)]
        self._restoring = {load.id: load.model.id for load in loads}
        for load in loads:
            self.send(load)

    def _on_exit(self, cause: Reason, pause_seconds: float) -> None:
        advice = "Send the request again once Paceline runs."
        if cause.code != "exit_stopped":
            advice = "It is being restarted; send the request again."
        message = f"The model worker ended while the request ran: {cause}. {advice}"
        for request_id in (*self._streams, *self._pending):
            error = WorkerGone(message, retry_after_seconds=self.retry_after_seconds)
            if self._fail(request_id, error):
                self._publish(failed_frame(request_id, error))
        # Nothing is restored after crashes in quick succession: a loaded model may be their cause.
        self.book.handle_exit(may_restore=not pause_seconds)
        self.ready_info = None

    def _route(self, event: StreamEvent) -> None:
        stream = self._streams.get(event.id)
        if stream is not None:
            stream.put(event)
            if not stream.is_open(event.id):
                self._streams.pop(event.id, None)

    def _fail(self, request_id: str, error: PacelineError) -> bool:
        """Fail a request; return False if it has ended or is unknown."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)
            if isinstance(error, ModelInUse):
                self._request_unit_in_use(stream.model_id)
            return True
        _, future = self._pending.get(request_id, ("", None))
        if future is None or future.done():
            return False
        future.set_exception(error)
        return True

    def _request_unit_in_use(self, model_id: str) -> None:
        """Make the unit that is in use the one requested last, once another unit of the model was refused for it."""
        unit = next((stream.model for stream in self._streams.values() if stream.model_id == model_id), None)
        if unit is not None:
            self.book.request(unit)

    def _publish(self, event: Event) -> None:
        for listener in tuple(self._listeners[type(event)]):
            try:
                listener(event)
            except Exception:  # a broken listener must not stop the answers
                logger.exception("a listener failed")


def _load(model: ModelSpecification, stay: Stay) -> LoadModel:
    return LoadModel(id=f"load-{secrets.token_hex(8)}", model=model, stay=stay)
