"""The acceptance rule: a draft is accepted iff it equals the token that the target draws itself.

The target draws x_i at every position with noise keyed by (seed, output position); x_i is emitted either way. So the
text is the target's own whatever the drafter proposes, and the rule needs no draft probabilities.
"""

from collections.abc import Sequence

import mlx.core as mx


def count_accepted(drafts: mx.array, drawn: mx.array, limits: Sequence[int]) -> mx.array:
    """int32 [rows]: length of the longest prefix of `drafts` [rows, K] that equals `drawn` [rows, 1 + K].

    `limits[row]` says how many of the K drafts are real; padding is always rejected.
    """
    width = drafts.shape[1]
    real = mx.arange(width) < mx.array(list(limits), dtype=mx.int32)[:, None]
    matches = (drafts == drawn[:, :width]) & real
    return mx.sum(mx.cumprod(matches.astype(mx.int32), axis=1), axis=1)
