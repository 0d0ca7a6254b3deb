"""The warm-up: what it runs, what it measures, when it stops, and that it leaves nothing behind."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest

from app.core.pool_events import Evicted, Loaded, PoolEvent, WarmedUp
from app.core.request import Request
from app.core.statistics import PhaseSeconds
from app.core.step import (
    DecodeStep,
    EngineLimits,
    EnginePort,
    PrefillStep,
    RowOutcome,
    StepCost,
    StepPlan,
    StepResult,
)
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine import memory
from app.engine.engine import Engine
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.engine.loading.pool import REST_SECONDS, EnginePool
from app.engine.loading.warm_up import LEAST_SECONDS, REQUEST_ID, ROUNDS, Key, WarmUps, WarmUpSteps, by_shape, warm_up
from app.models.draft_lengths import DRAFT_LENGTHS, LONGEST_CHAIN
from app.scheduler.costs import CostTable
from tests.engine.pool_world import SIZES, World, drain, specification
from tests.shares import one_in
from tests.tiny import write_tiny_model

COSTS = (StepCost("off", 1, 0, 0.5),)


@dataclass
class TimedEngine:
    """Engine with known step costs, whose drafters propose at most `block` tokens; it checks each plan."""

    slowdown: float = 1.0
    """Factor by which other programs slow every step."""
    plain_seconds: float = 0.02
    column_seconds: float = 0.001
    drafters: dict[str, float] = field(default_factory=lambda: {"draft_model": 0.002, "ngram": 0.0})
    block: int = 31
    context: int = 4_096
    carries: bool = False
    now: float = 0.0
    cached: dict[str, int] = field(default_factory=dict)
    fed: list[int] = field(default_factory=list)
    cheap_tokens: tuple[int, ...] = ()
    shapes: list[tuple[str, int] | tuple[str, int, int]] = field(default_factory=list)
    is_sampling: bool = False
    sampled_shapes: list[tuple[str, int]] = field(default_factory=list)
    lengths: set[tuple[int, ...]] = field(default_factory=set)
    """Lengths of the rows of each decode step of several rows, less the shortest."""

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            self.context,
            4,
            prefill_chunk_tokens=32,
            drafters=tuple(self.drafters),
            longest_drafts={"draft_model": LONGEST_CHAIN},
            cheap_tokens=self.cheap_tokens,
        )

    def clock(self) -> float:
        return self.now

    def fetch(self, request: Request) -> bool:
        return True

    def admit(self, request: Request) -> int:
        assert request.id.startswith(REQUEST_ID)
        assert request.id not in self.cached
        self.cached[request.id] = 0
        self.is_sampling = request.sampling.temperature > 0
        return 0

    def step(self, plan: StepPlan) -> StepResult:
        if isinstance(plan, PrefillStep):
            for row in plan.rows:
                assert row.start == self.cached[row.sequence_id] < row.end < len(row.tokens)
                self.cached[row.sequence_id] = row.end
                self.fed += row.tokens[row.start : row.end]
            columns = sum(row.end - row.start for row in plan.rows) - 1
            self.now += self.plain_seconds + columns * self.column_seconds
            return StepResult(prefilled=tuple((row.sequence_id, row.end) for row in plan.rows))
        assert isinstance(plan, DecodeStep)
        assert plan.timed
        return self._decode(plan)

    def _decode(self, plan: DecodeStep) -> StepResult:
        rows, row = len(plan.rows), plan.rows[0]
        assert [planned.sequence_id for planned in plan.rows] == list(self.cached)
        assert all(
            planned.computed == self.cached[planned.sequence_id] == len(planned.tokens) - 1 for planned in plan.rows
        )
        assert {(planned.method, planned.num_draft_tokens) for planned in plan.rows} == {
            (row.method, row.num_draft_tokens)
        }
        drafted = min(row.num_draft_tokens, self.block)
        self.shapes.append(
            (row.method, row.num_draft_tokens) if rows == 1 else (row.method, row.num_draft_tokens, rows)
        )
        if self.is_sampling:
            self.sampled_shapes.append((row.method, row.num_draft_tokens))
        if rows > 1:
            shortest = min(len(planned.tokens) for planned in plan.rows)
            self.lengths.add(tuple(len(planned.tokens) - shortest for planned in plan.rows))
        first = self.shapes.count(self.shapes[-1]) == 1
        drafting = drafted * self.drafters.get(row.method, 0.0)
        columns = rows * (1 + drafted) - 1
        drafting *= self.slowdown
        seconds = self.slowdown * (self.plain_seconds + columns * self.column_seconds) + drafting
        seconds += 0.5 if first else 0.0
        self.now += seconds
        self.cached = {name: count + (not (self.carries and drafted)) for name, count in self.cached.items()}
        outcomes = (RowOutcome(name, (1,), count, drafted, 0, method=row.method) for name, count in self.cached.items())
        phase_seconds = PhaseSeconds(drafting) if drafted else None
        return StepResult(tuple(outcomes), seconds=seconds, width=1 + drafted, phase_seconds=phase_seconds)

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        assert tokens == ()
        del self.cached[request_id]


def run(
    engine: TimedEngine, known: Sequence[StepCost] = (), *, rows: int = 1, budget_seconds: float = 0.0
) -> tuple[StepCost, ...]:
    steps = warm_up(
        engine,
        by_shape(known),
        rows=rows,
        clock=lambda: engine.now - 0.5 * len(set(engine.shapes)),
        budget_seconds=budget_seconds,
    )
    costs = costs_of(steps)
    assert not engine.cached, "nothing is left behind"
    return costs


def costs_of(steps: WarmUpSteps) -> tuple[StepCost, ...]:
    """Run a warm-up to its end and return what it measured."""
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            costs: tuple[StepCost, ...] = finished.value
            return costs


def test_every_shape_is_measured_after_it_ran_once() -> None:
    engine = TimedEngine()
    costs = {(cost.method, cost.drafts): cost for cost in run(engine)}
    assert costs["off", 0].seconds == pytest.approx(0.02)
    assert costs["draft_model", 1].draft_seconds == pytest.approx(0.002)
    assert costs["draft_model", 15].draft_seconds == pytest.approx(0.030)
    assert sorted(drafts for method, drafts in costs if method == "ngram") == list(DRAFT_LENGTHS)
    assert all(cost.seconds == pytest.approx(0.02 + 0.001 * drafts) for (_, drafts), cost in costs.items())
    del engine.shapes[engine.shapes.index(("draft_model", 1))]  # the sampled one
    assert {engine.shapes.count(shape) for shape in engine.shapes if shape != ("off", 0)} == {4}


def test_the_operations_of_sampled_tokens_and_of_rows_of_different_lengths_are_compiled_too() -> None:
    engine = TimedEngine()
    run(engine, rows=4)
    assert dict.fromkeys(engine.sampled_shapes) == dict.fromkeys([("off", 0), ("draft_model", 1)])
    assert engine.lengths == {(3, 2, 1, 0)}


def test_carried_tokens_are_read_before_the_next_shape() -> None:
    assert len(run(TimedEngine(carries=True))) >= 9


def test_a_block_drafter_is_measured_at_what_it_really_proposed() -> None:
    costs = run(TimedEngine(drafters={"dflash": 0.0}, block=7))
    assert {cost.drafts for cost in costs} == {0, 1, 2, 3, 5, 7}


def test_a_slow_machine_is_asked_for_little_but_always_for_a_verify_and_a_proposal() -> None:
    engine = TimedEngine(plain_seconds=2.0, column_seconds=2.0, drafters={"draft_model": 0.5, "ngram": 0.0})
    costs = run(engine)
    assert [(cost.method, cost.drafts) for cost in costs] == [("off", 0), ("draft_model", 1)]


def test_a_small_context_is_never_overrun() -> None:
    for context in (4, 20, 50, 100, 200):
        costs = run(TimedEngine(context=context))
        assert len(costs) <= 11
        assert bool(costs) == (context > 4)


def test_known_costs_are_not_measured_again_but_the_shapes_run() -> None:
    engine = TimedEngine()
    known = (StepCost("off", 1, 0, 0.02), StepCost("draft_model", 1, 1, 0.02, 0.002))
    assert run(engine, known)[:2] == known
    assert engine.shapes.count(("draft_model", 1)) == ROUNDS + 1, "the sampled one too"
    assert engine.shapes.count(("draft_model", 15)) == 4, "what is not known is measured"


def test_what_a_busy_machine_made_dear_is_corrected_by_the_next_load() -> None:
    engine = TimedEngine()
    known = (StepCost("off", 1, 0, 0.9), StepCost("ngram", 1, 5, 0.9), StepCost("ngram", 3, 5, 0.9))
    plain, five, batch = run(engine, known)[:3]
    assert plain.seconds == pytest.approx(0.02)
    assert five.seconds < 0.6, "it ran once, however long that took"
    assert batch.seconds == 0.9


def test_what_requests_taught_is_never_overwritten_by_a_cheaper_warm_up() -> None:
    known = (
        StepCost("off", 1, 0, 0.03, is_learnt=True),
        StepCost("ngram", 1, 5, 0.05, 0.01, is_learnt=True),
        StepCost("off", 1, 0, 1.8, context_tokens=8_192, is_learnt=True),
    )
    engine = TimedEngine()
    assert run(engine, known)[:3] == known
    assert ("ngram", 5) in engine.shapes, "but its kernels are warm"


def test_what_requests_taught_only_in_part_is_completed() -> None:
    known = (StepCost("ngram", 1, 7, 0.0, 0.001), StepCost("draft_model", 1, 15, 0.05, is_learnt=True))
    costs = {(cost.method, cost.drafts): cost for cost in run(TimedEngine(), known)}
    assert costs["ngram", 7].seconds == pytest.approx(0.027)
    assert (costs["draft_model", 15].seconds, costs["draft_model", 15].draft_seconds) == (0.05, pytest.approx(0.03))


def test_what_no_request_ran_is_measured_beside_what_requests_taught() -> None:
    known = (StepCost("off", 1, 0, 0.02, is_learnt=True),)
    costs = {(cost.method, cost.drafts): cost for cost in run(TimedEngine(), known)}
    assert costs["draft_model", 15].draft_seconds == pytest.approx(0.030)


@pytest.mark.parametrize("is_learnt", [True, False])
def test_a_machine_that_is_busy_meanwhile_does_not_make_drafts_look_dear(is_learnt: bool) -> None:
    known = (StepCost("off", 1, 0, 0.02, is_learnt=is_learnt),)
    costs = {(cost.method, cost.rows, cost.drafts): cost for cost in run(TimedEngine(slowdown=2.0), known, rows=4)}
    assert costs["off", 1, 0].seconds == pytest.approx(0.02)
    assert costs["draft_model", 1, 15].draft_seconds == pytest.approx(0.030)
    assert costs["ngram", 1, 7].seconds == pytest.approx(0.027)
    assert costs["off", 4, 0].seconds == pytest.approx(0.023), "rows that never ran are as slowed as one row"
    assert costs["ngram", 4, 3].seconds == pytest.approx(0.035)


def test_costs_are_of_one_pace_though_the_machine_was_busy_for_half_of_the_warm_up() -> None:
    engine = TimedEngine(slowdown=2.0)
    steps = warm_up(engine, {}, clock=engine.clock, budget_seconds=100.0)
    while len(engine.shapes) < 20:
        next(steps)
    engine.slowdown = 1.0
    measured = by_shape(costs_of(steps))
    assert all(cost.seconds == pytest.approx(0.02 + 0.001 * cost.drafts) for cost in measured.values()), (
        "the second round, at rest, counts"
    )


def test_the_least_that_is_measured_is_a_plain_step_and_a_proposal() -> None:
    engine = TimedEngine()
    costs = run(engine, budget_seconds=LEAST_SECONDS)
    assert [(cost.method, cost.drafts) for cost in costs] == [("off", 0), ("draft_model", 1)]
    assert len(engine.fed) == 8, "and little is read for it"


def test_a_warm_up_that_ends_early_leaves_nothing_behind() -> None:
    for steps_run in range(12):
        engine = TimedEngine()
        steps = warm_up(engine, {}, rows=4, clock=engine.clock, budget_seconds=100.0)
        for _ in range(steps_run):
            next(steps)
        steps.close()
        assert not engine.cached


def test_where_batches_may_draft_one_of_them_is_measured_too() -> None:
    engine = TimedEngine()
    costs = {(cost.method, cost.rows, cost.drafts): cost.seconds for cost in run(engine, rows=4)}
    assert {rows for _, rows, _ in costs} == {1, 4}
    assert costs["off", 4, 0] == pytest.approx(0.023)
    assert {drafts for method, rows, drafts in costs if (method, rows) == ("ngram", 4)} >= set(DRAFT_LENGTHS[:-1])
    assert costs["ngram", 4, 7] == pytest.approx(0.02 + 31 * 0.001)


def test_the_batch_is_measured_when_it_was_not_before_and_what_is_known_stays() -> None:
    known = (StepCost("off", 1, 0, 0.02), StepCost("ngram", 1, 1, 0.021))
    costs = run(TimedEngine(), known, rows=4)
    assert costs[:2] == known
    assert {cost.rows for cost in costs[2:]} == {1, 4}
    assert len(costs) > 8


def test_the_lengths_of_the_chip_are_measured() -> None:
    costs = run(TimedEngine(cheap_tokens=(2, 3, 5, 10, 16, 32)), rows=4)
    lengths = {rows: sorted({cost.drafts for cost in costs if cost.rows == rows and cost.drafts}) for rows in (1, 4)}
    assert lengths == {1: [1, 2, 4, 9, 15, 31], 4: [1, 3, 7]}


def test_a_verify_sees_no_token_twice_so_that_experts_are_not_thought_to_be_shared() -> None:
    engine = TimedEngine()
    run(engine)
    prompt = engine.fed[:47]
    assert all(len(set(prompt[start : start + 32])) == 32 for start in range(16))
    assert prompt[36:] == prompt[:11], "and prompt lookup finds something"


def test_a_large_model_gets_the_time_to_measure_the_lengths_that_decide() -> None:
    engine = TimedEngine(plain_seconds=0.08, column_seconds=0.015, drafters={"draft_model": 0.01, "ngram": 0.0})
    costs = run(engine)
    assert sorted(cost.drafts for cost in costs if cost.method == "ngram") == list(DRAFT_LENGTHS)
    assert 2.0 < engine.now - 0.5 * len(set(engine.shapes)) < 12.5


class Steps(WarmUps):
    """Warm-ups of two steps; if `broken`, the second one raises. `steps` records which ones ran, and each close."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(None, ())
        self.broken = broken
        self.steps: list[str] = []

    def warm_up(self, engine: EnginePort, spec: ModelSpecification, costs: dict[Key, StepCost]) -> Generator[None]:
        try:
            self.steps.append("first")
            yield
            self.steps.append("second")
            if self.broken:
                raise RuntimeError("[metal] no such kernel")
            yield
        finally:
            self.steps.append("closed")
        costs |= by_shape(COSTS)


