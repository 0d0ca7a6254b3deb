"""mlx-lm as published: its batch generator, its speculative loop, and the cost of its bare forwards."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.utils import load

from app.engine.memory import on_cpu
from app.serving.sweep.worker_side import DecodeClock
from bench.comparison.measure import Sample


def load_reference(folder: Path) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer with mlx-lm; on a CPU in float32 as ours, since half precision is slow there."""
    model, tokenizer, *_ = load(str(folder))
    if on_cpu():
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


def generate_in_batch(model: nn.Module, prompts: Sequence[Sequence[int]], tokens: int) -> Sample:
    """Decode all prompts with `BatchGenerator`; return tokens per second of the decode phase."""
    generator = BatchGenerator(model, max_tokens=tokens, completion_batch_size=max(8, len(prompts)))
    clock = DecodeClock(generator.insert([list(prompt) for prompt in prompts]))
    running = len(prompts)
    while running:
        for answer in generator.next_generated():
            clock.count(answer.uid, 1)
            running -= answer.finish_reason is not None
    generator.close()
    return Sample(clock.tokens_per_second)


def generate_with_draft(
    model: nn.Module, tokenizer: Any, draft: nn.Module | None, prompt: Sequence[int], tokens: int, drafts: int
) -> Sample:
    """Run `stream_generate` with or without a draft; return tokens per second from the prompt to the last token."""
    started = perf_counter()
    token_count = from_draft = 0
    answers = stream_generate(
        model, tokenizer, list(prompt), max_tokens=tokens, draft_model=draft, num_draft_tokens=drafts
    )
    for answer in answers:
        token_count = answer.generation_tokens
        from_draft += answer.from_draft
    rate = token_count / (perf_counter() - started)
    return Sample(rate, {"share from draft": from_draft / token_count}) if draft is not None else Sample(rate)


def raw_cycle(target: nn.Module, draft: nn.Module, prompt: Sequence[int], drafts: int, repeats: int) -> Sample:
    """Return the milliseconds of `drafts` bare draft forwards and one bare verify forward, the floor of a cycle."""
    target_cache, draft_cache = (_filled_cache(model, prompt) for model in (target, draft))
    draft_milliseconds, verify_milliseconds = [], []
    for _ in range(repeats):
        draft_milliseconds.append(_milliseconds(draft, draft_cache, 1, drafts))
        verify_milliseconds.append(_milliseconds(target, target_cache, drafts + 1, 1))
    drafting, verifying = median(draft_milliseconds), median(verify_milliseconds)
    return Sample(drafting + verifying, {"draft ms": drafting, "verify ms": verifying})


def forward_milliseconds(model: nn.Module, prompt: Sequence[int], width: int, repeats: int) -> float:
    """Return the median time of one bare forward over `width` tokens, in milliseconds."""
    cache = _filled_cache(model, prompt)
    return median(_milliseconds(model, cache, width, 1) for _ in range(repeats))


def _filled_cache(model: nn.Module, prompt: Sequence[int]) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.array([list(prompt)]), cache=cache))
    return cache


def _milliseconds(model: nn.Module, cache: list[Any], width: int, forwards: int) -> float:
    """Time a chain of greedy forwards with one synchronisation, then restore the cache."""
    saved = [list(entry.cache) if isinstance(entry, ArraysCache) else None for entry in cache]
    tokens = mx.full((1, width), 33, dtype=mx.uint32)
    mx.eval(tokens)
    started = perf_counter()
    for _ in range(forwards):
        tokens = mx.argmax(model(tokens, cache=cache), axis=-1)
    mx.eval(tokens)
    elapsed = perf_counter() - started
    for entry, arrays in zip(cache, saved, strict=True):
        if arrays is None:
            entry.trim(width * forwards)
        else:
            entry.cache = arrays
    return elapsed * 1000
