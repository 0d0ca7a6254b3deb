"""Which generation requests are open, and whether new ones may begin: the valve of a clean shutdown."""

import asyncio
from collections.abc import Callable

from app.core.errors import ModelUnavailable, QueueFull
from app.worker.client import RequestStream


class Activity:
    """The open generation requests. Called from the event loop only; `limit` tells how many there may be now."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._open: set[RequestStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = asyncio.Event()
        self.draining = False

    def __len__(self) -> int:
        return len(self._open)

    def check_open(self) -> None:
        """Raise `ModelUnavailable` while draining, `QueueFull` when too many requests are open."""
        if self.draining:
            raise ModelUnavailable("Paceline is shutting down.", code="shutting_down", retry_after_seconds=5)
        if len(self._open) >= self._limit():
            raise QueueFull("Too many requests are open: try again in a moment.", retry_after_seconds=1)

    def enter(self, request: RequestStream) -> None:
        """Count `request` as open until `leave`. Raises as `check_open` does."""
        self.check_open()
        self._open.add(request)
        self._idle.clear()
        self._busy.set()

    def leave(self, request: RequestStream) -> None:
        """`request` ended; a second call does nothing."""
        self._open.discard(request)
        if not self._open:
            self._idle.set()
            self._busy.clear()

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._idle.wait()

    async def wait_busy(self) -> None:
        """Until a request is open."""
        await self._busy.wait()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give open ones `seconds` to finish, then end the rest with an error."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for request in list(self._open):
                request.fail(
                    ModelUnavailable("Paceline shut down before the answer was complete.", code="shutting_down")
                )
