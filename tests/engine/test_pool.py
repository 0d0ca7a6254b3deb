"""The pool, one rule at a time, with a fake loader and a virtual clock."""

import msgspec
import pytest

from app.core.errors import InsufficientMemory, InvalidRequest, ModelInUse, ModelUnavailable
from app.core.messages import LoadProgress
from app.core.pool_events import Evicted, Loaded, LoadFailed
from app.core.request import Quantisation
from app.core.unit import DrafterSpecification, LiveValues, LoadedModel, ModelSpecification, Stay
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.pool import EnginePool
from app.models.footprint import RowSize
from app.serving.errors import error_object
from tests.engine.pool_world import SIZES, FakeEngine, World, drain, kept, ready, specification


@pytest.fixture(name="world")
def a_world() -> World:
    return World(dict(SIZES))


def test_a_load_is_told_slice_by_slice_and_shared_by_its_waiters(world: World) -> None:
    pool = world.pool()
    for _ in range(3):
        pool.acquire(specification("a"))
    assert pool.engine("a") is None
    assert pool.advance() == [LoadProgress(model_id="a", phase="weights", fraction=0.5)]
    world.now = 2.0
    assert drain(pool) == [LoadProgress(model_id="a", phase="weights", fraction=1.0), Loaded("a", 2.0)]
    assert world.loads == ["a"]
    assert pool.snapshot()[0].leases == 3
    assert pool.engine("a") is not None
    assert pool.advance() == []


def test_the_least_recently_used_makes_way_and_two_waiters_share_one_eviction(world: World) -> None:
    pool = world.pool()
    ready(pool, "a", "b")
    world.now = 1.0
    ready(pool, "a")
    pool.acquire(specification("c"))
    pool.acquire(specification("c"))
    assert [event for event in drain(pool) if isinstance(event, Evicted)] == [Evicted("b")]
    assert sorted(world.open) == ["a", "c"]
    assert world.loads == ["a", "b", "c"]


def test_room_is_made_before_the_load_begins(world: World) -> None:
    pool = world.pool()
    ready(pool, "a", "b")
    pool.acquire(specification("d"))
    assert world.open == []
    assert pool.accounted_bytes == 9
    assert world.reclaimed


def test_prefix_caches_go_before_models(world: World) -> None:
    pool = world.pool()
    ready(pool, "a")
    engine = pool.engine("a")
    assert isinstance(engine, FakeEngine)
    engine.prefix_cache_bytes = 4
    pool.acquire(specification("c"))
    assert engine.prefix_cache_bytes == 0
    assert world.open == ["a"]


def test_what_can_never_fit_is_refused_for_good_and_evicts_nothing(world: World) -> None:
    pool = world.pool()
    ready(pool, "a")
    with pytest.raises(InsufficientMemory, match=r"needs .* use a smaller model or raise memory_limit") as caught:
        pool.acquire(specification("huge"))
    assert caught.value.retry_after_seconds is None
    assert world.open == ["a"]
    assert not pool.loading


def test_sizes_are_told_in_gigabytes() -> None:
    pool = World({"big": 12 * 10**9}).pool(ceiling=8 * 10**9)
    with pytest.raises(InsufficientMemory, match=r"big needs 12.0 GB, the ceiling is 8.0 GB: use"):
        pool.acquire(specification("big"))


def test_models_in_use_stay_and_the_client_may_come_back(world: World) -> None:
    pool = world.pool()
    ready(pool, "a")
    pool.acquire(specification("c"))
    with pytest.raises(InsufficientMemory, match="models in use hold") as caught:
        pool.acquire(specification("d"))
    assert caught.value.retry_after_seconds is not None
    drain(pool)
    assert sorted(world.open) == ["a", "c"]
    pool.release("c")
    pool.acquire(specification("d"))
    assert world.open == []


def test_a_leased_model_stays_although_an_idle_one_was_used_later(world: World) -> None:
    pool = world.pool()
    pool.acquire(specification("a"))
    drain(pool)
    world.now = 1.0
    ready(pool, "b")
    pool.acquire(specification("c"))
    assert world.open == ["a"]


