"""Short rows share one rectangle of buffers, each long row has its own: their memory, and when rows are copied."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from app.core.request import Request
from app.engine.caches.lanes import Lane, SlotTable, reservation
from app.engine.probe import open_runner
from app.engine.runner import Runner
from tests.engine.driving import build
from tests.engine.schedules import run_schedule
from tests.shares import LANDING
from tests.tiny import tiny_model

SHORT = {"a": 100, "b": 150, "c": 200, "d": 250}
LONG_TOKENS = 8_192
ANSWER_TOKENS = 1 << 20
"""Answer length, in tokens, of a request without a limit: more than any row has room for."""


def feed(runner: Runner, fed: dict[str, int], tokens: int = 1) -> None:
    """Run and commit one forward that feeds each row its number of tokens, all with the id `tokens`."""
    names = runner.ordered(list(fed))
    width = max(fed.values())
    _, forward = runner.forward(names, mx.full((len(names), width), tokens, mx.int32), [fed[name] for name in names])
    runner.commit(forward, [fed[name] for name in names])


def read(runner: Runner, name: str, tokens: int, *, known: bool = True) -> None:
    """Claim a row and prefill a prompt of `tokens` tokens in chunks of 512."""
    runner.claim(name, reservation(tokens, ANSWER_TOKENS) if known else 0)
    while (left := tokens - runner.length(name)) > 0:
        runner.separate_long_rows()
        feed(runner, {name: min(512, left)})
        mx.eval(runner.arrays())


@pytest.mark.parametrize(
    ("family", "known", "most"),
    [
        ("qwen3", False, 1.2),
        pytest.param("qwen3", True, 1.2, marks=LANDING),
        pytest.param("qwen3_next", True, 1.2, marks=LANDING),
        pytest.param("gemma3", True, 1.25, marks=LANDING),
    ],
)
def test_a_long_row_and_four_short_ones_take_little_more_than_their_tokens(
    family: str, known: bool, most: float
) -> None:
    """Without a known length, buffers grow by eighths. Windows count with the whole buffer of a row that runs alone."""
    runner = open_runner(tiny_model(family))
    alone: dict[str, int] = {}
    for name, tokens in {"long": LONG_TOKENS, **SHORT}.items():
        lone = open_runner(runner.model)
        read(lone, name, tokens)
        alone[name] = sum(
            array.nbytes * (tokens if cache.lane.window is None else array.shape[2]) // array.shape[2]
            for cache in lone.caches.kv
            for array in cache.arrays()
        )
        read(runner, name, tokens, known=known)
    feed(runner, dict.fromkeys(alone, 1))
    kept = sum(cache.nbytes for cache in runner.caches.kv)
    assert kept <= most * sum(alone.values())


def test_joining_and_leaving_leave_the_long_row_where_it_is() -> None:
    runner = open_runner(tiny_model("qwen3"))
    read(runner, "long", 2_000)
    read(runner, "a", 40)
    held = [cache.row_buffers["long"].parts[0] for cache in runner.caches.kv]
    read(runner, "b", 60)
    runner.release("a")
    read(runner, "second long one", 1_500)
    runner.release("b")
    assert all(
        cache.row_buffers["long"].parts[0] is before for cache, before in zip(runner.caches.kv, held, strict=True)
    )
    runner.release("long")
    runner.release("second long one")
    assert runner.caches.nbytes == 0


def naive(model: nn.Module, tokens: list[int]) -> mx.array:
    cache: Any = make_prompt_cache(model)
    return model(mx.array([tokens]), cache=cache)[0]


@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next"])
def test_rows_that_become_long_leave_the_rectangle_and_say_what_they_would_alone(family: str, in_pieces: bool) -> None:
    """Forwards mix short and long rows, and leave some out; attention runs per buffer, or over padded buffers."""
    model = tiny_model(family)
    runner = open_runner(model, shared_tokens=12)
    assert runner.caches.table.attends_per_buffer, "qwen3's attention is called by its name"
    runner.caches.table.attends_per_buffer = in_pieces
    texts = {
        name: [(7 * place + size) % 97 for place in range(size)]
        for name, size in zip("abcde", (3, 9, 30, 5, 14), strict=True)
    }
    for name in texts:
        runner.claim(name)
    outputs: dict[str, list[mx.array]] = {name: [] for name in texts}
    for step in range(10):
        runner.separate_long_rows()
        going = [
            name for place, name in enumerate(texts) if (step + place) % 3 and runner.length(name) < len(texts[name])
        ]
        names = runner.ordered(going)
        if not names:
            continue
        fed = [texts[name][runner.length(name) : runner.length(name) + 4] for name in names]
        width = max(map(len, fed))
        tokens = mx.array([[*piece, *[0] * (width - len(piece))] for piece in fed])
        logits, forward = runner.forward(names, tokens, list(map(len, fed)))
        runner.commit(forward, list(map(len, fed)))
        for row, (name, part) in enumerate(zip(names, fed, strict=True)):
            outputs[name].append(logits[row, : len(part)])
    assert runner.caches.table.shared < len(texts), "some have buffers of their own"
    for name, parts in outputs.items():
        if parts:
            got = mx.concatenate(parts)
            wanted = naive(model, texts[name])[: len(got)]
            assert mx.max(mx.abs(got - wanted)) < 1e-4, name


def test_the_answer_of_a_known_prompt_finds_its_room_there() -> None:
    engine = build(tiny_model("qwen3"), chunk_tokens=512)
    engine.admit(Request(id="r", prompt_tokens=tuple(range(50)) * 40, max_tokens=200))
    assert engine.runner.caches.table.reserved["r"] == 2_062
    read(engine.runner, "other", 10)
    feed(engine.runner, {"r": 500})
    before = engine.runner.caches.kv[0].row_buffers["r"].parts[0].shape
    for _ in range(3):
        feed(engine.runner, {"r": 500})
    assert engine.runner.caches.kv[0].row_buffers["r"].parts[0].shape == before == (1, 1, 2_304, 16)


def test_a_row_that_sits_out_a_step_is_not_moved_within_its_window() -> None:
    table = SlotTable(shared_tokens=8)
    lane = Lane(table, window=8, margin_tokens=4, chunk_tokens=8)
    for name, length in (("first", 2), ("resting", 14), ("last", 2)):
        table.claim(name, reserve_tokens=9)
        table.set_length(name, length)
    table.select(["first", "last"], width=8)
    assert [place.name for place in lane.begin()] == ["first", "last"]
    table.select(["first", "resting"], width=8)
    (resting,) = [place for place in lane.begin() if place.name == "resting"]
    assert (resting.starts, resting.moves) == ((12,), ((0, 2, 14),))


def test_a_long_row_beside_a_prompt_that_is_read_says_what_it_would_alone() -> None:
    run_schedule("gemma3", 10322637, methods=("ngram",), script="perfect", longest=10)
