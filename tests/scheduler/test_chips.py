"""The governor on the recorded texts, at the prices of real chips: near the best fixed setting of each text."""

from functools import cache

import pytest

from app.models.draft_lengths import draft_lengths
from app.serving.sweep.grid import PLAIN
from bench.comparison.verdict import geometric_mean
from tests.scheduler.chips import CHIPS, MODELS, TABLES, ChipTable, fixed_rates_on, governed_rates_on
from tests.scheduler.replayed import Step
from tests.shares import one_in

NOTHING_PAYS = 1.01
"""Ratio of the best fixed setting to plain decoding below which no draft length pays."""


@cache
def ratios(table: ChipTable) -> dict[str, tuple[float, float]]:
    """Return two ratios by workload: governor to best fixed setting, and best fixed setting to plain decoding."""
    fixed, governed = fixed_rates_on(table), governed_rates_on(table, TABLES.index(table))
    best = {name: max(settings.values()) for name, settings in fixed.items()}
    return {name: (governed[name] / best[name], best[name] / fixed[name][PLAIN]) for name in fixed}


@pytest.mark.parametrize("table", one_in(14, TABLES), ids=lambda table: table.name)
def test_on_a_chip_it_earns_nearly_what_the_best_setting_of_each_text_would(table: ChipTable) -> None:
    by_text = ratios(table)
    assert geometric_mean(ratio for ratio, _ in by_text.values()) >= 0.9, by_text


@pytest.mark.soak
@pytest.mark.landing
def test_over_all_chips_models_and_contexts_the_mean_is_near_the_best() -> None:
    means = {table.name: geometric_mean(ratio for ratio, _ in ratios(table).values()) for table in TABLES}
    assert geometric_mean(means.values()) >= 0.97, means


@pytest.mark.soak
@pytest.mark.landing
def test_where_no_length_pays_it_stays_at_plain_decoding() -> None:
    lost = {
        (table.name, name): ratio
        for table in TABLES
        for name, (ratio, gain) in ratios(table).items()
        if gain < NOTHING_PAYS
    }
    assert len(lost) >= 10
    assert geometric_mean(lost.values()) >= 0.98, lost


@pytest.mark.parametrize("name", ["M4 8B 1k", "M4 32B 1k", "M5 8B 1k", "M5 32B 1k"])
def test_one_draft_more_than_a_cheap_length_costs_another_reading(name: str) -> None:
    table = next(table for table in TABLES if table.name == name)
    assert draft_lengths(table.cheap_tokens, 1) == (1, 2, 4, 9, 15, 31)
    cost = {drafts: table.of(Step("ngram", 1, drafts, 1_024))[1] for drafts in range(1, 17)}
    assert all(cost[length + 1] > 1.15 * cost[length] for length in (4, 9))


def test_the_tables_say_what_was_published() -> None:
    pro, newest = CHIPS[1], CHIPS[2]
    assert [pro.products(tokens) for tokens in (1, 4, 6, 8, 32)] == [1.0, 1.47, 2.07, 2.69, 4.0]
    assert [round(76 * newest.products(tokens)) for tokens in (1, 3, 5, 8, 12, 16)] == [76, 85, 108, 168, 295, 296]
    assert pro.products(33) == 2 * pro.products(32)
    assert {weights.name: weights.kv_kilobytes for weights in MODELS} == {"8B": 147, "32B": 262, "30B-A3B": 98}
