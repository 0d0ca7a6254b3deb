"""Which draft lengths are weighed: the widest of each stretch of widths at which a forward costs about the same.

A chip steps from one kernel to the next, so some lengths are a bargain and the next one longer is not. Where that is
known, a batch shares it: what counts are the tokens of the whole forward.
"""

import re

DRAFT_LENGTHS = (1, 2, 3, 5, 7, 15)
"""Where nothing is known of the chip: with the token before them, blocks of 8 and 16 are among them."""
LONGEST_DRAFT = DRAFT_LENGTHS[-1]
ONE_PASS_TOKENS = (2, 3, 5, 10, 16, 32, 64, 128)
"""Of a forward on Apple's third generation and later: weights are read once for each five tokens, and from 13 on in
tiles of 32."""
EARLY_TOKENS = (2, 3, 4, 6, 16, 32, 64, 128)
"""On the first two, affine weights are read once for each token, and from 6 on in tiles."""
ONE_PASS_GENERATION = 15
"""Apple's name of the M3's: M1 is 13, M2 is 14."""
SORTED_PAIRS = 64
"""Of tokens and experts: from so many on, a layer of experts sorts them first."""


def cheap_tokens(architecture: str, *, mode: str, experts_per_token: int = 0) -> tuple[int, ...]:
    """Tokens of one forward just before it gets dearer, ascending; empty where that is unknown: no Apple chip, or
    weights that are not quantised.

    `architecture` as the device names it ("applegpu_g16s"), `mode` of the quantisation ("affine", "mxfp4", ...).
    Source: shared reference, metal §2 (thresholds of mlx's quantised products).
    """
    found = re.match(r"applegpu_g(\d+)", architecture)
    if found is None or not mode:
        return ()
    one_pass = mode != "affine" or int(found[1]) >= ONE_PASS_GENERATION
    tokens: tuple[int, ...] = ONE_PASS_TOKENS if one_pass else EARLY_TOKENS
    if experts_per_token:
        unsorted = max(2, (SORTED_PAIRS - 1) // experts_per_token)
        tokens = tuple(sorted({unsorted, *(each for each in tokens if each < unsorted or each > LONGEST_DRAFT)}))
    return tokens


def draft_lengths(tokens: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Drafts for each of so many rows whose forward has about so many `tokens`; the usual ones where none are named."""
    return tuple(sorted({min(LONGEST_DRAFT, max(1, each // rows - 1)) for each in tokens})) or DRAFT_LENGTHS
