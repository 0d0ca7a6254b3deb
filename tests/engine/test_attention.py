"""Attention in query chunks, or composed, equals attention in one call; each kind of GPU gets its own form."""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3
from mlx_lm.models.base import scaled_dot_product_attention

from app.engine.caches.attention import (
    COMPOSED_QUERIES,
    Attend,
    attach,
    attend_for,
    attention,
    composed,
    composed_if_few,
    in_query_chunks,
    queries_per_chunk,
)
from app.engine.probe import open_runner
from tests.tiny import tiny_model

MAC = "applegpu_g16s"


@pytest.mark.parametrize(
    ("width", "group", "pieces"),
    [
        (1, 4, 1),
        (8, 4, 1),
        (9, 4, 2),
        (17, 1, 3),
        (4, 8, 1),
        (5, 8, 2),
        (16, 8, 4),
        (17, 8, 1),
        (512, 4, 1),
        (5, 64, 1),
    ],
)
def test_each_piece_fits_the_kernel_and_chunks_of_prompts_stay_whole(width: int, group: int, pieces: int) -> None:
    size = queries_per_chunk(width, group, 8192, 128)
    assert -(-width // size) == pieces
    assert pieces == 1 or (size <= 8 and size * group <= 32)


@pytest.mark.parametrize(("context", "dimension"), [(2047, 128), (8192, 80)])
def test_nothing_is_cut_in_short_contexts_or_for_other_heads(context: int, dimension: int) -> None:
    assert queries_per_chunk(9, 4, context, dimension) == 9


def ragged(width: int, context: int) -> mx.array:
    """Return the causal mask of two rows, the second seven tokens shorter."""
    first = mx.array([context - width, context - width - 7])[:, None, None, None]
    return first + mx.arange(width)[:, None] >= mx.arange(context)


def mask_of(kind: str, width: int, heads: int, context: int) -> Any:
    visible = ragged(width, context)
    places = mx.arange(context - width, context)[:, None]
    masks: dict[str, Any] = {
        "causal": "causal",
        "ragged": visible,
        "window": (places >= mx.arange(context)) & (places < mx.arange(context) + 100),
        "every key": ragged(1, context),
        "heads alone": mx.random.normal((heads, width, context)),
        "added": mx.where(visible, 0.0, -1e9),
        "by head": mx.where(visible, mx.random.normal((2, heads, width, context)), -1e9),
        "sinks": "causal",
        "none": None,
    }
    return masks[kind]


@pytest.mark.parametrize("kind", ["causal", "ragged", "window", "every key", "added", "sinks"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("width", [5, 9, 16, 17])
def test_pieces_are_equal_to_all_at_once(kind: str, group: int, width: int) -> None:
    context, size = 2100, 16
    mx.random.seed(width + group)
    queries = mx.random.normal((2, 2 * group, width, size))
    keys, values = mx.random.normal((2, 2, 2, context, size))
    sinks = mx.random.normal((2 * group,)) if kind == "sinks" else None
    asked: list[tuple[int, int, int, int]] = []

    def choose(*question: int) -> int:
        asked.append(question)  # type: ignore[arg-type]
        return min(8, 32 // group)

    arguments: dict[str, Any] = {"scale": size**-0.5, "mask": mask_of(kind, width, 2 * group, context), "sinks": sinks}
    whole = scaled_dot_product_attention(queries, keys, values, None, **arguments)
    cut = attention(
        queries, keys, values, SimpleNamespace(attend=partial(in_query_chunks, chunk_size=choose)), **arguments
    )
    assert float(mx.max(mx.abs(cut - whole))) < 1e-5
    assert asked == [(width, group, context, size)]


@pytest.mark.parametrize(
    "kind", ["causal", "ragged", "window", "every key", "heads alone", "added", "by head", "none", "sinks"]
)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("width", [2, 16, COMPOSED_QUERIES])
def test_few_queries_are_composed_to_what_mlx_computes(kind: str, group: int, width: int) -> None:
    context, size = 300, 16
    mx.random.seed(width + group)
    queries = mx.random.normal((2, 2 * group, width, size))
    keys, values = mx.random.normal((2, 2, 2, context, size))
    mask = mask_of(kind, width, 2 * group, context)
    sinks = mx.random.normal((2 * group,)) if kind == "sinks" else None
    whole = scaled_dot_product_attention(queries, keys, values, None, scale=0.25, mask=mask, sinks=sinks)
    assert float(mx.max(mx.abs(composed(queries, keys, values, 0.25, mask, sinks) - whole))) < 1e-5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_what_is_composed_keeps_its_precision(dtype: mx.Dtype) -> None:
    queries, keys, values = (mx.random.normal((1, heads, 5, 16)).astype(dtype) for heads in (4, 2, 2))
    assert composed(queries, keys, values, 0.25, "causal").dtype == dtype


@pytest.mark.parametrize("form", ["in pieces", "composed"])
def test_a_model_verifies_and_goes_on_alike_in_each_form(form: str) -> None:
    model = tiny_model("qwen3")
    asked: list[int] = []

    def four(width: int, *_: int) -> int:
        asked.append(width)
        return 4

    def few(queries: mx.array, *arguments: Any, **kept: Any) -> mx.array:
        asked.append(queries.shape[2])
        return composed_if_few(queries, *arguments, **kept)

    attend = {"in pieces": partial(in_query_chunks, chunk_size=four), "composed": few}[form]

    def verify(attend: Attend) -> mx.array:
        runner = open_runner(model)
        runner.caches.table.attend = attend
        rows = {"a": 40, "b": 33}
        outputs = []
        for name, length in rows.items():
            runner.claim(name)
            _, forward = runner.forward([name], mx.arange(length)[None], [length])
            runner.commit(forward, [length])
        for keep in ([3, 9], [9, 1]):
            logits, forward = runner.forward(list(rows), mx.arange(18).reshape(2, 9), [9, 9])
            runner.commit(forward, keep)
            outputs.append(logits)
        return mx.concatenate(outputs)

    assert float(mx.max(mx.abs(verify(attend) - verify(attend_for(""))))) < 1e-4
    assert set(asked) == {40, 33, 9}


def test_a_model_is_attached_once_and_each_device_has_its_form() -> None:
    for _ in range(2):
        attach(tiny_model("qwen3"))
        assert qwen3.scaled_dot_product_attention is attention
    assert sys.modules["mlx_lm.models.base"].scaled_dot_product_attention is not attention
    assert attend_for(MAC) is in_query_chunks
    assert attend_for("sm_90") is composed_if_few
    assert attend_for("") is scaled_dot_product_attention
