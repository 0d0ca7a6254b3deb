"""Every module of mlx-lm has a row in `docs/models.md`, and the row is true."""

import pytest

from tests.engine.families import HEAD, LARGEST_DISTANCE, PAGE, TABLE, counts, row_of
from tests.engine.family_walk import walk
from tests.engine.tiny_families import NOT_MODELS, NOT_RUN, UNSOUND, families, family_model
from tests.shares import one_in

ROWS = {
    row.split("`")[1]: row
    for row in (TABLE.search(PAGE.read_text(encoding="utf-8")) or [HEAD])[0].removeprefix(HEAD).splitlines(True)
}


@pytest.mark.parametrize("family", one_in(8, families()))
def test_a_family_says_what_mlx_lm_says_and_its_row_is_true(family: str) -> None:
    assert ROWS.get(family) == row_of(family), "`python -m tests.engine.families` renews the page"


@pytest.mark.soak
@pytest.mark.parametrize("family", [name for name in families() if name not in NOT_MODELS | NOT_RUN | UNSOUND])
def test_other_weights_and_schedules_change_nothing(family: str) -> None:
    for seed in range(1, 6):
        seen = walk(family_model(family, seed=seed), seed=seed)
        assert (seed, seen.wrong) == (seed, [])
        assert seen.distance <= LARGEST_DISTANCE


def test_the_page_counts_its_rows_and_at_least_sixty_families_draft() -> None:
    rows = list(ROWS.values())
    assert sorted(ROWS) == families()
    assert counts(rows) in PAGE.read_text(encoding="utf-8")
    assert sum("n-grams" in row for row in rows) >= 60
