"""Spans of a row are read by position and written to another row, which then continues as the first row would."""

import mlx.core as mx
import pytest

from app.engine.probe import open_runner
from app.engine.runner import Runner
from tests.tiny import tiny_model

BLOCK = 16


def feed(runner: Runner, name: str, tokens: list[int]) -> mx.array:
    logits, forward = runner.forward([name], mx.array([tokens]), [len(tokens)])
    runner.commit(forward, [len(tokens)])
    mx.eval(logits, runner.caches.arrays())
    return logits


def kept(runner: Runner, name: str, start: int, stop: int) -> list[tuple[mx.array, ...]]:
    spans = [tuple(map(mx.contiguous, span)) for span in runner.caches.read_span(name, start, stop)]
    mx.eval(spans)
    return spans


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("cut", [48, 41])
def test_blocks_put_back_one_by_one_are_as_good_as_reading_them_again(family: str, cut: int) -> None:
    runner = open_runner(tiny_model(family), margin_tokens=8, chunk_tokens=BLOCK)
    text = [(7 * place) % 97 for place in range(64)]
    runner.claim("first")
    blocks = []
    for start in range(0, 64, BLOCK):
        feed(runner, "first", text[start : start + BLOCK])
        blocks.append(kept(runner, "first", start, start + BLOCK))
    runner.claim("second")
    for start in range(0, cut, BLOCK):
        stop = min(cut, start + BLOCK)
        runner.caches.write_span(
            "second", start, [tuple(part[:, :, : stop - start] for part in span) for span in blocks[start // BLOCK]]
        )
    assert runner.length("second") == cut
    runner.rewind("first", cut)
    fresh = [5, 6, 7]
    assert mx.allclose(feed(runner, "second", fresh), feed(runner, "first", fresh), atol=1e-5)


def test_what_a_window_has_left_behind_is_neither_read_nor_needed() -> None:
    runner = open_runner(tiny_model("gemma3"), margin_tokens=8, chunk_tokens=4)
    text = [(5 * place) % 97 for place in range(80)]
    runner.claim("first")
    for start in range(0, 80, 4):
        feed(runner, "first", text[start : start + 4])
    early, late = kept(runner, "first", 0, 48), kept(runner, "first", 48, 80)
    sizes = [span[0].shape[2] for span in early]
    assert max(sizes) == 48
    assert min(sizes) == 0
    held = [span[0].shape[2] for span in late]
    assert 8 <= min(held) < 32 == max(held)
    runner.claim("second")
    runner.caches.write_span("second", 0, early)
    runner.caches.write_span("second", 48, late)
    assert mx.allclose(feed(runner, "second", [1, 2]), feed(runner, "first", [1, 2]), atol=1e-5)
    assert [span[0].shape[2] for span in kept(runner, "second", 0, 82)] == [
        span[0].shape[2] for span in kept(runner, "first", 0, 82)
    ]


def test_a_row_without_layers_that_keep_tokens_is_told_where_it_ends() -> None:
    runner = open_runner(tiny_model("mamba2"))
    runner.claim("a")
    assert runner.caches.read_span("a", 0, 8) == ()
    runner.caches.write_span("a", 0, (), stop=8)
    assert runner.length("a") == 8
