"""The MLX thread: commands in, one slice of a load and one step of each model in turn, deliveries out.

Only this thread touches the engine. It never waits for anything but its inbox, and for that only when there is
nothing to step. A step that raises fails its own requests (`served_model.py`); a load that fails tells those who wait
for it.
"""

import logging
import queue
import time
from collections.abc import Callable

import msgspec

from app.core.errors import PacelineError, QueueFull
from app.core.messages import (
    Cancel,
    Delivery,
    Event,
    Halt,
    Heartbeat,
    KeepModel,
    LoadedModel,
    LoadModel,
    LoadProgress,
    LoopCommand,
    ModelLoaded,
    ModelUnloaded,
    Refused,
    Snapshot,
    Submission,
    UnloadModel,
    failed_frame,
    short_text,
)
from app.core.ports import Clock
from app.engine.pool import EnginePool, Evicted, Loaded, LoadFailed, PoolEvent, Progress
from app.worker.recovery import CrashNote
from app.worker.served_model import KeepCosts, OpenScheduler, ServedModel

HEARTBEAT_SECONDS = 1.0
STEPS_TOLD_SECONDS = 0.1
"""Steps are told together, as often as this: a frame for each would cost the server as much as their tokens."""
HOUSEWORK_SECONDS = 1.0
REMEMBER_SECONDS = 30.0
LOADING_RETRY_SECONDS = 5

_logger = logging.getLogger("paceline.loop")


