"""Quantised keys and values: tokens equal those of a single request over mlx-lm's own quantised cache, with and without
drafts, in batches, after rewinds and from the prefix cache; and rows stay within their estimated memory."""

import random
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache
from msgspec.structs import replace

from app.core.request import UNQUANTISED, Quantisation, Request, SamplingParameters
from app.core.unit import ModelSpecification
from app.engine.caches.attention import MAX_PACKED_QUERIES, Packed, attention, packed_queries_for
from app.engine.caches.lanes import reservation
from app.engine.engine import Engine
from app.engine.loading.loader import load_unit
from app.engine.loading.opening import open_engine
from app.engine.prefix.disk import Disk
from app.engine.probe import open_runner
from app.models.footprint import KV_REFUSALS, RowSize, kv_refusal, main_footprint
from tests.engine.driving import Driver, build, naive, quantised_caches
from tests.engine.schedules import FEATURE_METHODS, METHODS, models, run_schedule
from tests.shares import one_in
from tests.tiny import tiny_config, tiny_model, write_tiny_model

FAMILIES = ("qwen3", "gemma3", "qwen3_next")
"""Families with full attention only, with sliding windows too, and with recurrent layers too."""
GREEDY = SamplingParameters(temperature=0.0)
LATENTS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "kv_lora_rank": 32}


def own_products(bits: int) -> QuantizedKVCache:
    return QuantizedKVCache(group_size=32, bits=bits)


@cache
def told_alone(family: str, prompt: tuple[int, ...], count: int, bits: int) -> list[int]:
    model, _ = models(family, False, 32)
    return naive(model, prompt, count, GREEDY, quantised_caches(model, bits))


def text_of(engine: Engine, family: str, name: str, prompt: tuple[int, ...], *, count: int = 12) -> int:
    """Run one greedy request with drafts and check it against the naive loop; return its number of cached tokens."""
    driver = Driver(engine, random.Random(1), ("draft_model", "ngram"))
    driver.admit(Request(id=name, prompt_tokens=prompt, max_tokens=count, sampling=GREEDY))
    computed = driver.live[name].computed
    while driver.live:
        driver.step()
    bits = engine.runner.quantisation.bits_of(len(prompt))
    assert driver.finished[name].output == told_alone(family, prompt, count, bits)
    return computed


@pytest.mark.parametrize(("method", "family", "bits"), one_in(3, [*METHODS, *FEATURE_METHODS], FAMILIES, [8, 4]))
def test_drafts_change_no_word_of_quantised_rows_beside_whole_ones(method: str, family: str, bits: int) -> None:
    """Prompts of 1 to 40 tokens; those of 12 and more are quantised."""
    outcome = run_schedule(family, 2, methods=(method,), quantisation=Quantisation(bits, 12), rows=3, sequences=4)
    assert outcome.output_tokens > 0
    assert method == "ngram" or outcome.accepted > 0


@pytest.mark.soak
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", [*FAMILIES, "llama", "falcon_h1"])
def test_hundreds_of_random_schedules_say_what_the_naive_loop_says(family: str, bits: int) -> None:
    for seed in range(100):
        run_schedule(
            family,
            seed,
            methods=(*METHODS, *FEATURE_METHODS),
            quantisation=Quantisation(bits, 12 * (seed % 2)),
            rows=1 + seed % 4,
            prefix_bytes=(0, 1 << 30)[seed % 2],
        )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_packed_keys_read_as_they_are_say_what_mlx_lms_own_products_say(family: str, bits: int) -> None:
    """Attention reads packed keys, as on Metal; the reference is mlx-lm's cache with mlx-lm's own attention."""
    target, draft = models(family, False, 32)
    engine = build(target, draft=draft, quantisation=Quantisation(bits))
    engine.runner.caches.table.packed_queries = MAX_PACKED_QUERIES
    driver = Driver(engine, random.Random(bits), ("draft_model",))
    prompts = {name: tuple((7 * place + size) % 97 for place in range(size)) for name, size in (("a", 30), ("b", 9))}
    for name, prompt in prompts.items():
        driver.admit(Request(id=name, prompt_tokens=prompt, max_tokens=40, sampling=GREEDY))
    while driver.live:
        driver.step()
    for name, prompt in prompts.items():
        wanted = naive(target, prompt, 40, GREEDY, quantised_caches(target, bits, own_products))
        assert driver.finished[name].output == wanted
        assert driver.finished[name].accepted > 0