def test_pinned_models_stay_and_waiting_would_not_help(world: World) -> None:
    pool = world.pool()
    pool.set_stays(kept("c"))
    ready(pool, "c")
    with pytest.raises(InsufficientMemory, match="unpin one") as caught:
        pool.acquire(specification("d"))
    assert caught.value.retry_after_seconds is None
    pool.set_stays(kept())
    pool.acquire(specification("d"))
    assert world.open == []


def test_a_failed_load_tells_its_waiters_and_the_next_acquire_tries_again(world: World) -> None:
    pool = world.pool()
    world.broken["a"] = ModelUnavailable("the file is broken")
    pool.acquire(specification("a"))
    pool.acquire(specification("a"))
    failed = drain(pool)[-1]
    assert isinstance(failed, LoadFailed)
    assert (failed.error.message, failed.error.__traceback__) == ("the file is broken", None)
    assert (pool.snapshot(), pool.accounted_bytes) == ((), 0)
    pool.release("a")
    ready(pool, "a")
    assert pool.snapshot()[0].leases == 0


def test_any_exception_of_a_load_becomes_one_of_ours(world: World) -> None:
    pool = world.pool()
    world.broken["a"] = MemoryError("no more")
    pool.acquire(specification("a"))
    failed = drain(pool)[-1]
    assert isinstance(failed, LoadFailed)
    assert isinstance(failed.error, ModelUnavailable)
    assert failed.error.message == "a cannot be loaded: MemoryError: no more; `paceline doctor` checks it"


def test_an_engine_that_does_not_open_is_a_failed_load(world: World) -> None:
    def refuse(unit: LoadedUnit) -> FakeEngine:
        raise ValueError(f"{unit.spec.id} has no cache")

    pool = EnginePool(ceiling_bytes=9, load=world.load, open_engine=refuse, estimate=world.footprint, clock=world.clock)
    pool.acquire(specification("a"))
    failed = drain(pool)[-1]
    assert isinstance(failed, LoadFailed)
    assert "a has no cache" in failed.error.message


def cancel_a_load(pool: EnginePool) -> None:
    """Begin a load of `a`, release its only lease and cancel the load."""
    pool.acquire(specification("a"))
    pool.advance()
    pool.release("a")
    pool.cancel_load("a")


def test_a_cancelled_load_frees_and_tells_once(world: World) -> None:
    pool = world.pool()
    cancel_a_load(pool)
    assert world.loading == []
    assert pool.advance() == [LoadProgress(model_id="a", phase="abandoned", fraction=0.0), Evicted("a")]
    assert not pool.loading
    pool.cancel_load("a")


def test_a_load_right_behind_a_cancelled_one_is_its_own(world: World) -> None:
    pool = world.pool()
    cancel_a_load(pool)
    pool.acquire(specification("a", methods=("prompt_lookup",)))
    assert isinstance(drain(pool)[-1], Loaded)
    pool.release("a")
    pool.unload("a")
    ready(pool, "a")
    pool.cancel_load("a")
    assert world.open == ["a"]


def test_an_abandoned_load_makes_way(world: World) -> None:
    pool = world.pool()
    pool.acquire(specification("c"))
    pool.advance()
    pool.release("c")
    pool.acquire(specification("d"))
    assert world.loading == []
    assert pool.advance() == [LoadProgress(model_id="c", phase="abandoned", fraction=0.0), Evicted("c")]


def test_another_draft_reloads_an_idle_model_and_waits_for_a_busy_one(world: World) -> None:
    pool = world.pool()
    ready(pool, "a")
    drafted = specification("a", drafters=(DrafterSpecification("b", "/models/b"),))
    pool.acquire(drafted)
    assert drain(pool)[0] == Evicted("a")
    assert pool.snapshot()[0].draft_ids == ("b",)
    with pytest.raises(ModelInUse, match="in use with other drafters or settings") as caught:
        pool.acquire(specification("a"))
    assert caught.value.retry_after_seconds is not None
    pool.acquire(drafted)
    assert pool.snapshot()[0].leases == 2


