"""The pool under random orders of calls from hypothesis: bytes, leases and evictions always agree."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.core.errors import InsufficientMemory, ModelInUse, ModelUnavailable
from app.core.messages import KeepModels
from app.core.pool_events import Evicted, LoadFailed, PoolEvent
from app.core.unit import DEFAULT_STAY, DrafterSpecification, Stay
from tests.engine.pool_world import CEILING, SIZES, FakeEngine, World, drain, specification

models = st.sampled_from(["a", "a", "b", "b", "c", "c", "d", "huge"])


class PoolMachine(RuleBasedStateMachine):
    """Random calls. `leases` is the reference: the leases that a caller who follows the contract expects to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(dict(SIZES))
        self.pool = self.world.pool()
        self.leases = dict.fromkeys(SIZES, 0)
        self.settings = KeepModels(usual=Stay(pinned=False, idle_seconds=30.0))
        self.pool.set_stays(self.settings)
        self.said = dict.fromkeys(SIZES, DEFAULT_STAY)
        """Stay of each model in memory, as a request or a setting last set it."""
        self.protected: set[str] = set()

    @initialize(held=models, idle=st.lists(models, max_size=3))
    def be_in_use(self, held: str, idle: list[str]) -> None:
        self.acquire(held, drafted=False)
        self.advance_to_the_end()
        for model in idle:
            self.serve_one(model)

    @rule(model=models, drafted=st.booleans(), idle_seconds=st.none() | st.floats(-1, 60))
    def acquire(self, model: str, drafted: bool, idle_seconds: float | None = None) -> None:
        self._protect()
        stay = Stay(idle_seconds=idle_seconds)
        resident = self.pool._entries.get(model)
        spec = specification(model, drafters=(DrafterSpecification("x", "/x"),) if drafted else ())
        before = (sorted(self.world.open), sorted(self.world.loading))
        try:
            self.pool.acquire(spec, stay)
        except (InsufficientMemory, ModelInUse):
            assert (sorted(self.world.open), sorted(self.world.loading)) == before
        else:
            if resident is None:  # a unit that replaces another one of its id stays as long as that
                self.said[model] = self.settings.of(model)
            self.said[model] = stay.over(self.said[model])
            self.leases[model] += 1
        self._check_protected(except_for=model)

    @rule(model=models)
    def release(self, model: str) -> None:
        if self.leases[model]:
            self.leases[model] -= 1
            self.pool.release(model)

    @rule()
    def advance(self) -> None:
        self._follow(self.pool.advance())

    @rule()
    def advance_to_the_end(self) -> None:
        self._follow(drain(self.pool))
        assert not self.world.loading

    @rule(model=models)
    def serve_one(self, model: str) -> None:
        """Acquire, load and release a model, as most requests do."""
        self.world.now += 1
        self.acquire(model, drafted=False)
        self.advance_to_the_end()
        self.release(model)

    @rule(model=models)
    def unload(self, model: str) -> None:
        try:
            self.pool.unload(model)
        except ModelInUse:
            assert self.leases[model]
        else:
            assert model not in self.world.open

    @rule(model=models)
    def cancel_load(self, model: str) -> None:
        self.pool.cancel_load(model)
        assert self.leases[model] or model not in self.world.loading

    @rule(model=models, pinned=st.none() | st.booleans(), idle_seconds=st.none() | st.floats(-1, 60))
    def change_settings(self, model: str, pinned: bool | None, idle_seconds: float | None) -> None:
        before = self.settings.of(model)
        models = self.settings.models | {model: Stay(pinned=pinned, idle_seconds=idle_seconds)}
        self.settings = KeepModels(usual=self.settings.usual, models=models)
        if self.settings.of(model) != before:
            self.said[model] = self.settings.of(model)
        self.pool.set_stays(self.settings)

    @rule(seconds=st.floats(0, 40))
    def expire(self, seconds: float) -> None:
        self._protect()
        self.world.now += seconds
        evicted = [event for event in self.pool.expire() if isinstance(event, Evicted)]
        assert not any(self.leases[event.model_id] for event in evicted)
        self._check_protected()
        for model in self.pool.snapshot():
            assert model.leases or model.seconds_left(self.world.now) != 0

    @rule(model=models)
    def break_the_next_load(self, model: str) -> None:
        self.world.broken[model] = ModelUnavailable("broken")

    @precondition(lambda self: self.world.open)
    @rule(size=st.integers(0, 6), data=st.data())
    def grow_a_prefix_cache(self, size: int, data: st.DataObject) -> None:
        engine = self.pool.engine(data.draw(st.sampled_from(sorted(self.world.open))))
        assert isinstance(engine, FakeEngine)
        engine.prefix_cache_bytes = max(0, min(size, CEILING - self._accounted_without(engine)))

    @invariant()
    def bytes_are_accounted_and_fit(self) -> None:
        entries = self.pool._entries.values()
        live = sum(entry.reserved_bytes + entry.prefix_bytes for entry in entries)
        assert self.pool.accounted_bytes == live <= CEILING
        assert sorted(entry.spec.id for entry in entries if entry.engine) == sorted(self.world.open)
        assert {entry.spec.id for entry in entries if not entry.engine} >= set(self.world.loading)

    @invariant()
    def nothing_is_there_twice(self) -> None:
        there = self.world.open + self.world.loading
        assert len(there) == len(set(there))

    @invariant()
    def leases_agree(self) -> None:
        for model, held in self.leases.items():
            entry = self.pool._entries.get(model)
            assert held == (entry.leases if entry else 0)

    @invariant()
    def the_last_word_on_a_stay_wins(self) -> None:
        assert {model.id: model.stay for model in self.pool.snapshot()} == {
            model.id: self.said[model.id] for model in self.pool.snapshot()
        }

    def teardown(self) -> None:
        self._follow(drain(self.pool))
        for model, held in self.leases.items():
            for _ in range(held):
                self.pool.release(model)
            self.pool.unload(model)
        assert (self.world.open, self.world.loading, self.pool.accounted_bytes) == ([], [], 0)

    def _follow(self, events: list[PoolEvent]) -> None:
        for event in events:
            if isinstance(event, LoadFailed):
                self.leases[event.model_id] = 0

    def _protect(self) -> None:
        pinned = {model.id for model in self.pool.snapshot() if model.stay.pinned}
        kept = {model for model, held in self.leases.items() if held} | pinned
        self.protected = kept & set(self.world.open)

    def _check_protected(self, except_for: str = "") -> None:
        assert self.protected - {except_for} <= set(self.world.open)

    def _accounted_without(self, engine: FakeEngine) -> int:
        return self.pool.accounted_bytes - engine.prefix_cache_bytes


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolInEveryOrder = PoolMachine.TestCase


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [pytest.param(300, marks=pytest.mark.landing), 2000])
def test_the_pool_in_many_orders(count: int) -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=count, stateful_step_count=80, deadline=None))
