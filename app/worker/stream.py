"""The events of one request on their way to its reader: bounded, ended exactly once."""

import asyncio
from collections import deque

from app.core.errors import PacelineError
from app.core.messages import Accepted, Delta, Finished

StreamEvent = Accepted | Delta | Finished


class EventStream:
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
