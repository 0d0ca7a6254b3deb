"""Keeps one worker process alive: spawns it, watches its heartbeat, reports its end, restarts it, quarantines models.

Runs in the server process on asyncio. One task owns the child process from spawn to exit, so that no crash, `stop` or
cancelled caller leaves an orphan. The consequences of a worker's end (the pause before the next start, the model to
blame) are computed without reading the clock: times are passed in.
"""

import asyncio
import contextlib
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from app.core.errors import InvalidRequest, WorkerGone
from app.core.messages import Command, Event, Heartbeat, Ready, Shutdown
from app.core.reason import NO_REASON, Reason
from app.supervision.child import WORKER_COMMAND, Child, describe_exit, exit_name

_STEP_WINDOW = 512
logger = logging.getLogger("paceline.supervisor")


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts (in seconds) and limits of the supervisor; the defaults are what the product promises."""

    start_seconds: float = 120.0
    silence_seconds: float = 30.0
    step_factor: float = 10.0
    longest_silence_seconds: float = 120.0
    """Longest silence allowed with slow steps (which send heartbeats) or without work (the worker may be suspended)."""
    poll_seconds: float = 1.0
    reap_seconds: float = 1.0
    abort_seconds: float = 2.0
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0
    awaited_pause_seconds: float = 1.0
    """Longest pause while a caller waits for the worker."""
    steady_seconds: float = 60.0
    crash_limit: int = 3
    crash_window_seconds: float = 300.0
    quarantine_seconds: float = 600.0
    stop_seconds: float = 5.0


DEFAULT_TIMING = Timing()


class Watchdog:
    """Measures the silence of one worker, in seconds during which the server was awake."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._steps: deque[float] = deque(maxlen=_STEP_WINDOW)
        self._silent_seconds = 0.0
        self._pending = False
        self._beat_received = True

    @property
    def allowed_seconds(self) -> float:
        """Longest allowed silence while work is pending, in seconds."""
        ordered = sorted(self._steps)
        slowest = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else 0.0
        slow = min(self._timing.longest_silence_seconds, self._timing.step_factor * slowest)
        return max(self._timing.silence_seconds, slow)

    def record_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat: the worker is alive."""
        self._beat_received = True
        self._pending = heartbeat.pending
        self._steps.extend(seconds for seconds in heartbeat.step_seconds if seconds > 0)

    def is_hung(self, elapsed_seconds: float, *, in_flight: bool) -> bool:
        """Return whether the worker hangs. `in_flight`: the server itself waits for an answer."""
        if self._beat_received:
            self._beat_received = False
            self._silent_seconds = 0.0
            return False
        self._silent_seconds += min(elapsed_seconds, 2 * self._timing.poll_seconds)  # a longer gap: the server slept
        is_busy = self._pending or in_flight
        return self._silent_seconds > (self.allowed_seconds if is_busy else self._timing.longest_silence_seconds)


class Backoff:
    """Exponential backoff between restarts, in seconds; it begins with 0, also after a long enough run."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._next_seconds = 0.0

    def pause_seconds(self, uptime_seconds: float) -> float:
        """Return the pause after a worker that ran for `uptime_seconds`."""
        pause = 0.0 if uptime_seconds >= self._timing.steady_seconds else self._next_seconds
        next_pause = max(self._timing.first_pause_seconds, pause * 2)
        self._next_seconds = min(self._timing.longest_pause_seconds, next_pause)
        return pause


def model_to_blame(code: int | None, active_model: str, in_flight: frozenset[str]) -> str:
    """Return the model to blame for the end of a worker; empty for none.

    `active_model` is the model that it was working on; in `in_flight`, "" stands for prompts that are only tokenized.
    SIGKILL and SIGTERM come from outside (a person, the system when out of memory): they count only against a model
    that had the worker to itself.
    """
    from_outside = code is not None and -code in (signal.SIGKILL, signal.SIGTERM)
    return "" if from_outside and in_flight - {active_model, ""} else active_model


