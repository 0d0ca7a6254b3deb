"""Draft lengths by chip: the longest of each range that costs the same; the rows of a batch share its tokens."""

import pytest

from app.models.draft_lengths import DRAFT_LENGTHS, VERIFIED_TOKENS, cheap_tokens, draft_lengths, longest_draft

M1, M2_ULTRA, M3, M5 = "applegpu_g13g", "applegpu_g14d", "applegpu_g15s", "applegpu_g17g"


@pytest.mark.parametrize(
    ("architecture", "mode", "experts", "lengths"),
    [
        (M3, "affine", 0, (1, 2, 4, 9, 15, 31)),
        (M5, "affine", 0, (1, 2, 4, 9, 15, 31)),
        (M1, "affine", 0, (1, 2, 3, 5, 15, 31)),
        (M2_ULTRA, "affine", 0, (1, 2, 3, 5, 11, 15, 31)),
        (M1, "mxfp4", 0, (1, 2, 4, 9, 15, 31)),
        (M2_ULTRA, "nvfp4", 0, (1, 2, 4, 9, 15, 31)),
        (M5, "affine", 8, (1, 2, 4, 6, 15, 31)),
        (M1, "affine", 8, (1, 2, 3, 5, 6, 15, 31)),
        (M3, "mxfp4", 4, (1, 2, 4, 9, 14, 15, 31)),
        (M3, "affine", 22, (1, 15, 31)),
        ("x86_64", "affine", 0, DRAFT_LENGTHS),
        (M3, "", 0, DRAFT_LENGTHS),
    ],
)
def test_one_row_drafts_as_many_as_the_chip_reads_along_for_nothing(
    architecture: str, mode: str, experts: int, lengths: tuple[int, ...]
) -> None:
    assert draft_lengths(cheap_tokens(architecture, mode=mode, experts_per_token=experts), 1) == lengths


@pytest.mark.parametrize(("rows", "lengths"), [(2, (1, 4, 7, 15, 31)), (4, (1, 3, 7, 15, 31)), (8, (1, 3, 7, 15))])
def test_the_rows_of_a_batch_share_the_tokens_of_a_forward(rows: int, lengths: tuple[int, ...]) -> None:
    tokens = cheap_tokens(M3, mode="affine")
    assert draft_lengths(tokens, rows) == lengths
    assert all(rows * (1 + length) in tokens for length in lengths if length > 1)


def test_where_no_chip_is_known_a_batch_weighs_what_one_row_does_unless_a_forward_gets_too_wide() -> None:
    assert draft_lengths((), 4) == draft_lengths((), 1) == DRAFT_LENGTHS
    assert draft_lengths((), 8) == (1, 2, 3, 5, 7, 15)
    assert draft_lengths((), 32) == (1, 2, 3)


def test_no_length_is_below_one_or_makes_a_forward_too_wide() -> None:
    for generation in range(13, 20):
        for experts in range(64):
            for rows in range(1, 33):
                lengths = draft_lengths(
                    cheap_tokens(f"applegpu_g{generation}d", mode="affine", experts_per_token=experts), rows
                )
                assert 1 <= lengths[0] <= lengths[-1] <= longest_draft(rows)
                assert rows * (1 + lengths[-1]) <= VERIFIED_TOKENS