def resting(world: World, costs: WarmUps, *models: str) -> EnginePool:
    """Return a pool whose models have been loaded and then idle for `REST_SECONDS`."""
    pool = world.pool(ceiling=100, costs=costs)
    for model in models:
        pool.acquire(specification(model))
        drain(pool)
        pool.release(model)
    world.now += REST_SECONDS
    return pool


def test_a_model_is_ready_before_it_is_warm_and_warmed_up_step_by_step_when_it_rests() -> None:
    world, costs = World(dict(SIZES)), Steps()
    pool = world.pool(costs=costs)
    pool.acquire(specification("a"))
    assert isinstance(drain(pool)[-1], Loaded)
    assert pool.next_warm_up == "", "a request is served first"
    pool.release("a")
    assert pool.next_warm_up == "", "another one may follow"
    world.now += REST_SECONDS
    assert pool.next_warm_up == "a"
    assert (pool.warm_up(), pool.warm_up(), pool.warm_up()) == ([], [], [WarmedUp("a", COSTS)])
    assert costs.steps == ["first", "second", "closed"]
    assert pool.next_warm_up == "", "once is enough"


def test_an_interrupted_warm_up_goes_on_with_what_it_has_measured() -> None:
    engine, warm_ups, costs = TimedEngine(), WarmUps(None, ()), dict[Key, StepCost]()
    steps = warm_ups.warm_up(engine, specification("a"), costs)
    while len(costs) < 5:
        next(steps)
    steps.close()
    assert not engine.cached
    measured, before = list(costs), len(engine.shapes)
    for _ in warm_ups.warm_up(engine, specification("a"), costs):
        pass
    assert list(costs)[:5] == measured
    assert len(costs) > 8
    again = engine.shapes[before:]
    again.remove(("draft_model", 1))  # the sampled one
    assert [again.count((method, drafts)) for method, _, drafts, _ in measured if drafts] == [ROUNDS] * 4


