"""One model as the loop serves it: its scheduler, the commands that wait for its engine, and the open choices.

Whatever the scheduler or the engine does, each choice ends exactly once and releases exactly one lease:
`_open_requests` records the choices that have not ended, and events for any other choice are dropped.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from app.core.clock import Clock
from app.core.errors import InsufficientMemory, PacelineError
from app.core.messages import LoadModel, short_text
from app.core.request import SpeculationRequest
from app.core.step import EnginePort, FinishReason, StepCost, StepPlan, TokenEvent
from app.core.unit import LoadedModel, ModelSpecification
from app.engine.loading.pool import EnginePool
from app.models.footprint import RowSize
from app.scheduler.scheduler import Scheduler
from app.worker.device_errors import MAX_TIMEOUTS, DeviceLost, check_device, is_timed_out
from app.worker.text_thread import TextThread
from app.worker.thread_commands import Submission

logger = logging.getLogger("paceline.loop")

OpenScheduler = Callable[[ModelSpecification, EnginePort, Sequence[StepCost]], Scheduler]
SaveCosts = Callable[[ModelSpecification, Sequence[StepCost]], None]


class ServedModel:
    """One served model. All calls come from the MLX thread; they raise nothing but DeviceLost.

    `pool` provides the engine, with one lease per choice, and reserves memory for its rows. A request whose row does
    not fit into memory with the running rows waits.
    """

    def __init__(
        self,
        *,
        open_scheduler: OpenScheduler,
        text_thread: TextThread,
        save_costs: SaveCosts,
        pool: EnginePool,
        model_id: str,
        clock: Clock,
    ) -> None:
        self._open_scheduler = open_scheduler
        self._text_thread = text_thread
        self._save_costs_callback = save_costs
        self._pool = pool
        self._model_id = model_id
        self._clock = clock
        self._specification: ModelSpecification | None = None
        self._engine: EnginePort | None = None
        self._scheduler: Scheduler | None = None
        self._measured_costs: Sequence[StepCost] = ()
        """Step costs as last reported by a load or a warm-up; a new scheduler begins with them."""
        self._waiting_commands: list[Submission | LoadModel] = []
        """Commands that wait for the engine."""
        self._open_requests: set[str] = set()
        self._reserved_rows: list[RowSize] = []
        """Expected sizes of the rows for which the pool has reserved memory."""
        self._timeouts = 0
        """Number of consecutive steps that were aborted because the GPU took too long."""
        self._is_fetching_prefix = False
        """Whether the next request waits for its cached prefix or for a measurement (`EnginePort.fetch`)."""

    def waiting_for(self, owner: str) -> int:
        """Return the number of choices of one owner that wait for the engine."""
        return sum(request.owner == owner for submission in self._submissions for request in submission.requests)

    @property
    def waiting(self) -> int:
        """Number of choices without a row."""
        unsubmitted = sum(len(submission.requests) for submission in self._submissions)
        return unsubmitted + (self._scheduler.waiting if self._scheduler else 0)

    @property
    def running(self) -> int:
        """Number of choices with a row."""
        return self._scheduler.running if self._scheduler else 0

    @property
    def rowless_since(self) -> float:
        """Time since which choices wait although none has a row; infinite if none does."""
        return self._scheduler.rowless_since if self._scheduler else math.inf

    @property
    def has_work(self) -> bool:
        """Whether a step is needed."""
        return self._scheduler is not None and self._scheduler.has_work

    @property
    def busy(self) -> bool:
        """Whether any choice is open, or any command waits for the engine."""
        return bool(self._open_requests or self._waiting_commands)

    @property
    def _submissions(self) -> list[Submission]:
        return [entry for entry in self._waiting_commands if isinstance(entry, Submission)]

    def describe(self, model: LoadedModel) -> LoadedModel:
        """Return `model`, the pool's state of this model, completed with its running and waiting requests."""
        reading = self._scheduler.prefill_progress if self._scheduler else {}
        return msgspec.structs.replace(model, running=self.running, waiting=self.waiting, reading=reading)

    @property
    def costs(self) -> Sequence[StepCost]:
        """Step costs on this machine, as measured and as learnt from requests."""
        return self._scheduler.costs.export() if self._scheduler is not None else self._measured_costs

    def save_costs(self) -> None:
        """Store the step costs for the next load; does nothing while a choice is open."""
        if self._scheduler is None or self._specification is None or self._open_requests:
            return
        try:
            self._save_costs_callback(self._specification, self.costs)
        except Exception:
            logger.exception("the step costs could not be stored")

    def add_costs(self, costs: Sequence[StepCost]) -> None:
        """Record the costs from a load or a warm-up; the scheduler adds only those of shapes that are new to it."""
        self._measured_costs = costs
        if self._scheduler is not None:
            self._scheduler.costs.add(costs)

    def enqueue(self, command: Submission | LoadModel) -> None:
        """Queue a command for the engine; the caller has acquired one lease per choice, or one for the load."""
        self._waiting_commands.append(command)

    def open(self, engine: EnginePort) -> list[LoadModel]:
        """Submit the waiting commands to the ready engine, in order. Returns the load commands, which are complete."""
        waiting_commands, self._waiting_commands = self._waiting_commands, []
        for entry in waiting_commands:
            if isinstance(entry, LoadModel):
                self._release()
                if engine is self._engine:
                    self._scheduler_for(entry.model, engine)  # applies changed settings to running requests too
                continue
            try:
                self._submit_all(entry, engine)
            except PacelineError as error:
                self._refuse(entry, error)
            except Exception as error:
                logger.exception("could not queue %s", entry.id)
                self._refuse(entry, PacelineError(f"The request could not be queued: {short_text(error)}"))
        return [entry for entry in waiting_commands if isinstance(entry, LoadModel)]

    def close(self, error: PacelineError) -> list[LoadModel]:
        """Refuse every choice that waits for the engine: the load failed, which also ended the leases. Returns the load
        commands."""
        waiting_commands, self._waiting_commands = self._waiting_commands, []
        for entry in waiting_commands:
            if isinstance(entry, Submission):
                self._text_thread.refused(entry.id, error)
        return [entry for entry in waiting_commands if isinstance(entry, LoadModel)]

    def detach(self) -> None:
        """Drop references to the evicted engine. An evicted engine has no rows."""
        if not self._open_requests:
            self._engine = self._scheduler = None

    def cancel(self, request_id: str) -> None:
        """Cancel one choice or load, waiting or running; does nothing if it has ended."""
        for index, entry in enumerate(self._waiting_commands):
            if isinstance(entry, LoadModel):
                if entry.id == request_id:
                    del self._waiting_commands[index]
                    self._release()
                    self._pool.cancel_load(self._model_id)
                    return
            elif any(request.id == request_id for request in entry.requests):
                remaining = tuple(request for request in entry.requests if request.id != request_id)
                self._waiting_commands[index : index + 1] = [replace(entry, requests=remaining)] if remaining else []
                self._release()
                end = TokenEvent(request_id, finish_reason=FinishReason.CANCELLED)
                self._text_thread.emitted((end,), self._clock())
                return
        if request_id in self._open_requests and self._scheduler is not None:
            try:
                events = self._scheduler.cancel(request_id)
            except Exception as error:
                logger.exception("the scheduler could not cancel")
                events = self._fail_all(error)
            self._deliver_events(events)
            if self._engine is not None:
                self._free_row(self._engine, request_id, ())  # if it had no row yet: drops the prefix that was fetched

    def step(self, *, may_admit: bool = True, beside_others: bool = False) -> bool:
        """Admit requests, then plan, run, commit and report one step. `beside_others`: other models have rows. Returns
        False if there was nothing to do."""
        scheduler, engine = self._scheduler, self._engine
        if scheduler is None or engine is None:
            return False
        plan: StepPlan | None = None
        events: list[TokenEvent] = []
        failure: Exception | None = None
        try:
            self._keep_within_memory(scheduler)
            self._is_fetching_prefix = False
            if may_admit:
                self._admit(scheduler, engine, events)
            plan = scheduler.plan(beside_others=beside_others)
            if plan is not None:
                events += scheduler.commit(engine.step(plan))
                self._timeouts = 0
        except Exception as error:
            logger.exception("a step failed")
            failure = error
        if failure is not None:
            events += self._recover(scheduler, failure)
        self._deliver_events(events)
        return plan is not None or bool(events) or self._is_fetching_prefix

    def _recover(self, scheduler: Scheduler, error: Exception) -> list[TokenEvent]:
        """Recover from a failed step: its requests continue in smaller steps if it was too large, otherwise they fail.

        Raises DeviceLost if the GPU accepts no more work, or after more than `MAX_TIMEOUTS` timeouts in a row.
        """
        check_device(error)
        timed_out = is_timed_out(error)
        self._timeouts += timed_out
        if self._timeouts > MAX_TIMEOUTS:
            raise DeviceLost(f"{self._timeouts} steps in a row timed out: {error}") from error
        try:
            if not (timed_out or isinstance(error, InsufficientMemory)):
                return scheduler.fail_running(short_text(error))
            if not timed_out:
                self._pool.free_unused()
            return scheduler.shrink(short_text(error))
        except Exception as second:
            logger.exception("the scheduler could not end its requests")
            return self._fail_all(second)

    def _submit_all(self, submission: Submission, engine: EnginePort) -> None:
        scheduler = self._scheduler_for(submission.model, engine)
        queued: list[str] = []
        try:
            for request in submission.requests:
                self._pool.check_row(self._model_id, scheduler.expected_of(request))
                scheduler.submit(request)
                queued.append(request.id)
        except Exception:
            for request_id in queued:
                scheduler.cancel(request_id)
            self._free_rows()
            raise
        self._open_requests.update(queued)
        self._text_thread.queued(submission.id, self._clock())

    def _scheduler_for(self, specification: ModelSpecification, engine: EnginePort) -> Scheduler:
        """Return the engine's scheduler, with the settings of `specification`; a new one if the engine changed."""
        if self._scheduler is None or engine is not self._engine:
            if self._open_requests:
                self._deliver_events(self._fail_all(RuntimeError("the engine was replaced")))
            self._scheduler = self._open_scheduler(specification, engine, self._measured_costs)
        elif specification != self._specification:
            configure(self._scheduler, specification)
        self._engine, self._specification = engine, specification
        return self._scheduler

    def _refuse(self, submission: Submission, error: PacelineError) -> None:
        self._text_thread.refused(submission.id, error)
        for _ in submission.requests:
            self._release()

    def _keep_within_memory(self, scheduler: Scheduler) -> None:
        """Preempt the newest rows if answers longer than expected have outgrown the reserved memory."""
        if scheduler.expected == self._reserved_rows:
            return
        while not self._reserve(scheduler.expected):
            preempted = scheduler.preempt()
            if not preempted:
                break
            logger.info("%s is preempted: it continues when older requests have freed memory", preempted)
            self._free_rows()

    def _reserve(self, rows: Sequence[RowSize]) -> bool:
        """Reserve memory in the pool for rows of these sizes; return whether it was granted."""
        granted = self._pool.reserve(self._model_id, rows)
        if granted:
            self._reserved_rows = list(rows)
        return granted

    def _admit(self, scheduler: Scheduler, engine: EnginePort, events: list[TokenEvent]) -> None:
        """Give free rows to waiting requests. A request that the engine cannot admit fails alone: its terminal event is
        added to `events` immediately, because admitting the next request may raise."""
        while not self._pool.must_wait and (request := scheduler.next_admission()) is not None:
            if not self._reserve([*scheduler.expected, scheduler.expected_of(request)]):
                self._free_row(engine, request.id, ())  # its fetched prefix would occupy memory while it waits
                break
            self._is_fetching_prefix = not engine.fetch(request)
            if self._is_fetching_prefix:
                self._reserve(scheduler.expected)
                break
            try:
                scheduler.admitted(request.id, engine.admit(request))
            except Exception as error:
                logger.exception("the engine could not admit %s", request.id)
                events += scheduler.fail(request.id, error if isinstance(error, PacelineError) else short_text(error))
                self._free_row(engine, request.id, ())
                self._reserve(scheduler.expected)

    def _fail_all(self, error: Exception) -> list[TokenEvent]:
        """Return events that end all choices of a broken scheduler; the next submission opens a new scheduler."""
        self._scheduler = None
        if self._engine is not None:
            for request_id in self._open_requests:
                self._free_row(self._engine, request_id, ())
            self._reserve(())
        return [
            TokenEvent(request_id=request_id, finish_reason=FinishReason.FAILED, error=short_text(error))
            for request_id in sorted(self._open_requests)
        ]

    def _free_rows(self) -> None:
        if self._scheduler is not None and self._engine is not None:
            released = self._scheduler.drain_released()
            for request_id, tokens in released:
                self._free_row(self._engine, request_id, tokens)
            if released:
                self._reserve(self._scheduler.expected)

    def _free_row(self, engine: EnginePort, request_id: str, tokens: Sequence[int]) -> None:
        """Free one row; a failure is logged, and the other rows are freed all the same."""
        try:
            engine.release(request_id, tokens)
        except Exception:
            logger.exception("freeing the row of %s failed", request_id)

    def _release(self) -> None:
        """Release one lease."""
        self._pool.release(self._model_id)

    def _deliver_events(self, events: Iterable[TokenEvent]) -> None:
        """Free rows, deliver the events of open choices, and release the leases of choices that ended."""
        self._free_rows()
        open_events: list[TokenEvent] = []
        for event in events:
            if event.request_id not in self._open_requests:
                continue
            open_events.append(event)
            if event.finish_reason is not None:
                self._open_requests.discard(event.request_id)
                self._release()
        if open_events:
            self._text_thread.emitted(open_events, self._clock())


def configure(scheduler: Scheduler, specification: ModelSpecification) -> None:
    """Apply to a scheduler the settings of its model that do not concern the engine."""
    method = specification.methods[0] if len(specification.methods) == 1 else "auto"
    live = specification.live
    scheduler.configure(
        policy=live.policy,
        default_speculation=SpeculationRequest(method=method, num_draft_tokens=live.num_draft_tokens),
        queue_limit=live.queue_limit,
    )
