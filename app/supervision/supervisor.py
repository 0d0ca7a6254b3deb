"""Keeps one worker process alive: spawns it, watches its heartbeat, reports its end, restarts it, quarantines models.

Runs in the server process on asyncio. One task owns the child process from spawn to exit, so that no crash, `stop` or
cancelled caller leaves an orphan. The worker's state is one value.
"""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from app.core.errors import InvalidRequest, WorkerGone
from app.core.messages import Command, Event, Heartbeat, Ready, Shutdown
from app.core.reason import NO_REASON, Reason
from app.supervision.child import WORKER_COMMAND, Child, describe_exit, exit_name
from app.supervision.recovery import DEFAULT_TIMING, Backoff, CrashLog, Timing, Watchdog, model_to_blame

logger = logging.getLogger("paceline.supervisor")


class WorkerPhase(StrEnum):
    """Phases of a worker, and of the time without one."""

    STARTING = "starting"  # it is being spawned, or has not sent `Ready`
    RUNNING = "running"  # it takes requests
    RENEWING = "renewing"  # it finishes its requests and takes no new ones; another worker follows
    STOPPING = "stopping"  # the same, and no other worker follows
    PAUSING = "pausing"  # it is gone, or being killed; another one follows
    STOPPED = "stopped"  # no worker starts any more


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A phase, and the monotonic times, in seconds, at which it began and ends if no event ends it first."""

    phase: WorkerPhase
    since: float
    until: float


class Supervisor:
    """Runs one worker at a time, until `stop`. A subclass talks to the worker by overriding `in_flight`, `_on_event`
    and `_on_exit`; none of them may raise."""

    def __init__(
        self,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        on_line: Callable[[str], None] | None = None,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self._command = command
        self._timing = timing
        self._on_line = on_line
        self._crashes = CrashLog(timing)
        self._backoff = Backoff(timing)
        self._watchdog = Watchdog(timing)
        self._task: asyncio.Task[None] | None = None
        self._child: Child | None = None
        now = time.monotonic()
        self._state = WorkerState(WorkerPhase.PAUSING, now, now)
        self._change = asyncio.Event()
        """Event that is set for a moment at each change; what waits for it then looks at the state again."""
        self._last_start_seconds = 2.0
        self.restarts = 0
        """Number of times the worker was restarted."""
        self.last_exit = NO_REASON
        """Reason why the last worker ended; `NO_REASON` if none has."""

    # --- for a subclass ---------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> frozenset[str]:
        """Ids of the models with requests that the worker has not answered."""
        return frozenset()

    def _on_event(self, event: Event) -> None:
        """Handle one event of the worker; called in order."""

    def _on_exit(self, cause: Reason, pause_seconds: float) -> None:
        """Handle the end of the worker: nothing that was in flight will be answered. The next one starts after the
        pause."""

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a worker takes requests."""
        return self._state.phase is WorkerPhase.RUNNING

    @property
    def draining(self) -> bool:
        """Whether the worker finishes running requests before another one replaces it."""
        return self._state.phase is WorkerPhase.RENEWING

    @property
    def _is_ending(self) -> bool:
        """Whether `stop` was called."""
        return self._state.phase in (WorkerPhase.STOPPING, WorkerPhase.STOPPED)

    @property
    def process_id(self) -> int | None:
        """Process id of the worker; None without one."""
        return self._child.process_id if self._child else None

    @property
    def quarantined(self) -> Mapping[str, Reason]:
        """Reasons of the current quarantines, by model id."""
        return self._crashes.quarantined(time.monotonic())

    @property
    def retry_after_seconds(self) -> int:
        """Seconds until a worker should be ready: the rest of the pause, plus a start as long as the last one. How
        long a drain takes is not known and counts as 0."""
        seconds = self._last_start_seconds
        if self._state.phase is WorkerPhase.STARTING:
            seconds -= time.monotonic() - self._state.since
        elif self._state.phase is WorkerPhase.PAUSING:
            until = min(self._state.until, self._state.since + self._timing.awaited_pause_seconds)
            seconds += max(0.0, until - time.monotonic())
        return math.ceil(max(1.0, seconds))

    # --- operations -------------------------------------------------------------------------------------------

    def release_quarantine(self, model_id: str) -> None:
        """Let a model run again. Raises InvalidRequest if it is not quarantined."""
        if not self._crashes.release(model_id):
            message = f"{model_id} is not quarantined: `paceline ps` names the models that are."
            raise InvalidRequest(message, code="not_quarantined", parameter="model")

    async def start(self) -> None:
        """Start the worker; returns immediately. `wait_ready` waits until the worker can be used."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="worker supervisor")

    async def wait_ready(self, seconds: float) -> bool:
        """Wait up to `seconds` for a worker; return whether one is ready. After `stop`, return False at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.ready and not self._is_ending:
                    self._limit_pause()
                    await self._change.wait()
        return self.ready

    def _limit_pause(self) -> None:
        """Shorten a long pause, because a caller waits."""
        until = self._state.since + self._timing.awaited_pause_seconds
        if self._state.phase is WorkerPhase.PAUSING and self._state.until > until:
            self._state = replace(self._state, until=until)
            self._notify()

    def renew(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for `drain_seconds`, then start another worker without pause; no model is blamed.

        New requests wait for the new worker. A second call ends a drain that is under way.
        """
        self._drain(WorkerPhase.RENEWING, drain_seconds)

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for `drain_seconds`, then end the worker for certain. Safe to call twice."""
        self._drain(WorkerPhase.STOPPING, drain_seconds)
        if self._task is not None:
            await asyncio.shield(self._task)

    def send(self, command: Command) -> None:
        """Queue a command. Raises WorkerGone without a ready or draining worker, and errors of `ServerChannel.send`."""
        if self._child is None or self._state.phase not in (
            WorkerPhase.RUNNING,
            WorkerPhase.RENEWING,
            WorkerPhase.STOPPING,
        ):
            message = "The model worker is not running; try again in a moment."
            raise WorkerGone(message, retry_after_seconds=self.retry_after_seconds)
        self._child.send(command)

    def _drain(self, phase: WorkerPhase, seconds: float) -> None:
        """Begin a drain, which `_end_drained` ends; or cut short the one that is under way, or a pause."""
        now, until = time.monotonic(), self._state.until
        match self._state.phase:
            case WorkerPhase.STARTING:
                self._enter(phase)
            case WorkerPhase.RUNNING:
                self.send(Shutdown(drain_seconds=seconds))
                self._enter(phase, seconds + self._timing.stop_seconds)
            case WorkerPhase.RENEWING:
                if now < until:
                    self.send(Shutdown())
                self._enter(phase, min(until - now, self._timing.stop_seconds))
            case WorkerPhase.PAUSING:
                self._enter(WorkerPhase.PAUSING if phase is WorkerPhase.RENEWING else WorkerPhase.STOPPED)

    # --- the one task -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._is_ending:
            try:
                await self._run_worker()
            except Exception as error:
                logger.exception("the supervisor failed; starting another worker")
                self._lose(Reason("exit_unwatched", {"detail": str(error)}), "")
            if not self._is_ending:
                self.restarts += 1
            while self._state.phase is WorkerPhase.PAUSING and (seconds := self._state.until - time.monotonic()) > 0:
                await self._wait(seconds)

    async def _run_worker(self) -> None:
        """Run one worker from spawn to its end."""
        closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def note_close(reason: str) -> None:
            closed.set_result(reason)
            self._notify()

        self._enter(WorkerPhase.STARTING, self._timing.start_seconds)
        self._watchdog = Watchdog(self._timing)
        try:
            self._child = child = await Child.spawn(
                self._command, on_event=self._handle, on_close=note_close, on_line=self._on_line
            )
        except OSError as error:
            self._lose(Reason("exit_not_started", {"detail": str(error)}), "")
            return
        try:
            hang_reason = await self._watch(closed)
            if self._state.phase is WorkerPhase.STOPPING or (self.draining and not closed.done()):
                await self._end_drained(child)
            elif hang_reason:
                self._lose(hang_reason, child.active_model)
                await child.end((signal.SIGABRT, self._timing.abort_seconds))
            else:
                code = await child.wait(self._timing.reap_seconds)
                blamed = model_to_blame(code, child.active_model, self.in_flight)
                reason = closed.result()
                self._lose(Reason("exit_channel", {"detail": reason}) if reason else describe_exit(code), blamed)
        finally:
            self._child = None
            if await child.end() is None:
                logger.error("process %d does not end: restart the computer if memory runs short", child.process_id)

    async def _watch(self, closed: asyncio.Future[str]) -> Reason:
        """Watch until the channel closes or a drain begins; return the reason if the worker hangs, else `NO_REASON`."""
        checked_at = time.monotonic()
        while not closed.done() and self._state.phase in (WorkerPhase.STARTING, WorkerPhase.RUNNING):
            now = time.monotonic()
            if not self.ready:
                if now > self._state.until:
                    return Reason("exit_not_ready", {"seconds": self._timing.start_seconds})
            elif self._watchdog.is_hung(now - checked_at, in_flight=bool(self.in_flight)):
                return Reason("exit_hung", {"seconds": self._watchdog.allowed_seconds})
            checked_at = now
            await self._wait(self._timing.poll_seconds)
        return NO_REASON

    async def _end_drained(self, child: Child) -> None:
        """End a draining worker: by the Shutdown that it was sent, SIGTERM, SIGKILL (in `Child.end`)."""
        code = await self._wait_for_drain(child)
        if code is None:
            code = await child.end((signal.SIGTERM, self._timing.reap_seconds))
        self._end(Reason("exit_stopped" if self._is_ending else "exit_restarted", {"code": exit_name(code)}), 0.0)

    async def _wait_for_drain(self, child: Child) -> int | None:
        """Wait for a draining worker; return its exit code, or None if it times out, hangs, or does not exit although
        no request is in flight any more."""
        checked_at, idle_until = time.monotonic(), math.inf
        while (seconds := min(self._state.until, idle_until) - checked_at) > 0:
            code = await child.wait(min(seconds, self._timing.poll_seconds))
            now = time.monotonic()
            if code is not None or self._watchdog.is_hung(now - checked_at, in_flight=bool(self.in_flight)):
                return code
            if not self.in_flight:
                idle_until = min(idle_until, now + self._timing.stop_seconds)
            checked_at = now
        return None

    def _lose(self, cause: Reason, blamed_model: str) -> None:
        """Handle the loss of the worker: report it, then record a crash of `blamed_model`, if any."""
        now = time.monotonic()
        logger.error("the worker is gone: %s", cause)
        is_wanted = self._is_ending or self.draining
        self._end(cause, 0.0 if is_wanted else self._backoff.pause_seconds(now - self._state.since))
        if blamed_model and self._crashes.record(now, blamed_model, cause):
            logger.error("quarantined %s: %s", blamed_model, self._crashes.quarantined(now)[blamed_model])

    def _end(self, cause: Reason, pause_seconds: float) -> None:
        """Handle the end of the worker; the next one, if any, starts after the pause."""
        self.last_exit = cause
        self._enter(WorkerPhase.STOPPED if self._is_ending else WorkerPhase.PAUSING, pause_seconds)
        self._on_exit(cause, pause_seconds)

    def _handle(self, event: Event) -> None:
        if self._state.phase in (WorkerPhase.PAUSING, WorkerPhase.STOPPED):
            return  # late events of an abandoned worker
        if isinstance(event, Heartbeat):
            self._watchdog.record_heartbeat(event)
        if isinstance(event, Ready) and self._state.phase is WorkerPhase.STARTING:
            self._last_start_seconds = time.monotonic() - self._state.since
            self._enter(WorkerPhase.RUNNING, math.inf)
        self._on_event(event)

    def _enter(self, phase: WorkerPhase, seconds: float = 0.0) -> None:
        """Enter a phase that lasts for `seconds` unless an event ends it."""
        now = time.monotonic()
        self._state = WorkerState(phase, now, now + seconds)
        self._notify()

    def _notify(self) -> None:
        self._change.set()
        self._change.clear()

    async def _wait(self, seconds: float) -> None:
        """Wait for a change, for `seconds` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change.wait()
