"""Sampling with top-p over a vocabulary of 151,936 tokens against sorting it, in paired turns."""

from collections.abc import Callable, Sequence
from time import perf_counter

import mlx.core as mx

from app.core.request import SamplingParameters
from app.engine.sampling.drawing import SampledRow, draw, gumbel_noise, noise_keys
from bench.comparison.cases import Bench, Case
from bench.comparison.measure import CaseResult, Check, Contender, Sample, Series, paired_ratio

VOCABULARY = 151_936
TOP_P = 0.95
SPREAD = 3.0
"""Standard deviation of the logits."""
SHAPES = ((1, 1), (5, 1), (8, 5))
"""Shapes of the logits: rows and slots."""
SUMMARY = "drawing with top-p from 151,936 tokens, against sorting them"


def draw_by_sorting(logits: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    """Sample by top-p literally: sort, sum up, cut, put back. Temperature is 1."""
    order = mx.argsort(-logits, axis=-1)
    ordered = mx.take_along_axis(logits, order, axis=-1)
    probabilities = mx.softmax(ordered, axis=-1, precise=True)
    kept = mx.cumsum(probabilities, axis=-1) - probabilities < TOP_P
    whole = mx.full(logits.shape, -mx.inf, dtype=logits.dtype)
    whole = mx.put_along_axis(whole, order, mx.where(kept, ordered, -mx.inf), axis=-1)
    return mx.argmax(whole + gumbel_noise(noise_keys(rows, logits.shape[1]), VOCABULARY), axis=-1)


def turn_of(function: Callable[..., mx.array], count: int, slots: int) -> Callable[[int], Sample]:
    """Return a turn that measures one draw in milliseconds; the same round has the same logits."""
    rows = [SampledRow(SamplingParameters(seed=row, top_p=TOP_P), [0], 1) for row in range(count)]

    def turn(number: int) -> Sample:
        logits = mx.random.normal((count, slots, VOCABULARY), key=mx.random.key(number + 1)) * SPREAD
        mx.eval(logits)
        started = perf_counter()
        mx.eval(function(logits, rows))
        return Sample((perf_counter() - started) * 1000)

    return turn


def run_sampling(bench: Bench) -> CaseResult:
    """Compare the milliseconds of a draw with and without sorting, shape by shape."""
    series: list[Series] = []
    checks = []
    for count, slots in SHAPES:
        shape = f"{count} × {slots}"
        ours = Contender(f"paceline, {shape}", turn_of(draw, count, slots))
        theirs = Contender(f"by sorting, {shape}", turn_of(draw_by_sorting, count, slots))
        measured = bench.measure(ours, theirs)
        ratio = paired_ratio(measured[theirs.name], measured[ours.name])
        checks.append(Check(f"time by sorting / without, {shape}", ratio, 3.0))
        series.extend(measured.values())
    return CaseResult("sampling_top_p", SUMMARY, "ms", tuple(series), tuple(checks))


SAMPLING_CASES = (Case("sampling_top_p", SUMMARY, run_sampling),)
