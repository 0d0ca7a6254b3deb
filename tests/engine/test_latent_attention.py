"""A verify forward over latents equals mlx-lm's over all keys and values, and makes neither keys nor values."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx import nn
from mlx_lm.models import deepseek_v3
from mlx_lm.models.base import scaled_dot_product_attention

from app.engine.caches import attention
from app.engine.caches.attention import LATENT_QUERIES, absorbed, attend_for, in_query_chunks
from app.engine.probe import open_runner
from app.engine.runner import Runner
from tests.engine.tiny_families import configuration, families, family_model
from tests.shares import one_in
from tests.tiny import fill_at_random

SOURCES = Path(mlx_lm.models.__path__[0])
OWN = [name for name in families() if "self.unembed_out(" in (SOURCES / f"{name}.py").read_text(encoding="utf-8")]
"""Modules of mlx-lm that define latent attention; those in `BORROWED` import it from one of these."""
BORROWED = ["glm_moe_dsa", "kimi_k25", "kimi_vl", "longcat_flash_ngram"]
ROWS = {"long": 41, "short": 33}


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the widths of attention calls over latents, which make no keys and values."""
    seen: list[int] = []

    def watched(reader: Any, queries: mx.array, *arguments: Any, **keywords: Any) -> mx.array:
        seen.append(queries.shape[2])
        return absorbed(reader, queries, *arguments, **keywords)

    monkeypatch.setattr(attention, "absorbed", watched)
    return seen


def verify(model: nn.Module, *, shared_tokens: int = 1024) -> mx.array:
    """Return the logits of three forwards over two rows with prompts of uneven lengths: of five tokens, of three after
    the kept ones, and of one."""
    runner = open_runner(model, shared_tokens=shared_tokens)
    outputs = []
    for name, length in ROWS.items():
        runner.claim(name, reserve_tokens=length)
        _, forward = runner.forward([name], mx.arange(1, length + 1)[None], [length])
        runner.commit(forward, [length])
    for width, keep in ((5, {"long": 5, "short": 2}), (3, {"long": 1, "short": 3}), (1, dict.fromkeys(ROWS, 1))):
        names = runner.ordered([*ROWS])
        tokens = mx.array([[7 + place + len(name) for place in range(width)] for name in names])
        logits, forward = runner.forward(names, tokens, [width] * 2, record=True)
        runner.commit(forward, [keep[name] for name in names])
        outputs += [logits[names.index(name)] for name in ROWS]
    return mx.concatenate(outputs)


def distance(actual: mx.array, wanted: mx.array) -> float:
    return float(mx.max(mx.abs(actual - wanted)) / mx.max(mx.abs(wanted)))


@pytest.mark.parametrize(("family", "shared_tokens"), one_in(2, [*OWN, *BORROWED], [1024, 40]))
def test_a_verify_says_what_it_says_with_all_keys_and_values(
    family: str, shared_tokens: int, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model(family)
    actual = verify(model, shared_tokens=shared_tokens)
    assert {5, 3} <= set(widths)
    widths.clear()
    monkeypatch.setattr(attention, "LATENT_QUERIES", 0)
    assert distance(actual, verify(model, shared_tokens=shared_tokens)) <= 1e-4
    assert widths == []


def latent_model(**sizes: int) -> nn.Module:
    wanted = {"num_attention_heads": 4, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 32, **sizes}
    model = deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(configuration("deepseek_v3") | wanted))
    fill_at_random(model, seed=0)
    return model


def test_packed_weights_are_read_alike(widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = latent_model(num_hidden_layers=2)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: path.endswith(("embed_q", "unembed_out")))
    actual = verify(model)
    assert widths
    monkeypatch.setattr(attention, "LATENT_QUERIES", 0)
    assert distance(actual, verify(model)) <= 1e-4


def test_a_verify_takes_less_memory_than_the_keys_of_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, context, dimension = 16, 4096, 32
    runner = open_runner(latent_model(num_attention_heads=heads, num_hidden_layers=1))
    runner.claim("a", reserve_tokens=2 * context)
    _, forward = runner.forward(["a"], mx.ones((1, context), dtype=mx.int32), [context])
    runner.commit(forward, [context])
    mx.eval(runner.arrays())

    def taken_bytes() -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(runner.forward(["a"], mx.ones((1, 4), dtype=mx.int32), [4])[0])
        return int(mx.get_peak_memory() - before)

    keys_bytes = heads * context * dimension * 4
    assert taken_bytes() < keys_bytes / 2
    monkeypatch.setattr(attention, "LATENT_QUERIES", 0)
    assert taken_bytes() > 2 * keys_bytes


def test_chunks_of_a_prompt_make_keys_and_values(widths: list[int]) -> None:
    runner = Runner(latent_model(num_hidden_layers=1))
    runner.claim("a")
    for width in (LATENT_QUERIES, LATENT_QUERIES + 1):
        runner.forward(["a"], mx.ones((1, width), dtype=mx.int32), [width])
    assert widths == [LATENT_QUERIES]


def test_all_heads_read_latents_at_once_where_no_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def whole(queries: mx.array, *arguments: Any, **keywords: Any) -> mx.array:
        asked.append(tuple(queries.shape))
        output: mx.array = scaled_dot_product_attention(queries, *arguments, **keywords)
        return output

    monkeypatch.setattr(attention, "_whole", whole)
    queries, latents = mx.random.normal((2, 4, 1, 16)), mx.random.normal((2, 1, 30, 16))
    mask = mx.random.normal((2, 4, 1, 30))
    outputs = [
        attention.attention(
            queries, latents, latents, SimpleNamespace(attend=attend, latent_reader=object()), scale=0.25, mask=mask
        )
        for attend in (attend_for(""), in_query_chunks)
    ]
    assert asked == [(2, 1, 4, 16), (2, 4, 1, 16)]
    assert distance(*outputs) < 1e-5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("family", ["deepseek_v3", "mistral4"])
def test_half_precision_stays_half(family: str, dtype: mx.Dtype, widths: list[int]) -> None:
    module = import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(configuration(family) | {"num_hidden_layers": 1}))
    fill_at_random(model, seed=0)
    model.set_dtype(dtype)
    assert verify(model).dtype == dtype
    assert widths
