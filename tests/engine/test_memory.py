"""Memory: estimates against what models really take, the ceiling, freed buffers, and errors when it runs out."""

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from app.core.errors import ModelUnavailable
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine import memory
from app.engine.caches.lanes import reservation
from app.engine.probe import open_runner
from app.machine import host
from app.models import footprint
from app.models.config_values import DEFAULT_CONTEXT_TOKENS, context_tokens, text_part
from app.models.folder import inspect_folder
from tests.shares import one_in
from tests.tiny import FAMILIES, tiny_model, write_tiny_model

GB = host.GIGABYTE


def specification(folder: Path, **changes: Any) -> ModelSpecification:
    return ModelSpecification(id="tiny", path=str(folder), **changes)


def estimate(spec: ModelSpecification, *, float32: bool | None = None) -> int:
    """Return the bytes that the unit of `spec` may take; `float32`: whether to widen weights, None asks the device."""
    return footprint.unit_footprint(spec, widen=memory.on_cpu() if float32 is None else float32).total_bytes


@pytest.mark.parametrize(
    ("total", "recommended", "ceiling"),
    [
        (8 * GB, None, 4 * GB),
        (16 * GB, None, 8 * GB),
        (64 * GB, None, 56 * GB),
        (64 * GB, 48 * GB, int(48 * GB * 0.9)),
        (64 * GB, 0, 56 * GB),
        (4 * GB, None, 2 * GB),
    ],
)
def test_the_ceiling_leaves_a_reserve_and_the_gpu_share(total: int, recommended: int | None, ceiling: int) -> None:
    assert host.ceiling_from(total, recommended) == ceiling


def test_the_environment_overrides_the_ceiling() -> None:
    assert memory.ceiling_bytes({"PACELINE_MEMORY_LIMIT": "3G"}) == 3 * GB
    assert memory.ceiling_bytes({}) == memory.ceiling_bytes({"PACELINE_MEMORY_LIMIT": ""}) > 0


@pytest.mark.parametrize(("total", "kept"), [(16 * GB, 8 * GB // 10), (64 * GB, int(3.2 * GB)), (512 * GB, 4 * GB)])
def test_freed_buffers_stay_within_a_twentieth_of_the_machine(total: int, kept: int) -> None:
    assert memory.buffer_cache_from(total) == kept


def test_mlx_keeps_no_more_freed_buffers_than_it_was_allowed() -> None:
    memory.bound_buffer_cache()
    usual = mx.set_cache_limit(1 << 20)
    try:
        assert usual == memory.buffer_cache_from(psutil.virtual_memory().total)
        mx.eval(mx.ones((1024, 1024)))
        assert mx.get_cache_memory() <= 1 << 20
    finally:
        mx.set_cache_limit(usual)


def test_trimming_gives_freed_buffers_back() -> None:
    mx.eval(mx.ones((512, 512)))
    assert mx.get_cache_memory() > 0
    memory.trim()
    assert mx.get_cache_memory() == 0


@pytest.mark.parametrize(
    "said",
    [
        "[METAL] Command buffer execution failed: Insufficient Memory",
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "[metal::malloc] Unable to allocate 17179869184 bytes.",
        "[metal::malloc] Attempting to allocate 137438953472 bytes which is greater than the maximum allowed buffer.",
        "[metal::malloc] Resource limit (499000) exceeded.",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "[malloc] Unable to allocate 1099511627776 bytes.",
        "std::bad_alloc",
    ],
)
def test_every_way_to_say_that_memory_ran_out_is_known(said: str) -> None:
    assert memory.is_exhausted(RuntimeError(said))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error"),
        RuntimeError("this model decodes one request at a time"),
        ValueError("Unable to allocate"),
    ],
)
def test_other_errors_are_not_taken_for_a_lack_of_memory(error: Exception) -> None:
    assert not memory.is_exhausted(error)
    assert memory.is_exhausted(MemoryError())


@given(total=st.integers(1, 10**13), recommended=st.none() | st.integers(0, 10**13))
def test_the_ceiling_is_never_more_than_there_is(total: int, recommended: int | None) -> None:
    assert 0 <= host.ceiling_from(total, recommended) < total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantised", [False, True])
def test_weights_are_counted_exactly_after_widening(tmp_path: Path, family: str, quantised: bool) -> None:
    write_tiny_model(tmp_path, family, dtype=mx.bfloat16, quantised=quantised)
    folder = inspect_folder(tmp_path)
    model = tiny_model(family, vocabulary_size=260)
    model.set_dtype(mx.bfloat16)
    if quantised:
        mx.eval(model.parameters())
        model = tiny_model(family, vocabulary_size=260, quantised=True)
        model.set_dtype(mx.bfloat16)
    assert footprint.weights_bytes(folder, widen=False) == bytes_of(model)
    model.set_dtype(mx.float32)
    assert footprint.weights_bytes(folder, widen=True) == bytes_of(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_covers_weights_and_caches_of_the_context(tmp_path: Path, family: str) -> None:
    write_tiny_model(tmp_path, family)
    tokens = 256
    spec = specification(tmp_path, max_rows=1, prefill_chunk_tokens=64, max_context_tokens=tokens)
    model = tiny_model(family, vocabulary_size=260)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, tokens), mx.int32), cache=cache))
    held = bytes_of(model) + sum(entry.nbytes for entry in cache)
    assert held <= estimate(spec, float32=True) <= 20 * held


