"""Estimates of costs and acceptance: measured points, interpolation between them, and evidence against priors."""

import pytest

from app.core.step import Offer, StepCost
from app.scheduler.costs import CostTable, Shape
from app.scheduler.estimates import AcceptanceHistory, DraftingRow, DraftObservation, Kind


def forwards(costs: CostTable, method: str, width: int, seconds: float, *, rows: int = 1, times: int = 2) -> None:
    for _ in range(times):
        costs.observe(Shape(method, rows, width - 1), seconds=seconds, draft_seconds=None)


def observe(
    history: AcceptanceHistory, method: str, row: DraftingRow, counts: tuple[int, int, int], *, times: int = 1
) -> None:
    """Observe a cycle `times` times; `counts` are drafts requested, drafted and accepted."""
    for _ in range(times):
        history.observe(DraftObservation(method, *counts, row))


def chance(history: AcceptanceHistory, method: str, row: DraftingRow, position: int = 0) -> float:
    """Return the probability that the draft at `position` is accepted if those before it were."""
    tokens = history.expected_tokens(method, row)[0]
    return (tokens[position + 1] - tokens[position]) / (tokens[position] - tokens[position - 1] if position else 1.0)


def test_neighbours_are_joined_by_lines_and_beyond_them_half_is_believed() -> None:
    points = [("off", 0, 1.0), ("ngram", 3, 2.0), ("ngram", 4, 4.0)]
    costs = CostTable(StepCost(method, 1, drafts, seconds) for method, drafts, seconds in points)
    curve = costs.curves("ngram", 1).forward
    assert [curve.at(drafts) for drafts in (0, 3, 4)] == [1.0, 2.0, 4.0]
    assert curve.at(2) == pytest.approx(5 / 3)
    assert curve.at(8) == pytest.approx(4.0 + 4 * 3 / 8), "half as steep as all before it"


def test_a_width_that_another_drafter_measured_need_not_be_tried_again() -> None:
    points = [("off", 0, 1.0), ("ngram", 4, 4.0), ("draft_model", 2, 2.0)]
    costs = CostTable(StepCost(method, 1, drafts, seconds) for method, drafts, seconds in points)
    curve = costs.curves("draft_model", 1).forward
    assert (curve.at(2), curve.at(4)) == (2.0, 4.0)


def test_drafting_is_interpolated_by_method_whatever_its_law() -> None:
    points = [("dflash", 1, 0.006), ("dflash", 7, 0.006), ("draft_model", 1, 0.002), ("draft_model", 16, 0.032)]
    costs = CostTable(StepCost(method, 1, drafts, 0.02, seconds) for method, drafts, seconds in points)
    assert costs.curves("dflash", 1).drafting.at(4) == pytest.approx(0.006)
    assert costs.curves("draft_model", 1).drafting.at(8) == pytest.approx(0.016)
    assert costs.curves("draft_model", 3).drafting.at(8) == pytest.approx(0.016), "what is nearest stands for a batch"
    assert costs.curves("mtp", 1).drafting.at(8) == 0.0, "an unknown method is free, so it is tried"


@pytest.mark.parametrize(
    ("timed", "longer"), [({4: 0.008}, 0.032), ({2: 0.006, 4: 0.008}, 0.020), ({2: 0.006, 4: 0.006}, 0.006)]
)
def test_beyond_the_longest_timed_length_drafting_rises_as_before_it(timed: dict[int, float], longer: float) -> None:
    costs = CostTable(
        StepCost(method, 1, drafts, 0.02, seconds) for method in ("mtp", "dflash") for drafts, seconds in timed.items()
    )
    assert costs.curves("mtp", 1).drafting.at(16) == pytest.approx(longer)
    assert costs.curves("dflash", 1).drafting.at(16) == timed[4], "its drafts come at once"