class Loop:
    """`run` it on the thread that owns mlx; `post` from any thread."""

    def __init__(
        self,
        *,
        pool: EnginePool,
        open_scheduler: OpenScheduler,
        deliver: Callable[[Delivery], None],
        send: Callable[[Event], None],
        keep_costs: KeepCosts = lambda _spec, _costs: None,
        crash_note: CrashNote | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._pool = pool
        self._open_scheduler = open_scheduler
        self._deliver = deliver
        self._send = send
        self._keep_costs = keep_costs
        self._crash_note = crash_note or CrashNote()
        self._clock = clock
        self._inbox: queue.SimpleQueue[LoopCommand] = queue.SimpleQueue()
        self._served: dict[str, ServedModel] = {}
        self._loads: dict[str, LoadModel] = {}
        self._halted = False
        self._moved = True
        self._next_house_work = self._next_remembering = self._next_beat = self._steps_told_at = clock()
        self._steps: list[float] = []
        self._shown: Snapshot | None = None

    def post(self, command: LoopCommand) -> None:
        """Leave a command; never blocks, also safe in a signal handler."""
        self._inbox.put(command)

    def run(self) -> None:
        """Turn until a Halt arrives."""
        while self.turn():
            pass
        self._remember()

    def turn(self, *, wait: bool = True) -> bool:
        """One round; with `wait` it sleeps on the inbox when there is nothing to do. False after a Halt."""
        self._read_commands(self._seconds_to_sleep() if wait else 0.0)
        if self._pool.loading:
            with self._crash_note.on(self._pool.next_load):
                events = self._pool.advance()
            for event in events:
                self._hear(event)
            self._beat_if_due()
        self._moved = False
        for model_id, served in tuple(self._served.items()):
            if served.has_work:
                began = self._clock()
                with self._crash_note.on(model_id):
                    self._moved |= served.step()
                self._stepped(self._clock() - began)
                self._read_commands(0.0)
        self._keep_house()
        self._beat_if_due()
        return not self._halted

    # --- commands ---------------------------------------------------------------------------------------------

    def _seconds_to_sleep(self) -> float:
        """0 while something can be stepped; a model that has work and no plan is asked again at the next beat."""
        if self._pool.loading or (self._moved and any(served.has_work for served in self._served.values())):
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
        match command:
            case Submission():
                self._submit(command)
            case LoadModel():
                self._load(command)
            case KeepModel():
                self._keep(command)
            case UnloadModel():
                self._unload(command)
            case Cancel():
                self._cancel(command.id)
            case Halt():
                self._halted = True
        self._moved = True

    def _submit(self, submission: Submission) -> None:
        model_id = submission.model.id
        served = self._served.get(model_id)
        line = served.line_of(submission.requests[0].owner) if served is not None else 0
        if line >= submission.model.queue_limit:
            message = f"{line} requests wait for {model_id} to be loaded; try again in a moment"
            self._deliver(Refused(submission.id, QueueFull(message, retry_after_seconds=LOADING_RETRY_SECONDS)))
            return
        with self._crash_note.on(model_id):
            error = self._attempt(lambda: self._lease(submission), f"{model_id} cannot be loaded")
        if error is not None:
            self._deliver(Refused(submission.id, error))
            return
        served = served or self._serve(model_id)
        served.join(submission)
        if (engine := self._pool.engine(model_id)) is not None:
            served.open(engine)

    def _lease(self, submission: Submission) -> None:
        """One lease for each choice, or none."""
        taken = 0
        try:
            for _ in submission.requests:
                self._pool.acquire(submission.model)
                taken += 1
        except Exception:
            for _ in range(taken):
                self._pool.release(submission.model.id)
            raise

    def _load(self, command: LoadModel) -> None:
        model_id = command.model.id
        with self._crash_note.on(model_id):
            error = self._attempt(lambda: self._pool.acquire(command.model), f"{model_id} cannot be loaded")
        if error is not None:
            self._send(failed_frame(command.id, error))
            return
        self._loads[command.id] = command
        if self._pool.engine(model_id) is not None:
            self._answer_loads(model_id, 0.0)

    def _keep(self, command: KeepModel) -> None:
        if command.pinned is not None:
            self._pool.pin(command.model_id, command.pinned)
        if command.idle_seconds is not None:
            self._pool.set_idle(command.model_id, command.idle_seconds if command.idle_seconds >= 0 else None)
        self._show()

    def _unload(self, command: UnloadModel) -> None:
        model_id = command.model_id
        error = self._attempt(lambda: self._pool.unload(model_id), f"{model_id} cannot be unloaded")
        if error is not None:
            self._send(failed_frame(command.id, error))
            return
        self._show()
        self._send(ModelUnloaded(id=command.id, model_id=model_id))

    def _cancel(self, request_id: str) -> None:
        """End a choice, or stop waiting for a load; the load itself ends when nobody else waits for it."""
        command = self._loads.pop(request_id, None)
        if command is None:
            for each in self._served.values():
                each.withdraw(request_id)
            return
        model_id = command.model.id
        self._pool.release(model_id)
        served = self._served.get(model_id)
        if not (served and served.busy) and not any(load.model.id == model_id for load in self._loads.values()):
            self._pool.cancel_load(model_id)

    def _attempt(self, work: Callable[[], None], what: str) -> PacelineError | None:
        """Do `work`; the answer is the error to tell, if it raised."""
        try:
            work()
        except PacelineError as error:
            return error
        except Exception as error:
            _logger.exception("%s", what)
            return PacelineError(f"{what}: {short_text(error)}")
        return None

    # --- models -----------------------------------------------------------------------------------------------

    def _serve(self, model_id: str) -> ServedModel:
        self._served[model_id] = served = ServedModel(
            open_scheduler=self._open_scheduler,
            deliver=self._deliver,
            pool=self._pool,
            model_id=model_id,
            clock=self._clock,
        )
        return served

    def _hear(self, event: PoolEvent) -> None:
        """What the pool told about one model."""
        model_id = event.model_id
        served = self._served.get(model_id)
        match event:
            case Progress():
                self._send(LoadProgress(model_id=model_id, phase=event.phase, fraction=event.fraction))
            case Loaded():
                self._send(LoadProgress(model_id=model_id, phase="ready", fraction=1.0))
                if served is not None and (engine := self._pool.engine(model_id)) is not None:
                    served.open(engine)
                self._answer_loads(model_id, event.seconds)
            case LoadFailed():
                self._send(LoadProgress(model_id=model_id, phase="failed", fraction=0.0))
                if served is not None:
                    served.close(event.error)
                for command in self._take_loads(model_id):
                    self._send(failed_frame(command.id, event.error))
                self._show()
            case Evicted():
                if served is not None:
                    served.keep_costs(self._keep_costs)
                    served.detach()
                    if not served.busy:
                        del self._served[model_id]
                self._show()

    def _answer_loads(self, model_id: str, seconds: float) -> None:
        commands = self._take_loads(model_id)
        for _ in commands:
            self._pool.release(model_id)
        self._show()
        for command in commands:
            self._send(ModelLoaded(id=command.id, model_id=model_id, seconds=seconds))

    def _take_loads(self, model_id: str) -> list[LoadModel]:
        taken = [command for command in self._loads.values() if command.model.id == model_id]
        for command in taken:
            del self._loads[command.id]
        return taken

    # --- heartbeats: a loop that is stuck is silent, and the supervisor notices ---------------------------------

    def _stepped(self, seconds: float) -> None:
        self._steps.append(seconds)
        if self._clock() >= min(self._next_beat, self._steps_told_at + STEPS_TOLD_SECONDS):
            self._beat()

    def _beat_if_due(self) -> None:
        if self._clock() >= self._next_beat:
            self._beat()

    def _show(self) -> None:
        """Models came or went: tell it before anybody is told that it happened."""
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
        snapshot = Snapshot(models=self._models(), active_bytes=active, cached_bytes=cached, peak_bytes=peak)
        if self._shown is not None and _timeless(snapshot) == _timeless(self._shown):
            return None
        self._shown = snapshot
        return snapshot

    # --- housework --------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """About once a second: let go of models that were idle too long."""
        now = self._clock()
        if now < self._next_house_work:
            return
        self._next_house_work = now + HOUSEWORK_SECONDS
        for event in self._pool.expire():
            self._hear(event)
        if now >= self._next_remembering and not self._busy():
            self._remember()

    def _remember(self) -> None:
        """Keep what steps cost, for the next load."""
        self._next_remembering = self._clock() + REMEMBER_SECONDS
        for served in self._served.values():
            served.keep_costs(self._keep_costs)

    def _busy(self) -> bool:
        """Whether anybody waits for a step or a load."""
        return self._pool.loading or any(served.busy for served in self._served.values())

    def _models(self) -> tuple[LoadedModel, ...]:
        """The pool's models, with the requests that they have."""
        models = []
        for model in self._pool.snapshot():
            served = self._served.get(model.id)
            if served is not None:
                now = {"running": served.running, "waiting": served.waiting, "reading": served.reading}
                model = msgspec.structs.replace(model, **now)  # noqa: PLW2901 - the same model, with its requests
            models.append(model)
        return tuple(models)


def _timeless(snapshot: Snapshot) -> Snapshot:
    """Without what changes by the mere passing of time."""
    models = tuple(msgspec.structs.replace(model, idle_seconds=0.0) for model in snapshot.models)
    return msgspec.structs.replace(snapshot, models=models)
