"""Generation requests, running and past: a short ring of the last ones, and the stored history.

Ended requests are written about once a second, in one batch, in a thread. If the history cannot be written, only its
entries are lost.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from app.core.clock import Clock
from app.core.dispensable import Dispensable
from app.core.errors import PacelineError
from app.core.messages import Event, Finished, LoadProgress
from app.core.request import FinishedRequest, Notice
from app.serving.record import CANCELLED, Record

if TYPE_CHECKING:
    from app.store.rows import RequestHistory

RING = 100
PENDING = 2_000
"""Maximum number of ended requests that wait to be written; while writing fails, the oldest are dropped."""
PERIOD_SECONDS = 1.0
TRIES = 10
MAX_KINDS = 256
"""Maximum number of kinds of notices that are logged, so that clients cannot flood the log."""

logger = logging.getLogger("paceline.journal")


class Journal:
    """Tracks all requests. Called from the event loop only; `limit` and `keeps_texts` are read at each use."""

    def __init__(
        self,
        history: "RequestHistory | None" = None,
        *,
        limit: Callable[[], int] = lambda: RING,
        keeps_texts: Callable[[], bool] = lambda: False,
        clock: Clock = time.monotonic,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        self._history = history
        """Stored history; None: nothing is stored."""
        self._limit = limit
        self._keeps_texts = keeps_texts
        self.clock = clock
        self.counting = Dispensable("the journal of requests", logger)
        self._period_seconds = period_seconds
        self._running: dict[str, Record] = {}
        self._unreported: deque[tuple[Record, FinishedRequest]] = deque(maxlen=RING)
        """Cancelled requests whose usage the worker has not reported yet, with their records so far."""
        self._recent: deque[FinishedRequest] = deque(maxlen=RING)
        self._pending: deque[FinishedRequest] = deque(maxlen=PENDING)
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._failures = 0
        self._logged: set[tuple[str, str]] = set()

    # --- requests ---------------------------------------------------------------------------------------------

    @property
    def keeps_texts(self) -> bool:
        """Whether the texts of a request that begins now are stored."""
        return self._keeps_texts() and self._limit() > 0

    def on_event(self, event: Event) -> None:
        """Handle worker events: loads that requests wait for, and the figures of cancelled requests."""
        if isinstance(event, LoadProgress):
            for record in self._running.values():
                if record.model_id == event.model_id:
                    record.on_event(event)
        elif isinstance(event, Finished):
            for record, past in list(self._unreported):
                if record.awaits(event):
                    record.add_usage(event)
                    if record.has_all_usage:
                        self._unreported.remove((record, past))
                        self._save(replace(past, figures=record.figures()))

    @property
    def running(self) -> Sequence[Record]:
        """Running requests, the oldest first."""
        return list(self._running.values())

    def find(self, request_id: str) -> Record | None:
        """Return the running request with this id."""
        return self._running.get(request_id)

    @property
    def recent(self) -> Sequence[FinishedRequest]:
        """Last requests that ended, the latest first, without texts."""
        return list(self._recent)[: max(0, self._limit())]

    def log_notices(self, notices: Iterable[Notice]) -> None:
        """Log notices, each kind once."""
        for notice in notices:
            kind = (notice.code, notice.parameter)
            if kind not in self._logged and len(self._logged) < MAX_KINDS:
                self._logged.add(kind)
                logger.info("%s (%s) (logged once)", notice.message, notice.code)

    def begun(self, record: Record) -> None:
        """Register a request as running."""
        self._running[record.id] = record

    def ended(self, record: Record) -> None:
        """Unregister a request and store its record; does nothing if it was not running."""
        if self._running.pop(record.id, None) is None or self._limit() <= 0:
            return
        past = record.past()
        if record.outcome == CANCELLED and record.awaits_usage:
            record.drop_prompts()
            self._unreported.append((record, past))
        self._save(past)

    def _save(self, past: FinishedRequest) -> None:
        """Store a record, replacing an earlier one of the same request."""
        without_texts = replace(past, prompt=None, reply=None)
        if past.id in {recent.id for recent in self._recent}:
            self._recent = deque(
                (without_texts if recent.id == past.id else recent for recent in self._recent), maxlen=RING
            )
        else:
            self._recent.appendleft(without_texts)
        self._pending.append(past)
        self._wake.set()

    # --- history ----------------------------------------------------------------------------------------------

    @property
    def has_unwritten(self) -> bool:
        """Whether ended requests wait to be written, or are being written now."""
        return bool(self._pending) or self._writing.locked()

    def on_settings_changed(self) -> None:
        """Apply a changed limit at the next write."""
        self._wake.set()

    async def clear(self) -> None:
        """Delete every request that has ended by now; if the history raises an error, keep all and raise it."""
        async with self._writing:
            unreported = (past for _, past in self._unreported)
            ended = {past.id for past in (*self._recent, *self._pending, *unreported)}
            if self._history is not None:
                await asyncio.to_thread(self._history.clear)
            self._pending = deque((past for past in self._pending if past.id not in ended), PENDING)
            self._recent = deque((past for past in self._recent if past.id not in ended), RING)
            self._unreported = deque((entry for entry in self._unreported if entry[1].id not in ended), RING)

    async def run(self) -> None:
        """Write ended requests about once a second until cancelled, then the rest."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(self._period_seconds)
                await asyncio.shield(self.flush())
        finally:
            await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Write ended requests now; what cannot be written waits for the next time."""
        async with self._writing:
            batch = list(self._pending)
            self._pending.clear()
            if self._history is None:
                return
            try:
                await asyncio.to_thread(self._history.save, batch, self._limit())
            except PacelineError as error:
                if not self._failures:
                    logger.warning("the history of requests cannot be written: %s", error.message)
                self._requeue(batch)
            except Exception:
                logger.exception("the history of requests cannot be written")
                self._requeue(batch)
            else:
                self._failures = 0

    async def load_recent(self) -> None:
        """Load the last requests of earlier runs. Call this before any request of this run ends."""
        if self._history is None:
            return
        try:
            self._recent.extend(await asyncio.to_thread(self._history.page, count=RING))
        except PacelineError as error:
            logger.warning("the history of requests cannot be read: %s", error.message)

    def _requeue(self, batch: Iterable[FinishedRequest]) -> None:
        """Requeue a batch; drop it after every `TRIES` failures in a row, so that it does not block newer requests."""
        self._failures += 1
        if self._failures % TRIES == 0:
            return
        newer = list(self._pending)
        self._pending.clear()
        self._pending.extend([*batch, *newer])
        self._wake.set()
