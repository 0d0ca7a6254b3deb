"""Acceptance rules: which drafts are kept, and which token of the target follows them. All are lossless.

`coupled`, the default: the target draws x_i at every position with noise keyed by (seed, output position); a draft is
accepted iff it equals x_i, and x_i is emitted either way. So the text is the target's own whatever the drafter
proposes, and the rule needs no draft probabilities. It is the best rule where a draft was the drafter's only choice.

`rejection` (Leviathan et al. 2211.17192, Chen et al. 2302.01318): a draft d ~ q is accepted with probability
min(1, p(d) / q(d)), and the first rejected one is replaced by a draw from max(p - q, 0); a bonus token is drawn from p.
It accepts the largest share possible, sum(min(p, q)), but equals plain decoding only in distribution, not seed by seed.
Drafts must be drawn with `DRAFT_SALT`, independently of p's noise, and none may be dropped because of its token.

`strict` is `coupled` where the width of a forward may move logits: `strict.py` decides `doubtful` tokens again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from app.engine.sampling.drawing import (
    ACCEPTANCE_SALT,
    SampledRow,
    draw,
    gumbel_noise,
    noise_keys,
    shape_logits,
    unit_noise,
)
from app.engine.sampling.truncation import may_be_kept, truncates


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a verify forward for one row, from a single read of the device."""

    drawn: Sequence[int]
    """The target's token at each slot."""
    accepted: int
    """Number of drafts that are kept."""
    certain: int
    """Number of leading slots where plain decoding surely draws the same token; all, unless the row is `strict`."""

    @property
    def emitted(self) -> Sequence[int]:
        """The accepted drafts and the token that follows them."""
        return self.drawn[: self.accepted + 1]

    @property
    def is_doubtful(self) -> bool:
        """Whether plain decoding might draw a different token after the accepted drafts."""
        return self.accepted == self.certain

    @staticmethod
    def pack(drawn: mx.array, accepted: mx.array, certain: mx.array) -> mx.array:
        """Join int32 `drawn` [rows, slots], `accepted` [rows] and `certain` [rows] to one array, for a single read.
        Drafts beyond the certain slots are not accepted."""
        return mx.concatenate([drawn, mx.stack([mx.minimum(accepted, certain), certain], axis=1)], axis=1)

    @classmethod
    def unpack(cls, packed: mx.array) -> list["Verified"]:
        """Read an array that `pack` made; wait until it is computed."""
        rows: Any = packed.tolist()
        return [cls(values[:-2], *values[-2:]) for values in rows]


def residual(target: mx.array, draft: mx.array) -> mx.array:
    """Return the weights to draw from after a rejection: max(p - q, 0), not normalised, float32 [rows, 1, vocabulary].
    `draft` (q) is 0 for a bonus token. Where rounding leaves no weight, return `target` (p)."""
    difference = mx.maximum(target - draft, 0.0)
    return mx.where(mx.any(difference > 0, axis=-1, keepdims=True), difference, target)


def count_accepted(passes: mx.array, counts: Sequence[int]) -> mx.array:
    """Return int32 [rows]: the number of leading true `passes` [rows, K] among the first `counts[row]` of each row."""
    real = mx.arange(passes.shape[1]) < mx.array(list(counts), dtype=mx.int32)[:, None]
    return mx.sum(mx.cumprod((passes & real).astype(mx.int32), axis=1), axis=1)


