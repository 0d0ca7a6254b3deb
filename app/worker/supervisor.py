"""Keeps one worker process alive: spawns it, watches its heartbeat, tells its end, restarts it, blames models.

Runs in the server process on asyncio. One task owns the child from spawn to the last wait, so that neither a crash
nor `stop` nor a cancelled caller leaves an orphan. The client attaches itself for the events.
"""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import WorkerGone
from app.core.messages import Command, Event, Heartbeat, Ready, Shutdown
from app.core.ports import Clock
from app.core.reason import NO_REASON, Reason
from app.worker.child import WORKER_COMMAND, Child
from app.worker.recovery import Backoff, CrashLog, describe_exit, exit_name, to_blame

_KEPT_STEPS = 512


class Watchdog:
    """The silence of one worker, in seconds of attentive watching."""

    def __init__(self, silence_seconds: float, step_factor: float, look_limit_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._step_factor = step_factor
        self._look_limit_seconds = look_limit_seconds
        self._steps: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._silent_seconds = 0.0
        self._pending = False
        self._heard = True

    @property
    def allowed_seconds(self) -> float:
        """How long the worker may be silent while work is pending."""
        if not self._steps:
            return self._silence_seconds
        ordered = sorted(self._steps)
        slowest = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        return max(self._silence_seconds, self._step_factor * slowest)

    def beat(self, heartbeat: Heartbeat) -> None:
        """The worker is alive."""
        self._heard = True
        self._pending = heartbeat.pending
        self._steps.extend(seconds for seconds in heartbeat.step_seconds if seconds > 0)

    def look(self, elapsed_seconds: float, *, in_flight: bool) -> bool:
        """True when the worker hangs. `in_flight`: the server itself waits for an answer."""
        if self._heard or not (self._pending or in_flight):
            self._heard = False
            self._silent_seconds = 0.0
            return False
        self._silent_seconds += min(elapsed_seconds, self._look_limit_seconds)
        return self._silent_seconds > self.allowed_seconds


_logger = logging.getLogger("paceline.supervisor")


@dataclass(frozen=True, slots=True)
class Timing:
    """Every wait of the supervisor, in seconds; the defaults are the product's promises."""

    start_seconds: float = 120.0
    silence_seconds: float = 30.0
    step_factor: float = 10.0
    look_seconds: float = 1.0
    reap_seconds: float = 1.0
    abort_seconds: float = 2.0
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0
    awaited_pause_seconds: float = 10.0
    """The longest pause while somebody waits for the worker."""
    steady_seconds: float = 60.0
    crash_limit: int = 3
    crash_window_seconds: float = 300.0
    quarantine_seconds: float = 600.0
    stop_seconds: float = 5.0


class Supervisor:
    """One worker at a time, for ever, until `stop`."""

    def __init__(
        self,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        memory_ceiling_bytes: int | None = None,
        costs_folder: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        timing: Timing | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        ceiling = () if memory_ceiling_bytes is None else ("--memory-ceiling-bytes", str(memory_ceiling_bytes))
        costs = () if costs_folder is None else ("--costs-folder", str(costs_folder))
        self._command = (*command, *ceiling, *costs)
        self._timing = timing or Timing()
        self._clock = clock
        self._on_line = on_line
        self._crashes = CrashLog(
            self._timing.crash_limit, self._timing.crash_window_seconds, self._timing.quarantine_seconds
        )
        self._backoff = Backoff(
            self._timing.first_pause_seconds, self._timing.longest_pause_seconds, self._timing.steady_seconds
        )
        self._tell_event: Callable[[Event], None] = lambda _event: None
        self._tell_end: Callable[[str], None] = lambda _cause: None
        self._in_flight: Callable[[], frozenset[str]] = frozenset
        self._task: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._watchdog = self._new_watchdog()
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._closed: Reason | None = None
        self._greeted = False
        self._drain_seconds: float | None = None
        self._renew_seconds: float | None = None
        self._began = clock()
        self._lost_at = self._pause_seconds = 0.0
        self._usual_start_seconds = 2.0
        self._waiting = 0
        self.restarts = 0
        self.last_exit = NO_REASON

    @property
    def ready(self) -> bool:
        """Whether a worker has said `Ready`, lives and is not being stopped or renewed."""
        return self._ready.is_set() and self._drain_seconds is None and not self.draining

    @property
    def process_id(self) -> int | None:
        """The worker's process id while there is one."""
        return self._child.process_id if self._child else None

    @property
    def quarantined(self) -> Mapping[str, Reason]:
        """Model id -> why it is kept from running."""
        return self._crashes.quarantined(self._clock())

    @property
    def retry_after_seconds(self) -> int:
        """When a worker should be ready for who asks again then: the rest of the pause, and a start as it was last."""
        started = self._clock() - self._began if self._child and self._closed is None else 0.0
        pause = self._pause_left(self._timing.awaited_pause_seconds)
        return math.ceil(max(1.0, pause + self._usual_start_seconds - started))

    def release_quarantine(self, model_id: str) -> bool:
        """Let a model run again; False when it was not quarantined."""
        return self._crashes.release(model_id)

    def attach(
        self,
        *,
        handle: Callable[[Event], None],
        worker_gone: Callable[[str], None],
        in_flight: Callable[[], frozenset[str]],
    ) -> None:
        """Before `start`: who hears each event in order and, at once, why the worker ended; and who knows for which
        models an answer is waited for. None of them may raise."""
        self._tell_event, self._tell_end, self._in_flight = handle, worker_gone, in_flight

    async def start(self) -> None:
        """Begin; returns at once, `wait_ready` tells when the worker can be used."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="worker supervisor")

    async def wait_ready(self, seconds: float) -> bool:
        """Whether a worker is ready within `seconds`; at once False after `stop`."""
        if self._drain_seconds is None:
            self._waiting += 1
            self._wake.set()  # a long pause ends sooner for who waits
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ready.wait(), seconds)
            finally:
                self._waiting -= 1
        return self.ready

    @property
    def draining(self) -> bool:
        """Whether the worker finishes what runs, and another one takes its place."""
        return self._renew_seconds is not None

    def renew(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for `drain_seconds`, then start another worker at once; nobody is blamed.

        Who asks meanwhile waits for the new one. A second call cuts the first one's patience short.
        """
        if self._drain_seconds is not None:
            return
        self._hurry()
        self._renew_seconds = drain_seconds
        self._ready.clear()
        self._wake.set()

    def send(self, command: Command) -> None:
        """Queue a command. Raises WorkerGone without a ready worker, and what `ServerChannel.send` raises."""
        if self._child is None or not (self._ready.is_set() or self.draining):
            message = "The model worker is not running; try again in a moment."
            raise WorkerGone(message, retry_after_seconds=self.retry_after_seconds)
        self._child.send(command)

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for `drain_seconds`, then end the worker for certain. Safe to call twice."""
        if self._drain_seconds is None:
            self._hurry()
            self._drain_seconds = drain_seconds
        self._wake.set()
        self._ready.set()  # whoever waits looks again and learns that it is over
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _run(self) -> None:
        while self._drain_seconds is None:
            self._began = self._clock()
            try:
                await self._live()
            except Exception as error:
                _logger.exception("the supervisor stumbled")
                self._lose(Reason("exit_unwatched", {"detail": str(error)}), "")
            if self._drain_seconds is not None:
                break
            self.restarts += 1
            await self._pause()
            self._renew_seconds = None

    async def _live(self) -> None:
        """One worker from spawn to its end."""
        self._closed = None
        self._greeted = False
        self._wake.clear()
        self._watchdog = self._new_watchdog()
        try:
            self._child = child = await Child.spawn(
                self._command, on_event=self._handle, on_close=self._handle_close, on_line=self._on_line
            )
        except OSError as error:
            self._lose(Reason("exit_not_started", {"detail": str(error)}), "")
            return
        try:
            hung = await self._watch()
            if self._drain_seconds is not None:
                await self._drain(child, self._drain_seconds, "exit_stopped")
            elif self._renew_seconds is not None and self._closed is None:
                await self._drain(child, self._renew_seconds, "exit_restarted")
            elif hung:
                self._lose(hung, child.at)
                await child.end((signal.SIGABRT, self._timing.abort_seconds))
            else:
                code = await child.wait(self._timing.reap_seconds)
                self._lose(self._closed or describe_exit(code), to_blame(code, child.at, self._in_flight()))
        finally:
            self._ready.clear()
            self._child = None
            await child.end()

    async def _watch(self) -> Reason:
        """Return when the channel closed or `stop` was called, or why the worker counts as hung."""
        looked = self._clock()
        while self._closed is None and self._drain_seconds is None and self._renew_seconds is None:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._timing.look_seconds)
                continue
            now = self._clock()
            if not self.ready:
                if now - self._began > self._timing.start_seconds:
                    return Reason("exit_not_ready", {"seconds": self._timing.start_seconds})
            elif self._watchdog.look(now - looked, in_flight=bool(self._in_flight())):
                return Reason("exit_hung", {"seconds": self._watchdog.allowed_seconds})
            looked = now
        return NO_REASON

    async def _drain(self, child: Child, drain_seconds: float, why: str) -> None:
        """The orderly end: a command, then SIGTERM, then (in `Child.end`) SIGKILL; a worker still starting has none."""
        code = None
        if self._greeted:
            child.send(Shutdown(drain_seconds=drain_seconds))
            code = await child.wait(drain_seconds + self._timing.stop_seconds)
        if code is None:
            steps = ((signal.SIGTERM, self._timing.reap_seconds),) if self._greeted else ()
            code = await child.end(*steps)
        self._ready.clear()
        self.last_exit = Reason(why, {"code": exit_name(code)})
        self._tell_end(str(self.last_exit))

    def _hurry(self) -> None:
        """A worker that drains already has drained long enough: the second Shutdown means now."""
        if self.draining and self._greeted and self._child is not None:
            self._child.send(Shutdown())

    def _lose(self, cause: Reason, blamed: str) -> None:
        """The worker is gone: tell everyone first, then learn from it. `blamed`: the model whose doing it was."""
        now = self._clock()
        self._ready.clear()
        self._closed = cause
        self.last_exit = cause
        _logger.error("the worker is gone: %s", cause)
        self._lost_at, self._pause_seconds = now, self._backoff.pause_seconds(now - self._began)
        self._tell_end(str(cause))
        if blamed and self._crashes.record(now, blamed, cause):
            _logger.error("quarantined %s: %s", blamed, self._crashes.quarantined(now)[blamed])

    async def _pause(self) -> None:
        """Wait before the next start, which comes sooner while somebody waits for it."""
        while self._drain_seconds is None and not self.draining:
            left = self._pause_left(self._timing.awaited_pause_seconds if self._waiting else math.inf)
            if left <= 0:
                return
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left)

    def _pause_left(self, longest_seconds: float) -> float:
        return max(0.0, self._lost_at + min(self._pause_seconds, longest_seconds) - self._clock())

    def _handle(self, event: Event) -> None:
        if self._closed is not None:
            return  # the last words of a worker that was given up
        if isinstance(event, Heartbeat):
            self._watchdog.beat(event)
        self._tell_event(event)
        if isinstance(event, Ready):
            self._greeted = True
            self._usual_start_seconds = self._clock() - self._began
            if not self.draining:
                self._ready.set()

    def _handle_close(self, reason: str) -> None:
        if self._closed is None:
            self._closed = Reason("exit_channel", {"detail": reason}) if reason else NO_REASON
        self._wake.set()

    def _new_watchdog(self) -> Watchdog:
        return Watchdog(self._timing.silence_seconds, self._timing.step_factor, 2 * self._timing.look_seconds)