def test_the_bits_are_felt() -> None:
    target, _ = models("qwen3", False, 32)
    prompt = tuple(range(40))
    texts = {bits: naive(target, prompt, 80, GREEDY, quantised_caches(target, bits)) for bits in (0, 8, 4)}
    assert texts[4] not in (texts[0], texts[8])


def test_packed_keys_are_read_packed_by_few_queries_on_a_mac_only() -> None:
    assert packed_queries_for("applegpu_g16s") == MAX_PACKED_QUERIES
    assert packed_queries_for("") == packed_queries_for("sm_90") == 0


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("width", [1, 5])
def test_attention_reads_packed_keys_with_sinks_and_without(width: int, sinks: bool) -> None:
    queries, keys, values = (mx.random.normal((2, heads, size, 64)) for heads, size in ((4, width), (2, 50), (2, 50)))
    packed = [Packed(tuple(mx.quantize(array, group_size=64, bits=8)), 8) for array in (keys, values)]
    more = mx.random.normal((4,)) if sinks else None
    mask = None if width == 1 else "causal"
    output = attention(queries * 1, packed[0], packed[1], None, 0.125, mask, more)
    wanted = attention(queries, packed[0].dequantised(), packed[1].dequantised(), None, 0.125, mask, more)
    assert float(mx.max(mx.abs(output - wanted))) < 1e-5
    assert float(mx.max(mx.abs(packed[0].dequantised() - keys))) < 0.03


@pytest.mark.parametrize(
    ("bits", "size", "share"), [(8, 64, 9 / 32), (4, 64, 5 / 32), (8, 32, 10 / 32), (4, 32, 6 / 32)]
)
def test_a_quantised_row_takes_its_bits_and_a_scale_and_bias_for_each_group(bits: int, size: int, share: float) -> None:
    """Scales and biases are float32 too: together 64 bits for each group of 64 or 32 numbers."""
    model = tiny_model("qwen3", head_size=size)
    taken = []
    for row_bits in (0, bits):
        runner = open_runner(model)
        runner.claim("a", 2000, row_bits)
        logits, forward = runner.forward(["a"], mx.zeros((1, 300), mx.int32), [300])
        runner.commit(forward, [300])
        mx.eval(logits)
        taken.append(runner.caches.nbytes)
    assert taken[1] == taken[0] * share


@pytest.mark.parametrize(("bits", "family", "from_tokens"), one_in(3, [8, 4], [*FAMILIES, "falcon_h1"], [0, 100]))
def test_what_quantised_rows_are_promised_covers_them(tmp_path: Path, family: str, bits: int, from_tokens: int) -> None:
    write_tiny_model(tmp_path, family, head_size=64)
    spec = ModelSpecification(id="tiny", path=str(tmp_path), max_rows=4, prefill_chunk_tokens=64)
    quantisation = Quantisation(bits, from_tokens)
    promised = main_footprint(replace(spec, quantisation=quantisation), widen=True)
    runner = open_runner(tiny_model(family, vocabulary_size=260, head_size=64), chunk_tokens=64)
    sizes: list[RowSize] = []
    for name, tokens in (("long", 1500), ("short", 5), ("second", 300), ("third", 20), ("fourth", 99)):
        runner.claim(name, reservation(tokens, 64), quantisation.bits_of(tokens))
        sizes.append(RowSize(tokens + 64, tokens))
        for start in range(0, tokens, 64):
            width = min(64, tokens - start)
            _, forward = runner.forward([name], mx.zeros((1, width), mx.int32), [width])
            runner.commit(forward, [width])
            mx.eval(runner.arrays())
        assert runner.caches.nbytes <= promised.rows_bytes(sizes), name
    whole = main_footprint(spec, widen=True)
    assert promised.cache_bytes < whole.cache_bytes
    assert promised.peak_bytes > whole.peak_bytes, "a layer is unpacked to be read"
    ratio = promised.row_position_bytes(RowSize(300, 300)) / whole.position_bytes
    assert ratio == (bits + 1) / 32
    if from_tokens:
        assert promised.row_position_bytes(RowSize(300, 99)) == whole.position_bytes