def test_the_estimate_grows_with_draft_context_rows_and_dtype(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", "qwen3_next", dtype=mx.bfloat16)
    draft = write_tiny_model(tmp_path / "draft", "qwen3", dtype=mx.bfloat16)
    base = estimate(specification(target, max_context_tokens=128), float32=False)
    for larger in (
        specification(target, max_context_tokens=256),
        specification(target, max_context_tokens=128, max_rows=16),
        specification(target, max_context_tokens=128, drafters=(DrafterSpecification("d", str(draft)),)),
    ):
        assert estimate(larger, float32=False) > base
    assert estimate(specification(target, max_context_tokens=128), float32=True) > base
    chunks = [
        estimate(specification(target, max_context_tokens=4096, prefill_chunk_tokens=size), float32=False)
        for size in (512, 1024, 2048, 4096)
    ]
    assert chunks == sorted(set(chunks))
    assert chunks[2] == estimate(specification(target, max_context_tokens=4096), float32=False)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 6, "num_attention_heads": 4}, (6, 0, 0)),
        ({"n_layer": 6, "n_head": 4}, (6, 0, 0)),  # GPT-2
        ({"num_hidden_layers": 6, "sliding_window_pattern": 3, "sliding_window": 8}, (2, 4, 0)),
        ({"num_hidden_layers": 8, "full_attention_interval": 4, "num_attention_heads": 4}, (2, 0, 6)),
        ({"layer_types": ["full_attention", "sliding_attention", "conv", "conv"]}, (1, 1, 2)),
        ({"layer_types": ["mamba", "attention", "mamba"], "model_type": "granitemoehybrid"}, (1, 0, 2)),
        ({"num_hidden_layers": 3, "num_heads": 4, "head_dim": 8, "state_size": 8}, (0, 0, 3)),
    ],
)
def test_layers_are_told_apart_by_what_they_keep(config: dict[str, Any], layers: tuple[int, int, int]) -> None:
    assert footprint._layer_kinds(config) == layers


def test_latent_attention_keeps_one_compressed_vector() -> None:
    assert footprint._position_width({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}) == 576
    assert footprint._position_width({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}) == 64


def test_what_gemma_3_leaves_out_of_its_config_is_known() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
    published = {"model_type": "gemma3", "text_config": text | {"model_type": "gemma3_text"}}
    assert footprint._layer_kinds(text_part(published)) == (5, 29, 0)
    assert footprint._position_width(text_part(published)) == 2 * 4 * 256
    assert not footprint.is_fused(published, "applegpu_g16s")
    assert (context_tokens(published), footprint.kv_refusal(published)) == (131_072, "")


def test_the_context_comes_from_the_config_also_from_a_nested_one() -> None:
    assert context_tokens({"max_position_embeddings": 4096}) == 4096
    assert context_tokens({"text_config": {"max_position_embeddings": 100}, "model_type": "x"}) == 100
    assert context_tokens({}) == DEFAULT_CONTEXT_TOKENS


def test_a_missing_folder_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable):
        estimate(specification(tmp_path / "nothing"))


def test_readings_follow_live_arrays() -> None:
    memory.release()
    before = mx.get_active_memory()
    block = mx.ones((1024, 1024))
    mx.eval(block)
    assert mx.get_active_memory() - before >= 4 << 20
    assert memory.usage() == (mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())
    assert mx.get_peak_memory() >= mx.get_active_memory()
    del block
    memory.release()
    assert (mx.get_active_memory(), mx.get_cache_memory()) == (before, 0)


def test_the_device_and_its_dtype_rule() -> None:
    assert memory.device_name().endswith(("(cpu)", "(gpu)"))
    assert memory.on_cpu() is memory.device_name().endswith("(cpu)")


