"""The MLX thread: commands in, one slice of a load and one step of each model per turn, deliveries out.

Only this thread touches the engine. Apart from backpressure of the channel and the text thread, it blocks only on its
inbox, and only if there is nothing to step. A step that raises fails its own requests (`served_model.py`); a load that
fails, the requests that wait for it.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterable

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
from app.engine.loading.pool import EnginePool, Evicted, Loaded, LoadFailed, PoolEvent
from app.machine.host import memory_pressure
from app.worker.channel import CrashNote
from app.worker.served_model import KeepCosts, OpenScheduler, ServedModel
from app.worker.text_thread import TextThread
from app.worker.thread_commands import Halt, LoopCommand, Submission

HEARTBEAT_SECONDS = 1.0
STEPS_TOLD_SECONDS = 0.1
"""Seconds between reports of step times: a frame for each step would cost the server as much as its tokens."""
HOUSEWORK_SECONDS = 1.0
REMEMBER_SECONDS = 30.0
TRIM_STEPS = 256
"""Steps after which freed buffers are returned to the system; also done when idle."""
LOADING_RETRY_SECONDS = 5
TEXT_STEP_BYTES = 16 << 20
"""Rounding, in bytes, of the reported memory of text processes: each change is sent to the server."""
RELIEF_SECONDS = 10.0
"""Seconds between two releases of memory while the system is short of it."""

_logger = logging.getLogger("paceline.loop")


class Loop:
    """The worker's main loop: call `run` on the thread that owns mlx, and `post` from any thread."""

    def __init__(
        self,
        *,
        pool: EnginePool,
        open_scheduler: OpenScheduler,
        text_thread: TextThread,
        send: Callable[[Event], None],
        keep_costs: KeepCosts,
        crash_note: CrashNote,
        text_bytes: Callable[[], int] = lambda: 0,
        clock: Clock = time.monotonic,
        hear_pressure: Callable[[], Pressure] = memory_pressure,
    ) -> None:
        self._pool = pool
        self._open_scheduler = open_scheduler
        self._text_thread = text_thread
        self._send = send
        self._keep_costs = keep_costs
        self._text_bytes = text_bytes
        self._crash_note = crash_note
        self._clock = clock
        self._hear_pressure = hear_pressure
        self._relieved: Pressure = "normal"
        self._relieved_at = clock()
        self._inbox: queue.SimpleQueue[LoopCommand] = queue.SimpleQueue()
        self._served: dict[str, ServedModel] = {}
        self._halted = False
        self._made_progress = True
        self._next_house_work = self._next_remembering = self._next_beat = self._steps_told_at = clock()
        self._steps: list[float] = []
        self._untrimmed_steps = 0
        self._shown: Snapshot | None = None
        pool.on_progress = self._beat_if_due

    def post(self, command: LoopCommand) -> None:
        """Queue a command; never blocks, also safe in a signal handler."""
        self._inbox.put(command)

    def run(self) -> None:
        """Run turns until a Halt arrives."""
        while self.turn():
            pass
        self._remember()

    def turn(self, *, wait: bool = True) -> bool:
        """Run one round; with `wait`, sleep on the inbox if there is nothing to do. Returns False after a Halt."""
        self._read_commands(self._seconds_to_sleep() if wait else 0.0)
        if self._pool.loading:
            with self._crash_note.on(self._pool.next_load):
                events = self._pool.advance()
            for event in events:
                self._on_event(event)
            self._beat_if_due()
        self._made_progress = False
        for model_id, served in tuple(self._served.items()):
            if served.has_work:
                began = self._clock()
                with self._crash_note.on(model_id):
                    self._made_progress |= served.step()
                self._steps.append(self._clock() - began)
                self._count_step()
                self._beat_if_due()
                self._read_commands(0.0)
        self._keep_house()
        self._beat_if_due()
        return not self._halted

    # --- commands ---------------------------------------------------------------------------------------------

    def _seconds_to_sleep(self) -> float:
        """Return the seconds to the next heartbeat, when models without a plan are retried; 0 if a step is due."""
        if self._pool.loading or (self._made_progress and any(served.has_work for served in self._served.values())):
            return 0.0
        return max(0.0, self._next_beat - self._clock())

    def _read_commands(self, seconds: float) -> None:
        try:
            command = self._inbox.get(timeout=seconds) if seconds > 0 else self._inbox.get_nowait()
            while True:
                self._obey(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _obey(self, command: LoopCommand) -> None:
        self._made_progress = True
        match command:
            case Submission() | LoadModel():
                with self._crash_note.on(command.model.id):
                    self._attempt(command, lambda: self._join(command), f"{command.model.id} cannot be loaded")
            case UnloadModel():
                self._attempt(command, lambda: self._unload(command), f"{command.model_id} cannot be unloaded")
            case KeepModels():
                self._pool.keep(command)
                self._send_snapshot()
            case ClearPrefixes():
                self._pool.clear_prefixes()
                self._send_snapshot()
            case Cancel():
                for served in self._served.values():
                    served.withdraw(command.id)
            case Halt():
                self._halted = True

    def _attempt(self, command: Submission | LoadModel | UnloadModel, obey: Callable[[], None], what: str) -> None:
        """Call `obey`, and send an error that it raises to the sender of the command."""
        refusal = None
        try:
            obey()
        except PacelineError as error:
            refusal = error
        except Exception as error:
            _logger.exception("%s", what)
            refusal = PacelineError(f"{what}: {short_text(error)}")
        if refusal is not None and isinstance(command, Submission):
            self._text_thread.refused(command.id, refusal)
        elif refusal is not None:
            self._send(failed_frame(command.id, refusal))

    def _join(self, command: Submission | LoadModel) -> None:
        """Queue for the engine, with one lease for each choice or for the load; start at once if it is ready."""
        model_id, leases = command.model.id, 1
        if isinstance(command, Submission):
            leases = len(command.requests)
            served = self._served.get(model_id)
            line = served.line_of(command.requests[0].owner) if served is not None else 0
            if line and line + leases > command.model.queue_limit:  # what is too much alone, the scheduler refuses
                message = f"{line} requests wait for {model_id} to be loaded; try again in a moment"
                raise QueueFull(message, retry_after_seconds=LOADING_RETRY_SECONDS)
        for _ in range(leases):
            self._pool.acquire(command.model, command.stay)
        if isinstance(command, LoadModel):
            self._pool.use(command.model)
        served = self._serve(model_id)
        served.join(command)
        if (engine := self._pool.engine(model_id)) is not None and (loads := served.open(engine)):
            self._answer(loads, 0.0)

    def _answer(self, loads: Iterable[LoadModel], seconds: float) -> None:
        """Answer load commands whose model is ready."""
        self._send_snapshot()
        for load in loads:
            self._send(ModelLoaded(id=load.id, model_id=load.model.id, seconds=seconds))

    def _unload(self, command: UnloadModel) -> None:
        self._pool.unload(command.model_id)
        self._send_snapshot()
        self._send(ModelUnloaded(id=command.id, model_id=command.model_id))

    # --- models -----------------------------------------------------------------------------------------------

    def _serve(self, model_id: str) -> ServedModel:
        if model_id not in self._served:
            self._served[model_id] = ServedModel(
                open_scheduler=self._open_scheduler,
                text_thread=self._text_thread,
                keep_costs=self._keep_costs,
                pool=self._pool,
                model_id=model_id,
                clock=self._clock,
            )
        return self._served[model_id]

    def _on_event(self, event: PoolEvent) -> None:
        """Handle a pool event of one model."""
        model_id, served = event.model_id, self._serve(event.model_id)
        match event:
            case LoadProgress():
                self._send(event)
            case Loaded():
                self._send(LoadProgress(model_id=model_id, phase="ready", fraction=1.0))
                engine = self._pool.engine(model_id)
                self._answer(served.open(engine) if engine is not None else (), event.seconds)
            case LoadFailed():
                self._send(LoadProgress(model_id=model_id, phase="failed", fraction=0.0))
                for load in served.close(event.error):
                    self._send(failed_frame(load.id, event.error))
            case Evicted():
                served.keep_costs()
                served.detach()
        if isinstance(event, LoadFailed | Evicted):
            if not served.busy:
                del self._served[model_id]
            self._send_snapshot()

    # --- heartbeats: if the loop hangs, they stop, and the supervisor notices -----------------------------------

    def _beat_if_due(self) -> None:
        due = min(self._next_beat, self._steps_told_at + STEPS_TOLD_SECONDS) if self._steps else self._next_beat
        if self._clock() >= due:
            self._beat()

    def _send_snapshot(self) -> None:
        """Send a snapshot at once, so that it precedes the reports of loads and unloads."""
        self._next_beat = self._clock()
        self._beat()

    def _beat(self) -> None:
        now = self._steps_told_at = self._clock()
        snapshot = None
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            snapshot = self._changed_snapshot()
        steps, self._steps = tuple(self._steps), []
        self._send(Heartbeat(pending=self._busy(), step_seconds=steps, snapshot=snapshot))

    def _changed_snapshot(self) -> Snapshot | None:
        active, cached, peak = self._pool.memory()
        models = tuple(
            served.describe(model) if (served := self._served.get(model.id)) else model
            for model in self._pool.snapshot()
        )
        snapshot = Snapshot(
            models=models,
            active_bytes=active,
            cached_bytes=cached,
            peak_bytes=peak,
            text_bytes=self._text_bytes() // TEXT_STEP_BYTES * TEXT_STEP_BYTES,
            memory_pressure=self._pool.pressure,
        )
        if snapshot == self._shown:
            return None
        self._shown = snapshot
        return snapshot

    # --- housework --------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """Do the housework, about once a second: evict models that were idle too long, relieve memory pressure, and, if
        idle, free the buffers of steps and store their costs."""
        now = self._clock()
        if now < self._next_house_work:
            return
        self._next_house_work = now + HOUSEWORK_SECONDS
        for event in self._pool.expire():
            self._on_event(event)
        self._text_thread.in_memory(frozenset(model.unit.path for model in self._pool.snapshot()))
        self._relieve(now)
        if self._busy():
            return
        if self._untrimmed_steps:
            self._trim()
        if now >= self._next_remembering:
            self._remember()

    def _relieve(self, now: float) -> None:
        """Read the system's memory pressure, and give memory back when that is due."""
        before, pressure = self._pool.pressure, self._hear_pressure()
        self._pool.pressure = pressure
        if is_relief_due(pressure, self._relieved, now - self._relieved_at):
            self._relieved, self._relieved_at = pressure, now
            freed = self._pool.relieve()
            if freed or pressure != before:
                _logger.warning("the system is short of memory (%s): gave back %.1f MB", pressure, freed / 10**6)
        elif pressure == "normal" != before:
            _logger.info("the system has memory again")

    def _count_step(self) -> None:
        self._untrimmed_steps += 1
        if self._untrimmed_steps >= TRIM_STEPS:
            self._trim()

    def _trim(self) -> None:
        self._untrimmed_steps = 0
        self._pool.trim()

    def _remember(self) -> None:
        """Store the measured step costs, for the next load."""
        self._next_remembering = self._clock() + REMEMBER_SECONDS
        for served in self._served.values():
            served.keep_costs()

    def _busy(self) -> bool:
        """Return whether any request waits for a step or a load."""
        return self._pool.loading or any(served.busy for served in self._served.values())


def is_relief_due(pressure: Pressure, relieved: Pressure, seconds: float) -> bool:
    """Return whether to give memory back, `seconds` after the last time at pressure `relieved`: at once if the pressure
    has risen, else every `RELIEF_SECONDS` while it lasts."""
    is_worse = PRESSURES.index(pressure) > PRESSURES.index(relieved)
    return pressure != "normal" and (is_worse or seconds >= RELIEF_SECONDS)
