"""Does drafting pay? One measurement at a time, in the background, on the worker that also serves.

The model is loaded with the drafters to compare, and their settings take turns (`app/serving/sweep`). Afterwards the
model is restored, loaded or not; if nobody has chosen its drafters, it gets those measured fastest. Other requests have
priority: a turn that another request would disturb is abandoned and repeated once the server is idle, so that no result
includes other work. Call every method on the event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import Field

from app.admin.model_view import ModelView
from app.core.errors import PacelineError, SpeculationUnavailable, StoreUnavailable
from app.core.unit import LoadedModel, ModelSpecification
from app.model_settings import Id
from app.models.catalog import CatalogModel
from app.models.drafters.methods import DRAFT_METHODS
from app.models.pairing import Candidate
from app.serving.context import Context
from app.serving.errors import Rejected
from app.serving.gate import Body
from app.serving.sweep.grid import (
    GRIDS,
    LENGTHS,
    TASKS,
    TOKENS,
    Budget,
    Grid,
    MeasuredTurn,
    Sweep,
    TurnRequest,
    cells,
    turns,
)
from app.serving.sweep.report import best_by_drafter, report_object, report_of, speedups
from app.serving.sweep.worker_side import TurnRunner, describe_machine, describe_versions
from app.store.rows import StoredMeasurements
from app.store.tables import BenchmarkRow

Phase = Literal["loading", "measuring", "paused", "restoring"]
Prompt = Annotated[str, Field(min_length=1, max_length=20_000)]
Result = TypeVar("Result")

logger = logging.getLogger("paceline.measuring")


class MeasurementRequest(Body):
    """Measurement to run. Without `drafts`: the best drafter of each method. `grid`: one request; also four at a time;
    or all batch sizes and contexts."""

    model: str = Field(min_length=1, max_length=500)
    drafts: list[Id] | None = Field(None, max_length=8)
    prompts: list[Prompt] = Field([], max_length=8)
    minutes: float = Field(2.0, gt=0, le=60)
    rounds: int = Field(3, ge=1, le=9)
    grid: Grid = "several"


@dataclass(slots=True)
class MeasurementJob:
    """The measurement under way."""

    request: MeasurementRequest
    budget: Budget
    phase: Phase = "loading"
    sweep: Sweep = field(default_factory=Sweep)
    turn_request: TurnRequest | None = None
    disturbed: int = 0
    """Number of turns abandoned for other requests."""
    skipped_drafters: list[str] = field(default_factory=list)
    """Reasons why some drafters are not measured."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self) -> dict[str, Any]:
        """Return the job as JSON, with its results so far."""
        turn_request = self.turn_request
        return {
            "model_id": self.request.model,
            "phase": self.phase,
            "ask": turn_request
            and {
                "text": turn_request.text,
                **asdict(turn_request.cell),
                **asdict(turn_request.setting),
                "round": turn_request.number + 1,
                "rounds": turn_request.rounds,
            },
            "seconds_left": max(0, round(self.budget.remaining)),
            "minutes": self.request.minutes,
            "disturbed": self.disturbed,
            "report": report_object(self.sweep.results(options={"disturbed": self.disturbed})),
        }


@dataclass(frozen=True, slots=True)
class MeasurementOutcome:
    """Outcome of a measurement; `number` is that of the stored result, 0 if nothing was stored."""

    model_id: str
    outcome: Literal["done", "stopped", "failed"]
    number: int = 0
    problem: str = ""


class MeasurementStopped(Exception):
    """The measurement was stopped."""


