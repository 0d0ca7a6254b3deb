"""The MLX thread: mail in, one slice of a load and one step of each model in turn, deliveries out.

Only this thread touches the engine. It never waits for anything but its mailbox, and for that only when there is
nothing to step. A step that raises fails its own requests (`lane.py`); a load that fails tells those who wait for it.
"""

import logging
import queue
import time
from collections.abc import Callable

import msgspec

from app.core.errors import PacelineError
from app.core.messages import (
    Cancel,
    Event,
    Heartbeat,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    ModelUnloaded,
    Snapshot,
    UnloadModel,
)
from app.core.ports import Clock
from app.engine.pool import Evicted, Loaded, LoadFailed, PoolEvent, Progress
from app.worker.failure import failed_frame, short_text
from app.worker.lane import Lane, OpenScheduler
from app.worker.mail import Delivery, Halt, Mail, Refused, Submission, Withdrawal
from app.worker.ports import PoolPort

HEARTBEAT_SECONDS = 1.0

_logger = logging.getLogger("paceline.loop")


class Loop:
    """`run` it on the thread that owns mlx; `post` from any thread."""

    def __init__(
        self,
        *,
        pool: PoolPort,
        open_scheduler: OpenScheduler,
        deliver: Callable[[Delivery], None],
        send: Callable[[Event], None],
        text_is_alive: Callable[[], bool] = lambda: True,
        clock: Clock = time.monotonic,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._pool = pool
        self._open_scheduler = open_scheduler
        self._deliver = deliver
        self._send = send
        self._text_is_alive = text_is_alive
        self._clock = clock
        self._heartbeat_seconds = heartbeat_seconds
        self._mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._lanes: dict[str, Lane] = {}
        self._loads: dict[str, LoadModel] = {}
        self._halted = False
        self._moved = True
        self._told_snapshot: Snapshot | None = None
        self._next_beat = self._next_house_work = clock()

    def post(self, mail: Mail) -> None:
        """Leave mail; never blocks, also safe in a signal handler."""
        self._mailbox.put(mail)

    def run(self) -> None:
        """Turn until a Halt arrives."""
        while self.turn():
            pass

    def turn(self, *, wait: bool = True) -> bool:
        """One round; with `wait` it sleeps on the mailbox when there is nothing to do. False after a Halt."""
        self._read_mail(self._seconds_to_sleep() if wait else 0.0)
        if self._pool.loading:
            for event in self._pool.advance():
                self._hear(event)
            self._beat_if_due()
        self._moved = False
        for lane in tuple(self._lanes.values()):
            if lane.has_work:
                began = self._clock()
                self._moved |= lane.step()
                self._beat(self._clock() - began)
                self._read_mail(0.0)
        self._keep_house()
        self._beat_if_due()
        return not self._halted

    # --- mail -------------------------------------------------------------------------------------------------

    def _seconds_to_sleep(self) -> float:
        """0 while something can be stepped; a lane that has work and no plan is asked again at the next beat."""
        if self._pool.loading or (self._moved and any(lane.has_work for lane in self._lanes.values())):
            return 0.0
        return max(0.0, self._next_beat - self._clock())

    def _read_mail(self, seconds: float) -> None:
        try:
            mail = self._mailbox.get(timeout=seconds) if seconds > 0 else self._mailbox.get_nowait()
            while True:
                self._obey(mail)
                mail = self._mailbox.get_nowait()
        except queue.Empty:
            return

    def _obey(self, mail: Mail) -> None:
        match mail:
            case Submission():
                self._submit(mail)
            case Withdrawal():
                self._withdraw(mail.request_ids)
            case LoadModel():
                self._load(mail)
            case UnloadModel():
                self._unload(mail)
            case Cancel():
                self._cancel_load(mail.id)
            case Halt():
                self._halted = True
        self._moved = True

    def _submit(self, submission: Submission) -> None:
        model_id = submission.model.id
        error = self._attempt(lambda: self._lease(submission), f"{model_id} cannot be loaded")
        if error is not None:
            self._deliver(Refused(submission.id, error))
            return
        lane = self._lanes.get(model_id) or self._new_lane(model_id)
        lane.join(submission)
        if (engine := self._pool.engine(model_id)) is not None:
            lane.open(engine)

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

    def _withdraw(self, request_ids: tuple[str, ...]) -> None:
        for lane in self._lanes.values():
            for request_id in request_ids:
                lane.withdraw(request_id)

    def _load(self, command: LoadModel) -> None:
        model_id = command.model.id
        error = self._attempt(lambda: self._pool.acquire(command.model), f"{model_id} cannot be loaded")
        if error is not None:
            self._send(failed_frame(command.id, error))
            return
        self._loads[command.id] = command
        if self._pool.engine(model_id) is not None:
            self._answer_loads(model_id, 0.0)

    def _unload(self, command: UnloadModel) -> None:
        model_id = command.model_id
        error = self._attempt(lambda: self._pool.unload(model_id), f"{model_id} cannot be unloaded")
        if error is not None:
            self._send(failed_frame(command.id, error))
            return
        self._show()
        self._send(ModelUnloaded(id=command.id, model_id=model_id))

    def _cancel_load(self, request_id: str) -> None:
        """Stop waiting for a load; the load itself ends when nobody else waits for it."""
        command = self._loads.pop(request_id, None)
        if command is None:
            return
        model_id = command.model.id
        self._pool.release(model_id)
        lane = self._lanes.get(model_id)
        if not (lane and lane.busy) and not any(load.model.id == model_id for load in self._loads.values()):
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

    def _new_lane(self, model_id: str) -> Lane:
        self._lanes[model_id] = lane = Lane(
            open_scheduler=self._open_scheduler,
            deliver=self._deliver,
            release=lambda: self._pool.release(model_id),
            clock=self._clock,
        )
        return lane

    def _hear(self, event: PoolEvent) -> None:
        """What the pool told about one model."""
        model_id = event.model_id
        lane = self._lanes.get(model_id)
        match event:
            case Progress():
                self._send(LoadProgress(model_id=model_id, phase=event.phase, fraction=event.fraction))
            case Loaded():
                self._send(LoadProgress(model_id=model_id, phase="ready", fraction=1.0))
                self._show()
                if lane is not None and (engine := self._pool.engine(model_id)) is not None:
                    lane.open(engine)
                self._answer_loads(model_id, event.seconds)
            case LoadFailed():
                self._send(LoadProgress(model_id=model_id, phase="failed", fraction=0.0))
                if lane is not None:
                    lane.close(event.error)
                for command in self._take_loads(model_id):
                    self._send(failed_frame(command.id, event.error))
                self._show()
            case Evicted():
                if lane is not None:
                    lane.detach()
                    if not lane.busy:
                        del self._lanes[model_id]
                self._show()

    def _answer_loads(self, model_id: str, seconds: float) -> None:
        for command in self._take_loads(model_id):
            if command.pinned is not None:
                self._pool.pin(model_id, command.pinned)
            if command.idle_seconds is not None:
                self._pool.set_idle(model_id, command.idle_seconds if command.idle_seconds >= 0 else None)
            self._pool.release(model_id)
            self._send(ModelLoaded(id=command.id, model_id=model_id, seconds=seconds))

    def _take_loads(self, model_id: str) -> list[LoadModel]:
        taken = [command for command in self._loads.values() if command.model.id == model_id]
        for command in taken:
            del self._loads[command.id]
        return taken

    # --- telling ----------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """About once a second: let go of models that were idle too long."""
        now = self._clock()
        if now < self._next_house_work:
            return
        self._next_house_work = now + self._heartbeat_seconds
        for event in self._pool.expire():
            self._hear(event)

    def _beat_if_due(self) -> None:
        if self._clock() >= self._next_beat:
            self._beat(0.0)

    def _show(self) -> None:
        """Models came or went: tell it before anybody is told that it happened."""
        self._next_beat = self._clock()
        self._beat(0.0)

    def _beat(self, step_seconds: float) -> None:
        """Say that the worker lives, unless its other thread does not: half a worker counts as none."""
        now = self._clock()
        snapshot = self._changed_snapshot() if now >= self._next_beat else None
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat_seconds
        if self._text_is_alive():
            pending = self._pool.loading or any(lane.busy for lane in self._lanes.values())
            self._send(Heartbeat(pending=pending, step_seconds=step_seconds, snapshot=snapshot))

    def _changed_snapshot(self) -> Snapshot | None:
        active, cached, peak = self._pool.memory()
        models = []
        for model in self._pool.snapshot():
            lane = self._lanes.get(model.id)
            running, waiting = (lane.running, lane.waiting) if lane else (0, 0)
            models.append(msgspec.structs.replace(model, running=running, waiting=waiting))
        snapshot = Snapshot(models=tuple(models), active_bytes=active, cached_bytes=cached, peak_bytes=peak)
        if self._told_snapshot is not None and _timeless(snapshot) == _timeless(self._told_snapshot):
            return None
        self._told_snapshot = snapshot
        return snapshot


def _timeless(snapshot: Snapshot) -> Snapshot:
    """Without what changes by the mere passing of time."""
    models = tuple(msgspec.structs.replace(model, idle_seconds=0.0) for model in snapshot.models)
    return msgspec.structs.replace(snapshot, models=models)
