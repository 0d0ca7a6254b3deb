"""Runs one family of mlx-lm through the engine; compares tokens and logits with single rows over mlx-lm's own caches.

Three prompts of uneven lengths are prefilled in ragged chunks and decoded together. Some of their drafts are right, and
the rows end one after the other. Then a new request continues one of these texts from the prefix cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from app.core.request import Request, SamplingParameters
from app.core.step import EngineLimits
from app.engine.caches.rollback import UnknownCacheError
from app.engine.drafters.registry import Drafters
from app.engine.engine import Engine
from app.engine.prefix.cache import PrefixCache
from app.engine.runner import AloneRunner, Runner
from tests.engine.driving import Driver, Scripted, build

GREEDY = SamplingParameters(temperature=0.0)
PROMPTS = {"long": 23, "short": 5, "middle": 12}
SHARED_TOKENS = 24
"""Longest row, in tokens, that shares a rectangle: "long" outgrows it, the other two prompts do not."""
AGAIN = "again"
"""Id of the request that continues the text of "long"."""
OUTPUT_TOKENS = 10
HIGHEST_TOKEN = 97


@dataclass
class Truth:
    """Result of one row over mlx-lm's own caches: all its tokens, and the logits after each token but the last."""

    tokens: list[int]
    prompt_tokens: int
    logits: mx.array

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


@dataclass
class Walk:
    """Findings of a walk: the engine, the largest error relative to the largest logit, positions compared, most rows of
    a forward, requests with wrong tokens, cached tokens of the continued text, and accepted drafts."""

    engine: Engine
    distance: float = 0.0
    compared: int = 0
    rows: int = 0
    wrong: list[str] = field(default_factory=list)
    cached: int = 0
    accepted: int = 0


def tell(model: nn.Module, prompt: Sequence[int]) -> Truth:
    """Return the greedy continuation of `prompt`, token by token."""
    caches: Any = make_prompt_cache(model)
    tokens, fed, logits = list(prompt), mx.array([list(prompt)]), []
    for _ in range(OUTPUT_TOKENS):
        logits.append(model(fed, cache=caches)[0].astype(mx.float32))
        tokens.append(int(mx.argmax(logits[-1][-1]).item()))
        fed = mx.array([[tokens[-1]]])
    return Truth(tokens, len(prompt), mx.concatenate(logits))


def walk(model: nn.Module, *, seed: int = 0) -> Walk:
    """Walk a model through all requests; its vocabulary must have at least `HIGHEST_TOKEN` tokens."""
    chance = random.Random(seed)
    prompts = {name: [chance.randrange(1, HIGHEST_TOKEN) for _ in range(size)] for name, size in PROMPTS.items()}
    truths = {name: tell(model, prompt) for name, prompt in prompts.items()}
    prompts[AGAIN] = [*truths["long"].tokens[:-1], 5, 6, 7]
    truths[AGAIN] = tell(model, prompts[AGAIN])
    seen = Walk(_engine(model, truths))
    _watch(seen, truths)
    methods = tuple(seen.engine.limits.drafters) or ("off",)
    driver = Driver(seen.engine, chance, methods, longest_draft=5 if methods != ("off",) else 0, chunk_tokens=9)
    rows = seen.engine.limits.max_rows
    for names in ([*PROMPTS], [AGAIN]):
        waiting = list(names)
        while waiting or driver.live:
            while waiting and len(driver.live) < rows:
                name = waiting.pop(0)
                prompt = tuple(prompts[name])
                driver.admit(Request(id=name, prompt_tokens=prompt, max_tokens=OUTPUT_TOKENS, sampling=GREEDY))
                if name == AGAIN:
                    seen.cached = driver.live[name].computed
            driver.step()
    seen.wrong = [name for name, truth in truths.items() if driver.finished[name].output != truth.output]
    seen.accepted = sum(sequence.accepted for sequence in driver.finished.values())
    return seen


def _engine(model: nn.Module, truths: dict[str, Truth]) -> Engine:
    """Return an engine as `open_engine` makes it, with a drafter that knows the right continuations."""
    outputs = {name: truth.output for name, truth in truths.items()}
    scripted = Scripted(outputs, HIGHEST_TOKEN, lambda cycle: (cycle * 7) % 5)
    try:
        engine = build(
            model, scripted=scripted, prefix_bytes=1 << 30, max_rows=len(PROMPTS), shared_tokens=SHARED_TOKENS
        )
    except UnknownCacheError:
        limits = EngineLimits(max_context_tokens=4096, max_rows=1, prefill_chunk_tokens=9, drafters=())
        return Engine(AloneRunner(model), Drafters({}), limits, PrefixCache(0))
    return engine


def _watch(seen: Walk, truths: dict[str, Truth]) -> None:
    """Compare the logits of every later forward, up to the first fed token that is not the true one."""
    runner: Runner = seen.engine.runner
    forward, inside = runner.forward, [False]

    def watched(sequence_ids: Sequence[str], tokens: mx.array, widths: Sequence[int], **wishes: Any) -> Any:
        outermost, inside[0] = not inside[0], True
        try:
            logits, done = forward(sequence_ids, tokens, widths, **wishes)
        finally:
            inside[0] = not outermost
        if outermost:
            seen.rows = max(seen.rows, len(sequence_ids))
            for row, (name, width, start) in enumerate(zip(sequence_ids, widths, done.starts, strict=True)):
                _compare(seen, truths[name], logits[row], tokens[row, :width], start)
        return logits, done

    runner.forward = watched  # type: ignore[method-assign]


def _compare(seen: Walk, truth: Truth, logits: mx.array, fed: mx.array, start: int) -> None:
    tokens: Any = fed.tolist()
    wanted = truth.tokens[start : start + len(tokens)]
    right = next((place for place in range(len(wanted)) if tokens[place] != wanted[place]), len(wanted))
    right = min(right, len(truth.logits) - start)
    if right > 0:
        expected, got = truth.logits[start : start + right], logits[:right].astype(mx.float32)
        scale = mx.maximum(mx.max(mx.where(mx.isfinite(expected), mx.abs(expected), 0.0)), 1.0)
        error = mx.max(mx.where(got == expected, 0.0, mx.abs(got - expected))) / scale
        seen.distance = max(seen.distance, float(error))
        seen.compared += right
