"""Truncation by top-k, then top-p, then min-p (vLLM's order), on a CPU without sorting the vocabulary.

Tokens are ordered by logit, likeliest first, ties by lower id first. Top-k keeps the first k. Top-p keeps tokens whose
predecessors have less than p of the mass that top-k kept. The first token is always kept.
"""

from collections.abc import Sequence
from math import ceil, copysign, e, exp, log, log1p

import mlx.core as mx

from app.core.request import SamplingParameters
from app.engine.memory import on_cpu

BLOCK_TOKENS = 64
NEGLIGIBLE_NATS = 64 * log(2)
"""Negative log of the probability that is treated as zero, 2^-64."""
ROUNDING = 1e-5
"""Relative rounding error of float32 sums over a vocabulary."""
LOWEST_KEY, HIGHEST_KEY, KEY_BITS = -(1 << 31), (1 << 31) - 1, 32


def draw_kept(logits: mx.array, noise: mx.array, parameters: Sequence[SamplingParameters]) -> mx.array:
    """Draw int32 [rows, slots] by the largest `logits + noise` among the tokens that `truncate` keeps.
    `logits` are float32 [rows, slots, vocabulary]. A CPU checks only tokens that may be drawn (`_candidates`); a GPU
    sorts all tokens, in one kernel instead of a hundred."""
    values = _above_floor(logits, parameters) + noise
    drawn = mx.argmax(values, axis=-1).astype(mx.int32)
    cut = [row for row, sampling in enumerate(parameters) if _top_k(sampling, logits.shape[-1]) or sampling.top_p < 1.0]
    if len(cut) == len(parameters):
        return _first_kept(logits, values, parameters)
    if cut:
        rows = mx.array(cut)
        drawn[rows] = _first_kept(logits[rows], values[rows], [parameters[row] for row in cut])
    return drawn


def best_of(values: mx.array, count: int) -> mx.array:
    """Return ids [rows, slots, count] of the largest `values` [rows, slots, vocabulary], best first, ties by lower id.
    They are all in the `count` blocks with the largest maxima, so two short sorts suffice."""
    *leading, vocabulary = values.shape
    missing = -vocabulary % BLOCK_TOKENS
    if missing:
        values = mx.pad(values, [(0, 0), (0, 0), (0, missing)], constant_values=mx.array(-mx.inf))
    blocks = values.reshape(*leading, -1, BLOCK_TOKENS)
    best = mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[..., :count]
    best = mx.sort(best, axis=-1)[..., None]  # ascending, so that the stable sort below puts the lower id first
    members = mx.take_along_axis(blocks, best, axis=-2).flatten(-2)
    ids = (best * BLOCK_TOKENS + mx.arange(BLOCK_TOKENS)).flatten(-2)
    return mx.take_along_axis(ids, mx.argsort(-members, axis=-1)[..., :count], axis=-1).astype(mx.int32)


def _candidates(parameters: SamplingParameters, vocabulary: int) -> tuple[int, bool]:
    """Return how many tokens one draw must examine, and whether they are the likeliest ones.

    Top-k keeps k, and the n likeliest tokens have at least n / vocabulary of the mass. The alternative is the first n
    by logit + noise: they are draws without replacement, and the probability that all n miss a nucleus of mass p is
    below (1 - p)^n, whatever the distribution.
    """
    if top_k := _top_k(parameters, vocabulary):
        return top_k, True
    likeliest = ceil(max(parameters.top_p, 0.0) * vocabulary) + 1
    drawn = ceil(NEGLIGIBLE_NATS / -log1p(-max(parameters.top_p, 1e-30)))
    return min((likeliest, True), (drawn, False))


def _first_kept(logits: mx.array, values: mx.array, parameters: Sequence[SamplingParameters]) -> mx.array:
    """Run `draw_kept` on rows that all have top-k or top-p; `values` are logits + noise, -inf below min-p."""
    if not on_cpu():
        return mx.argmax(mx.where(_kept_by_sorting(logits, parameters), values, -mx.inf), axis=-1).astype(mx.int32)
    vocabulary = logits.shape[-1]
    counts, likeliest = zip(*(_candidates(sampling, vocabulary) for sampling in parameters), strict=True)
    order = logits if all(likeliest) else values
    if any(likeliest) and not all(likeliest):
        order = mx.where(mx.array(likeliest)[:, None, None], logits, values)
    ids = mx.sort(best_of(order, min(max(counts), vocabulary)), axis=-1)
    ids = mx.take_along_axis(ids, mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1), axis=-1)
    is_kept = _kept_of(logits, ids, parameters)
    scores = mx.where(is_kept, mx.take_along_axis(values, ids, axis=-1), -mx.inf)
    best = mx.max(scores, axis=-1, keepdims=True)
    return mx.min(mx.where(scores == best, ids, vocabulary), axis=-1).astype(mx.int32)


