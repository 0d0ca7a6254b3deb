"""What is known of costs and acceptance: measured points, what lies between them, and how evidence outweighs belief."""

import pytest

from app.core.step import StepCost
from app.scheduler.costs import CostTable
from app.scheduler.estimates import Acceptance, History, Rates


def forwards(costs: CostTable, method: str, width: int, seconds: float, *, rows: int = 1, times: int = 2) -> None:
    for _ in range(times):
        costs.observe(method, rows=rows, width=width, seconds=seconds, draft_seconds=None)


def test_neighbours_are_joined_by_lines_and_elsewhere_half_is_believed() -> None:
    costs = CostTable()
    for method, width, seconds in (("off", 1, 1.0), ("ngram", 4, 2.0), ("ngram", 5, 4.0)):
        forwards(costs, method, width, seconds)
    curve = costs.curve("ngram", rows=1)
    assert [curve.seconds(width) for width in (1, 4, 4.5, 5)] == [1.0, 2.0, 3.0, 4.0]
    assert 1.04 < curve.seconds(3) < 1.67, "across a gap there may be a step"
    assert curve.seconds(9) == pytest.approx(8.0), "half as steep as before"


def test_a_width_that_another_drafter_measured_need_not_be_tried_again() -> None:
    costs = CostTable()
    for method, width, seconds in (("off", 1, 1.0), ("ngram", 5, 4.0), ("draft_model", 3, 2.0)):
        forwards(costs, method, width, seconds)
    curve = costs.curve("draft_model", rows=1)
    assert (curve.seconds(3), curve.seconds(5)) == (2.0, 4.0)


def test_drafting_is_interpolated_by_method_whatever_its_law() -> None:
    points = [("dflash", 1, 0.006), ("dflash", 7, 0.006), ("draft_model", 1, 0.002), ("draft_model", 16, 0.032)]
    costs = CostTable(StepCost(method, 1, drafts, 0.02, seconds) for method, drafts, seconds in points)
    assert costs.drafting("dflash", rows=1)(4) == pytest.approx(0.006)
    assert costs.drafting("draft_model", rows=1)(8) == pytest.approx(0.016)
    assert costs.drafting("draft_model", rows=3)(8) == pytest.approx(0.016), "what is nearest stands for a batch"
    assert costs.drafting("mtp", rows=1)(8) == 0.0, "an unknown method is free, so it is tried"


def test_one_timed_length_is_a_bound_for_the_others() -> None:
    costs = CostTable([StepCost("mtp", 1, 4, 0.02, 0.008)])
    drafting = costs.drafting("mtp", rows=1)
    assert (drafting(2), drafting(4), drafting(16)) == (0.004, 0.008, 0.008)


def test_drafting_is_timed_until_two_lengths_are_known_and_then_now_and_then() -> None:
    costs = CostTable()
    asked = []
    for step in range(200):
        drafts = 2 if step % 2 else 6
        timed = costs.must_time("ngram", rows=1, drafts=drafts)
        asked.append(timed)
        costs.observe("ngram", rows=1, width=1 + drafts, seconds=0.02, draft_seconds=0.001 if timed else None)
    assert asked[:3] == [True, True, False]
    assert 4 <= sum(asked[2:]) <= 7


def test_a_batch_is_expected_to_cost_what_as_many_tokens_of_one_row_cost() -> None:
    costs = CostTable([StepCost("off", 1, 0, 1.0), StepCost("ngram", 1, 3, 1.2), StepCost("ngram", 1, 7, 4.0)])
    curve = costs.curve("ngram", rows=4)
    assert curve.seconds(2) == pytest.approx(4.0)
    forwards(costs, "off", 1, 2.4, rows=4, times=3)
    assert costs.curve("ngram", rows=4).seconds(2) == pytest.approx(8.0), "measured twice as slow as it was expected"


def test_rows_that_never_ran_plainly_borrow_the_narrowest_cost_of_their_neighbours() -> None:
    costs = CostTable()
    forwards(costs, "ngram", 5, 2.0, rows=3)
    assert costs.curve("off", rows=3).narrowest_seconds == 2.0
    assert costs.curve("off", rows=4).narrowest_seconds == 1.0


