"""Candidate draft lengths: the widest of each range of widths at which a forward costs about the same.

A chip switches from one kernel to the next, so some lengths are cheap and the next longer one is not. Where the
steps are known, the rows of a batch share them: what counts is the number of tokens in the whole forward.
"""

import re

DRAFT_LENGTHS = (1, 2, 3, 5, 7, 15, 31)
"""Draft lengths for an unknown chip; with the token before them, 7, 15 and 31 make blocks of 8, 16 and 32."""
LONGEST_DRAFT = DRAFT_LENGTHS[-1]
LONGEST_CHAIN = 15
"""Longest draft, in tokens, considered for methods that pay for each draft token; copies cost nothing to draft."""
VERIFIED_TOKENS = 128
"""Maximum width, in tokens of all rows together, of a forward that verifies drafts."""
ONE_PASS_TOKENS = (2, 3, 5, 10, 16, 32, 64, 128)
"""Tokens of a cheap forward from the M3 on: weights are read once per five tokens, and from 13 on in tiles of 32."""
EARLY_TOKENS = (2, 3, 4, 6, 16, 32, 64, 128)
"""Tokens of a cheap forward on M1 and M2: affine weights are read once per token, and from 6 on in tiles."""
EARLY_ULTRA_TOKENS = (2, 3, 4, 6, 12, 16, 32, 64, 128)
"""The same on their Ultras, whose tiles begin at 12."""
ONE_PASS_GENERATION = 15
"""GPU generation of the M3, as Apple numbers it: M1 is 13, M2 is 14."""
SORTED_PAIRS = 64
"""Pairs of token and expert from which on a mixture-of-experts layer sorts them first."""


def cheap_tokens(architecture: str, *, mode: str, experts_per_token: int = 0) -> tuple[int, ...]:
    """Return the token counts just before a forward gets dearer, ascending.

    Empty where they are unknown: no Apple chip, or weights that are not quantised. `architecture` as the device names
    it ("applegpu_g16s"), `mode` of the quantisation ("affine", "mxfp4", ...).
    Source: the thresholds of mlx's quantised products (mlx/backend/metal/quantized.cpp).
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
    """Return drafts per row that make a forward of `rows` about `tokens` wide; `DRAFT_LENGTHS` where none are given."""
    lengths = [count // rows - 1 for count in tokens] or DRAFT_LENGTHS
    return tuple(sorted({min(longest_draft(rows), max(1, length)) for length in lengths}))


def longest_draft(rows: int) -> int:
    """Return the most drafts per row of a forward of `rows`."""
    return min(LONGEST_DRAFT, max(1, VERIFIED_TOKENS // rows - 1))
