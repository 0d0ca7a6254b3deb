"""Weights are wired after a load and unwired before they are freed, whatever else is in memory."""

import random

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import ModelUnavailable
from app.core.pool_events import Evicted, LoadFailed
from app.engine.loading.pool import EnginePool
from app.engine.loading.wiring import WirableMemory, Wiring, set_wired_limit, wirable_from, wirable_memory
from tests.engine.pool_world import SIZES, World, drain, kept, ready, specification

GB = 10**9
ROOMY = WirableMemory(total_bytes=100 * GB, recommended_bytes=75 * GB)
"""Memory in which all models of `World`, a few bytes each, can be wired."""


@pytest.fixture(name="world")
def a_world() -> World:
    return World(dict(SIZES))


def wired(world: World, memory: WirableMemory = ROOMY, **options: int) -> EnginePool:
    return world.pool(wiring=Wiring(memory, world.set_limit, lambda: 0), **options)


def test_a_load_ends_with_its_weights_wired(world: World) -> None:
    pool = wired(world)
    pool.acquire(specification("a"))
    assert pool.advance() != []
    assert world.actions == []  # half of the weights are loaded: nothing is wired yet
    drain(pool)
    assert world.actions == ["wire 3"]


def test_the_limit_is_that_of_all_models_together(world: World) -> None:
    ready(wired(world), "a", "b")
    assert world.actions == ["wire 3", "wire 7"]


def test_an_evicted_model_is_let_go_before_it_is_freed_and_the_others_are_wired_again(world: World) -> None:
    pool = wired(world)
    ready(pool, "a", "b")
    world.actions.clear()
    pool.acquire(specification("c"))
    drain(pool)
    assert world.actions == ["wire 0", "close a", "wire 4", "wire 9"]


def test_nothing_is_wired_while_somebody_may_still_hold_an_evicted_model(world: World) -> None:
    pool = wired(world)
    ready(pool, "a", "b")
    world.actions.clear()
    pool.unload("a")
    pool.expire()
    assert world.actions == ["wire 0", "close a"], "its eviction is not reported yet"
    assert pool.advance() == [Evicted("a")]
    pool.expire()
    assert world.actions[2:] == ["wire 4"]


def test_a_model_that_expires_is_let_go_too(world: World) -> None:
    pool = wired(world)
    ready(pool, "a")
    world.actions.clear()
    pool.set_stays(kept(a=0.0))
    pool.expire()
    pool.expire()
    assert world.actions == ["wire 0", "close a"]


@pytest.mark.parametrize("broken", ["reading", "opening"])
def test_a_load_that_fails_leaves_nothing_wired(world: World, broken: str) -> None:
    pool = wired(world)
    if broken == "reading":
        world.broken["a"] = ModelUnavailable("broken")
    else:
        world.unopenable.add("a")
    pool.acquire(specification("a"))
    assert isinstance(drain(pool)[-1], LoadFailed)
    assert world.actions == ([] if broken == "reading" else ["wire 3", "wire 0"])


def test_a_cancelled_load_leaves_nothing_wired(world: World) -> None:
    pool = wired(world)
    pool.acquire(specification("a"))
    pool.advance()
    pool.release("a")
    pool.cancel_load("a")
    drain(pool)
    assert world.actions == []


@pytest.mark.parametrize(
    ("total", "recommended", "weights", "limit"),
    [
        (128 * GB, 96 * GB, 60 * GB, 60 * GB),
        (128 * GB, 96 * GB, 90 * GB, 128 * GB - int(0.35 * 128 * GB)),  # 35 % stay unwired
        (128 * GB, 80 * GB, 90 * GB, 80 * GB),
        (16 * GB, 11 * GB, 8 * GB, 8 * GB),
        (16 * GB, 11 * GB, 9 * GB, 8 * GB),  # 8 GB stay unwired
        (8 * GB, 5 * GB, 2 * GB, 0),
        (64 * GB, 0, 9 * GB, 0),  # no Metal, or an old macOS
        (0, 0, 9 * GB, 0),
    ],
)
def test_only_weights_that_leave_enough_for_the_rest_are_wired(
    total: int, recommended: int, weights: int, limit: int
) -> None:
    assert WirableMemory(total, recommended).limit(weights) == limit