def test_a_width_that_nobody_ran_for_long_is_tried_again() -> None:
    costs = CostTable()
    forwards(costs, "ngram", 9, 50.0)
    forwards(costs, "off", 1, 1.0, times=2_000)
    assert costs.curve("ngram", rows=1).seconds(9) < 1.2


def test_a_machine_that_runs_at_half_its_former_pace_is_not_thought_to_draft_for_free() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("ngram", 1, 4, 0.02)])
    forwards(costs, "off", 1, 0.02, times=60)
    assert costs.curve("ngram", rows=1).seconds(5) == pytest.approx(0.04, rel=0.1)


def test_what_was_learnt_survives_the_process() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("dflash", 1, 7, 0.02, 0.006)])
    forwards(costs, "off", 1, 0.03, times=50)
    restored = CostTable(costs.export())
    assert restored.curve("off", rows=1).narrowest_seconds == pytest.approx(0.03, rel=0.05)
    assert restored.drafting("dflash", rows=1)(7) == pytest.approx(0.006)
    assert restored.export() == costs.export()
    assert restored.knows_plain(1, 2)


def test_expected_tokens_are_the_sum_of_the_chances_to_survive() -> None:
    assert Rates(1.0, (0.5, 0.5, 0.5)).expected_tokens() == [1.0, 1.5, 1.75, 1.875]
    accepts = Acceptance(memory=1 - 1 / 64, prior_weight=2.0)
    for _ in range(1_000):
        accepts.observe(asked=3, drafted=3, accepted=1)
    assert accepts.rates(Rates.flat(1.0, 0.5)).expected_tokens()[3] == pytest.approx(2.0, abs=0.25)


def test_a_proposal_that_ends_early_counts_as_a_miss_where_it_ended() -> None:
    accepts, prior = Acceptance(memory=1 - 1 / 64, prior_weight=2.0), Rates.flat(0.5, 0.9)
    for _ in range(1_000):
        accepts.observe(asked=8, drafted=2, accepted=2)
    assert accepts.rates(prior).expected_tokens()[8] == pytest.approx(3.0, abs=0.1)
    for _ in range(1_000):
        accepts.observe(asked=8, drafted=0, accepted=0)
    assert accepts.rates(prior).proposal < 0.05


def test_a_few_cycles_of_a_request_outweigh_the_history_of_its_model() -> None:
    history = History()
    for step in range(500):
        history.observe("dflash", f"old {step}", 100, asked=4, drafted=4, accepted=4)
    assert history.rates("dflash", "new", 100).positions[0] > 0.95
    for _ in range(6):
        history.observe("dflash", "new", 100, asked=4, drafted=4, accepted=0)
    assert history.rates("dflash", "new", 100).positions[0] < 0.4
    assert history.rates("dflash", "newer", 100).positions[0] > 0.9, "the others do not pay for it"
    history.forget("new")
    assert history.rates("dflash", "new", 100) == history.rates("dflash", "newer", 100)


def test_positions_beyond_what_was_drafted_follow_those_before_them() -> None:
    history = History()
    for _ in range(100):
        history.observe("mtp", "r", 0, asked=2, drafted=2, accepted=2)
    assert history.rates("mtp", "r", 0).positions[9] > 0.9
    for _ in range(100):
        history.observe("mtp", "r", 0, asked=2, drafted=2, accepted=1)
    assert history.rates("mtp", "r", 0).positions[9] < 0.5


def test_contexts_are_told_apart_and_a_longer_one_starts_from_the_shorter() -> None:
    history = History()
    for _ in range(100):
        history.observe("eagle3", "r", 500, asked=4, drafted=4, accepted=4)
    assert history.rates("eagle3", "s", 20_000).positions[0] > 0.9
    for _ in range(100):
        history.observe("eagle3", "r", 20_000, asked=4, drafted=4, accepted=0)
    assert history.rates("eagle3", "s", 20_000).positions[0] < 0.1
    assert history.rates("eagle3", "s", 500).positions[0] > 0.9
