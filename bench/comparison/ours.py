"""Paceline's engine and scheduler in a plain loop: the worker without its process, threads and HTTP.

The scheduler lives as long as the engine, as in the worker, so that the governor keeps its measurements."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

import mlx.core as mx

from app.core.request import DraftingPolicy, Request, SamplingParameters, SpeculationRequest
from app.core.statistics import Statistics
from app.core.step import DecodeStep, StepCost, StepResult
from app.core.unit import DrafterSpecification, LiveValues, ModelSpecification
from app.engine.engine import Engine
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.engine.loading.warm_up import warm_up
from app.scheduler.scheduler import Scheduler
from app.serving.sweep.worker_side import DecodeClock
from bench.comparison.measure import Sample
from bench.comparison.workshop import PairFolders

PLAIN = SpeculationRequest(method="off")
AUTOMATIC = SpeculationRequest()
GREEDY = SamplingParameters(temperature=0.0)


@dataclass(slots=True)
class Run:
    """Record of one loop. `cycles`: wall seconds and result of every decode step; `texts`: tokens by request, in order.

    `prompt_seconds` is the time until every row has produced a token.
    """

    clock: DecodeClock
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    tokens: int = 0
    texts: dict[str, list[int]] = field(default_factory=dict)
    cycles: list[tuple[float, StepResult]] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Rate from the first prompt token to the last generated one."""
        return self.tokens / self.seconds

    def notes(self) -> dict[str, float]:
        """Return acceptance and tokens per step, if anything was drafted."""
        drafted = sum(answer.drafted for answer in self.statistics)
        accepted = sum(answer.accepted for answer in self.statistics)
        steps = sum(answer.steps for answer in self.statistics)
        if not drafted:
            return {}
        return {"acceptance": accepted / drafted, "tokens per step": self.tokens / steps}


OpenEngine = Callable[[LoadedUnit], Engine]


class OurSide:
    """One loaded unit: a pair of the workshop, or the unit of a specification."""

    def __init__(self, unit: PairFolders | ModelSpecification, *, open_unit: OpenEngine = open_engine) -> None:
        self._specification = unit if isinstance(unit, ModelSpecification) else specification_of(unit)
        self.engine: Engine = open_unit(_load(self._specification))
        self._measured = measured_costs(self.engine)
        self._scheduler = self._new_scheduler()
        self._numbers = count()

    def with_new_scheduler(self) -> "OurSide":
        """Return a copy with the same engine and a new scheduler, which knows only the costs measured at the load.

        Only one of the two may run at a time, and only one of them must be closed."""
        other = copy(self)
        other._scheduler = self._new_scheduler()  # noqa: SLF001 - its own class
        return other

    def close(self) -> None:
        """Free caches and weights."""
        self.engine.close()
        del self.engine
        mx.clear_cache()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        speculation: SpeculationRequest,
        stop_token_ids: frozenset[int] = frozenset(),
        sampling: SamplingParameters = GREEDY,
    ) -> Run:
        """Generate for all prompts at once, `tokens` each unless a stop token comes first."""
        requests = [
            Request(
                id=f"bench-{next(self._numbers)}",
                prompt_tokens=tuple(prompt),
                max_tokens=tokens,
                stop_token_ids=stop_token_ids,
                sampling=sampling,
                speculation=speculation,
            )
            for prompt in prompts
        ]
        for request in requests:
            self._scheduler.submit(request)
        run = Run(DecodeClock(request.id for request in requests), texts={request.id: [] for request in requests})
        started = perf_counter()
        while self._scheduler.has_work:
            self._step(run)
        run.seconds = perf_counter() - started
        run.prompt_seconds = max(0.0, run.clock.started - started)
        return run

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.engine.limits, policy=self._specification.live.policy, measured=self._measured)

    def _step(self, run: Run) -> None:
        """Run one turn of the worker's loop: admit, plan, step, commit, free rows."""
        started_at = perf_counter()
        scheduler, engine = self._scheduler, self.engine
        while (request := scheduler.next_admission()) is not None:
            scheduler.admitted(request.id, engine.admit(request))
        plan = scheduler.plan()
        result = StepResult() if plan is None else engine.step(plan)
        for event in scheduler.commit(result) if plan is not None else ():
            run.tokens += len(event.tokens)
            if event.tokens:
                run.texts[event.request_id] += event.tokens
                run.clock.count(event.request_id, len(event.tokens))
            if event.finish_reason is not None:
                run.statistics.append(event.statistics)
        for request_id, tokens in scheduler.drain_released():
            engine.release(request_id, tokens)
        if isinstance(plan, DecodeStep):
            run.cycles.append((perf_counter() - started_at, result))

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Sample:
        """Decode plainly; return tokens per second once every row has produced a token."""
        return Sample(self.run(prompts, tokens, PLAIN).clock.tokens_per_second)

    def answer(self, prompt: Sequence[int], tokens: int, speculation: SpeculationRequest) -> Sample:
        """Run one request; return tokens per second from prompt to last token."""
        run = self.run([prompt], tokens, speculation)
        return Sample(run.tokens_per_second, run.notes())


def specification_of(folders: PairFolders, *, policy: DraftingPolicy = "single") -> ModelSpecification:
    """Specify a pair of the workshop without a prefix cache: every turn prefills its prompt."""
    return ModelSpecification(
        id=folders.target.name,
        path=str(folders.target),
        drafters=(DrafterSpecification(folders.draft.name, str(folders.draft)),) if folders.draft else (),
        prefix_cache_bytes=0,
        live=LiveValues(policy=policy),
    )


def measured_costs(engine: Engine) -> tuple[StepCost, ...]:
    """Warm up as the worker does, so that no measured run pays for it; return the costs of steps."""
    warming = warm_up(engine, {})
    while True:
        try:
            next(warming)
        except StopIteration as finished:
            costs: tuple[StepCost, ...] = finished.value
            return costs


def _load(specification: ModelSpecification) -> LoadedUnit:
    """Load in one go, with no other work in between."""
    loading = load_unit(specification)
    while True:
        try:
            next(loading)
        except StopIteration as finished:
            unit: LoadedUnit = finished.value
            return unit