def bytes_of(model: Any) -> int:
    return sum(int(value.nbytes) for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "reserved"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_rows_are_promised_covers_their_caches_however_they_come_and_go(
    tmp_path: Path, family: str, *, known: bool
) -> None:
    write_tiny_model(tmp_path, family)
    spec = specification(tmp_path, max_rows=4, prefill_chunk_tokens=64)
    promised = footprint.main_footprint(spec, widen=True)
    runner = open_runner(tiny_model(family, vocabulary_size=260), chunk_tokens=64)
    lengths: dict[str, int] = {}

    def read(name: str, tokens: int) -> None:
        runner.claim(name, reservation(tokens, 4096) if known else 0)
        before = runner.caches.nbytes
        lengths[name] = 0
        while lengths[name] < tokens:
            runner.separate_long_rows()
            width = min(64, tokens - lengths[name])
            _, forward = runner.forward([name], mx.zeros((1, width), mx.int32), [width])
            runner.commit(forward, [width])
            lengths[name] += width
        runner.separate_long_rows()
        lengths[name] += 1024 if known else 0  # length that the scheduler expects of a long answer
        assert runner.caches.nbytes <= max(
            before, promised.rows_bytes([footprint.RowSize(length) for length in lengths.values()])
        )

    for name, tokens in (("long", 700), ("short", 5), ("second", 300), ("third", 20)):
        read(name, tokens)
    for name in ("second", "long"):
        runner.release(name)
        del lengths[name]
    read("again", 1100)  # buffers that grow are as large as the present rows need


@pytest.mark.parametrize(("known", "sizes"), [(True, 1), (False, 6)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_prompt_whose_length_is_known_gets_its_buffers_once(family: str, *, known: bool, sizes: int) -> None:
    runner = open_runner(tiny_model(family), margin_tokens=8, chunk_tokens=128)
    runner.claim("a", reservation(3000, 500) if known else 0)
    seen = set()
    for start in range(0, 3000, 128):
        width = min(128, 3000 - start)
        _, forward = runner.forward(["a"], mx.zeros((1, width), mx.int32), [width])
        runner.commit(forward, [width])
        seen.add(max(array.shape[2] for cache in runner.caches.kv for array in cache.arrays()))
    assert len(seen) >= sizes if sizes > 1 else seen == {3328}


def test_an_answer_longer_than_reserved_grows_and_a_later_row_gets_its_own_room() -> None:
    runner = open_runner(tiny_model("qwen3"))

    def feed(name: str, tokens: int) -> int:
        _, forward = runner.forward([name], mx.zeros((1, tokens), mx.int32), [tokens])
        runner.commit(forward, [tokens])
        cache = runner.caches.kv[0]
        return int(cache.row_buffers.get(name, cache.shared).positions)

    runner.claim("a", reservation(100, 50))
    assert feed("a", 100) == feed("a", 150) == 256
    assert feed("a", 100) == 512
    runner.claim("b", reservation(2000, 10_000))
    assert feed("b", 1) == feed("b", 1999) == feed("b", 300) == 2304
    runner.release("a")
    assert runner.caches.table.reserved == {"b": 2062}
    assert feed("b", 4) == 2304
    assert feed("b", 1) == 2816, "an eighth more"


def test_drafts_of_many_rows_are_provided_for_where_chunks_of_prompts_are_shorter(tmp_path: Path) -> None:
    """A verify forward of eight rows has up to 128 tokens, of one row 32, and all of them pass the widest layer."""
    folder = write_tiny_model(tmp_path / "tiny", "qwen3")
    one_row, eight_rows = (
        footprint.main_footprint(specification(folder, max_rows=rows, prefill_chunk_tokens=16), widen=False).peak_bytes
        for rows in (1, 8)
    )
    assert eight_rows == pytest.approx(4 * one_row, rel=0.01)


@pytest.mark.parametrize(
    ("config", "is_fused"),
    [
        ({"head_dim": 128}, True),
        ({"hidden_size": 2048, "num_attention_heads": 32}, True),
        ({"head_dim": 256}, False),  # Qwen3.5, Gemma 3
        ({"head_dim": 96, "global_head_dim": 512}, False),  # Gemma 4
        ({"head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, False),  # DeepSeek-V3
        ({}, True),  # Mamba
    ],
)
def test_metal_stores_scores_for_some_sizes_of_heads(config: dict[str, int], is_fused: bool) -> None:
    assert footprint.is_fused(config, "applegpu_g16s") == is_fused
    assert footprint.is_fused(config, "sm_90")
    assert not footprint.is_fused(config, "")


@pytest.mark.parametrize("sizes", one_in(6, [*product([64, 256, 128, 512], [32_768, 131_072, 8_192])]), ids=str)
def test_where_scores_are_stored_a_prompt_takes_what_was_counted(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Measure the chunk that takes most memory, in the first layer, after keys and values of zeros."""
    head_size, context = sizes
    folder = write_tiny_model(tmp_path / "tiny", "qwen3", head_size=head_size, context_tokens=context)
    model = tiny_model("qwen3", head_size=head_size)
    pairs = footprint.prefill_pairs(fused=False)
    chunk = next(size for size in (64, 128, 256, 512, 1024) if size * context >= pairs)
    before = min(context, pairs // chunk) - chunk
    (cache,) = make_prompt_cache(model)[:1]
    heads = inspect_folder(folder).config["num_key_value_heads"]
    cache.keys, cache.values = (mx.zeros((1, heads, context, head_size)) for _ in range(2))
    cache.offset = before
    layer, states = model.layers[0], mx.zeros((1, chunk, inspect_folder(folder).config["hidden_size"]))
    mx.eval(cache.keys, cache.values, states)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(layer(states, "causal", cache))
    taken = mx.get_peak_memory() - held
    spec = specification(folder, max_rows=1, prefill_chunk_tokens=chunk, max_context_tokens=before + chunk)
    counted = footprint.main_footprint(spec, widen=True).peak_bytes
    assert taken <= counted <= 1.2 * taken