def test_drafting_is_timed_until_two_lengths_are_known_and_then_now_and_then() -> None:
    costs = CostTable()
    asked = []
    for step in range(200):
        drafts = 2 if step % 2 else 6
        timed = costs.must_time("ngram", rows=1, drafts=drafts)
        asked.append(timed)
        costs.observe(Shape("ngram", 1, drafts), seconds=0.02, draft_seconds=0.001 if timed else None)
    assert asked[:3] == [True, True, False]
    assert 4 <= sum(asked[2:]) <= 7


def test_a_batch_is_expected_to_cost_what_as_many_tokens_of_one_row_cost() -> None:
    costs = CostTable([StepCost("off", 1, 0, 1.0), StepCost("ngram", 1, 3, 1.2), StepCost("ngram", 1, 7, 4.0)])
    assert costs.curves("ngram", 4).forward.at(1) == pytest.approx(4.0)
    forwards(costs, "off", 1, 2.4, rows=4, times=60)
    assert costs.curves("ngram", 4).forward.at(1) == pytest.approx(8.0, rel=0.01), "twice as slow as it was expected"


def test_rows_that_never_ran_plainly_borrow_the_narrowest_cost_of_their_neighbours() -> None:
    costs = CostTable([StepCost("ngram", 3, 4, 2.0)])
    assert costs.curves("off", 3).plain == 2.0
    assert costs.curves("off", 4).plain == 1.0


def test_a_width_that_nobody_ran_for_long_is_tried_again() -> None:
    costs = CostTable()
    forwards(costs, "ngram", 9, 50.0)
    forwards(costs, "off", 1, 1.0, times=2_000)
    assert costs.curves("ngram", 1).forward.at(8) < 1.2


def test_curves_stay_while_steps_cost_what_they_show_and_follow_what_changes_or_goes_stale() -> None:
    costs = CostTable()
    forwards(costs, "off", 1, 1.0)
    forwards(costs, "ngram", 5, 3.0, times=20)
    drawn = costs.curves("ngram", 1)
    assert drawn.forward.at(4) > 2.5
    forwards(costs, "off", 1, 1.001, times=10)
    assert costs.curves("ngram", 1) is drawn
    forwards(costs, "off", 1, 1.5)
    assert costs.curves("ngram", 1).plain > 1.04
    for _ in range(1_200):
        forwards(costs, "off", 1, 1.5, times=1)
        last = costs.curves("ngram", 1)
    assert last.forward.at(4) < 2.0, "a width that nobody ran for long is forgotten on the quietest machine, too"


def test_the_first_sample_of_a_shape_is_not_believed_alone() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("ngram", 1, 7, 0.02)])
    forwards(costs, "ngram", 4, 0.5)
    assert costs.curves("ngram", 1).forward.at(3) < 0.03, "a pause of the machine"
    forwards(costs, "ngram", 4, 0.05, times=8)
    assert costs.curves("ngram", 1).forward.at(3) > 0.035, "it is so"


def test_a_long_context_slows_everything_down_and_short_ones_are_not_blamed_for_it() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("ngram", 1, 15, 0.02, 0.001)])
    for _ in range(40):
        costs.observe(Shape("ngram", 1, 15), seconds=0.042, draft_seconds=0.002, context=1_500)
    assert costs.curves("ngram", 1).cycle(15)[0] == pytest.approx(2.1, rel=0.05)
    forwards(costs, "off", 1, 0.01, times=10)
    assert costs.curves("ngram", 1).cycle(15)[0] == pytest.approx(2.1, rel=0.05), "as in a short context before"


def test_beyond_noisy_neighbours_no_cliff_is_believed() -> None:
    points = [("off", 0, 0.0038), ("ngram", 7, 0.0050), ("dflash", 13, 0.0055), ("dflash", 15, 0.0072)]
    costs = CostTable(StepCost(method, 1, drafts, seconds) for method, drafts, seconds in points)
    assert costs.curves("dflash", 4).forward.at(7) < 0.0095, "32 tokens of one row, twice as many as were measured"


