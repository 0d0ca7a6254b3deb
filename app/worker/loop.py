"""The MLX thread: each turn reads commands, runs one slice of a load and one step of each model, and reports results.

Only this thread touches the engine. Apart from backpressure of the channel and the text thread, it blocks only on its
inbox, and only if there is nothing to do. A failed step fails only its own requests (`served_model.py`); a failed load
fails the requests that wait for it.
"""

import logging
import math
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from app.core.clock import Clock
from app.core.errors import PacelineError, QueueFull
from app.core.messages import (
    PRESSURES,
    Cancel,
    ClearPrefixes,
    Event,
    Heartbeat,
    KeepModels,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    ModelUnloaded,
    Pressure,
    Snapshot,
    UnloadModel,
    failed_frame,
    short_text,
)
from app.core.pool_events import Evicted, Loaded, LoadFailed, PoolEvent, WarmedUp
from app.engine import memory
from app.engine.loading.pool import EnginePool
from app.machine.channel import CrashNote
from app.machine.host import memory_pressure
from app.worker.device_errors import check_device
from app.worker.served_model import OpenScheduler, SaveCosts, ServedModel
from app.worker.text_thread import TextThread
from app.worker.thread_commands import Halt, LoopCommand, Submission

HEARTBEAT_SECONDS = 1.0
STEP_REPORT_SECONDS = 0.1
"""Seconds between reports of step times: a frame per step would cost the server as much as the step's tokens."""
HOUSEKEEPING_SECONDS = 1.0
SAVE_COSTS_SECONDS = 30.0
TRIM_STEPS = 256
"""Number of steps after which freed buffers are returned to the system; an idle loop does this sooner."""
LOADING_RETRY_SECONDS = 5
PATIENCE_SECONDS = 10.0
"""Longest time, in seconds, for which a model without a row waits while other models admit requests."""
TEXT_ROUNDING_BYTES = 16 << 20
"""Granularity, in bytes, of the reported memory of text processes: each reported change sends a new snapshot."""
RELIEF_SECONDS: Mapping[Pressure, float] = {"normal": math.inf, "warning": 60.0, "critical": 10.0}
"""Seconds between releases of memory while a pressure lasts. A Mac may warn for hours; each release halves caches."""

logger = logging.getLogger("paceline.loop")