LIVE = LiveValues(
    policy="off",
    queue_limit=1,
    num_draft_tokens=2,
    draft_unavailable="none",
    context_tokens=64,
    longest_token_bytes=9,
    missing_drafters=("gone",),
)
UNITS = {
    "path": "/models/elsewhere",
    "size_bytes": 1,
    "drafters": (DrafterSpecification("b", "/models/b"),),
    "acceptance": "rejection",
    "methods": ("ngram",),
    "prompt_lookup_min": 3,
    "prompt_lookup_max": 9,
    "ngram_across_requests": True,
    "max_rows": 1,
    "prefill_chunk_tokens": 64,
    "max_context_tokens": 32,
    "quantisation": Quantisation(8, 100),
    "prefix_cache_bytes": 0,
}


def test_every_value_of_a_unit_is_tried_here() -> None:
    assert {"id", "live", *UNITS} == set(ModelSpecification.__struct_fields__)
    assert not any(getattr(LIVE, name) == value for name, value in msgspec.structs.asdict(LiveValues()).items())


def test_live_values_need_no_reload(world: World) -> None:
    pool = world.pool()
    pool.acquire(specification("a"))
    drain(pool)
    pool.acquire(specification("a", live=LIVE))
    assert (world.loads, pool.snapshot()[0].leases) == (["a"], 2)


@pytest.mark.parametrize("name", UNITS)
def test_any_other_setting_reloads_an_idle_model_and_is_told_to_wait_for_one_in_use(world: World, name: str) -> None:
    pool = world.pool()
    pool.acquire(specification("a"))
    drain(pool)
    changed = msgspec.structs.replace(specification("a"), **{name: UNITS[name]})
    with pytest.raises(ModelInUse, match="in use with other drafters or settings") as caught:
        pool.acquire(changed)
    assert (caught.value.code, pool.snapshot()[0].leases) == ("model_in_use", 1)
    pool.release("a")
    pool.acquire(changed)
    drain(pool)
    assert world.loads == ["a", "a"]


def test_a_model_that_a_request_pinned_stays_pinned_with_another_draft(world: World) -> None:
    pool = world.pool()
    pool.acquire(specification("d"), Stay(pinned=True))
    drain(pool)
    pool.release("d")
    pool.acquire(specification("d", drafters=(DrafterSpecification("x", "/models/x"),)))
    drain(pool)
    assert pool.snapshot()[0].stay.pinned


def test_a_pinned_model_may_reload_with_another_draft(world: World) -> None:
    pool = world.pool()
    pool.set_stays(kept("d"))
    ready(pool, "d")
    pool.acquire(specification("d", drafters=(DrafterSpecification("x", "/models/x"),)))
    assert isinstance(drain(pool)[-1], Loaded)


def test_a_reload_that_cannot_fit_keeps_the_old_unit(world: World) -> None:
    pool = world.pool(ceiling=9)
    ready(pool, "d")
    with pytest.raises(InsufficientMemory):
        pool.acquire(specification("d", drafters=(DrafterSpecification("x", "/models/x"),)))
    assert world.open == ["d"]


def test_rows_are_promised_memory_until_the_ceiling(world: World) -> None:
    world.row_bytes = 2
    pool = world.pool()
    pool.acquire(specification("a"))
    drain(pool)
    assert pool.reserve("a", [RowSize(1)])
    assert pool.reserve("a", [RowSize(1), RowSize(1)])
    assert pool.accounted_bytes == 3 + 4
    assert not pool.reserve("a", [RowSize(1), RowSize(1), RowSize(1)]), (
        "three rows take a rectangle of four: 8 + 3 > 10"
    )
    assert pool.accounted_bytes == 3 + 4, "a refusal promises nothing"
    assert pool.reserve("a", [])
    assert pool.accounted_bytes == 3


