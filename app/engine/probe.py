"""Probes a model: compares a runner's forwards over slot caches with mlx-lm's own."""

import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeVar, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from app.engine.caches.rollback import MARGIN_TOKENS
from app.engine.loaded_unit import Findings
from app.engine.runner import Runner, padded
from app.models.footprint import SHARED_TOKENS

PROBE = (((1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (5, 6, 8, 9, 10)), ((21, 22, 23, 24, 25, 26), (0, 4, 5, 6, 6)))
"""Tokens of each probe row, and how many of them have been fed after each forward: one row runs alone, the other joins
with more tokens, both continue, and the first runs alone again."""
PROBE_REJECTS: tuple[tuple[int, ...], ...] = ((), (9,), (), (), ())
"""Draft tokens that are also fed to the first row in each of these forwards, and then rejected."""

SLOW_FORWARDS_SECONDS = 1.0
"""Processor time of mlx-lm's own forwards, in seconds, above which rows in separate buffers are not probed: padding
hardly matters on so slow a machine, and the model loads in half the time."""

LARGEST_ERROR, LARGEST_HALF_ERROR = 0.01, 0.15
"""Tolerated relative error of logits in float32 and in half precision: rounding changes with the number of rows
and tokens, and deep models and routers amplify it. Families that do not work are off by 0.27 to 1.2."""
INTERFERING_IN_LONG_CONTEXTS = frozenset({"mlx_lm.models.minimax_m3_vl"})
"""Model modules whose rows disturb one another only in contexts longer than the probe's: this one selects blocks of
keys by their distance from the end of the longest row."""

SPLIT_DEPENDENT = {"mlx_lm.models.phi3small": "in mlx-lm its tokens attend to later tokens of the same forward"}
"""Modules whose answers depend on how tokens are split into forwards, and why."""

Result = TypeVar("Result")


def open_runner(
    model: nn.Module,
    *,
    margin_tokens: int = MARGIN_TOKENS,
    chunk_tokens: int = 512,
    shared_tokens: int = SHARED_TOKENS,
    findings: Findings | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Runner:
    """Open a runner for a model, and probe it first unless `findings` about it are known. Raises UnknownCacheError."""
    opened = partial(Runner, model, margin_tokens=margin_tokens, chunk_tokens=chunk_tokens, shared_tokens=shared_tokens)
    if findings is None:
        findings = finished(probe(opened()), on_progress)
    return opened(findings=findings, on_progress=on_progress)


def finished(steps: Generator[Any, None, Result], after_each: Callable[[], None] = lambda: None) -> Result:
    """Run `steps` to the end, calling `after_each` after each one, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("Result", end.value)
        after_each()


def probe(runner: Runner) -> Generator[None, None, Findings]:
    """Compare two rows of uneven widths, one of them with a rejected draft, with mlx-lm's own forward of each row.
    Yield after each forward.

    If logits differ, the findings make rows run separately, or carry accepted tokens over instead of recording scans.
    If a row differs even on its own, the findings have an error. Do not use the runner afterwards.
    """
    module = type(runner.model).__module__
    if reason := SPLIT_DEPENDENT.get(module, ""):
        return Findings([], error=reason)
    expected, seconds = [], 0.0
    for tokens, _ in PROBE:
        started = time.process_time()
        expected.append(runner.model(mx.array([tokens]), cache=make_prompt_cache(runner.model))[0])
        mx.eval(expected)
        seconds += time.process_time() - started
        yield
    isolation_modes = (True,) if module in INTERFERING_IN_LONG_CONTEXTS else (False, True)
    recordings = (True, False) if runner.recordable else (False,)
    for runner.rows_isolated, runner.recordable in product(isolation_modes, recordings):
        reason = yield from _mismatch(runner, expected)
        if reason:
            continue
        attends_per_buffer = False
        if not runner.rows_isolated and seconds < SLOW_FORWARDS_SECONDS:
            runner.caches.table.attends_per_buffer = True
            attends_per_buffer = not (yield from _mismatch(runner, expected, separate_buffers=True))
        return Findings([], runner.rows_isolated, runner.recordable, attends_per_buffer)
    return Findings([], error=reason)


def _mismatch(
    runner: Runner, expected: Sequence[mx.array], *, separate_buffers: bool = False
) -> Generator[None, None, str]:
    """Return how the probe's rows differ from `expected`, each row's logits [tokens, vocabulary]; "" if they do not.
    `separate_buffers` gives each row its own buffers. Yields after each forward."""
    names = [f"probe {row}" for row in range(len(PROBE))]
    for name in names:
        runner.claim(name)
    for name in names if separate_buffers else ():
        runner.caches.separate(name)
    actual = [logits[:0] for logits in expected]
    try:
        for step, rejected in enumerate(PROBE_REJECTS):
            lengths = [runner.length(name) for name in names]
            fed = [tokens[start : ends[step]] for start, (tokens, ends) in zip(lengths, PROBE, strict=True)]
            rows = sorted((row for row, tokens in enumerate(fed) if tokens), key=lambda row: runner.rows[names[row]])
            keep = [len(fed[row]) for row in rows]
            fed[0] = (*fed[0], *rejected)
            widths = [len(fed[row]) for row in rows]
            sequence_ids = [names[row] for row in rows]
            logits, forward = runner.forward(
                sequence_ids, padded([fed[row] for row in rows]), widths, record=bool(rejected)
            )
            for index, row in enumerate(rows):
                actual[row] = mx.concatenate([actual[row][: lengths[row]], logits[index, : keep[index]]])
            runner.commit(forward, keep)
            mx.eval(logits)
            yield
        distance = max(_distance(batched, alone) for batched, alone in zip(actual, expected, strict=True))
    except (AttributeError, TypeError, ValueError, LookupError, NotImplementedError, AssertionError) as error:
        return f"the model accesses its caches in an unsupported way ({error})"
    finally:
        for name in reversed(names):
            runner.release(name)
    limit = LARGEST_ERROR if logits.dtype == mx.float32 else LARGEST_HALF_ERROR
    return "" if distance < limit else f"slot caches change the model's answer by {distance:.3g}"


def _distance(batched: mx.array, alone: mx.array) -> float:
    """Return the relative error of logits [tokens, vocabulary] at the worst token, by norm, so that no outlier decides.
    Equal infinities, and an offset common to all logits, count as no difference."""
    finite = mx.isfinite(alone)
    error, size = (mx.where(finite, logits, 0.0).astype(mx.float32) for logits in (batched - alone, alone))
    error, size = (values - mx.mean(values, axis=-1, keepdims=True) for values in (error, size))
    ratios = mx.linalg.norm(error, axis=-1) / mx.maximum(mx.linalg.norm(size, axis=-1), 1e-6)
    return float("inf") if bool(mx.any(finite != mx.isfinite(batched))) else float(mx.max(ratios))