def accept(
    drafts: mx.array,
    logits: mx.array,
    rows: Sequence[SampledRow],
    counts: Sequence[int],
    *,
    draft_logits: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return drawn int32 [rows, 1 + K] and accepted int32 [rows], lazy; a row emits `drawn[: accepted + 1]`.

    `drafts` int32 [rows, K], of which `counts[row]` are real; `logits` float32 [rows, 1 + K, vocabulary] are the
    target's after bias and penalties; the drafts were drawn from `draft_logits` [rows, K, vocabulary], with a salt of
    their own. Without `draft_logits`, and for rows at temperature 0, the rule is `coupled`, else `rejection`.
    """
    width, sampling = drafts.shape[1], [row.parameters.temperature > 0 for row in rows]
    if draft_logits is None or not any(sampling):
        drawn = draw(logits, rows)
        return drawn, count_accepted(drafts == drawn[:, :width], counts)
    greedy, is_sampled = mx.argmax(logits, axis=-1).astype(mx.int32), mx.array(sampling)[:, None]
    fitted_logits = fit_vocabulary(draft_logits, logits.shape[-1])
    target, draft = (
        mx.softmax(shape_logits(model_logits, rows), axis=-1, precise=True) for model_logits in (logits, fitted_logits)
    )
    target_probabilities = mx.take_along_axis(target[:, :width], drafts[..., None], axis=-1)[..., 0]
    draft_probabilities = mx.take_along_axis(draft, drafts[..., None], axis=-1)[..., 0]
    uniform = unit_noise(noise_keys(rows, width, salt=ACCEPTANCE_SALT))
    passes = (target_probabilities > 0) & (target_probabilities >= uniform * draft_probabilities)
    accepted = count_accepted(mx.where(is_sampled, passes, drafts == greedy[:, :width]), counts)
    # The recovered or bonus token is drawn with the target's own noise, which is made for this slot only.
    slot = accepted[:, None, None]
    rejected = slot < mx.array(list(counts), dtype=mx.int32)[:, None, None]
    draft_at_slot = mx.take_along_axis(draft, mx.minimum(slot, width - 1), axis=1)
    weights = residual(mx.take_along_axis(target, slot, axis=1), mx.where(rejected, draft_at_slot, 0.0))
    noise = gumbel_noise(mx.take_along_axis(noise_keys(rows, 1 + width), slot, axis=1), logits.shape[-1])
    last = mx.argmax(mx.log(weights) + noise, axis=-1).astype(mx.int32)
    drawn = mx.where(mx.arange(1 + width) < accepted[:, None], mx.concatenate([drafts, last], axis=1), last)
    return mx.where(is_sampled, drawn, greedy), accepted


def fit_vocabulary(logits: mx.array, vocabulary: int) -> mx.array:
    """Fit `logits` [rows, slots, any] to the target's vocabulary; tokens that the drafter does not know get -inf."""
    missing = vocabulary - logits.shape[-1]
    if missing > 0:
        return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=mx.array(-mx.inf))
    return logits[..., :vocabulary] if missing else logits


def doubtful(logits: mx.array, drawn: mx.array, row: SampledRow, tolerance: float) -> mx.array:
    """Return bool [slots]: whether `row` might not draw `drawn` if each logit were up to `tolerance` off.
    `drawn` is int32 [slots]. `logits` [slots, vocabulary] include bias and penalties; `tolerance` does not."""
    parameters, vocabulary, drawn_ids = row.parameters, logits.shape[-1], drawn[:, None]
    # Two logits may be off in opposite directions, hence the 2; a repetition penalty scales the error too.
    slack = 2 * tolerance * max(parameters.repetition_penalty, 1 / parameters.repetition_penalty)
    scores = logits
    if parameters.temperature > 0:
        temperature = max(parameters.temperature, 1e-6)
        logits, slack = logits / temperature, slack / temperature
        scores = logits + gumbel_noise(noise_keys([row], len(logits)), vocabulary)[0]
    is_near = scores > mx.take_along_axis(scores, drawn_ids, axis=-1) - slack
    rivals = is_near & (mx.arange(vocabulary) != drawn_ids)
    any_rival = mx.any(rivals, axis=-1)
    if parameters.temperature <= 0 or not truncates(parameters, vocabulary):
        return any_rival
    strongest = mx.argmax(mx.where(rivals, logits, -mx.inf), axis=-1)
    return ~may_be_kept(logits, drawn, parameters, -slack) | (
        any_rival & may_be_kept(logits, strongest, parameters, slack)
    )
