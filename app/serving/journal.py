"""What runs now and what ran: a record of each generation request, a short ring of the last ones, and their history.

Requests that ended are written about once a second, together, in a thread. A history that cannot be written costs
entries of the history and nothing else; `limit` says how many may be remembered now.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from app.core.errors import PacelineError
from app.core.messages import Event, Finished, LoadProgress
from app.core.past import Past
from app.core.ports import Clock
from app.serving.record import CANCELLED, Asked, Record

RING = 100
PENDING = 2_000
"""Ended requests that wait to be written; while nothing can be written, the oldest are forgotten."""
PERIOD_SECONDS = 1.0
TRIES = 10

logger = logging.getLogger(__name__)


class History(Protocol):
    """Where requests that ended are kept. Calls write a file: make them in a thread. Raises `PacelineError`."""

    def keep(self, requests: Sequence[Past], limit: int) -> None:
        """Add these, and forget the oldest beyond `limit`."""

    def latest(self, count: int) -> list[Past]:
        """The last ones, the latest first."""

    def clear(self) -> None:
        """Forget all of them."""


class Journal:
    """Called from the event loop only. `limit` and `keeps_texts` are asked at use, so that changes are felt at once."""

    def __init__(
        self,
        history: History | None = None,
        *,
        limit: Callable[[], int] = lambda: RING,
        keeps_texts: Callable[[], bool] = lambda: False,
        clock: Clock = time.monotonic,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._history = history
        """None: nothing is kept."""
        self._limit = limit
        self._keeps_texts = keeps_texts
        self._clock = clock
        self._period_seconds = period_seconds
        self._running: dict[str, Record] = {}
        self._unaccounted: deque[Record] = deque(maxlen=RING)
        """Cancelled ones whose figures the worker has still to tell."""
        self._recent: deque[Past] = deque(maxlen=RING)
        self._pending: deque[Past] = deque(maxlen=PENDING)
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._failures = 0

    # --- requests ---------------------------------------------------------------------------------------------

    def open(self, asked: Asked) -> Record:
        """A record for a request; it runs from `Record.begin` on."""
        keeps_texts = self._keeps_texts() and self._limit() > 0
        return Record(asked, clock=self._clock, keeps_texts=keeps_texts, begun=self._begun, ended=self._ended)

    def hear(self, event: Event) -> None:
        """Listen to the worker: loads that requests wait for, and the figures of cancelled ones."""
        if isinstance(event, LoadProgress):
            for record in self._running.values():
                if record.asked.model_id == event.model_id:
                    record.loading(event)
        elif isinstance(event, Finished):
            for record in [each for each in self._unaccounted if event.id in each.asked.command_ids]:
                record.finished(event)
                if record.is_accounted:
                    self._unaccounted.remove(record)
                    self._keep(record.past())

    def cancel(self, request_id: str, error: PacelineError) -> bool:
        """End a running request with `error`; False when it does not run."""
        record = self._running.get(request_id)
        if record is not None:
            record.cancel(error)
        return record is not None

    @property
    def running(self) -> Sequence[Record]:
        """The requests that run, the oldest first."""
        return list(self._running.values())

    def find(self, request_id: str) -> Record | None:
        """A request that runs."""
        return self._running.get(request_id)

    @property
    def recent(self) -> Sequence[Past]:
        """The last requests that ended, the latest first, without texts."""
        return list(self._recent)[: max(0, self._limit())]

    def _begun(self, record: Record) -> None:
        self._running[record.asked.id] = record

    def _ended(self, record: Record) -> None:
        if self._running.pop(record.asked.id, None) is None or self._limit() <= 0:
            return
        if record.outcome == CANCELLED and not record.is_accounted:
            self._unaccounted.append(record)
        self._keep(record.past())

    def _keep(self, past: Past) -> None:
        """Remember it in the place of what was known of it before."""
        shown = replace(past, prompt=None, reply=None)
        if past.id in {each.id for each in self._recent}:
            self._recent = deque((shown if each.id == past.id else each for each in self._recent), maxlen=RING)
        else:
            self._recent.appendleft(shown)
        self._pending.append(past)
        self._wake.set()

    # --- history ----------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether something ended that is not written yet."""
        return bool(self._pending)

    def feel(self) -> None:
        """The settings changed: perhaps less is to be remembered."""
        self._wake.set()

    async def clear(self) -> None:
        """Forget every request that ended. Raises what the history raises."""
        async with self._writing:
            self._pending.clear()
            self._recent.clear()
            if self._history is not None:
                await asyncio.to_thread(self._history.clear)

    async def run(self) -> None:
        """Write what ended about once a second, until cancelled; then write the rest."""
        try:
            await self._remember()
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(self._period_seconds)
                await self.flush()
        finally:
            await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Write what ended now; what cannot be written waits for the next time."""
        async with self._writing:
            batch = list(self._pending)
            self._pending.clear()
            if self._history is None:
                return
            try:
                await asyncio.to_thread(self._history.keep, batch, self._limit())
            except PacelineError as error:
                if not self._failures:
                    logger.warning("the history of requests cannot be written: %s", error.message)
                self._put_back(batch)
            except Exception:
                logger.exception("the history of requests cannot be written")
                self._put_back(batch)
            else:
                self._failures = 0

    async def _remember(self) -> None:
        """The last requests of earlier starts."""
        if self._history is None:
            return
        try:
            self._recent.extend(await asyncio.to_thread(self._history.latest, RING))
        except PacelineError as error:
            logger.warning("the history of requests cannot be read: %s", error.message)

    def _put_back(self, batch: Iterable[Past]) -> None:
        """Try again later; what has failed too often is dropped, lest it keeps others out."""
        self._failures += 1
        if self._failures % TRIES == 0:
            return
        newer = list(self._pending)
        self._pending.clear()
        self._pending.extend([*batch, *newer])
        self._wake.set()
