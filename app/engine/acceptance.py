"""The acceptance rules: which drafts stay, and which token of the target comes after them. Both are lossless.

`coupled`, the default: the target draws x_i at every position with noise keyed by (seed, output position); a draft is
accepted iff it equals x_i, and x_i is emitted either way. So the text is the target's own whatever the drafter
proposes, and the rule needs no draft probabilities. It is the best rule where a draft was the drafter's only choice.

`rejection` (Leviathan et al. 2211.17192, Chen et al. 2302.01318): a draft d ~ q is accepted with probability
min(1, p(d) / q(d)); the first rejected one is replaced by a draw from max(p - q, 0), renormalised; after full
acceptance a bonus is drawn from p. It accepts sum(min(p, q)), the most that is possible, but only the distribution is
that of plain decoding: the text of one seed is another one. The drafts must be drawn with `DRAFT_SALT`, independently
of p's noise, and none may be dropped for what it is.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from app.engine.sampling import ACCEPTANCE_SALT, SampledRow, draw, gumbel_noise, noise_keys, shape_logits, unit_noise

MODES = ("coupled", "rejection")

Residual = Callable[[mx.array, mx.array], mx.array]
"""Probabilities p and q float32 [rows, 1, vocabulary] → weights to draw from where a draft was rejected; the bonus is
the same with q = 0."""


def residual(target: mx.array, draft: mx.array) -> mx.array:
    """max(p - q, 0), not normalised; p itself where rounding leaves nothing of it."""
    left = mx.maximum(target - draft, 0.0)
    return mx.where(mx.any(left > 0, axis=-1, keepdims=True), left, target)


def count_accepted(drafts: mx.array, drawn: mx.array, limits: Sequence[int]) -> mx.array:
    """int32 [rows]: length of the longest prefix of `drafts` [rows, K] that equals `drawn` [rows, 1 + K].

    `limits[row]` says how many of the K drafts are real; padding is always rejected.
    """
    return _leading(drafts == drawn[:, : drafts.shape[1]], limits)


def _leading(passes: mx.array, limits: Sequence[int]) -> mx.array:
    """int32 [rows]: how many of the first `limits[row]` of `passes` [rows, K] hold without a gap."""
    real = mx.arange(passes.shape[1]) < mx.array(list(limits), dtype=mx.int32)[:, None]
    return mx.sum(mx.cumprod((passes & real).astype(mx.int32), axis=1), axis=1)


def accept(
    drafts: mx.array,
    logits: mx.array,
    rows: Sequence[SampledRow],
    counts: Sequence[int],
    *,
    draft_logits: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """(drawn int32 [rows, 1 + K], accepted int32 [rows]): a row emits `drawn[: accepted + 1]`. Nothing is evaluated.

    `drafts` int32 [rows, K], of which `counts[row]` are real; `logits` float32 [rows, 1 + K, vocabulary] are the
    target's after bias and penalties, `draft_logits` [rows, K, vocabulary] what the drafts were drawn from, with a salt
    of their own. Without them, and where every row is greedy, the rule is `coupled`, else `rejection`.
    """
    if draft_logits is not None and any(row.parameters.temperature > 0 for row in rows):
        return reject(drafts, logits, rows, counts, draft_logits)
    drawn = draw(logits, rows)
    return drawn, count_accepted(drafts, drawn, counts)


def reject(
    drafts: mx.array,
    logits: mx.array,
    rows: Sequence[SampledRow],
    counts: Sequence[int],
    draft_logits: mx.array,
    *,
    remainder: Residual = residual,
) -> tuple[mx.array, mx.array]:
    """Rejection sampling as `accept` says; rows at temperature 0 keep the rule of equality."""
    width, vocabulary = drafts.shape[1], logits.shape[-1]
    greedy = mx.argmax(logits, axis=-1).astype(mx.int32)
    sampling = mx.array([row.parameters.temperature > 0 for row in rows])[:, None]
    target = mx.softmax(shape_logits(logits, rows), axis=-1, precise=True)
    draft = mx.softmax(shape_logits(fit_vocabulary(draft_logits, vocabulary), rows), axis=-1, precise=True)
    likely, proposed = (
        mx.take_along_axis(values[:, :width], drafts[..., None], axis=-1)[..., 0] for values in (target, draft)
    )
    uniform = unit_noise(noise_keys(rows, width, salt=ACCEPTANCE_SALT))
    passes = (likely > 0) & (likely >= uniform * proposed)
    accepted = _leading(mx.where(sampling, passes, drafts == greedy[:, :width]), counts)
    last = _recover(target, draft, accepted, rows, counts, remainder)
    drawn = mx.where(mx.arange(1 + width) < accepted[:, None], mx.concatenate([drafts, last], axis=1), last)
    return mx.where(sampling, drawn, greedy), accepted


def _recover(
    target: mx.array,
    draft: mx.array,
    accepted: mx.array,
    rows: Sequence[SampledRow],
    counts: Sequence[int],
    remainder: Residual,
) -> mx.array:
    """int32 [rows, 1]: the recovered token after a rejection, the bonus after none.

    A row needs one of them, at one slot; so noise, the target's own of that position, is made for this slot alone.
    """
    place = accepted[:, None, None]
    rejected = place < mx.array(list(counts), dtype=mx.int32)[:, None, None]
    there = mx.take_along_axis(target, place, axis=1)
    instead = mx.take_along_axis(draft, mx.minimum(place, draft.shape[1] - 1), axis=1)
    weights = remainder(there, mx.where(rejected, instead, 0.0))
    keys = mx.take_along_axis(noise_keys(rows, target.shape[1]), place, axis=1)
    noise = gumbel_noise(keys, target.shape[-1])
    return mx.argmax(mx.log(weights) + noise, axis=-1).astype(mx.int32)


def fit_vocabulary(logits: mx.array, vocabulary: int) -> mx.array:
    """`logits` [rows, slots, any] with the width of the target's: tokens that the drafter does not know get -inf."""
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=mx.array(-mx.inf))
