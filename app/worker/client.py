"""What the server asks of the worker, as asyncio calls: generate, load, unload, and what is known of its state.

Runs on the event loop of the server process and never imports the engine. Every request ends in exactly one way:
all choices finished, one error, or its reader left (which cancels it in the worker).
"""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from app.core.errors import InvalidRequest, ModelUnavailable, PacelineError, WorkerGone
from app.core.messages import (
    Accepted,
    Cancel,
    Command,
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
    Ready,
    Snapshot,
    UnloadModel,
)
from app.core.reason import Reason
from app.worker.failure import error_of, failed_frame

StreamEvent = Accepted | Delta | Finished


class RequestEvents:
    """A queue of at most `limit` events for one reader on the event loop."""

    def __init__(self, model_id: str, choices: int, limit: int) -> None:
        self.model_id = model_id
        self._open_choices = choices
        self._limit = limit
        self._events: deque[StreamEvent] = deque()
        self._error: PacelineError | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether the last event or an error has been put in; nothing follows it."""
        return self._error is not None or self._open_choices == 0

    def put(self, event: StreamEvent) -> bool:
        """Take one event; False when the reader is too slow and the stream failed because of it."""
        if self.ended:
            return True
        if len(self._events) >= self._limit:
            self.fail(PacelineError("The client does not read its answer.", code="client_too_slow"))
            return False
        self._events.append(event)
        if isinstance(event, Finished):
            self._open_choices -= 1
        self._changed.set()
        return True

    def fail(self, error: PacelineError) -> None:
        """End with `error`, which the reader gets after the events that are already here."""
        if not self.ended:
            self._error = error
            self._changed.set()

    async def get(self) -> StreamEvent | None:
        """The next event, None after the last one. Raises the error that ended the stream."""
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._open_choices == 0:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()


BUFFER_EVENTS = 4096
READY_SECONDS = 20.0
LOAD_ENDED = frozenset({"ready", "failed"})
"""The phases of the last `LoadProgress` of a load."""

_logger = logging.getLogger("paceline.client")


class WorkerLink(Protocol):
    """What the client needs of a supervisor."""

    restarts: int
    last_exit: Reason

    @property
    def ready(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def quarantined(self) -> Mapping[str, Reason]: ...

    def attach(self, listener: "WorkerClient") -> None: ...

    @property
    def retry_after_seconds(self) -> int: ...

    def release_quarantine(self, model_id: str) -> bool: ...

    def renew(self, drain_seconds: float = 0.0) -> None: ...

    async def wait_ready(self, seconds: float) -> bool: ...

    def send(self, command: Command) -> None: ...


class WorkerClient:
    """One per server process; attaches itself to `link`."""

    def __init__(
        self, link: WorkerLink, *, buffer_events: int = BUFFER_EVENTS, ready_seconds: float = READY_SECONDS
    ) -> None:
        self._link = link
        self._buffer_events = buffer_events
        self._ready_seconds = ready_seconds
        self._streams: dict[str, RequestEvents] = {}
        self._answers: dict[str, tuple[str, asyncio.Future[ModelLoaded | ModelUnloaded]]] = {}
        self._listeners: list[Callable[[Event], None]] = []
        self._progress: dict[str, LoadProgress] = {}
        self.snapshot = Snapshot()
        self.ready_info: Ready | None = None
        link.attach(self)

    # --- state ----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a worker runs and takes requests."""
        return self._link.ready

    @property
    def draining(self) -> bool:
        """Whether the worker finishes what runs before another one takes its place."""
        return self._link.draining

    @property
    def restarts(self) -> int:
        """How often the worker was started again."""
        return self._link.restarts

    @property
    def last_exit(self) -> Reason:
        """Why the last worker ended; none when none has."""
        return self._link.last_exit

    @property
    def quarantined(self) -> Mapping[str, Reason]:
        """Model id -> why it is kept from running."""
        return self._link.quarantined

    @property
    def progress(self) -> Mapping[str, LoadProgress]:
        """Model id -> the last progress of a load that is under way."""
        return MappingProxyType(self._progress)

    @property
    def in_flight(self) -> frozenset[str]:
        """The models of which an answer of the worker is waited for."""
        return frozenset(
            [stream.model_id for stream in self._streams.values() if not stream.ended]
            + [model_id for model_id, future in self._answers.values() if not future.done()]
        )

    @property
    def retry_after_seconds(self) -> int:
        """When a worker should be ready for who asks again then."""
        return self._link.retry_after_seconds

    def release_quarantine(self, model_id: str) -> None:
        """Let a model run again. Raises InvalidRequest when it is not quarantined."""
        if not self._link.release_quarantine(model_id):
            message = f"{model_id} is not quarantined: `paceline ps` names the models that are."
            raise InvalidRequest(message, code="not_quarantined", parameter="model")

    def renew(self, drain_seconds: float = 0.0) -> None:
        """Replace the worker once its running requests have finished, or after so many seconds."""
        self._link.renew(drain_seconds)

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event, also with a `Failed` for each request that a dead worker left.

        The answer ends the subscription. Listeners run on the event loop and must be quick.
        """
        self._listeners.append(listener)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    # --- requests -------------------------------------------------------------------------------------------

    async def generate(self, command: Generate) -> AsyncGenerator[StreamEvent, None]:
        """`Accepted`, then `Delta`s, and one `Finished` for each of the `n` choices; then it ends.

        Leaving early (aclose, cancellation) cancels the request in the worker. Raises the PacelineError that ended
        it: ModelUnavailable for a quarantined model, WorkerGone when the worker dies or is not ready in time.
        """
        await self._prepare(command.model.id)
        if command.id in self._streams:
            raise ValueError(f"the request id {command.id} is in use")
        stream = RequestEvents(command.model.id, command.n, self._buffer_events)
        self._link.send(command)
        self._streams[command.id] = stream
        try:
            while (event := await stream.get()) is not None:
                yield event
        finally:
            self._streams.pop(command.id, None)
            if not stream.ended:
                self._cancel(command.id)

    async def load(self, model: ModelSpecification) -> ModelLoaded:
        """Load a unit and keep it; cancelling the caller cancels the load. Raises the PacelineError that ended it."""
        await self._prepare(model.id)
        request_id = f"load-{secrets.token_hex(8)}"
        answer = await self._ask(LoadModel(id=request_id, model=model), request_id, model.id)
        if not isinstance(answer, ModelLoaded):
            raise PacelineError("The worker answered a load with something else.")
        return answer

    def keep(self, model_id: str, *, pinned: bool | None, idle_seconds: float | None) -> None:
        """Say how long a model stays, if a worker runs; None: as it was. Loads nothing."""
        with contextlib.suppress(WorkerGone):
            self._link.send(KeepModel(model_id=model_id, pinned=pinned, idle_seconds=idle_seconds))

    async def unload(self, model_id: str) -> None:
        """Unload a unit. Raises ModelUnavailable while requests use it."""
        await self._prepare(None)
        request_id = f"unload-{secrets.token_hex(8)}"
        await self._ask(UnloadModel(id=request_id, model_id=model_id), request_id, model_id)

    async def _prepare(self, model_id: str | None) -> None:
        """Raises when the model may not run or no worker is there in time."""
        if not self._link.ready and not await self._link.wait_ready(self._ready_seconds):
            seconds = self._link.retry_after_seconds
            message = f"The model worker is not running ({self.last_exit or 'it starts'}); try again in {seconds} s."
            raise WorkerGone(message, retry_after_seconds=seconds)
        reason = self._link.quarantined.get(model_id) if model_id is not None else None
        if reason is not None:
            raise ModelUnavailable(
                f"{model_id} is quarantined: {reason}, or at once after `paceline release {model_id}`.",
                code="model_quarantined",
            )

    async def _ask(self, command: LoadModel | UnloadModel, request_id: str, model_id: str) -> Event:
        future: asyncio.Future[ModelLoaded | ModelUnloaded] = asyncio.get_running_loop().create_future()
        self._link.send(command)
        self._answers[request_id] = (model_id, future)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(request_id)
            raise
        finally:
            self._answers.pop(request_id, None)

    def _cancel(self, request_id: str) -> None:
        with contextlib.suppress(WorkerGone):
            self._link.send(Cancel(id=request_id))

    # --- what the supervisor tells ----------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """One event of the worker; called by the supervisor."""
        match event:
            case Accepted() | Delta() | Finished():
                self._put(event)
            case Failed():
                self._fail(event.id, error_of(event))
            case Heartbeat(snapshot=Snapshot() as snapshot):
                self.snapshot = snapshot
            case ModelLoaded() | ModelUnloaded():
                _, future = self._answers.get(event.id, ("", None))
                if future is not None and not future.done():
                    future.set_result(event)
            case LoadProgress():
                self._progress.pop(event.model_id, None)
                if event.phase not in LOAD_ENDED:
                    self._progress[event.model_id] = event
            case Ready():
                self.ready_info = event
        self._publish(event)

    def worker_gone(self, cause: str) -> None:
        """Fail everything in flight; called by the supervisor."""
        message = (
            f"The model worker ended while the request ran: {cause}. It is being restarted; send the request again."
        )
        for request_id in (*self._streams, *self._answers):
            error = WorkerGone(message, retry_after_seconds=self._link.retry_after_seconds)
            if self._fail(request_id, error):
                self._publish(failed_frame(request_id, error))
        self._progress.clear()
        self.snapshot = Snapshot()
        self.ready_info = None

    def _put(self, event: StreamEvent) -> None:
        stream = self._streams.get(event.id)
        if stream is not None and not stream.put(event):
            _logger.warning("cancelled %s: its client does not read", event.id)
            self._cancel(event.id)

    def _fail(self, request_id: str, error: PacelineError) -> bool:
        """False when the request had ended, or is nobody's."""
        stream = self._streams.get(request_id)
        if stream is not None:
            ended = stream.ended
            stream.fail(error)
            return not ended
        _, future = self._answers.get(request_id, ("", None))
        if future is None or future.done():
            return False
        future.set_exception(error)
        return True

    def _publish(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:  # a broken page must not stop the answers
                _logger.exception("a listener failed")