@given(total=st.integers(0, 10**13), recommended=st.integers(0, 10**13), weights=st.integers(0, 10**13))
def test_whatever_the_machine_the_rest_of_it_keeps_its_share(total: int, recommended: int, weights: int) -> None:
    limit = WirableMemory(total, recommended).limit(weights)
    assert limit <= min(weights, recommended)
    assert not limit or total - limit >= max(8 * GB, int(0.35 * total))


def test_a_machine_that_cannot_wire_is_never_asked_to(world: World) -> None:
    pool = wired(world, WirableMemory())
    ready(pool, "a", "b")
    pool.unload("a")
    pool.expire()
    assert world.actions == ["close a"]


class Residency:
    """mlx's `ResidencySet`: new buffers are wired while they fit; a new limit wires all again, in random order."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.buffers: list[tuple[str, int]] = []
        self.wired: list[tuple[str, int]] = []
        self.limit = 0

    def allocate(self, kind: str, size_bytes: int, buffer_bytes: int) -> None:
        for _ in range(size_bytes // buffer_bytes):
            self.buffers.append((kind, buffer_bytes))
            self._wire(self.buffers[-1])

    def free(self, kind: str) -> None:
        self.buffers = [buffer for buffer in self.buffers if buffer[0] != kind]
        self.wired = [buffer for buffer in self.wired if buffer[0] != kind]

    def set_limit(self, limit: int) -> None:
        self.limit, self.wired = limit, []
        for buffer in self.chance.sample(self.buffers, len(self.buffers)):
            self._wire(buffer)

    def _wire(self, buffer: tuple[str, int]) -> None:
        if self.bytes_of("", self.wired) + buffer[1] <= self.limit:
            self.wired.append(buffer)

    def bytes_of(self, kind: str, buffers: list[tuple[str, int]]) -> int:
        return sum(size for name, size in buffers if name.startswith(kind))

    def active_bytes(self) -> int:
        return self.bytes_of("", self.buffers)


@pytest.mark.parametrize("seed", range(5))
def test_weights_stay_wired_beside_20_gb_of_kept_prompts(seed: int) -> None:
    """A second model is loaded, evicted and loaded again; in between, rows and cached prompts grow."""
    memory = Residency(random.Random(seed))
    wiring = Wiring(WirableMemory(64 * GB, 48 * GB), memory.set_limit, memory.active_bytes)
    large, small = 17 * GB, 4_600 * 10**6

    def wire(*models: int) -> None:
        wiring.wire(sum(models), lambda: memory.free("prompts"))
        weights = memory.bytes_of("weights", memory.buffers)
        assert memory.bytes_of("weights", memory.wired) >= 0.95 * weights
        assert memory.bytes_of("", memory.wired) <= memory.limit <= 64 * GB - int(0.35 * 64 * GB)

    memory.allocate("weights large", large, 100 * 10**6)
    wire(large)
    memory.allocate("prompts", 20 * GB, 10 * 10**6)
    memory.allocate("rows", 2 * GB, 50 * 10**6)
    memory.allocate("weights small", small, 20 * 10**6)
    wire(large, small)
    memory.allocate("prompts", 20 * GB, 10 * 10**6)
    wiring.unwire()
    memory.free("weights small")
    wire(large)
    memory.allocate("weights small", small, 20 * 10**6)
    wire(large, small)


@pytest.mark.parametrize(("version", "wires"), [("14.7.1", False), ("15.0", True), ("26.1", True), ("", False)])
def test_macos_15_and_later_wire_and_no_other_system(version: str, wires: bool) -> None:
    assert wirable_from(version, 64 * GB, 48 * GB) == (WirableMemory(64 * GB, 48 * GB) if wires else WirableMemory())
    assert mx.metal.is_available() or wirable_memory() == WirableMemory()


def test_the_real_device_takes_the_calls() -> None:
    set_wired_limit(0)
    assert mx.get_cache_memory() == 0
