"""Scores of prompts equal those of one plain forward: in chunks, in batches, and whatever other requests run."""

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from app.core.request import Request, SamplingParameters
from app.core.step import PrefillRow, PrefillStep, TokenLogprobs
from app.engine.drafters.registry import Drafters
from app.engine.engine import Engine
from app.engine.prefix.cache import PrefixCache
from app.engine.runner import AloneRunner
from app.scheduler.scheduler import Scheduler
from tests.engine.driving import build, naive
from tests.engine.schedules import models
from tests.tiny import FAMILIES, tiny_model

GREEDY = SamplingParameters(temperature=0.0)
TOP = 3


def asked(name: str, prompt: Sequence[int], *, scored: bool = True, top: int | None = TOP, count: int = 6) -> Request:
    sampling = SamplingParameters(temperature=0.0, top_logprobs=top)
    return Request(id=name, prompt_tokens=tuple(prompt), max_tokens=count, sampling=sampling, scores_prompt=scored)


def run(engine: Engine, requests: Sequence[Request]) -> tuple[dict[str, list[TokenLogprobs]], dict[str, list[int]]]:
    """Run requests; return the prompt scores and tokens of each. A request's scores must precede its tokens."""
    scheduler = Scheduler(engine.limits, policy="auto")
    scores: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        scheduler.submit(request)
    while scheduler.has_work:
        while (head := scheduler.next_admission()) is not None:
            scheduler.admitted(head.id, engine.admit(head))
        plan = scheduler.plan()
        for event in scheduler.commit(engine.step(plan)) if plan else ():
            assert not (event.prompt_logprobs and tokens[event.request_id])
            scores[event.request_id] += event.prompt_logprobs
            tokens[event.request_id] += event.tokens
        for name, kept in scheduler.drain_released():
            engine.release(name, kept)
    return scores, tokens


def plain_scores(model: nn.Module, prompt: Sequence[int]) -> list[list[float]]:
    """Return the log softmax for each prompt token but the first, from one forward over the prompt."""
    logits: Any = model(mx.array([list(prompt)]))
    logits = logits[0].astype(mx.float32)
    logprobs: Any = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    return logprobs[:-1]  # type: ignore[no-any-return]


def check(model: nn.Module, prompt: Sequence[int], scores: Sequence[TokenLogprobs], top: int = TOP) -> None:
    expected = plain_scores(model, prompt)
    assert len(scores) == len(expected) == len(prompt) - 1
    for token, score, row in zip(prompt[1:], scores, expected, strict=True):
        assert score.logprob == pytest.approx(row[token], abs=1e-3)
        best = sorted(row, reverse=True)[:top]
        assert [value for _, value in score.top] == pytest.approx(best, abs=1e-3)
        assert [row[other] for other, _ in score.top] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scores_of_a_prompt_are_those_of_a_plain_forward(family: str) -> None:
    target, draft = models(family, False)
    chance = random.Random(7)
    prompts = {f"p{size}": [chance.randrange(97) for _ in range(size)] for size in (1, 2, 5, 17, 18, 40, 75)}
    engine = build(target, draft=draft, prefix_bytes=1 << 30)
    scores, tokens = run(engine, [asked(name, prompt) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        check(target, prompt, scores[name])
        assert tokens[name] == naive(target, prompt, 6, GREEDY), "and speculation stays exact after it"


@pytest.mark.parametrize("family", ["qwen3", "mamba2"])
def test_a_cached_prefix_and_rows_beside_it_change_no_score(family: str) -> None:
    target, _ = models(family, False)
    engine = build(target, prefix_bytes=1 << 30)
    prompt = [5 * place % 97 for place in range(50)]
    others = [asked(f"other {size}", [9] * size, scored=False, top=None) for size in (30, 12)]
    run(engine, [asked("before", prompt, scored=False)])
    scores, tokens = run(engine, [*others, asked("alone", prompt, top=0), asked("beside", prompt)])
    check(target, prompt, scores["beside"])
    check(target, prompt, [*scores["alone"]], top=0)
    assert tokens["beside"] == tokens["alone"] == naive(target, prompt, 6, GREEDY)
    assert scores["other 30"] == scores["other 12"] == []


def test_a_model_that_decodes_alone_scores_prompts_too() -> None:
    target, _ = models("qwen3", False)
    limits = build(target).limits
    engine = Engine(AloneRunner(target), Drafters({}), limits, PrefixCache(0))
    prompt = [3 * place % 97 for place in range(30)]
    scores, _ = run(engine, [asked("a", prompt)])
    check(target, prompt, scores["a"])


def test_who_asks_for_no_scores_pays_for_no_logits() -> None:
    target = tiny_model("qwen3", vocabulary_size=50_000)
    prompt = [place % 90 for place in range(257)]

    def peak_bytes(*, scored: bool) -> int:
        engine = build(target, chunk_tokens=256)
        engine.admit(asked("a", prompt, scored=scored))
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine.step(PrefillStep((PrefillRow("a", prompt, 0, 256),)))
        return int(mx.get_peak_memory() - before)

    assert peak_bytes(scored=False) < 256 * 50_000 * 4 / 4 < peak_bytes(scored=True)
