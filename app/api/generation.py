"""One HTTP request's generations: the event streams of its prompts, merged, measured and ended together.

Each prompt has a task that reads the worker's client, so that leaving (`close`) never waits and always cancels: the
task closes the client's generator on its own time. `choice` counts over prompts: prompt × n + index.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from app.core.errors import CONTEXT_OVERFLOW, PacelineError
from app.core.messages import Accepted, Delta, Finished, Generate
from app.core.ports import Clock
from app.core.prompt_size import check_prompt
from app.serving.measurements import Measurements
from app.serving.record import Record
from app.worker.client import WorkerClient

QUEUE_EVENTS = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """One event of one choice."""

    choice: int
    event: Delta | Finished


class Generation:
    """Runs `commands` (one per prompt, all for one model); `close` must be called in the end."""

    def __init__(
        self,
        worker: WorkerClient,
        commands: Sequence[Generate],
        measurements: Measurements,
        clock: Clock,
        record: Record,
    ) -> None:
        self._worker = worker
        self._record = record
        self._commands = commands
        self._measurements = measurements
        self._clock = clock
        self._began = clock()
        self._told_at: dict[int, float] = {}
        self._queue: asyncio.Queue[ChoiceEvent | PacelineError] = asyncio.Queue(QUEUE_EVENTS)
        self._error: PacelineError | None = None
        self._accepted: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._unfinished = sum(command.n for command in commands)

    @property
    def model_id(self) -> str:
        """The model that all prompts are for."""
        return self._commands[0].model.id

    @property
    def running(self) -> bool:
        """Whether a choice is still to finish."""
        return self._unfinished > 0

    def start(self) -> None:
        """Send every prompt to the worker."""
        loop = asyncio.get_running_loop()
        self._record.begin(self.abort)
        self._accepted = [loop.create_future() for _ in self._commands]
        self._tasks = [loop.create_task(self._pump(position)) for position in range(len(self._commands))]

    async def wait_accepted(self, timeout_seconds: float) -> None:
        """Return when the worker took every prompt, or after the timeout. Raises the first error."""
        done, _ = await asyncio.wait(self._accepted, timeout=timeout_seconds, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()

    async def next(self, timeout_seconds: float | None = None) -> ChoiceEvent | None:
        """The next event; None when nothing happened in time. Raises the error that ended the request."""
        if self._error is not None and self._queue.empty():
            raise self._error
        try:
            async with asyncio.timeout(timeout_seconds):
                item = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(item, PacelineError):
            raise item
        if isinstance(item.event, Finished):
            self._unfinished -= 1
        return item

    def abort(self, error: PacelineError) -> None:
        """End the request with `error`; its reader gets it after what is already here."""
        if self._error is None:
            self._error = error
            self._record.failed(error)
            self._cancel_tasks()
            with contextlib.suppress(asyncio.QueueFull):
                self._queue.put_nowait(error)  # wakes a waiting reader; one with a full queue does not wait

    def close(self) -> None:
        """Cancel what still runs; never waits, may be called twice."""
        self._cancel_tasks()
        self._record.close()
        for future in self._accepted:
            if future.done() and not future.cancelled():
                future.exception()  # somebody looked: asyncio need not warn
            future.cancel()

    async def _pump(self, position: int) -> None:
        try:
            await self._read(position)
        except PacelineError as error:
            self._fail(position, error.with_traceback(None))  # which would keep the prompt
        except Exception:
            logger.exception("%s: a generation failed in the server", self._commands[position].id)
            self._fail(position, PacelineError("Internal error: see the log of the server."))

    async def _read(self, position: int) -> None:
        command = self._commands[position]
        check_prompt(command)
        unfinished = command.n
        async with contextlib.aclosing(self._worker.generate(command)) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    self._accept(position, event)
                    continue
                choice = position * command.n + event.index
                self._measure(choice, event)
                await self._queue.put(ChoiceEvent(choice, event))
                unfinished -= isinstance(event, Finished)
        if unfinished:
            raise PacelineError("The worker ended the request without finishing it.")

    def _accept(self, position: int, event: Accepted) -> None:
        self._measurements.accepted(self.model_id, event.prompt_tokens)
        self._record.accepted(event)
        if not self._accepted[position].done():
            self._accepted[position].set_result(None)

    def _fail(self, position: int, error: PacelineError) -> None:
        if error.code == CONTEXT_OVERFLOW:
            error.parameter = "prompt" if self._commands[position].messages is None else "messages"
        if not self._accepted[position].done():
            self._accepted[position].set_exception(error)
        self.abort(error)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _measure(self, choice: int, event: Delta | Finished) -> None:
        if isinstance(event, Finished):
            cached_tokens = event.usage.cached_tokens if event.index == 0 else 0
            self._measurements.finished(self.model_id, event.usage, cached_tokens)
            self._record.finished(event)
            return
        self._record.told(choice, event)
        if event.tokens > 0:
            now = self._clock()
            before = self._told_at.get(choice)
            seconds = now - (self._began if before is None else before)
            self._measurements.emitted(self.model_id, event.tokens, first=before is None, seconds=seconds)
            self._told_at[choice] = now
