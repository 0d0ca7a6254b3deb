"""Keeps one worker process alive: spawns it, watches its heartbeat, reports its end, restarts it, quarantines models.

Runs in the server process on asyncio. One task owns the child from spawn to the last wait, so that neither a crash nor
`stop` nor a cancelled caller leaves an orphan. What follows from a worker's end (the pause before
the next one, the model to blame) is computed without reading the clock: times are passed in.
"""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from app.core.errors import InvalidRequest, WorkerGone
from app.core.messages import Command, Event, Heartbeat, Ready, Shutdown
from app.core.reason import NO_REASON, Reason
from app.worker.child import WORKER_COMMAND, Child, describe_exit, exit_name

_KEPT_STEPS = 512
_logger = logging.getLogger("paceline.supervisor")


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts and limits of the supervisor, in seconds; the defaults are what the product promises."""

    start_seconds: float = 120.0
    silence_seconds: float = 30.0
    step_factor: float = 10.0
    longest_silence_seconds: float = 120.0
    """Longest silence allowed with slow steps (their parts send heartbeats) or without work (it may be suspended)."""
    look_seconds: float = 1.0
    reap_seconds: float = 1.0
    abort_seconds: float = 2.0
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0
    awaited_pause_seconds: float = 2.0
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
        self._steps: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._silent_seconds = 0.0
        self._pending = False
        self._heard = True

    @property
    def allowed_seconds(self) -> float:
        """Longest allowed silence while work is pending, in seconds."""
        ordered = sorted(self._steps)
        slowest = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else 0.0
        slow = min(self._timing.longest_silence_seconds, self._timing.step_factor * slowest)
        return max(self._timing.silence_seconds, slow)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Take a heartbeat: the worker is alive."""
        self._heard = True
        self._pending = heartbeat.pending
        self._steps.extend(seconds for seconds in heartbeat.step_seconds if seconds > 0)

    def look(self, elapsed_seconds: float, *, in_flight: bool) -> bool:
        """Return whether the worker hangs. `in_flight`: the server itself waits for an answer."""
        if self._heard:
            self._heard = False
            self._silent_seconds = 0.0
            return False
        self._silent_seconds += min(elapsed_seconds, 2 * self._timing.look_seconds)  # more means that the server slept
        is_busy = self._pending or in_flight
        return self._silent_seconds > (self.allowed_seconds if is_busy else self._timing.longest_silence_seconds)