def test_rows_make_idle_models_and_former_prompts_go_but_no_model_in_use(world: World) -> None:
    world.row_bytes = 3
    pool = world.pool()
    ready(pool, "b")
    pool.acquire(specification("a"))
    drain(pool)
    engine = pool.engine("a")
    assert isinstance(engine, FakeEngine)
    engine.prefix_cache_bytes = 3
    assert pool.reserve("a", [RowSize(1)])
    assert pool.accounted_bytes == 3 + 4 + 3, "both models and one row"
    assert engine.prefix_cache_bytes == 0
    assert pool.reserve("a", [RowSize(1), RowSize(1)])
    assert world.open == ["a"]


def test_a_row_waits_for_the_rows_of_another_model_but_somebody_always_goes_on(world: World) -> None:
    world.row_bytes = 4
    pool = world.pool()
    for name in "ab":
        pool.acquire(specification(name))
    drain(pool)
    assert pool.reserve("a", [RowSize(1)]), "nobody runs: it may, although both models are in use"
    assert not pool.reserve("b", [RowSize(1)])
    assert pool.reserve("a", [])
    assert pool.reserve("b", [RowSize(1)])


def test_a_row_that_can_never_fit_is_told_with_the_figures(world: World) -> None:
    world.position_bytes = 1
    pool = world.pool()
    ready(pool, "a")
    pool.check_row("a", RowSize(7))
    with pytest.raises(InvalidRequest, match="8 tokens, whose keys and values take 8 B") as caught:
        pool.check_row("a", RowSize(8))
    assert caught.value.code == "context_length_exceeded"
    words = error_object(caught.value, path="/v1/messages")["error"]["message"]
    assert words == "prompt is too long: 8 tokens > 7 maximum", "Claude Code compacts the conversation"
    assert "memory_limit in the settings" in caught.value.message
    assert pool.reserve("a", [RowSize(7)]), "whoever is alone goes on"


def test_idle_models_expire_by_their_own_time(world: World) -> None:
    pool = world.pool()
    pool.set_stays(kept(usual=60.0, b=-1.0))
    ready(pool, "a", "b")
    world.now = 59.0
    assert pool.expire() == []
    world.now = 61.0
    assert pool.expire() == [Evicted("a")]
    pool.set_stays(kept("b", b=10.0))
    assert pool.expire() == []
    pool.set_stays(kept(b=10.0))
    assert pool.expire() == [Evicted("b")]
    assert pool.snapshot() == ()


def test_a_model_that_is_to_leave_after_its_answer_leaves_once(world: World) -> None:
    pool = world.pool()
    pool.acquire(specification("a"), Stay(idle_seconds=0.0))
    drain(pool)
    assert pool.expire() == []
    pool.release("a")
    assert pool.expire() == [Evicted("a")]
    ready(pool, "a")
    assert pool.expire() == []


def test_the_last_request_decides_how_long_a_model_stays(world: World) -> None:
    pool = world.pool()
    pool.acquire(specification("a"), Stay(idle_seconds=0.0))
    pool.acquire(specification("a"), Stay(idle_seconds=600.0))
    pool.acquire(specification("a"))
    drain(pool)
    for _ in range(3):
        pool.release("a")
    world.now = 599.0
    assert pool.expire() == []
    world.now = 600.0
    assert pool.expire() == [Evicted("a")]


def test_a_model_that_was_pinned_by_a_setting_stays_where_a_request_lets_it_go_and_leaves_without_the_pin(
    world: World,
) -> None:
    pool = world.pool()
    pool.set_stays(kept("a"))
    pool.acquire(specification("a"), Stay(idle_seconds=0.0))
    drain(pool)
    pool.release("a")
    assert pool.expire() == []
    pool.set_stays(kept())
    assert pool.expire() == [], "the changed setting is the last word"
    world.now = 3600.0
    assert pool.expire() == [Evicted("a")]


def test_settings_of_another_model_leave_what_a_request_said(world: World) -> None:
    pool = world.pool()
    pool.acquire(specification("a"), Stay(idle_seconds=5.0))
    drain(pool)
    pool.release("a")
    pool.set_stays(kept("b"))
    world.now = 5.0
    assert pool.expire() == [Evicted("a")]


