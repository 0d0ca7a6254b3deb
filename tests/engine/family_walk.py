"""One family of mlx-lm through the engine, each of its tokens and logits against mlx-lm's own caches and one row.

Three prompts of uneven lengths are read in ragged chunks, decoded together with drafts of which some are right, leave
one after the other, and one of them goes on from the prefix cache.
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
"""The longest of them has buffers of its own, the others share a rectangle."""
AGAIN = "again"
"""The request that goes on from what "long" said."""
OUTPUT_TOKENS = 10
HIGHEST_TOKEN = 97


@dataclass
class Truth:
    """What one row says with mlx-lm's own caches: its tokens, and the logits behind each of them but the last."""

    tokens: list[int]
    prompt_tokens: int
    logits: mx.array

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


@dataclass
class Walk:
    """What was seen: the engine, the largest distance of logits relative to the largest one, and how many were
    compared; which answers had other tokens; cached tokens of the prompt that was known, accepted drafts."""

    engine: Engine
    distance: float = 0.0
    compared: int = 0
    rows: int = 0
    wrong: list[str] = field(default_factory=list)
    cached: int = 0
    accepted: int = 0


def tell(model: nn.Module, prompt: Sequence[int]) -> Truth:
    """The greedy continuation of `prompt`, token by token."""
    caches: Any = make_prompt_cache(model)
    tokens, fed, logits = list(prompt), mx.array([list(prompt)]), []
    for _ in range(OUTPUT_TOKENS):
        logits.append(model(fed, cache=caches)[0].astype(mx.float32))
        tokens.append(int(mx.argmax(logits[-1][-1]).item()))
        fed = mx.array([[tokens[-1]]])
    return Truth(tokens, len(prompt), mx.concatenate(logits))


def walk(model: nn.Module, *, seed: int = 0) -> Walk:
    """Run it all; the first `HIGHEST_TOKEN` tokens have to be in the vocabulary."""
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
    """As `open_engine` makes it, with a drafter that knows what comes."""
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
    """Compare the logits of every forward from now on, wherever the tokens before them are the true ones."""
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