def _kept_by_sorting(logits: mx.array, parameters: Sequence[SamplingParameters]) -> mx.array:
    """Return bool like `logits`: which tokens top-k and top-p keep."""
    ids = mx.argsort(-logits, axis=-1)
    likely = mx.softmax(mx.take_along_axis(logits, ids, axis=-1), axis=-1, precise=True)
    limit = _column([_share(sampling) for sampling in parameters])
    top_k = [_top_k(sampling, logits.shape[-1]) for sampling in parameters]
    if any(top_k):
        is_first = mx.arange(ids.shape[-1]) < _column([size or ids.shape[-1] for size in top_k])
        is_kept = is_first & _is_within(mx.where(is_first, likely, 0.0), limit)
    else:
        is_kept = _is_within(likely, limit)
    return mx.put_along_axis(mx.zeros_like(is_kept), ids, is_kept, axis=-1)


def _is_within(likely: mx.array, limit: mx.array) -> mx.array:
    """Return whether the predecessors of each token, in order, have less than `limit` of the total mass."""
    mass = mx.cumsum(likely, axis=-1)
    return mass - likely < limit * mass[..., -1:]


def _kept_of(logits: mx.array, ids: mx.array, parameters: Sequence[SamplingParameters]) -> mx.array:
    """Return bool [rows, slots, n]: which of `ids` top-k and top-p keep.
    `ids` are in the order of the module's rule; for a row with top-k, they include its k likeliest tokens."""
    candidate_logits = mx.take_along_axis(logits, ids, axis=-1)
    top_k = [_top_k(sampling, logits.shape[-1]) for sampling in parameters]
    is_kept = mx.arange(ids.shape[-1]) < _column([size or logits.shape[-1] for size in top_k])
    if all(sampling.top_p >= 1.0 for sampling in parameters):
        return is_kept
    top = mx.max(logits, axis=-1, keepdims=True)
    likely = mx.where(is_kept, mx.exp(candidate_logits - top), 0.0)
    mass, share = mx.sum(likely, axis=-1, keepdims=True), _column([_share(sampling) for sampling in parameters])
    if all(top_k):
        return is_kept & (mx.cumsum(likely, axis=-1) - likely < share * mass)
    weights = mx.power(e, logits - top)  # takes a third of exp's time on a CPU
    mass = mx.where(mx.array([size > 0 for size in top_k])[:, None, None], mass, mx.sum(weights, -1, keepdims=True))
    return is_kept & _preceded(logits, weights, candidate_logits, ids, share * mass)


def _preceded(
    logits: mx.array, weights: mx.array, candidate_logits: mx.array, ids: mx.array, limit: mx.array
) -> mx.array:
    """Return bool [rows, slots, n]: whether the predecessors of each of `ids`, in order, weigh less than `limit`.
    `limit` is [rows, slots, 1]. The boundary is bisected by logit, a vocabulary pass a step; ties matter only there."""
    count, before = ids.shape[-1], mx.zeros(limit.shape)
    inside = mx.zeros(limit.shape, dtype=mx.int32)  # number of `ids` known to be inside
    steps = [1 << bit for bit in reversed(range(count.bit_length()))]
    levels = mx.pad(candidate_logits, [(0, 0), (0, 0), (0, sum(steps) - count)], constant_values=mx.array(-mx.inf))
    for step in steps:
        level = mx.take_along_axis(levels, inside + (step - 1), axis=-1)
        mass = mx.sum(weights * (logits > level), axis=-1, keepdims=True)
        is_inside = mass < limit
        inside, before = mx.where(is_inside, inside + step, inside), mx.where(is_inside, mass, before)
    last = mx.take_along_axis(levels, mx.maximum(inside - 1, 0), axis=-1)
    ties = mx.cumsum((logits == last).astype(mx.float32), axis=-1)  # counts, not sums of weights: exact
    rank_in_ties, weight = (mx.take_along_axis(by_token, ids, axis=-1) for by_token in (ties, weights))
    return (mx.arange(count) < inside) & ((candidate_logits > last) | (before + weight * (rank_in_ties - 1) < limit))