def test_at_best_a_width_that_was_never_measured_costs_what_the_next_narrower_one_does() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.02), StepCost("mtp", 1, 2, 0.02), StepCost("mtp", 1, 5, 0.05)])
    curves = costs.curves("mtp", 1)
    assert curves.cycle(3)[0] == pytest.approx(1.5)
    assert [curves.cycle(drafts)[1] for drafts in (2, 3, 4, 5, 9)] == [1.0, 1.0, 1.0, 2.5, 2.5]


def test_a_cycle_is_told_in_plain_steps() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("dflash", 1, 7, 0.02, 0.005)])
    assert costs.curves("dflash", 1).cycle(7)[0] == pytest.approx(2.5)
    for method, width, seconds in (("dflash", 8, 0.04), ("off", 1, 0.01)):
        forwards(costs, method, width, seconds, times=30)
    assert 3.5 < costs.curves("dflash", 1).cycle(7)[0] < 5.1, "and drawn anew"


def test_a_machine_that_runs_at_half_its_former_pace_is_not_thought_to_draft_for_free() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("ngram", 1, 4, 0.02)])
    forwards(costs, "off", 1, 0.02, times=60)
    assert costs.curves("ngram", 1).forward.at(4) == pytest.approx(0.04, rel=0.1)


def test_what_was_learnt_survives_the_process() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("dflash", 1, 7, 0.02, 0.006)])
    forwards(costs, "off", 1, 0.03, times=50)
    restored = CostTable(costs.export())
    assert restored.curves("off", 1).plain == pytest.approx(0.03, rel=0.05)
    assert restored.curves("dflash", 1).drafting.at(7) == pytest.approx(0.006)
    assert restored.export() == costs.export()
    assert restored.knows_plain(1, 2)


def test_expected_tokens_are_the_sum_of_the_chances_to_survive() -> None:
    history, row = AcceptanceHistory(), DraftingRow("r")
    assert history.expected_tokens("mtp", row)[0][:4] == pytest.approx([1.0, 1.667, 2.111, 2.407], abs=0.001), (
        "nothing is known yet"
    )
    assert history.expected_tokens("mtp", row)[1] == 0
    observe(history, "mtp", row, (3, 3, 1), times=1_000)
    assert history.expected_tokens("mtp", row)[0][3] == pytest.approx(2.0, abs=0.25)


def test_what_was_asked_for_and_not_drafted_counts_as_a_miss() -> None:
    history, row = AcceptanceHistory(), DraftingRow("r")
    observe(history, "mtp", row, (8, 2, 2), times=1_000)
    assert history.expected_tokens("mtp", row)[0][8] == pytest.approx(3.0, abs=0.3)
    observe(history, "mtp", row, (8, 0, 0), times=1_000)
    assert chance(history, "mtp", row) < 0.05


def test_a_few_cycles_of_a_request_outweigh_what_others_had() -> None:
    history, new, newer = AcceptanceHistory(), DraftingRow("new", 100), DraftingRow("newer", 100)
    for step in range(500):
        observe(history, "dflash", DraftingRow(f"old {step}", 100), (4, 4, 4))
    assert chance(history, "dflash", new, 1) > 0.95
    observe(history, "dflash", new, (4, 4, 0), times=12)
    assert chance(history, "dflash", new, 1) < 0.4
    assert chance(history, "dflash", newer, 1) > 0.9, "the others do not pay for it"
    history.forget("new")
    assert history.expected_tokens("dflash", new) == history.expected_tokens("dflash", newer)


def sure(name: str, confidence: float) -> DraftingRow:
    return DraftingRow(name, confidence=confidence)


def test_how_sure_the_target_is_tells_how_it_goes_on() -> None:
    """Drafts are right for long, then wrong for long: confidence predicts this, the average acceptance does not."""
    history = AcceptanceHistory()
    for _ in range(40):
        for confidence, accepted in ((0.999, 7), (0.4, 0)):
            for _ in range(10):
                observe(history, "dflash", sure("old", confidence), (7, 7, accepted))
    assert history.expected_tokens("dflash", sure("new", 0.995))[0][7] > 6
    assert history.expected_tokens("dflash", sure("new", 0.3))[0][7] < 1.5
    assert 2 < history.expected_tokens("dflash", DraftingRow("new"))[0][7] < 6, "before its first token"