class Backoff:
    """Pauses between restarts in seconds: none after a long enough run, else first, 2 × first … up to the longest."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._next_seconds = 0.0

    def pause_seconds(self, lived_seconds: float) -> float:
        """Return the pause after a worker that ran for `lived_seconds`."""
        pause = 0.0 if lived_seconds >= self._timing.steady_seconds else self._next_seconds
        longer = max(self._timing.first_pause_seconds, pause * 2)
        self._next_seconds = min(self._timing.longest_pause_seconds, longer)
        return pause


def to_blame(code: int | None, at: str, in_flight: frozenset[str]) -> str:
    """Return the model to blame for the end of a worker; empty for none.

    `at` is the model that it was working on; in `in_flight`, "" stands for prompts that are only counted. SIGKILL and
    SIGTERM come from outside (a person, the system when out of memory): they count only against a model that had the
    worker to itself.
    """
    from_outside = code is not None and -code in (signal.SIGKILL, signal.SIGTERM)
    return "" if from_outside and in_flight - {at, ""} else at


class CrashLog:
    """Counts crashes by model: enough within the window put it in quarantine, until released or until that expires."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._crashes: deque[tuple[float, str]] = deque()
        self._quarantined: dict[str, tuple[float, Reason]] = {}

    def quarantined(self, now_seconds: float) -> Mapping[str, Reason]:
        """Return model id -> why it is quarantined now."""
        self._quarantined = {name: kept for name, kept in self._quarantined.items() if kept[0] > now_seconds}
        return {
            name: replace(why, values={**why.values, "again": max(1, round((until - now_seconds) / 60))})
            for name, (until, why) in self._quarantined.items()
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
        why = Reason("quarantined", {"count": count, "minutes": window_seconds / 60, "cause": str(cause)})
        self._quarantined[model_id] = now_seconds + self._timing.quarantine_seconds, why
        return True

    def release(self, model_id: str) -> bool:
        """Let a model run again, with its crashes forgotten; return whether it was quarantined."""
        self._crashes = deque(crash for crash in self._crashes if crash[1] != model_id)
        return self._quarantined.pop(model_id, None) is not None


class PrefixDisk(NamedTuple):
    """Folder in which the worker keeps earlier prompts on disk, with the limits on bytes and days."""

    folder: Path
    limit_bytes: int
    most_days: float

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments for the worker's command line."""
        folder = ("--prefixes-folder", str(self.folder))
        return (*folder, "--prefixes-bytes", str(self.limit_bytes), "--prefixes-days", str(self.most_days))


class Supervisor:
    """Runs one worker at a time, until `stop`. A subclass talks to the worker by overriding `in_flight`, `_on_event`
    and `_on_exit`; none of them may raise."""

    def __init__(
        self,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        memory_ceiling_bytes: int | None = None,
        costs_folder: Path | None = None,
        wire: str = "off",
        prefixes: PrefixDisk | None = None,
        on_line: Callable[[str], None] | None = None,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        ceiling = () if memory_ceiling_bytes is None else ("--memory-ceiling-bytes", str(memory_ceiling_bytes))
        costs = () if costs_folder is None else ("--costs-folder", str(costs_folder))
        wiring = () if wire == "off" else ("--wire", wire)
        self._command = (*command, *ceiling, *costs, *wiring, *(prefixes.arguments if prefixes else ()))
        self._timing = timing
        self._on_line = on_line
        self._crashes = CrashLog(timing)
        self._backoff = Backoff(timing)
        self._watchdog = Watchdog(timing)
        self._task: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._closed: Reason | None = None
        self._greeted = False
        self._stopping = False
        self._drain_seconds: float | None = None
        """Seconds that running requests may take in a worker that is to end, for a stop or a renewal; else None."""
        self._drained_at = math.inf
        """Moment at which signals end it if it has not ended by itself."""
        self._began = time.monotonic()
        self._lost_at = self._pause_seconds = 0.0
        self._usual_start_seconds = 2.0
        self._waiting = 0
        self.restarts = 0
        """Number of times the worker was restarted."""
        self.last_exit = NO_REASON
        """Why the last worker ended; `NO_REASON` if none has."""

    # --- for a subclass ---------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> frozenset[str]:
        """Models for which an answer of the worker is awaited."""
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
        """Model id -> why it is quarantined."""
        return self._crashes.quarantined(time.monotonic())

    @property
    def retry_after_seconds(self) -> int:
        """Seconds until a worker should be ready: the rest of the pause, plus a start as long as the last one."""
        started = time.monotonic() - self._began if self._child and self._closed is None else 0.0
        pause = self._pause_left(self._timing.awaited_pause_seconds)
        return math.ceil(max(1.0, pause + self._usual_start_seconds - started))

    # --- operations -------------------------------------------------------------------------------------------

    def release_quarantine(self, model_id: str) -> None:
        """Let a model run again. Raises InvalidRequest if it is not quarantined."""
        if not self._crashes.release(model_id):
            message = f"{model_id} is not quarantined: `paceline ps` names the models that are."
            raise InvalidRequest(message, code="not_quarantined", parameter="model")

    async def start(self) -> None:
        """Start the worker; returns at once. `wait_ready` waits until it can be used."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="worker supervisor")

    async def wait_ready(self, seconds: float) -> bool:
        """Return whether a worker is ready within `seconds`; False at once after `stop`."""
        if not self._stopping:
            self._waiting += 1
            self._wake.set()  # a waiting caller shortens a long pause
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ready.wait(), seconds)
            finally:
                self._waiting -= 1
        return self.ready

    def renew(self, drain_seconds: float = 0.0) -> None:
        """Let running requests finish for `drain_seconds`, then start another worker at once; no model is blamed.

        New requests wait for the new worker. A second call ends a drain that is under way.
        """
        if not self._stopping:
            self._hurry()
            self._drain_seconds = drain_seconds
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
        if not self._stopping:
            self._hurry()
            self._stopping, self._drain_seconds = True, drain_seconds
        self._wake.set()
        self._ready.set()  # wakes waiting callers, which then see that it is over
        if self._task is not None:
            await asyncio.shield(self._task)

    def _hurry(self) -> None:
        """Cut a drain under way short: the second Shutdown means now."""
        if self.draining and self._greeted and self._child is not None:
            self._child.send(Shutdown())
            self._leave_seconds(self._timing.stop_seconds)

    # --- the one task -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            self._drain_seconds = None
            self._began = time.monotonic()
            try:
                await self._live()
            except Exception as error:
                _logger.exception("the supervisor failed; another worker is started")
                self._lose(Reason("exit_unwatched", {"detail": str(error)}), "")
            if not self._stopping:
                self.restarts += 1
                await self._pause()

    async def _live(self) -> None:
        """Run one worker from spawn to its end."""
        self._closed = None
        self._greeted = False
        self._wake.clear()
        self._watchdog = Watchdog(self._timing)
        try:
            self._child = child = await Child.spawn(
                self._command, on_event=self._handle, on_close=self._handle_close, on_line=self._on_line
            )
        except OSError as error:
            self._lose(Reason("exit_not_started", {"detail": str(error)}), "")
            return
        try:
            hung = await self._watch()
            if self._drain_seconds is not None and (self._stopping or self._closed is None):
                await self._drain(child, self._drain_seconds, "exit_stopped" if self._stopping else "exit_restarted")
            elif hung:
                self._lose(hung, child.at)
                await child.end((signal.SIGABRT, self._timing.abort_seconds))
            else:
                code = await child.wait(self._timing.reap_seconds)
                self._lose(self._closed or describe_exit(code), to_blame(code, child.at, self.in_flight))
        finally:
            self._ready.clear()
            self._child = None
            if await child.end() is None:
                _logger.error("process %d does not end: restart the computer if memory runs short", child.process_id)

    async def _watch(self) -> Reason:
        """Watch until the channel closes or the worker is to end; return why it hangs, else `NO_REASON`."""
        looked = time.monotonic()
        while self._closed is None and self._drain_seconds is None:
            now = time.monotonic()
            if not self.ready:
                if now - self._began > self._timing.start_seconds:
                    return Reason("exit_not_ready", {"seconds": self._timing.start_seconds})
            elif self._watchdog.look(now - looked, in_flight=bool(self.in_flight)):
                return Reason("exit_hung", {"seconds": self._watchdog.allowed_seconds})
            looked = now
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._timing.look_seconds)
        return NO_REASON

    async def _drain(self, child: Child, drain_seconds: float, why: str) -> None:
        """End the worker: Shutdown, SIGTERM, then (in `Child.end`) SIGKILL; one that still starts is killed at once."""
        code = None
        if self._greeted:
            child.send(Shutdown(drain_seconds=drain_seconds))
            self._drained_at = time.monotonic() + drain_seconds + self._timing.stop_seconds
            code = await self._outlast(child)
        if code is None:
            steps = ((signal.SIGTERM, self._timing.reap_seconds),) if self._greeted else ()
            code = await child.end(*steps)
        self._ready.clear()
        self.last_exit = Reason(why, {"code": exit_name(code)})
        self._pause_seconds = 0.0
        self._on_exit(self.last_exit)

    async def _outlast(self, child: Child) -> int | None:
        """Return the exit code of a worker that drains; None if its time is over, if it hangs, or if it does not end
        although nothing of it is awaited any more."""
        while (left := self._drained_at - (looked := time.monotonic())) > 0:
            code = await child.wait(min(left, self._timing.look_seconds))
            if code is not None or self._watchdog.look(time.monotonic() - looked, in_flight=bool(self.in_flight)):
                return code
            if not self.in_flight:
                self._leave_seconds(self._timing.stop_seconds)
        return None

    def _leave_seconds(self, seconds: float) -> None:
        """Give a worker that drains at most these seconds from now on."""
        self._drained_at = min(self._drained_at, time.monotonic() + seconds)

    def _lose(self, cause: Reason, blamed: str) -> None:
        """Handle the loss of the worker: report it, then record the crash of the model to blame, `blamed`, if any."""
        now = time.monotonic()
        self._ready.clear()
        self._closed = self.last_exit = cause
        _logger.error("the worker is gone: %s", cause)
        self._lost_at, self._pause_seconds = now, self._backoff.pause_seconds(now - self._began)
        self._on_exit(cause)
        if blamed and self._crashes.record(now, blamed, cause):
            _logger.error("quarantined %s: %s", blamed, self._crashes.quarantined(now)[blamed])

    async def _pause(self) -> None:
        """Wait before the next start; the pause is shorter while a caller waits."""
        while self._drain_seconds is None:
            left = self._pause_left(self._timing.awaited_pause_seconds if self._waiting else math.inf)
            if left <= 0:
                return
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left)

    def _pause_left(self, longest_seconds: float) -> float:
        return max(0.0, self._lost_at + min(self._pause_seconds, longest_seconds) - time.monotonic())

    def _handle(self, event: Event) -> None:
        if self._closed is not None:
            return  # late events of a worker that was given up
        if isinstance(event, Heartbeat):
            self._watchdog.beat(event)
        if isinstance(event, Ready):
            self._greeted = True
            self._usual_start_seconds = time.monotonic() - self._began
            if self._drain_seconds is None:
                self._ready.set()
        self._on_event(event)

    def _handle_close(self, reason: str) -> None:
        if self._closed is None:
            self._closed = Reason("exit_channel", {"detail": reason}) if reason else NO_REASON
        self._wake.set()