class Loop:
    """The worker's main loop: call `run` on the thread that owns mlx, and `post` from any thread."""

    def __init__(
        self,
        *,
        pool: EnginePool,
        open_scheduler: OpenScheduler,
        text_thread: TextThread,
        send: Callable[[Event], None],
        save_costs: SaveCosts,
        crash_note: CrashNote,
        text_bytes: Callable[[], int] = lambda: 0,
        clock: Clock = time.monotonic,
        read_pressure: Callable[[], Pressure] = memory_pressure,
    ) -> None:
        self._pool = pool
        self._open_scheduler = open_scheduler
        self._text_thread = text_thread
        self._send = send
        self._save_costs_callback = save_costs
        self._text_bytes = text_bytes
        self._crash_note = crash_note
        self._clock = clock
        self._read_pressure = read_pressure
        self._last_relief_pressure: Pressure = "normal"
        self._last_relief_at = clock()
        self._inbox: queue.SimpleQueue[LoopCommand] = queue.SimpleQueue()
        self._served: dict[str, ServedModel] = {}
        self._halted = False
        self._made_progress = True
        self._next_housekeeping = self._next_cost_save = self._next_heartbeat = self._steps_reported_at = clock()
        self._steps: list[float] = []
        self._untrimmed_steps = 0
        self._last_snapshot: Snapshot | None = None
        pool.on_progress = self._send_heartbeat_if_due

    def post(self, command: LoopCommand) -> None:
        """Queue a command; never blocks, also safe in a signal handler."""
        self._inbox.put(command)

    def run(self) -> None:
        """Run turns until a Halt arrives. Raises DeviceLost."""
        while self.turn():
            pass
        self._save_all_costs()

    def turn(self, *, wait: bool = True) -> bool:
        """Run one turn; with `wait`, block on the inbox if there is nothing to do. Returns False after a Halt."""
        self._read_commands(self._seconds_to_sleep() if wait else 0.0)
        if self._pool.loading:
            with self._crash_note.on(self._pool.next_load):
                events = self._pool.advance()
            for event in events:
                self._on_event(event)
            self._send_heartbeat_if_due()
        self._made_progress = False
        first, running = self._first_to_admit, {name for name, served in self._served.items() if served.running}
        for model_id, served in tuple(self._served.items()):
            if served.has_work:
                began = self._clock()
                with self._crash_note.on(model_id):
                    beside_others = bool(running - {model_id})
                    self._made_progress |= served.step(may_admit=first in (None, served), beside_others=beside_others)
                self._steps.append(self._clock() - began)
                self._count_step()
                self._send_heartbeat_if_due()
                self._read_commands(0.0)
        if next_warm_up := self._next_warm_up:
            with self._crash_note.on(next_warm_up):
                events = self._pool.warm_up(lambda: self._served_model(next_warm_up).costs)
            for event in events:
                self._on_event(event)
        self._do_housekeeping()
        self._send_heartbeat_if_due()
        return not self._halted

    # --- commands ---------------------------------------------------------------------------------------------

    def _seconds_to_sleep(self) -> float:
        """Return the seconds to the next heartbeat, when models that planned no step are retried; 0 if work is due."""
        works = self._made_progress and any(served.has_work for served in self._served.values())
        if works or self._pool.loading or self._next_warm_up:
            return 0.0
        return max(0.0, self._next_heartbeat - self._clock())

    @property
    def _next_warm_up(self) -> str:
        """Id of the model to warm up now; empty if there is none, or while a request or a load is pending."""
        return "" if self._busy() else self._pool.next_warm_up

    def _read_commands(self, seconds: float) -> None:
        try:
            command = self._inbox.get(timeout=seconds) if seconds > 0 else self._inbox.get_nowait()
            while True:
                self._execute(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _execute(self, command: LoopCommand) -> None:
        self._made_progress = True
        match command:
            case Submission() | LoadModel():
                with self._crash_note.on(command.model.id):
                    self._execute_or_refuse(
                        command, lambda: self._enqueue(command), f"{command.model.id} cannot be loaded"
                    )
            case UnloadModel():
                self._execute_or_refuse(
                    command, lambda: self._unload(command), f"{command.model_id} cannot be unloaded"
                )
            case KeepModels():
                self._pool.set_stays(command)
                self._send_snapshot()
            case ClearPrefixes():
                self._pool.clear_prefixes()
                self._send_snapshot()
            case Cancel():
                for served in self._served.values():
                    served.cancel(command.id)
            case Halt():
                self._halted = True

    def _execute_or_refuse(
        self, command: Submission | LoadModel | UnloadModel, execute: Callable[[], None], failure_message: str
    ) -> None:
        """Call `execute`; report an error that it raises to the sender of the command."""
        failure = None
        try:
            execute()
        except PacelineError as error:
            failure = error
        except Exception as error:
            logger.exception("%s", failure_message)
            failure = PacelineError(f"{failure_message}: {short_text(error)}")
        if failure is not None and isinstance(command, Submission):
            self._text_thread.refused(command.id, failure)
        elif failure is not None:
            self._send(failed_frame(command.id, failure))

    def _enqueue(self, command: Submission | LoadModel) -> None:
        """Queue a command for its engine, with one lease per choice or load; submit it now if the engine is ready."""
        model_id, leases = command.model.id, 1
        if isinstance(command, Submission):
            leases = len(command.requests)
            served = self._served.get(model_id)
            waiting_count = served.waiting_for(command.requests[0].owner) if served is not None else 0
            # The scheduler refuses a submission that is over the limit by itself.
            if waiting_count and waiting_count + leases > command.model.live.queue_limit:
                message = f"{waiting_count} requests wait for {model_id} to be loaded; try again in a moment"
                raise QueueFull(message, retry_after_seconds=LOADING_RETRY_SECONDS)
        for _ in range(leases):
            self._pool.acquire(command.model, command.stay)
        if isinstance(command, LoadModel):
            self._pool.update_specification(command.model)
        served = self._served_model(model_id)
        served.enqueue(command)
        if (engine := self._pool.engine(model_id)) is not None and (loads := served.open(engine)):
            self._report_loaded(loads, 0.0)

    def _report_loaded(self, loads: Iterable[LoadModel], seconds: float) -> None:
        """Report that the models of these load commands are ready."""
        self._send_snapshot()
        for load in loads:
            self._send(ModelLoaded(id=load.id, model_id=load.model.id, seconds=seconds))

    def _unload(self, command: UnloadModel) -> None:
        self._pool.unload(command.model_id)
        self._send_snapshot()
        self._send(ModelUnloaded(id=command.id, model_id=command.model_id))

    # --- models -----------------------------------------------------------------------------------------------

    def _served_model(self, model_id: str) -> ServedModel:
        if model_id not in self._served:
            self._served[model_id] = ServedModel(
                open_scheduler=self._open_scheduler,
                text_thread=self._text_thread,
                save_costs=self._save_costs_callback,
                pool=self._pool,
                model_id=model_id,
                clock=self._clock,
            )
        return self._served[model_id]

    @property
    def _first_to_admit(self) -> ServedModel | None:
        """Model that has had no row for too long, because others fill the memory; they admit nobody before it does."""
        first = min(self._served.values(), key=attrgetter("rowless_since"), default=None)
        return first if first and self._clock() - first.rowless_since >= PATIENCE_SECONDS else None

    def _on_event(self, event: PoolEvent) -> None:
        """Handle a pool event of one model."""
        model_id, served = event.model_id, self._served_model(event.model_id)
        match event:
            case LoadProgress():
                self._send(event)
            case Loaded():
                self._send(LoadProgress(model_id=model_id, phase="ready", fraction=1.0))
                served.add_costs(event.costs)
                engine = self._pool.engine(model_id)
                self._report_loaded(served.open(engine) if engine is not None else (), event.seconds)
            case LoadFailed():
                check_device(event.error)
                self._send(LoadProgress(model_id=model_id, phase="failed", fraction=0.0))
                for load in served.close(event.error):
                    self._send(failed_frame(load.id, event.error))
            case WarmedUp():
                served.add_costs(event.costs)
            case Evicted():
                served.save_costs()
                served.detach()
        if isinstance(event, LoadFailed | Evicted):
            if not served.busy:
                del self._served[model_id]
            self._send_snapshot()

    # --- heartbeats: if the loop hangs, they stop, and the supervisor notices -----------------------------------

    def _send_heartbeat_if_due(self) -> None:
        due = (
            min(self._next_heartbeat, self._steps_reported_at + STEP_REPORT_SECONDS)
            if self._steps
            else self._next_heartbeat
        )
        if self._clock() >= due:
            self._send_heartbeat()

    def _send_snapshot(self) -> None:
        """Send a snapshot now, so that it precedes the reports of loads and unloads."""
        self._next_heartbeat = self._clock()
        self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        now = self._steps_reported_at = self._clock()
        snapshot = None
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            snapshot = self._changed_snapshot()
        steps, self._steps = tuple(self._steps), []
        self._send(Heartbeat(pending=self._busy(), step_seconds=steps, snapshot=snapshot))

    def _changed_snapshot(self) -> Snapshot | None:
        active, cached, peak = memory.usage()
        models = tuple(
            served.describe(model) if (served := self._served.get(model.id)) else model
            for model in self._pool.snapshot()
        )
        snapshot = Snapshot(
            models=models,
            active_bytes=active,
            cached_bytes=cached,
            peak_bytes=peak,
            text_bytes=self._text_bytes() // TEXT_ROUNDING_BYTES * TEXT_ROUNDING_BYTES,
            memory_pressure=self._pool.pressure,
        )
        if snapshot == self._last_snapshot:
            return None
        self._last_snapshot = snapshot
        return snapshot

    # --- housekeeping -----------------------------------------------------------------------------------------

    def _do_housekeeping(self) -> None:
        """Do housekeeping about once a second: evict models that were idle too long, relieve memory pressure, and, if
        idle, free the buffers of steps and store their costs."""
        now = self._clock()
        if now < self._next_housekeeping:
            return
        self._next_housekeeping = now + HOUSEKEEPING_SECONDS
        for event in self._pool.expire():
            self._on_event(event)
        self._text_thread.in_memory(frozenset(model.unit.path for model in self._pool.snapshot()))
        self._relieve(now)
        if self._busy():
            return
        if self._untrimmed_steps:
            self._trim()
        if now >= self._next_cost_save:
            self._save_all_costs()

    def _relieve(self, now: float) -> None:
        """Read the system's memory pressure, and release memory if a release is due."""
        before, pressure = self._pool.pressure, self._read_pressure()
        self._pool.pressure = pressure
        if is_relief_due(pressure, self._last_relief_pressure, now - self._last_relief_at):
            self._last_relief_pressure, self._last_relief_at = pressure, now
            freed = self._pool.relieve()
            if freed or pressure != before:
                logger.warning("the system is short of memory (%s): gave back %.1f MB", pressure, freed / 10**6)
        elif pressure == "normal" != before:
            logger.info("the system has memory again")

    def _count_step(self) -> None:
        self._untrimmed_steps += 1
        if self._untrimmed_steps >= TRIM_STEPS:
            self._trim()

    def _trim(self) -> None:
        self._untrimmed_steps = 0
        self._pool.trim()

    def _save_all_costs(self) -> None:
        """Store the step costs of every model for its next load."""
        self._next_cost_save = self._clock() + SAVE_COSTS_SECONDS
        for served in self._served.values():
            served.save_costs()

    def _busy(self) -> bool:
        """Return whether any request waits for a step or a load."""
        return self._pool.loading or any(served.busy for served in self._served.values())


def is_relief_due(pressure: Pressure, relieved_at_pressure: Pressure, seconds: float) -> bool:
    """Return whether to release memory now, `seconds` after the last release, which was at `relieved_at_pressure`:
    immediately if the pressure has risen since, at intervals while it lasts."""
    is_worse = PRESSURES.index(pressure) > PRESSURES.index(relieved_at_pressure)
    return is_worse or seconds >= RELIEF_SECONDS[pressure]