def test_a_request_interrupts_a_warm_up_which_begins_again_when_the_model_rests() -> None:
    world, costs = World(dict(SIZES)), Steps()
    pool = resting(world, costs, "a")
    pool.warm_up()
    pool.acquire(specification("a"))
    assert costs.steps == ["first", "closed"], "its rows are free before the request gets one"
    pool.release("a")
    world.now += REST_SECONDS
    assert [event for _ in range(3) for event in pool.warm_up()] == [WarmedUp("a", COSTS)]


def test_nothing_is_warmed_up_beside_a_request_a_load_or_a_lack_of_memory() -> None:
    pool = resting(World(dict(SIZES)), Steps(), "a")
    pool.pressure = "warning"
    assert pool.next_warm_up == ""
    pool.pressure = "normal"
    assert pool.next_warm_up == "a"
    pool.acquire(specification("b"))
    assert pool.next_warm_up == ""
    assert pool.warm_up() == []
    drain(pool)
    assert pool.next_warm_up == "", "b serves a request"


def test_models_are_warmed_up_one_after_the_other_and_an_evicted_one_no_more() -> None:
    costs = Steps()
    pool = resting(World(dict(SIZES)), costs, "a", "b")
    pool.warm_up()
    pool.unload("a")
    assert costs.steps == ["first", "closed"]
    drain(pool)
    assert [event for _ in range(3) for event in pool.warm_up()] == [WarmedUp("b", COSTS)]