def truncate(logits: mx.array, parameters: Sequence[SamplingParameters]) -> mx.array:
    """Set excluded tokens of float32 `logits` [rows, slots, vocabulary] to -inf; rows without rules are unchanged."""
    vocabulary = logits.shape[-1]
    kept_logits = logits
    if any(_top_k(sampling, vocabulary) for sampling in parameters):
        limit = _column([_top_k(sampling, vocabulary) or vocabulary for sampling in parameters])
        kept_logits = mx.where(_before(logits, mx.ones_like(logits), limit), kept_logits, -mx.inf)
    if any(sampling.top_p < 1.0 for sampling in parameters):
        weights = mx.softmax(kept_logits, axis=-1, precise=True)
        kept_logits = mx.where(
            _before(kept_logits, weights, _column([_share(sampling) for sampling in parameters])), kept_logits, -mx.inf
        )
    return _above_floor(kept_logits, parameters)


def truncates(parameters: SamplingParameters, vocabulary: int) -> bool:
    """Return whether any token may be excluded."""
    return bool(_top_k(parameters, vocabulary)) or parameters.top_p < 1.0 or parameters.min_p > 0.0


def may_be_kept(logits: mx.array, tokens: mx.array, parameters: SamplingParameters, slack: float) -> mx.array:
    """Return bool [slots]: whether `truncate` might keep `tokens` if any two logits were closer by `slack`.
    If `slack` is negative: whether it surely does. `tokens` are int32 [slots], `logits` float32 [slots, vocabulary]."""
    vocabulary, token = logits.shape[-1], tokens[:, None]
    level, top = mx.take_along_axis(logits, token, axis=-1), mx.max(logits, axis=-1, keepdims=True)
    top_k, weights = _top_k(parameters, vocabulary), mx.exp(logits - top)
    is_ahead = (logits > level + slack) & (mx.arange(vocabulary) != token)
    is_kept = mx.sum(is_ahead, axis=-1) < (top_k or vocabulary)
    if parameters.top_p < 1.0:
        mass = mx.sum(mx.topk(weights, top_k, axis=-1) if top_k else weights, axis=-1)
        share = _share(parameters) * exp(slack + copysign(ROUNDING, slack))
        is_kept = is_kept & (mx.sum(mx.where(is_ahead, weights, 0.0), axis=-1) < share * mass)
    if parameters.min_p > 0.0:
        is_kept = is_kept & (level >= top + log(max(parameters.min_p, 1e-30)) - slack)[..., 0]
    return is_kept


def _before(logits: mx.array, weights: mx.array, limit: mx.array) -> mx.array:
    """Return bool like `logits`: whether the `weights` of a token's predecessors sum to less than `limit` (> 0).

    The lowest kept logit is found by bisection over the 32 bits of a float32, read as an integer of the same order.
    """
    bits = mx.view(logits + 0.0, mx.int32)  # + 0.0 turns -0.0 into 0.0
    keys = mx.where(bits < 0, bits ^ HIGHEST_KEY, bits)
    low = mx.full((*logits.shape[:-1], 1), LOWEST_KEY, dtype=mx.int32)
    high = mx.full(low.shape, HIGHEST_KEY, dtype=mx.int32)
    for _ in range(KEY_BITS):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        is_inside = mx.sum(weights * (keys > middle), axis=-1, keepdims=True) < limit
        low, high = mx.where(is_inside, low, middle + 1), mx.where(is_inside, middle, high)
    first = mx.sum(weights * (keys > low), axis=-1, keepdims=True)
    ties = mx.cumsum((keys == low).astype(mx.float32), axis=-1)  # counts, not sums of weights: exact
    return (keys > low) | ((keys == low) & (first + weights * (ties - 1) < limit))


def _above_floor(logits: mx.array, parameters: Sequence[SamplingParameters]) -> mx.array:
    """Set tokens less likely than min-p times the likeliest one to -inf."""
    if all(sampling.min_p <= 0.0 for sampling in parameters):
        return logits
    floor = mx.log(_column([max(sampling.min_p, 1e-30) for sampling in parameters]))
    return mx.where(logits < mx.max(logits, axis=-1, keepdims=True) + floor, -mx.inf, logits)


def _top_k(parameters: SamplingParameters, vocabulary: int) -> int:
    """Return top-k; 0 if it keeps all tokens."""
    return parameters.top_k if 0 < parameters.top_k < vocabulary else 0


def _share(parameters: SamplingParameters) -> float:
    """Return top-p as an exclusive limit on the predecessors' mass; infinite if it excludes no token."""
    return max(parameters.top_p, 1e-30) if parameters.top_p < 1.0 else float("inf")


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None, None]
