"""Cells and settings that are measured, and their order."""

import pytest

from app.serving.sweep.grid import GOVERNOR, GRIDS, MAIN, PLAIN, Cell, Setting, cells, settings_of


def test_one_request_with_a_short_prompt_comes_first() -> None:
    grid = cells(GRIDS["full"], max_rows=8, max_context_tokens=100_000, tokens=64)
    assert grid[0] == MAIN == Cell(1, 128)
    assert {cell.rows for cell in grid} == {1, 2, 4, 8}
    assert {cell.context for cell in grid} == {128, 1024, 4096}
    assert len(grid) == len(set(grid)) == 12


def test_cells_that_a_model_cannot_run_are_left_out() -> None:
    assert cells(GRIDS["full"], max_rows=1, max_context_tokens=4096, tokens=64) == [Cell(1, 128), Cell(1, 1024)]
    medium = cells(GRIDS["full"], max_rows=8, max_context_tokens=8192, tokens=64)
    assert {cell.context for cell in medium} == {128, 1024}
    assert cells(GRIDS["full"], max_rows=8, max_context_tokens=100, tokens=64) == [MAIN]


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(16, (1, 2, 3, 4, 6, 8, 12, 16)), (7, (1, 2, 3, 4, 6, 7)), (1, (1,)), (64, (1, 2, 3, 4, 6, 8, 12, 16))],
)
def test_the_longest_draft_of_a_method_is_among_its_lengths(longest: int, lengths: tuple[int, ...]) -> None:
    assert tuple(sorted(setting.drafts for setting in settings_of({"ngram": longest})[2:])) == lengths


def test_the_first_settings_have_plain_decoding_the_governor_and_each_method() -> None:
    assert settings_of({"dflash": 3, "ngram": 16})[:4] == [PLAIN, GOVERNOR, Setting("dflash", 3), Setting("ngram", 4)]


def test_without_a_method_only_plain_decoding_is_left() -> None:
    assert settings_of({}) == [PLAIN]


def test_cells_and_settings_have_names_for_people() -> None:
    assert [Cell(1, 128).name, Cell(4, 4096).name] == ["1 request, 0.1k", "4 requests, 4k"]
    assert [setting.name for setting in (PLAIN, GOVERNOR, Setting("dflash", 7))] == [
        "no drafting",
        "governor",
        "dflash 7",
    ]
