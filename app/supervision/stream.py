"""The events of one request, from the worker to the one reader of its answer. Runs on the server's event loop."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from app.core.clock import Alarm
from app.core.errors import PacelineError
from app.core.messages import Accepted, Delta, Finished, Generate

StreamEvent = Accepted | Delta | Finished

BUFFER_EVENTS = 4096
MAX_IN_FLIGHT = 64
"""Limit on choices of one request in the worker at a time (two encoder batches), so that other requests get turns."""

logger = logging.getLogger("paceline.client")


class RequestStream:
    """The events of all prompts of one request, in one queue of at most `limit` events for one reader.

    Many prompts are sent to the worker a few at a time, so that they neither fill its queue nor delay other requests.
    `on_event` is called with each event as it arrives, and with an error that ends the request; it must not raise.
    `cancel` cancels one prompt in the worker. Choices are numbered across prompts: prompt × n + index.
    """

    def __init__(
        self,
        commands: Sequence[Generate],
        *,
        cancel: Callable[[str], None],
        on_event: Callable[[StreamEvent | PacelineError], None] = lambda _event: None,
        limit: int = BUFFER_EVENTS,
    ) -> None:
        self.model = commands[0].model
        self.model_id = self.model.id
        self._first_choices = {command.id: position * command.n for position, command in enumerate(commands)}
        self._open_choices = {command.id: command.n for command in commands}
        """Number of open choices, for each prompt that has not ended."""
        self._unaccepted = set(self._open_choices)
        self._cancel = cancel
        self._on_event = on_event
        self._limit = limit
        self._events: deque[StreamEvent] = deque()
        self._error: PacelineError | None = None
        self._changed = asyncio.Event()
        self._in_flight = 0
        """Number of choices that are in the worker."""
        self._max_in_flight = min(MAX_IN_FLIGHT, max(1, commands[0].model.live.queue_limit // 2))
        self._slot_freed = asyncio.Event()
        """Event that is set when a choice leaves the worker, or when nothing more will be sent."""
        self._alarm = Alarm(self._on_timeout)
        self._timed_out = False
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether further events are ignored: the last event or an error has arrived, or the reader has left."""
        return self._closed or self._error is not None or not self._open_choices

    @property
    def running(self) -> bool:
        """Whether `next` still has something to return or raise."""
        return bool(self._events or self._open_choices or self._error)

    def is_open(self, request_id: str) -> bool:
        """Return whether this prompt has not ended yet."""
        return not self.ended and request_id in self._open_choices

    def choice(self, event: Delta | Finished) -> int:
        """Return the number of the choice that an event belongs to."""
        return self._first_choices[event.id] + event.index

    def put(self, event: StreamEvent) -> None:
        """Queue one event of the worker; if the reader is too slow, the request fails."""
        if self.ended:
            return
        if len(self._events) >= self._limit:
            logger.warning("cancelled %s: its client does not read", event.id)
            self.fail(PacelineError("The client does not read its answer.", code="client_too_slow"))
            return
        self._on_event(event)
        if isinstance(event, Accepted):
            self._unaccepted.discard(event.id)
        elif isinstance(event, Finished):
            self._open_choices[event.id] -= 1
            self._in_flight -= 1
            self._slot_freed.set()
            if not self._open_choices[event.id]:
                del self._open_choices[event.id]
        self._events.append(event)
        self._changed.set()

    def fail(self, error: PacelineError) -> None:
        """End with `error`, which the reader gets after the queued events; cancel the open prompts."""
        if not self.ended:
            self._error = error.with_traceback(None)  # the frames of a traceback would keep the prompt in memory
            self._on_event(error)
            self._cancel_open()
            self._changed.set()
            self._slot_freed.set()

    async def next(self, seconds: float | None = None) -> StreamEvent | None:
        """Return the next event; None after the last, or if none comes in time. Raises the error of the request."""
        if not self._events:
            await self._wait(lambda: bool(self._events) or self.ended, seconds)
        if self._events:
            return self._events.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def wait_turn(self, choices: int) -> bool:
        """Wait until `choices` more choices may be sent; count them as in flight. False if the request has ended."""
        while not self.ended and self._in_flight and self._in_flight + choices > self._max_in_flight:
            self._slot_freed.clear()
            await self._slot_freed.wait()
        self._in_flight += choices
        return not self.ended

    async def wait_accepted(self, seconds: float) -> None:
        """Return once the worker has accepted every prompt, or after `seconds`. Raises an error that came first."""
        await self._wait(lambda: not self._unaccepted or self.ended, seconds)
        if self._unaccepted and self._error is not None:
            raise self._error

    def close(self) -> None:
        """Cancel the open prompts, because the reader leaves. Never blocks, may be called twice."""
        if not self.ended:
            self._cancel_open()
        self._closed = True
        self._slot_freed.set()
        self._alarm.close()

    async def _wait(self, condition: Callable[[], bool], seconds: float | None) -> None:
        """Wait until `condition()` is true, or for `seconds`."""
        self._timed_out = False
        if seconds is not None:
            self._alarm.set(seconds)
        while not condition() and not self._timed_out:
            self._changed.clear()
            await self._changed.wait()
        self._alarm.disarm()

    def _on_timeout(self) -> None:
        self._timed_out = True
        self._changed.set()

    def _cancel_open(self) -> None:
        for request_id in tuple(self._open_choices):
            self._cancel(request_id)
