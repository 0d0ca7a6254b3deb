"""The pool with real tiny models: every byte comes back, and estimates cover what models take."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from app.core.errors import InsufficientMemory, PacelineError
from app.core.messages import LoadProgress
from app.core.pool_events import Evicted, Loaded, LoadFailed
from app.core.request import Request
from app.core.step import DecodeRow, DecodeStep, PrefillRow, PrefillStep
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine import memory
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.engine.loading.pool import EnginePool, open_pool
from tests.engine.pool_world import drain
from tests.shares import LANDING
from tests.tiny import write_tiny_model


@pytest.fixture(name="folders")
def real_folders(tmp_path: Path) -> Callable[..., ModelSpecification]:
    def make(family: str, *, draft: bool = False, **changes: Any) -> ModelSpecification:
        path = write_tiny_model(tmp_path / family, family)
        spec = ModelSpecification(
            id=family, path=str(path), max_rows=2, max_context_tokens=128, prefill_chunk_tokens=16, **changes
        )
        if not draft:
            return spec
        small = write_tiny_model(tmp_path / f"{family}-draft", family, noise=0.03)
        return msgspec.structs.replace(spec, drafters=(DrafterSpecification(f"{family}-draft", str(small)),))

    return make


def use(pool: EnginePool, model_id: str) -> list[int]:
    """Generate some tokens on a ready model."""
    engine = pool.engine(model_id)
    assert engine is not None
    tokens = list(range(40, 60))
    request = Request(id="r", prompt_tokens=tuple(tokens), max_tokens=12)
    engine.admit(request)
    engine.step(PrefillStep((PrefillRow("r", tokens, 0, 15),)))
    computed = 15
    for remaining in range(6, 0, -1):
        row = DecodeRow("r", tokens, 20, computed, remaining + 6, "draft_model", 3)
        row = row if "draft_model" in engine.limits.drafters else replace(row, method="off", num_draft_tokens=0)
        (outcome,) = engine.step(DecodeStep((row,))).outcomes
        tokens += outcome.emitted
        computed = outcome.computed
    engine.release("r", tokens)
    return tokens[20:]


@pytest.mark.parametrize(
    ("family", "draft"), [pytest.param("qwen3", True, marks=LANDING), ("gemma3", False), ("qwen3_next", True)]
)
def test_after_the_last_release_and_unload_every_byte_is_back(
    folders: Callable[..., ModelSpecification], family: str, draft: bool
) -> None:
    spec = folders(family, draft=draft)
    memory.release()
    before = mx.get_active_memory()
    pool = open_pool(10**9)
    outputs, idle = [], []
    for _ in range(3):
        pool.acquire(spec)
        events = drain(pool)
        assert isinstance(events[-1], Loaded), events
        outputs.append(use(pool, family))
        assert mx.get_active_memory() - before > pool.snapshot()[0].weights_bytes
        pool.release(family)
        pool.unload(family)
        idle.append((mx.get_active_memory(), mx.get_cache_memory()))
    assert outputs[0] == outputs[1] == outputs[2]
    assert idle[0] == idle[1] == idle[2]
    assert 0 <= idle[0][0] - before < 256, "only scalars of compiled functions may outlive a model"
    assert idle[0][1] == 0


def test_what_a_model_really_takes_stays_within_its_estimate(folders: Callable[..., ModelSpecification]) -> None:
    spec = folders("qwen3", draft=True, prefix_cache_bytes=0)
    memory.release()
    idle = mx.get_active_memory()
    pool = open_pool(10**9)
    pool.acquire(spec)
    drain(pool)
    use(pool, "qwen3")
    assert 0 < mx.get_active_memory() - idle <= memory.footprint(spec).total_bytes == pool.accounted_bytes


def test_real_models_make_way_for_one_another(folders: Callable[..., ModelSpecification]) -> None:
    first, second = folders("qwen3"), folders("llama")
    ceiling = max(memory.footprint(first).total_bytes, memory.footprint(second).total_bytes) + 1
    memory.release()
    idle = mx.get_active_memory()
    pool = open_pool(ceiling)
    for spec in (first, second, first):
        pool.acquire(spec)
        drain(pool)
        use(pool, spec.id)
        pool.release(spec.id)
        assert [model.id for model in pool.snapshot()] == [spec.id]
    pool.unload("qwen3")
    assert mx.get_active_memory() - idle < 256


def test_an_evicted_engine_that_somebody_keeps_is_freed_before_the_next_load(
    folders: Callable[..., ModelSpecification],
) -> None:
    first, second = folders("qwen3"), folders("llama")
    ceiling = max(memory.footprint(first).total_bytes, memory.footprint(second).total_bytes) + 1
    memory.release()
    idle = mx.get_active_memory()
    pool = open_pool(ceiling)
    pool.acquire(first)
    drain(pool)
    kept = pool.engine("qwen3")
    pool.release("qwen3")
    pool.acquire(second)
    assert pool.advance() == [Evicted("qwen3")]
    del kept
    assert isinstance(pool.advance()[0], LoadProgress)
    assert mx.get_active_memory() - idle < 256
    assert mx.get_cache_memory() == 0


def test_a_real_cancelled_or_failed_load_leaves_nothing(folders: Callable[..., ModelSpecification]) -> None:
    spec = folders("qwen3", draft=True)
    memory.release()
    idle = mx.get_active_memory()
    pool = EnginePool(
        ceiling_bytes=10**9,
        load=partial(load_unit, slice_bytes=4096),
        open_engine=open_engine,
        estimate=memory.footprint,
    )
    pool.acquire(spec)
    for _ in range(8):
        pool.advance()
    assert mx.get_active_memory() > idle
    pool.release("qwen3")
    pool.cancel_load("qwen3")
    assert mx.get_active_memory() - idle < 256
    (Path(spec.drafters[0].path) / "model.safetensors").write_bytes(b"")
    pool.advance()
    with pytest.raises(PacelineError, match="truncated or corrupt"):
        pool.acquire(spec)
    config = Path(spec.path) / "config.json"
    config.write_text(config.read_text().replace('"qwen3"', '"qwen4"'))
    pool.acquire(msgspec.structs.replace(spec, drafters=()))
    failed = drain(pool)[-1]
    assert isinstance(failed, LoadFailed)
    assert "qwen4 not supported" in failed.error.message
    assert mx.get_active_memory() - idle < 256


def test_the_ceiling_reaches_the_real_pool(folders: Callable[..., ModelSpecification]) -> None:
    spec = folders("qwen3")
    with pytest.raises(InsufficientMemory, match=r"the ceiling is \d+ kB: use a smaller model"):
        open_pool(memory.footprint(spec).total_bytes - 1).acquire(spec)
    open_pool(memory.footprint(spec).total_bytes).acquire(spec)