@pytest.mark.parametrize(("family", "bits"), one_in(2, [*FAMILIES, "falcon_h1"], [8, 4]))
def test_a_quantised_prompt_is_found_again_in_its_form_and_in_no_other(family: str, bits: int) -> None:
    target, draft = models(family, False, 32)
    engine = build(target, draft=draft, prefix_bytes=1 << 30, quantisation=Quantisation(bits, 40))
    prompt = tuple(5 * place % 97 for place in range(60))
    assert text_of(engine, family, "whole", prompt[:39]) == 0
    assert text_of(engine, family, "quantised", prompt) == 0, "what a whole row left is of another form"
    assert text_of(engine, family, "again", prompt) == 59
    assert text_of(engine, family, "whole again", prompt[:39]) == 38
    longer = (*prompt, 3, 1, 4, 1, 5)
    assert text_of(engine, family, "longer", longer) >= 59
    engine.runner.quantisation = Quantisation(12 - bits, 40)
    assert text_of(engine, family, "other bits", longer) == 0


def test_a_kept_block_takes_its_bits() -> None:
    target = tiny_model("qwen3", head_size=64)
    prompt = tuple(5 * place % 97 for place in range(600))
    kept = []
    for bits in (0, 8, 4):
        engine = build(target, prefix_bytes=1 << 30, chunk_tokens=512, quantisation=Quantisation(bits))
        driver = Driver(engine, random.Random(1), ("ngram",), chunk_tokens=512)
        driver.admit(Request(id="a", prompt_tokens=prompt, max_tokens=1, sampling=GREEDY))
        while driver.live:
            driver.step()
        kept.append(engine.prefix_cache_bytes)
    assert kept[1] < 0.30 * kept[0]
    assert kept[2] < 0.18 * kept[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restart_finds_quantised_prompts_on_disk_unless_the_bits_changed(tmp_path: Path, family: str) -> None:
    target, draft = models(family, False, 32)
    prompt = tuple(5 * place % 97 for place in range(270))

    def engine_of(bits: int) -> Engine:
        disk = Disk(tmp_path, 1 << 30)
        quantisation = Quantisation(bits)
        return build(target, draft=draft, prefix_bytes=1 << 30, chunk_tokens=512, disk=disk, quantisation=quantisation)

    first = engine_of(4)
    assert text_of(first, family, "a", prompt) == 0
    first.close()
    asked = Request(id="b", prompt_tokens=prompt, max_tokens=1, sampling=GREEDY)
    assert [engine_of(bits).admit(asked) for bits in (8, 0)] == [0, 0]
    again = engine_of(4)
    assert text_of(again, family, "a", prompt) == 269
    assert again.prefixes.restored_tokens["disk"] > 0


def test_models_whose_keys_cannot_be_quantised_say_why() -> None:
    refusals = {family: kv_refusal(tiny_config(family, head_size=32)) for family in (*FAMILIES, "mamba2", "falcon_h1")}
    assert refusals == {**dict.fromkeys((*FAMILIES, "falcon_h1"), ""), "mamba2": "no_positions"}
    assert kv_refusal(tiny_config("qwen3", head_size=80)) == "head_size"
    assert kv_refusal({**tiny_config("qwen3"), "layer_types": ["sliding_attention"] * 2}) == "no_positions"
    assert kv_refusal(LATENTS) == kv_refusal({"text_config": LATENTS}) == "latents"
    assert {"latents", "no_positions", "head_size"} == set(KV_REFUSALS)


@pytest.mark.parametrize(("size", "kept"), [(32, Quantisation(8, 20)), (16, UNQUANTISED)])
def test_a_loaded_model_is_quantised_where_it_can_be_and_whole_where_not(
    tmp_path: Path, size: int, kept: Quantisation
) -> None:
    write_tiny_model(tmp_path, "qwen3", head_size=size)
    spec = ModelSpecification(id="tiny", path=str(tmp_path), quantisation=Quantisation(8, 20))
    steps = load_unit(spec)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            engine = open_engine(stop.value)
            break
    assert engine.runner.quantisation == kept
    assert ("8-bit" in engine.cache_families) is bool(kept.bits)
    engine.admit(Request(id="short", prompt_tokens=tuple(range(19)), max_tokens=4))
    engine.admit(Request(id="long", prompt_tokens=tuple(range(20)), max_tokens=4))
    assert engine.runner.caches.table.bits == ({"long": 8} if kept.bits else {})
    engine.close()
    assert engine.runner.caches.table.bits == {}