def test_values_that_no_engine_depends_on_change_without_a_reload(world: World) -> None:
    pool = world.pool()
    ready(pool, "a")
    pool.update_specification(specification("a", live=LiveValues(policy="off")))
    assert pool.snapshot()[0].unit.live.policy == "off"
    pool.update_specification(specification("a", max_rows=3))
    assert pool.snapshot()[0].unit.max_rows == specification("a").max_rows
    assert world.loads == ["a"]


def test_a_leased_model_never_expires(world: World) -> None:
    pool = world.pool()
    pool.set_stays(kept(usual=1.0))
    pool.acquire(specification("a"))
    drain(pool)
    world.now = 100.0
    assert pool.expire() == []
    pool.release("a")
    assert pool.expire() == []
    world.now = 101.0
    assert pool.expire() == [Evicted("a")]


def test_caches_that_outgrow_the_ceiling_are_told_and_relieved(world: World) -> None:
    pool = world.pool()
    ready(pool, "a", "b")
    grown = pool.engine("b")
    assert isinstance(grown, FakeEngine)
    grown.cache_bytes = 5
    assert pool.accounted_bytes == 3 + 9
    world.now = 1.0
    pool.acquire(specification("b"))
    assert pool.expire() == [Evicted("a")]


def test_when_the_device_is_full_former_prompts_and_idle_models_go_and_nothing_else(world: World) -> None:
    pool = world.pool()
    ready(pool, "a", "b")
    pool.acquire(specification("a"))
    engine = pool.engine("a")
    assert isinstance(engine, FakeEngine)
    engine.prefix_cache_bytes, engine.cache_bytes = 2, 1
    pool.free_unused()
    assert (engine.prefix_cache_bytes, engine.cache_bytes, world.open) == (0, 1, ["a"])
    assert pool.advance() == [Evicted("b")]


def test_a_model_in_use_is_not_unloaded(world: World) -> None:
    pool = world.pool()
    pool.acquire(specification("a"))
    with pytest.raises(ModelInUse, match="in use by 1 requests"):
        pool.unload("a")
    pool.release("a")
    pool.set_stays(kept("a"))
    pool.unload("a")
    pool.unload("nobody")
    assert (world.open, world.loading) == ([], [])
    assert pool.advance()[-1] == Evicted("a")


def test_the_snapshot_tells_state_leases_and_bytes(world: World) -> None:
    pool = world.pool()
    pool.set_stays(kept("b"))
    ready(pool, "b")
    world.now = 7.0
    pool.acquire(specification("a", drafters=(DrafterSpecification("x", "/x"),)))
    b, a = pool.snapshot()
    assert b == LoadedModel(
        unit=specification("b"),
        state="ready",
        weights_bytes=4,
        cache_families=("kv",),
        max_context_tokens=64,
        stay=Stay(pinned=True, idle_seconds=3600.0),
    )
    assert (b.idle_seconds(7.0), b.seconds_left(7.0)) == (7.0, None)
    assert (a.state, a.draft_ids, a.leases, a.idle_seconds(9.0)) == ("loading", ("x",), 1, 0.0)


def test_a_warning_of_the_system_halves_former_prompts_and_need_drops_them_with_idle_models(world: World) -> None:
    pool = world.pool()
    ready(pool, "a", "b")
    engine = pool.engine("a")
    assert isinstance(engine, FakeEngine)
    engine.prefix_cache_bytes = 2
    pool.pressure = "warning"
    assert pool.relieve() == 1
    assert (engine.prefix_cache_bytes, world.open) == (1, ["a", "b"])
    pool.set_stays(kept("b"))
    pool.pressure = "critical"
    assert pool.relieve() == 1 + SIZES["a"]
    assert world.open == ["b"]


def test_in_need_a_load_waits_for_the_rows_that_run_and_then_goes_on(world: World) -> None:
    world.row_bytes = 1
    pool = world.pool()
    pool.acquire(specification("a"))
    drain(pool)
    pool.reserve("a", [RowSize(1)])
    pool.acquire(specification("b"))
    pool.pressure = "critical"
    assert pool.must_wait
    assert pool.advance() == []
    assert world.loads == ["a"]
    pool.reserve("a", [])
    assert not pool.must_wait
    assert Loaded("b", 0.0) in drain(pool)
