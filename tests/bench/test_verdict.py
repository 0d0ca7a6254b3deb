"""The arithmetic of the ten workloads; nothing here is timed."""

import pytest

from app.serving.sweep.grid import GOVERNOR, PLAIN, Setting
from bench.comparison.verdict import Rates, best_single, effective_setting, geometric_mean, paired, summarise

SHORT, LONG, OTHER = Setting("dflash", 2), Setting("dflash", 7), Setting("mtp", 2)

COUNTING = Rates(
    "counting",
    {PLAIN: (10, 1, 10), SHORT: (20, 2, 20), LONG: (40, 4, 40)},
    {PLAIN: (9, 0.9), LONG: (30, 3), GOVERNOR: (27, 2.7)},
)
SPELLING = Rates(
    "spelling",
    {PLAIN: (10, 10, 10), SHORT: (9, 9, 9), LONG: (2, 2, 2)},
    {PLAIN: (10, 10), GOVERNOR: (9.5, 9.5)},
)
HYBRID = Rates("hybrid", {PLAIN: (10, 10, 10), OTHER: (20, 20, 20)}, {PLAIN: (10,), OTHER: (20,), GOVERNOR: (20,)})
ALL = (COUNTING, SPELLING, HYBRID)


def test_ratios_are_paired_by_round() -> None:
    assert paired((20, 2, 22), (10, 1, 10)) == 2.0


def test_what_the_sweep_said_of_the_best_is_not_what_the_governor_is_compared_with() -> None:
    """The best setting reached 40 tokens/s in the sweep, but 30 in the rounds with the governor."""
    assert COUNTING.best == LONG
    assert COUNTING.ratio == pytest.approx(0.9)


def test_the_best_fixed_setting_differs_by_workload_and_may_be_plain() -> None:
    assert [rates.best for rates in ALL] == [LONG, PLAIN, OTHER]


def test_a_setting_without_its_drafter_is_plain() -> None:
    assert effective_setting(LONG, HYBRID.sweep) == PLAIN
    assert HYBRID.ratio_to(LONG) == 2.0


def test_the_best_single_setting_is_best_for_all_together() -> None:
    """Long drafts gain most in one workload and lose more in another; MTP drafts cost the other workloads nothing."""
    assert best_single((COUNTING.sweep, SPELLING.sweep)) == SHORT
    assert best_single([rates.sweep for rates in ALL]) == OTHER


def test_the_verdict_names_the_worst_the_mean_and_the_lead() -> None:
    verdict = summarise(ALL)
    assert (verdict.worst_name, verdict.worst) == ("counting", pytest.approx(0.9))
    assert verdict.mean == pytest.approx((0.9 * 0.95 * 1.0) ** (1 / 3))
    assert verdict.single == OTHER
    assert verdict.mean_over_single == pytest.approx((3.0 * 0.95 * 1.0) ** (1 / 3))


def test_the_geometric_mean_is_that_of_factors() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
