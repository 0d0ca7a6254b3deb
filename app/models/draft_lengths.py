"""Candidate draft lengths: the longest before each jump in the cost of a forward.

A chip switches kernels as a forward gets wider, so one length is cheap and the next is not. Where these jumps are
known, they depend on the number of tokens in the whole forward, which all rows of the batch share.
"""

import re

DRAFT_LENGTHS = (1, 2, 3, 5, 7, 15, 31)
"""Draft lengths, in tokens, for an unknown chip; with the token before them, 7, 15 and 31 fill 8, 16 and 32 slots."""
LONGEST_DRAFT = DRAFT_LENGTHS[-1]
LONGEST_CHAIN = 15
"""Longest draft, in tokens, of methods that run a forward for each draft token; for others it is `LONGEST_DRAFT`."""
VERIFIED_TOKENS = 128
"""Maximum number of tokens, over all rows together, in a forward that verifies drafts."""
ONE_PASS_TOKENS = (2, 3, 5, 10, 16, 32, 64, 128)
"""Token counts of cheap forwards on M3 and later: weights are read once per 5 tokens, from 13 on in tiles of 32."""
EARLY_TOKENS = (2, 3, 4, 6, 16, 32, 64, 128)
"""Token counts of cheap forwards on M1 and M2: affine weights are read once per token, from 6 tokens on in tiles."""
EARLY_ULTRA_TOKENS = (2, 3, 4, 6, 12, 16, 32, 64, 128)
"""Token counts of cheap forwards on the Ultra chips of M1 and M2, which use tiles from 12 tokens on."""
ONE_PASS_GENERATION = 15
"""GPU generation of the M3, as Apple numbers it: M1 is 13, M2 is 14."""
SORTED_PAIRS = 64
"""Minimum number of (token, expert) pairs that a mixture-of-experts layer sorts before it multiplies."""


def cheap_tokens(architecture: str, *, mode: str, experts_per_token: int = 0) -> tuple[int, ...]:
    """Return, in ascending order, the token counts just before a forward gets more expensive.

    Empty where they are unknown: the chip is not Apple's, or the weights are not quantised. `architecture` is the
    device's name for its GPU ("applegpu_g16s"), `mode` the mode of the quantisation ("affine", "mxfp4", ...). Products
    with sides of up to 4,096 get dearer later; the longest, of MLPs and head, take most of the time and decide here.
    Source: the thresholds of mlx's quantised matrix products (mlx/backend/metal/quantized.cpp).
    """
    match = re.match(r"applegpu_g(\d+)(d?)", architecture)
    if match is None or not mode:
        return ()
    one_pass = mode != "affine" or int(match[1]) >= ONE_PASS_GENERATION
    tokens: tuple[int, ...] = ONE_PASS_TOKENS if one_pass else EARLY_ULTRA_TOKENS if match[2] else EARLY_TOKENS
    if experts_per_token:
        unsorted = max(2, (SORTED_PAIRS - 1) // experts_per_token)
        tokens = tuple(sorted({unsorted, *(count for count in tokens if count < unsorted or count > LONGEST_CHAIN)}))
    return tokens


def draft_lengths(tokens: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the draft lengths for forwards of `rows` rows and `tokens` tokens; `DRAFT_LENGTHS` without `tokens`."""
    lengths = [count // rows - 1 for count in tokens] or DRAFT_LENGTHS
    return tuple(sorted({min(longest_draft(rows), max(1, length)) for length in lengths}))


def longest_draft(rows: int) -> int:
    """Return the maximum draft length per row in a forward over `rows` rows."""
    return min(LONGEST_DRAFT, max(1, VERIFIED_TOKENS // rows - 1))