def test_a_model_that_cannot_be_warmed_up_serves_all_the_same() -> None:
    costs = Steps(broken=True)
    pool = resting(World(dict(SIZES)), costs, "a")
    engine = pool.engine("a")
    assert engine is not None
    (event,) = [event for _ in range(2) for event in pool.warm_up()]
    assert isinstance(event, WarmedUp)
    assert costs.steps == ["first", "second", "closed"]
    assert pool.next_warm_up == ""
    assert pool.engine("a") is engine


def test_the_costs_of_an_earlier_load_are_known_at_once(tmp_path: Path) -> None:
    WarmUps(tmp_path, ()).save(specification("a"), COSTS)
    pool = World(dict(SIZES)).pool(costs=WarmUps(tmp_path, ()))
    pool.acquire(specification("a"))
    assert drain(pool)[-1] == Loaded("a", 0.0, COSTS)


def test_a_warm_up_begins_with_what_requests_have_taught_since_the_load() -> None:
    learnt = StepCost("ngram", 1, 3, 0.02, is_learnt=True)
    pool = resting(World(dict(SIZES)), Steps(), "a")
    pool.warm_up(lambda: (learnt,))
    (event,) = [event for _ in range(2) for event in pool.warm_up()]
    assert isinstance(event, WarmedUp)
    assert learnt in event.costs