class Measuring:
    """Runs one measurement at a time."""

    def __init__(self, context: Context, models: ModelView, stored_measurements: StoredMeasurements) -> None:
        self._worker = context.worker
        self._resolver = context.resolver
        self._activity = context.activity
        self._clock = context.clock
        self._models = models
        self._stored_measurements = stored_measurements
        self._task: asyncio.Task[None] | None = None
        self._job: MeasurementJob | None = None
        self._gains: tuple[int, dict[str, Any]] = (-1, {})
        self.last: MeasurementOutcome | None = None

    @property
    def active(self) -> str:
        """Id of the model being measured; empty if none is."""
        return self._job.request.model if self._job is not None else ""

    def view(self) -> dict[str, Any]:
        """Return the measurement under way and how the last one ended."""
        return {"active": self._job and self._job.view(), "last": self.last and asdict(self.last)}

    def gains(self) -> dict[str, Any]:
        """Return each model's gain from drafting for a single request, by its latest measurement: the main cell with
        only its best setting, and the time. All pages and `paceline ls` show these figures. Reads the disk."""
        revision = self._stored_measurements.revision
        if self._gains[0] != revision:
            with contextlib.suppress(StoreUnavailable):
                gains = {row.model_id: _gain(row) for row in self._stored_measurements.latest()}
                self._gains = revision, {model_id: gain for model_id, gain in gains.items() if gain is not None}
        return self._gains[1]

    def begin(self, request: MeasurementRequest) -> None:
        """Start a measurement. Raises `Rejected` while another one runs, ModelUnavailable when the server is ending."""
        if self._job is not None:
            message = f"{self.active} is being measured: wait until that has ended, or stop it"
            raise Rejected(409, message, "already_measuring")
        self._activity.check_open()
        logger.info("%s is measured, for at most %g minutes.", request.model, request.minutes)
        self._job = MeasurementJob(request, Budget(60 * request.minutes, self._clock))
        self._task = asyncio.get_running_loop().create_task(self._run(self._job), name="measuring")

    def stop(self) -> bool:
        """Stop the measurement and keep its results so far; False if none runs."""
        if self._job is not None:
            self._job.stopping.set()
        return self._job is not None

    async def close(self) -> None:
        """Cancel the measurement when the server ends: nothing is stored or restored."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait(self) -> MeasurementOutcome | None:
        """Wait until the measurement has ended; return its outcome."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        return self.last

    # --- one measurement ----------------------------------------------------------------------------------------

    async def _run(self, job: MeasurementJob) -> None:
        model_id = job.request.model
        outcome = MeasurementOutcome(model_id, "failed", problem="Paceline was stopped")
        try:
            outcome = await self._measure_and_restore(job)
        except PacelineError as error:
            outcome = MeasurementOutcome(model_id, "failed", problem=error.message)
        except Exception:
            logger.exception("a measurement failed")
            outcome = MeasurementOutcome(
                model_id, "failed", problem="internal error: the log of the server has the details"
            )
        finally:
            self._job, self._task, self.last = None, None, outcome
            logger.info("The measurement of %s is %s. %s", model_id, outcome.outcome, outcome.problem)

    async def _measure_and_restore(self, job: MeasurementJob) -> MeasurementOutcome:
        main = await asyncio.to_thread(self._resolver.main, job.request.model)
        unit = await asyncio.to_thread(self._choose, job, main)
        try:
            await self._wait_until_idle(job)
        except MeasurementStopped:
            return MeasurementOutcome(unit.id, "stopped")
        in_memory = self._resolver.loaded().get(unit.id)
        before = in_memory.unit if in_memory is not None else None
        planned = await asyncio.to_thread(self._planned_unit, unit.id)
        try:
            try:
                loaded = await self._load(job, unit, before or planned)
                job.budget = Budget(60 * job.request.minutes, self._clock)
                await self._sweep(job, unit, loaded, chats=main.has_chat_template)
            except MeasurementStopped:
                job.sweep.interrupted = True
            number = await asyncio.to_thread(self._store_results, job, unit)
        finally:
            if self._task is not None and not self._task.cancelling():
                job.phase, job.turn_request = "restoring", None
                await self._restore(unit.id, before, planned)
        return MeasurementOutcome(unit.id, "stopped" if job.sweep.interrupted else "done", number)

    def _choose(self, job: MeasurementJob, main: CatalogModel) -> ModelSpecification:
        """Build the unit with the requested drafters, or the best of each method; all methods may run, also in batches.

        Raises InsufficientMemory for a model that is too large by itself, and what resolver and candidates raise.
        """
        self._models.check_room(main)
        footprint = self._models.footprint(main)
        chosen: list[Candidate] = []
        for candidate in self._candidates_to_measure(main, job.request.drafts):
            if footprint is not None and not self._models.fits_alone(footprint + candidate.footprint):
                job.skipped_drafters.append(f"{candidate.id}: not enough memory beside the other drafters")
                continue
            footprint = footprint and footprint + candidate.footprint
            chosen.append(candidate)
        planned, drafters = self._resolver.planned(main), (candidate.draft for candidate in chosen)
        return msgspec.structs.replace(
            planned,
            drafters=tuple(draft.as_draft for draft in drafters if draft is not None),
            methods=(),
            live=msgspec.structs.replace(
                planned.live, policy="auto", num_draft_tokens=None, draft_unavailable="", missing_drafters=()
            ),
        )

    def _candidates_to_measure(self, main: CatalogModel, drafts: Sequence[str] | None) -> list[Candidate]:
        """Return one drafter of each method: those requested, else the first that fits and is usual or was measured.
        Raises SpeculationUnavailable if a requested drafter cannot be used, or two of them share a method."""
        documents = [row.results for row in self._stored_measurements.of(main.id)]
        candidates = self._models.candidates(main, speedups(documents))
        if drafts is None:
            known = best_by_drafter(documents)
            selected = [
                candidate
                for candidate in candidates
                if candidate.fits and (candidate.is_usual or (candidate.method, candidate.id) in known)
            ]
        else:
            selected = self._models.candidates_named(main, candidates, drafts)
        by_method: dict[str, Candidate] = {}
        for candidate in selected:
            first = by_method.setdefault(candidate.method, candidate)
            if drafts is not None and first is not candidate:
                message = f"{first.id} and {candidate.id} both draft by {candidate.method}: measure one after the other"
                raise SpeculationUnavailable(message, parameter="drafts")
        return [by_method[method] for method in DRAFT_METHODS if method in by_method]

    async def _load(
        self, job: MeasurementJob, specification: ModelSpecification, usual: ModelSpecification
    ) -> LoadedModel:
        """Load the unit to measure in place of the `usual` unit. Requests for the model then use the measured unit, so
        that they do not replace it, but draft only with the drafters of the usual unit."""
        job.phase = "loading"
        self._resolver.begin_measurement(specification, usual)
        await self._run_until_stopped(job, self._worker.load(specification))
        loaded = self._resolver.loaded().get(specification.id)
        if loaded is None:
            raise PacelineError(f"{specification.id} was unloaded before it could be measured; try again")
        return loaded

    def _planned_unit(self, model_id: str) -> ModelSpecification:
        return self._resolver.planned(self._resolver.usable(model_id))

    async def _sweep(self, job: MeasurementJob, unit: ModelSpecification, loaded: LoadedModel, *, chats: bool) -> None:
        runner = TurnRunner(self._worker, unit, job.request.prompts or TASKS, chats=chats, clock=self._clock)
        methods = {name: loaded.longest_drafts.get(name, max(LENGTHS)) for name in loaded.methods}
        measured_cells = cells(
            GRIDS[job.request.grid],
            max_rows=unit.max_rows,
            max_context_tokens=loaded.max_context_tokens,
            tokens=TOKENS,
        )
        schedule = turns(job.sweep, measured_cells, methods, budget=job.budget, rounds=job.request.rounds)
        turn: MeasuredTurn | None = None
        while True:
            try:
                job.turn_request = turn_request = schedule.send(turn) if turn is not None else next(schedule)
            except StopIteration:
                return
            turn = await self._turn(job, runner, turn_request)

    async def _turn(self, job: MeasurementJob, runner: TurnRunner, turn_request: TurnRequest) -> MeasuredTurn:
        """Measure one turn undisturbed: wait for other requests to end, and repeat a turn that a request interrupts."""
        while True:
            started_at = self._clock()
            await self._wait_until_idle(job)
            job.budget.extend(self._clock() - started_at)
            job.phase = "measuring"
            started_at = self._clock()
            try:
                return await self._run_until_stopped(job, runner.turn(turn_request), alone=True)
            except TimeoutError:
                job.disturbed += 1
                job.budget.extend(self._clock() - started_at)

    async def _wait_until_idle(self, job: MeasurementJob) -> None:
        """Wait until no other request is open."""
        if len(self._activity):
            job.phase = "paused"
            await self._run_until_stopped(job, self._activity.idle.wait())

    async def _run_until_stopped(
        self, job: MeasurementJob, work: Coroutine[Any, Any, Result], *, alone: bool = False
    ) -> Result:
        """Return the result of `work`. Raises MeasurementStopped, or if `alone` TimeoutError when a request arrives."""
        working = asyncio.ensure_future(work)
        waiting: dict[asyncio.Future[Any], type[Exception]] = {
            asyncio.ensure_future(job.stopping.wait()): MeasurementStopped
        }
        if alone:
            waiting[asyncio.ensure_future(self._activity.busy.wait())] = TimeoutError
        try:
            await asyncio.wait({working, *waiting}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise next(error for future, error in waiting.items() if future.done())
        finally:
            for future in (working, *waiting):
                future.cancel()
            await asyncio.gather(working, *waiting, return_exceptions=True)

    async def _restore(self, model_id: str, before: ModelSpecification | None, planned: ModelSpecification) -> None:
        """Restore what was in memory; if that was the `planned` unit, load the unit that is planned now. A model in use
        is left as it is until its next load, and its requests keep drafting as during the measurement."""
        with contextlib.suppress(PacelineError):
            if before is None:
                await self._worker.unload(model_id)
            else:
                is_planned = before.same_unit(planned)
                await self._worker.load(await asyncio.to_thread(self._planned_unit, model_id) if is_planned else before)
            self._resolver.end_measurement(model_id)

    def _store_results(self, job: MeasurementJob, unit: ModelSpecification) -> int:
        """Store the results and return their number; 0 if the measurement stopped too early to compare anything."""
        info = self._worker.ready_info
        options = {
            "minutes": job.request.minutes,
            "rounds": job.request.rounds,
            "prompts": job.request.prompts or "built in",
            "device": info.device if info is not None else "",
            "source": "dashboard",
            "disturbed": job.disturbed,
            "left_out": job.skipped_drafters,
        }
        drafts = {drafter.method: drafter.id for drafter in unit.drafters}
        results = job.sweep.results(model=unit.id, drafts=drafts, options=options)
        alone = report_of(results).main_cell
        if job.sweep.interrupted and (alone is None or alone.verdict == "none"):
            return 0
        return self._stored_measurements.save(
            unit.id, versions=describe_versions(), machine=describe_machine(), results=results
        )


def _gain(row: BenchmarkRow) -> dict[str, Any] | None:
    cell = report_of(row.results).main_cell
    if cell is None or cell.verdict == "none":
        return None
    settings = tuple(figures for figures in cell.settings if figures.name == cell.best)
    return {**msgspec.to_builtins(replace(cell, settings=settings)), "measured_at": row.created_at}