def test_a_confidence_that_was_never_seen_is_judged_like_all_of_them() -> None:
    history = AcceptanceHistory()
    observe(history, "dflash", sure("old", 0.999), (7, 7, 7), times=100)
    assert chance(history, "dflash", sure("new", 0.95)) == chance(history, "dflash", DraftingRow("new"))


def test_what_is_known_of_a_drafter_weighs_less_the_longer_ago_it_missed() -> None:
    history, weights = AcceptanceHistory(), list[float]()
    observe(history, "mtp", DraftingRow("r"), (4, 4, 0), times=30)
    for tokens in (0, 64, 426):
        history.tokens += tokens
        weights.append(history.expected_tokens("mtp", DraftingRow("r"))[1])
    assert weights == [pytest.approx(30), pytest.approx(15), pytest.approx(3.5, abs=0.1)]
    assert history.expected_tokens("mtp", DraftingRow("other"))[1] == weights[-1], "whichever request wrote them"
    observe(history, "mtp", DraftingRow("r"), (4, 4, 4))
    assert history.expected_tokens("mtp", DraftingRow("r"))[1] < 4, "what hits may go on"
    observe(history, "mtp", DraftingRow("r"), (4, 4, 3))
    assert history.expected_tokens("mtp", DraftingRow("r"))[1] > 30


def test_misses_behind_sure_tokens_fade_though_it_also_misses_behind_others() -> None:
    history = AcceptanceHistory()
    observe(history, "dflash", sure("r", 0.999), (7, 7, 0), times=3)
    history.tokens += 320
    observe(history, "dflash", sure("r", 0.95), (7, 7, 3))
    assert history.expected_tokens("dflash", sure("r", 0.999))[1] == pytest.approx(0.5)


def test_the_record_of_a_request_fades_while_a_drafter_is_not_asked() -> None:
    history = AcceptanceHistory()
    for number in range(30):
        observe(history, "mtp", DraftingRow(f"old {number}", 10), (4, 4, 4))
    observe(history, "mtp", DraftingRow("r", 10), (4, 4, 0), times=8)
    assert chance(history, "mtp", DraftingRow("r", 500)) > chance(history, "mtp", DraftingRow("r", 11)) + 0.1


def test_a_new_request_is_judged_by_whole_requests_not_by_how_their_first_drafts_fared() -> None:
    history = AcceptanceHistory()
    for number in range(200):
        observe(history, "mtp", DraftingRow(f"old {number}"), (4, 4, 0))
        observe(history, "mtp", DraftingRow(f"old {number}"), (4, 4, 4), times=4)
    assert chance(history, "mtp", DraftingRow("new")) > 0.7


def test_an_offer_is_believed_by_the_length_of_its_match() -> None:
    history = AcceptanceHistory()
    short, long = (DraftingRow("r", offered={"ngram": Offer((1, 2, 3), matched)}) for matched in (2, 30))
    assert chance(history, "ngram", short) < 0.8
    assert chance(history, "ngram", long) > 0.9
    for _ in range(50):
        history.observe(DraftObservation("ngram", 1, 1, 0, short, Kind.of("ngram", short.offered["ngram"]).match))
    assert chance(history, "ngram", short) < 0.1
    assert chance(history, "ngram", long) > 0.9


def test_positions_beyond_what_was_drafted_follow_those_before_them() -> None:
    history, row = AcceptanceHistory(), DraftingRow("r")
    observe(history, "mtp", row, (2, 2, 2), times=100)
    assert chance(history, "mtp", row, 10) > 0.9
    observe(history, "mtp", row, (2, 2, 0), times=100)
    assert chance(history, "mtp", row, 10) < 0.5