class Unhurried(WarmUps):
    """Warm-ups with time for every shape, however slow the machine is."""

    def warm_up(self, engine: EnginePort, spec: ModelSpecification, costs: dict[Key, StepCost]) -> Generator[None]:
        yield from warm_up(engine, costs, rows=2, budget_seconds=100.0)


@pytest.mark.parametrize("family", one_in(4, ["qwen3_next", "qwen3", "gemma3", "mamba2"]))
def test_a_real_engine_is_measured_and_as_empty_as_before(tmp_path: Path, family: str) -> None:
    path = write_tiny_model(tmp_path / family, family)
    draft = write_tiny_model(tmp_path / "draft", family, noise=0.03)
    spec = ModelSpecification(
        id=family,
        path=str(path),
        drafters=(DrafterSpecification("draft", str(draft)),),
        max_rows=2,
        max_context_tokens=1_000,
        prefill_chunk_tokens=16,
    )
    world = World({})
    pool = EnginePool(
        ceiling_bytes=10**9,
        load=load_unit,
        open_engine=open_engine,
        estimate=memory.footprint,
        costs=Unhurried(None, ()),
        clock=world.clock,
    )
    pool.acquire(spec)
    assert isinstance(drain(pool)[-1], Loaded)
    pool.release(family)
    world.now += REST_SECONDS
    events: list[PoolEvent] = []
    steps = 0
    while not events:
        events, steps = pool.warm_up(), steps + 1
    assert steps > 20
    engine = pool.engine(family)
    assert isinstance(engine, Engine)
    assert (engine.cache_bytes, engine.prefix_cache_bytes) == (0, 0)
    assert mx.get_cache_memory() == 0
    (event,) = events
    assert isinstance(event, WarmedUp)
    methods = {(cost.method, cost.drafts) for cost in event.costs}
    assert {("off", 0), ("draft_model", 1), ("draft_model", 15), ("ngram", 7)} <= methods
    assert {("off", 0), ("ngram", 7)} <= {(cost.method, cost.drafts) for cost in event.costs if cost.rows == 2}
    assert all(cost.seconds > 0 for cost in event.costs)
    assert CostTable(event.costs).knows_plain(1, 2)
    pool.unload(family)
    assert pool.advance() == [Evicted(family)]