class CrashLog:
    """Counts crashes by model. Enough within the window quarantine the model until `release`, or for a limited time."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._crashes: deque[tuple[float, str]] = deque()
        self._quarantined: dict[str, tuple[float, Reason]] = {}
        self._lock = threading.Lock()

    def quarantined(self, now_seconds: float) -> Mapping[str, Reason]:
        """Return the reason of each current quarantine, by model id. Any thread may call this."""
        with self._lock:
            self._quarantined = {name: entry for name, entry in self._quarantined.items() if entry[0] > now_seconds}
            return {
                name: replace(reason, values={**reason.values, "again": max(1, round((until - now_seconds) / 60))})
                for name, (until, reason) in self._quarantined.items()
            }

    def record(self, now_seconds: float, model_id: str, cause: Reason) -> bool:
        """Record a crash that `model_id` caused; return whether that quarantines it."""
        self._crashes.append((now_seconds, model_id))
        window_seconds, count = self._timing.crash_window_seconds, self._timing.crash_limit
        while self._crashes[0][0] < now_seconds - window_seconds:
            self._crashes.popleft()
        if sum(name == model_id for _, name in self._crashes) < count:
            return False
        self.release(model_id)
        reason = Reason("quarantined", {"count": count, "minutes": window_seconds / 60, "cause": str(cause)})
        with self._lock:
            self._quarantined[model_id] = now_seconds + self._timing.quarantine_seconds, reason
        return True

    def release(self, model_id: str) -> bool:
        """Let a model run again, and forget its crashes; return whether it was quarantined."""
        self._crashes = deque(crash for crash in self._crashes if crash[1] != model_id)
        with self._lock:
            return self._quarantined.pop(model_id, None) is not None


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
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._close_reason: Reason | None = None
        self._is_initialized = False
        self._stopping = False
        self._drain_seconds: float | None = None
        """Seconds that running requests may still take before a stop or a renewal ends the worker; None without one."""
        self._drained_at = math.inf
        """Monotonic time, in seconds, at which a drain is over: signals then end a worker that has not exited."""
        self._started_at = time.monotonic()
        self._exited_at = self._pause_seconds = 0.0
        self._last_start_seconds = 2.0
        self._waiting_callers = 0
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

    def _on_exit(self, cause: Reason) -> None:
        """Handle the end of the worker: nothing that was in flight will be answered."""

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a worker has sent `Ready`, is alive and is not being stopped or renewed."""
        return self._ready.is_set() and self._drain_seconds is None

    @property
    def draining(self) -> bool:
        """Whether the worker finishes running requests before another one replaces it."""
        return self._drain_seconds is not None and not self._stopping

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
        """Seconds until a worker should be ready: the rest of the pause, plus a start as long as the last one."""
        started = time.monotonic() - self._started_at if self._child and self._close_reason is None else 0.0
        pause = self._remaining_pause_seconds(self._timing.awaited_pause_seconds)
        return math.ceil(max(1.0, pause + self._last_start_seconds - started))

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
        if not self._stopping:
            self._waiting_callers += 1
            self._wake.set()  # a waiting caller shortens a long pause
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ready.wait(), seconds)
            finally:
                self._waiting_callers -= 1
        return self.ready

    def renew(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for `drain_seconds`, then start another worker without pause; no model is blamed.

        New requests wait for the new worker. A second call ends a drain that is under way.
        """
        if not self._stopping:
            self._cut_drain_short()
            self._drain_seconds = drain_seconds
            self._ready.clear()
            self._wake.set()

    def send(self, command: Command) -> None:
        """Queue a command. Raises WorkerGone without a ready or draining worker, and errors of `ServerChannel.send`."""
        if self._child is None or not (self._ready.is_set() or self.draining):
            message = "The model worker is not running; try again in a moment."
            raise WorkerGone(message, retry_after_seconds=self.retry_after_seconds)
        self._child.send(command)

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for `drain_seconds`, then end the worker for certain. Safe to call twice."""
        if not self._stopping:
            self._cut_drain_short()
            self._stopping, self._drain_seconds = True, drain_seconds
        self._wake.set()
        self._ready.set()  # wakes waiting callers, which then see `ready` False
        if self._task is not None:
            await asyncio.shield(self._task)

    def _cut_drain_short(self) -> None:
        """Cut a drain in progress short: a second Shutdown ends it now."""
        if self.draining and self._is_initialized and self._child is not None:
            self._child.send(Shutdown())
            self._limit_drain(self._timing.stop_seconds)

    # --- the one task -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            self._drain_seconds = None
            self._started_at = time.monotonic()
            try:
                await self._run_worker()
            except Exception as error:
                logger.exception("the supervisor failed; starting another worker")
                self._handle_loss(Reason("exit_unwatched", {"detail": str(error)}), "")
            if not self._stopping:
                self.restarts += 1
                await self._pause()

    async def _run_worker(self) -> None:
        """Run one worker from spawn to its end."""
        self._close_reason = None
        self._is_initialized = False
        self._wake.clear()
        self._watchdog = Watchdog(self._timing)
        try:
            self._child = child = await Child.spawn(
                self._command, on_event=self._handle, on_close=self._handle_close, on_line=self._on_line
            )
        except OSError as error:
            self._handle_loss(Reason("exit_not_started", {"detail": str(error)}), "")
            return
        try:
            hang_reason = await self._watch()
            if self._drain_seconds is not None and (self._stopping or self._close_reason is None):
                await self._drain(child, self._drain_seconds, "exit_stopped" if self._stopping else "exit_restarted")
            elif hang_reason:
                self._handle_loss(hang_reason, child.active_model)
                await child.end((signal.SIGABRT, self._timing.abort_seconds))
            else:
                code = await child.wait(self._timing.reap_seconds)
                self._handle_loss(
                    self._close_reason or describe_exit(code), model_to_blame(code, child.active_model, self.in_flight)
                )
        finally:
            self._ready.clear()
            self._child = None
            if await child.end() is None:
                logger.error("process %d does not end: restart the computer if memory runs short", child.process_id)

    async def _watch(self) -> Reason:
        """Watch until the channel closes or a drain begins; return the reason if the worker hangs, else `NO_REASON`."""
        checked_at = time.monotonic()
        while self._close_reason is None and self._drain_seconds is None:
            now = time.monotonic()
            if not self.ready:
                if now - self._started_at > self._timing.start_seconds:
                    return Reason("exit_not_ready", {"seconds": self._timing.start_seconds})
            elif self._watchdog.is_hung(now - checked_at, in_flight=bool(self.in_flight)):
                return Reason("exit_hung", {"seconds": self._watchdog.allowed_seconds})
            checked_at = now
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._timing.poll_seconds)
        return NO_REASON

    async def _drain(self, child: Child, drain_seconds: float, reason: str) -> None:
        """End the worker by Shutdown, SIGTERM, SIGKILL (in `Child.end`); a worker still starting is killed directly."""
        code = None
        if self._is_initialized:
            child.send(Shutdown(drain_seconds=drain_seconds))
            self._drained_at = time.monotonic() + drain_seconds + self._timing.stop_seconds
            code = await self._wait_for_drain(child)
        if code is None:
            steps = ((signal.SIGTERM, self._timing.reap_seconds),) if self._is_initialized else ()
            code = await child.end(*steps)
        self._ready.clear()
        self.last_exit = Reason(reason, {"code": exit_name(code)})
        self._pause_seconds = 0.0
        self._on_exit(self.last_exit)

    async def _wait_for_drain(self, child: Child) -> int | None:
        """Wait for a draining worker; return its exit code, or None if it times out, hangs, or does not exit although
        no request is in flight any more."""
        while (remaining_seconds := self._drained_at - (checked_at := time.monotonic())) > 0:
            code = await child.wait(min(remaining_seconds, self._timing.poll_seconds))
            if code is not None or self._watchdog.is_hung(
                time.monotonic() - checked_at, in_flight=bool(self.in_flight)
            ):
                return code
            if not self.in_flight:
                self._limit_drain(self._timing.stop_seconds)
        return None

    def _limit_drain(self, seconds: float) -> None:
        """Limit a drain in progress to `seconds` from now."""
        self._drained_at = min(self._drained_at, time.monotonic() + seconds)

    def _handle_loss(self, cause: Reason, blamed_model: str) -> None:
        """Handle the loss of the worker: report it, then record a crash of `blamed_model`, if any."""
        now = time.monotonic()
        self._ready.clear()
        self._close_reason = self.last_exit = cause
        logger.error("the worker is gone: %s", cause)
        self._exited_at, self._pause_seconds = now, self._backoff.pause_seconds(now - self._started_at)
        self._on_exit(cause)
        if blamed_model and self._crashes.record(now, blamed_model, cause):
            logger.error("quarantined %s: %s", blamed_model, self._crashes.quarantined(now)[blamed_model])

    async def _pause(self) -> None:
        """Wait before the next start; the pause is shorter while a caller waits."""
        while self._drain_seconds is None:
            remaining_seconds = self._remaining_pause_seconds(
                self._timing.awaited_pause_seconds if self._waiting_callers else math.inf
            )
            if remaining_seconds <= 0:
                return
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), remaining_seconds)

    def _remaining_pause_seconds(self, longest_seconds: float) -> float:
        return max(0.0, self._exited_at + min(self._pause_seconds, longest_seconds) - time.monotonic())

    def _handle(self, event: Event) -> None:
        if self._close_reason is not None:
            return  # late events of an abandoned worker
        if isinstance(event, Heartbeat):
            self._watchdog.record_heartbeat(event)
        if isinstance(event, Ready):
            self._is_initialized = True
            self._last_start_seconds = time.monotonic() - self._started_at
            if self._drain_seconds is None:
                self._ready.set()
        self._on_event(event)

    def _handle_close(self, reason: str) -> None:
        if self._close_reason is None:
            self._close_reason = Reason("exit_channel", {"detail": reason}) if reason else NO_REASON
        self._wake.set()
