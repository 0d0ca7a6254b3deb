"""Verifying in pieces says what verifying at once says; only Metal's vector kernel asks for it."""

import sys
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3
from mlx_lm.models.base import scaled_dot_product_attention

from app.engine.attention import Cut, attach, attention, cut_for, piece_queries
from app.engine.runner import Runner
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
    size = piece_queries(width, group, 8192, 128)
    assert -(-width // size) == pieces
    assert pieces == 1 or (size <= 8 and size * group <= 32)


@pytest.mark.parametrize(("context", "dimension"), [(2047, 128), (8192, 80)])
def test_nothing_is_cut_in_short_contexts_or_for_other_heads(context: int, dimension: int) -> None:
    assert piece_queries(9, 4, context, dimension) == 9


def ragged(width: int, context: int) -> mx.array:
    """The mask of two rows of which the second one is seven tokens shorter."""
    first = mx.array([context - width, context - width - 7])[:, None, None, None]
    return first + mx.arange(width)[:, None] >= mx.arange(context)


@pytest.mark.parametrize("kind", ["causal", "ragged", "window", "every key", "added", "sinks"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("width", [5, 9, 16, 17])
def test_pieces_are_equal_to_all_at_once(kind: str, group: int, width: int) -> None:
    context, size = 2100, 16
    mx.random.seed(width + group)
    queries = mx.random.normal((2, 2 * group, width, size))
    keys, values = mx.random.normal((2, 2, 2, context, size))
    visible = ragged(width, context)
    places = mx.arange(context - width, context)[:, None]
    masks: dict[str, Any] = {
        "causal": "causal",
        "ragged": visible,
        "window": (places >= mx.arange(context)) & (places < mx.arange(context) + 100),
        "every key": ragged(1, context),
        "added": mx.where(visible, 0.0, -1e9),
        "sinks": "causal",
    }
    sinks = mx.random.normal((2 * group,)) if kind == "sinks" else None
    asked: list[tuple[int, int, int, int]] = []

    def choose(*question: int) -> int:
        asked.append(question)  # type: ignore[arg-type]
        return min(8, 32 // group)

    arguments: dict[str, Any] = {"scale": size**-0.5, "mask": masks[kind], "sinks": sinks}
    whole = scaled_dot_product_attention(queries, keys, values, None, **arguments)
    cut = attention(queries, keys, values, SimpleNamespace(cut=choose), **arguments)
    assert float(mx.max(mx.abs(cut - whole))) < 1e-5
    assert asked == [(width, group, context, size)]


def test_a_model_verifies_and_goes_on_alike_in_pieces() -> None:
    model = tiny_model("qwen3")
    asked: list[int] = []

    def four(width: int, *_: int) -> int:
        asked.append(width)
        return 4

    def verify(cut: Cut | None) -> mx.array:
        runner = Runner(model)
        runner.caches.table.cut = cut
        rows = {"a": 40, "b": 33}
        told = []
        for name, length in rows.items():
            runner.claim(name)
            _, forward = runner.forward([name], mx.arange(length)[None], [length])
            runner.commit(forward, [length])
        for keep in ([3, 9], [9, 1]):
            logits, forward = runner.forward(list(rows), mx.arange(18).reshape(2, 9), [9, 9])
            runner.commit(forward, keep)
            told.append(logits)
        return mx.concatenate(told)

    assert float(mx.max(mx.abs(verify(four) - verify(None)))) < 1e-4
    assert set(asked) == {40, 33, 9}


def test_a_model_is_attached_once_and_cut_on_a_mac_only() -> None:
    for _ in range(2):
        attach(tiny_model("qwen3"))
        assert qwen3.scaled_dot_product_attention is attention
    assert sys.modules["mlx_lm.models.base"].scaled_dot_product_attention is not attention
    assert cut_for(MAC) is piece_queries
    assert cut_for("") is cut_for("sm_90") is None