def test_contexts_are_told_apart_and_a_longer_one_starts_from_the_shorter() -> None:
    history, short, long = AcceptanceHistory(), DraftingRow("s", 500), DraftingRow("s", 20_000)
    observe(history, "eagle3", DraftingRow("r", 500), (4, 4, 4), times=100)
    assert chance(history, "eagle3", long, 1) > 0.9
    observe(history, "eagle3", DraftingRow("q", 20_000), (4, 4, 0), times=100)
    assert chance(history, "eagle3", long) < 0.1
    assert chance(history, "eagle3", short, 1) > 0.9


def test_what_a_drafter_missed_is_counted_until_it_drafts_again() -> None:
    history = AcceptanceHistory()
    assert history.unread("draft_model", DraftingRow("r", 900)) == 900
    observe(history, "draft_model", DraftingRow("r", 900), (4, 4, 4))
    assert history.unread("draft_model", DraftingRow("r", 905)) == 0, "any cycle leaves a few"
    assert history.unread("draft_model", DraftingRow("r", 1_000)) == 100
    assert history.unread("ngram", DraftingRow("r", 1_000, {"ngram": Offer()})) == 0


def test_a_batch_is_drafted_for_by_the_law_that_one_row_shows_at_its_own_cost() -> None:
    points = [("dflash", 1, 1, 0.005), ("dflash", 1, 7, 0.006), ("dflash", 4, 7, 0.012)]
    chain = [("eagle3", 1, 1, 0.002), ("eagle3", 1, 15, 0.03), ("eagle3", 4, 5, 0.02)]
    costs = CostTable(StepCost(method, rows, drafts, 0.02, seconds) for method, rows, drafts, seconds in points + chain)
    assert costs.curves("dflash", 4).drafting.at(1) == pytest.approx(0.01), "one forward, however many drafts"
    assert costs.curves("eagle3", 4).drafting.at(1) == pytest.approx(0.004), "a forward for each"


def test_the_first_drafting_of_a_shape_warms_up_as_a_forward_does() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("dflash", 1, 7, 0.02, 0.006)])
    for draft_seconds in (0.09, 0.01):
        costs.observe(Shape("dflash", 4, 7), seconds=0.1, draft_seconds=draft_seconds)
    assert costs.curves("dflash", 4).drafting.at(7) == pytest.approx(0.01)


def test_a_long_context_makes_wide_verifies_dearer_than_plain_steps() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("ngram", 1, 4, 0.02), StepCost("ngram", 1, 9, 0.03)])
    for shape, seconds in ((Shape("off", 1, 0), 0.02), (Shape("ngram", 1, 4), 0.04), (Shape("ngram", 1, 9), 0.12)):
        for _ in range(20):
            costs.observe(shape, seconds=seconds, draft_seconds=None, context=9_000)
    there, short = costs.curves("ngram", 1, 9_000), costs.curves("ngram", 1)
    assert [round(there.cycle(drafts)[0], 1) for drafts in (4, 9)] == [2.0, 6.0]
    assert [round(short.cycle(drafts)[0], 1) for drafts in (4, 9)] == [2.0, 3.0], "a short one is not blamed for it"
    twice = costs.curves("ngram", 1, 20_000)
    assert [round(twice.cycle(drafts)[0], 1) for drafts in (4, 9)] == [2.0, 7.0], (
        "and one twice as long adds twice that"
    )


def test_what_one_width_shows_of_a_context_stands_for_the_others_until_they_ran_there() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("ngram", 1, 4, 0.02), StepCost("ngram", 1, 9, 0.03)])
    for _ in range(20):
        costs.observe(Shape("off", 1, 0), seconds=0.02, draft_seconds=None, context=9_000)
    assert costs.curves("ngram", 1).cycle(9)[0] == pytest.approx(3.0, rel=0.05)
    assert costs.curves("ngram", 1, 9_000).cycle(9)[0] == pytest.approx(2.0, rel=0.05), "keys are read once for both"
    assert costs.knows_context(9_000)


def test_plain_decoding_is_unknown_where_only_wide_steps_showed_that_the_context_slows_them() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("ngram", 1, 9, 0.03)])
    assert costs.knows_context(9_000)
    for _ in range(3):
        costs.observe(Shape("ngram", 1, 9), seconds=0.06, draft_seconds=None, context=9_000)
    assert not costs.knows_context(9_000)
    assert costs.knows_context(100)


def test_what_contexts_cost_survives_the_process() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("dflash", 1, 9, 0.03, 0.004)])
    for _ in range(20):
        costs.observe(Shape("off", 1, 0), seconds=0.02, draft_seconds=None, context=9_000)
        costs.observe(Shape("dflash", 1, 9), seconds=0.13, draft_seconds=0.01, context=9_000)
    restored = CostTable(costs.export())
    for context in (0, 9_000, 40_000):
        cycles = [table.curves("dflash", 1, context).cycle(9)[0] for table in (costs, restored)]
        assert cycles[0] == pytest.approx(cycles[1], rel=0.02), context
    assert {cost.context_tokens for cost in costs.export()} == {0, 8_192}


def test_on_a_chip_whose_kernels_step_a_length_between_two_costs_what_the_longer_one_does() -> None:
    points = [("off", 0, 1.0), ("ngram", 4, 1.5), ("ngram", 9, 3.0)]
    costs = CostTable(
        (StepCost(method, 1, drafts, seconds) for method, drafts, seconds in points), cheap_tokens=(5, 10)
    )
    curves = costs.curves("ngram", 1)
    assert [curves.forward.at(drafts) for drafts in (0, 1, 4, 5, 9)] == [1.0, 1.5, 1.5, 3.0, 3.0]
    assert curves.cycle(5)[1] == 1.5, "a trial may hope that it is as cheap as the next narrower one"
    assert costs.curves("ngram", 2).forward.at(3) == 3.0, "eight tokens of two rows"


def test_a_batch_that_was_never_measured_is_judged_by_the_next_smaller_one() -> None:
    points = [("off", 1, 0, 1.0), ("ngram", 1, 7, 1.1), ("off", 4, 0, 2.0), ("ngram", 4, 7, 8.0)]
    costs = CostTable(StepCost(*point) for point in points)
    assert costs.curves("ngram", 8).forward.at(3) == pytest.approx(8.0), "as many tokens as four rows with seven drafts"
    assert costs.curves("ngram", 2).forward.at(3) == pytest.approx(1.1), "as one row with seven"


def test_what_requests_taught_is_marked() -> None:
    costs = CostTable([StepCost("off", 1, 0, 0.01), StepCost("ngram", 1, 4, 0.02, is_learnt=True)])
    assert {cost.drafts: cost.is_learnt for cost in costs.export()} == {0: False, 4: True}
    forwards(costs, "off", 1, 0.01)
    assert all(cost.is_learnt for cost in costs.export())


def test_a_step_that_read_what_a_drafter_had_missed_does_not_tell_what_a_draft_costs() -> None:
    table = CostTable([StepCost("off", 1, 0, 0.02)])
    shape = Shape("draft_model", 1, 1)
    table.observe(shape, seconds=0.0, draft_seconds=0.5)
    assert not table.knows_drafting("draft_model"), "or fifteen would be tried next, as if they were free"
    table.observe(shape, seconds=0.05, draft_seconds=0.02)
    assert table.knows_drafting("draft_model")


def test_what_a_warm_up_adds_fills_gaps_and_replaces_nothing() -> None:
    table = CostTable([StepCost("off", 1, 0, 0.02), StepCost("ngram", 1, 1, 0.03)])
    for _ in range(3):
        table.observe(Shape("off", 1, 0), seconds=0.02, draft_seconds=0.0)
    version = table.version
    table.add([StepCost("off", 1, 0, 0.5), StepCost("ngram", 1, 1, 0.5), StepCost("ngram", 1, 7, 0.06)])
    costs = {(cost.method, cost.drafts): cost.seconds for cost in table.export()}
    assert costs == {("off", 0): 0.02, ("ngram", 1): 0.03, ("ngram", 7): 0.06}
    assert table.curves("ngram", 1).forward.at(7) == 0.06, "known curves are drawn again"
    assert table.version > version, "and choices are weighed again"
