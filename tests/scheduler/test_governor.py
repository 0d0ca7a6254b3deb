"""The governor on simulated machines: never slower than plain, near the best fixed length, and it says why."""

import re
from collections.abc import Callable

import pytest

from app.scheduler.estimates import Acceptance, CostTable
from app.scheduler.speculation import Choice, DraftObservation, Governor, StepObservation
from tests.scheduler.simulated import Drafter, Machine, best_fixed_rate, fixed_rate, governed_rate

COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda width: 0.020 * (1 + 0.002 * (width - 1)),
    "slow growth": lambda width: 0.020 * (1 + 0.05 * (width - 1)),
    "linear": lambda width: 0.020 * (1 + 0.2 * (width - 1)),
    "steep": lambda width: 0.020 * (1 + 0.5 * (width - 1)),
    "a step after four": lambda width: 0.020 if width <= 4 else 0.050,
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("draft_seconds", [0.0, 0.003])
def test_useless_drafts_cost_at_most_three_percent(cost: str, draft_seconds: float) -> None:
    machine = Machine(COSTS[cost], {"draft_model": Drafter(0.0, draft_seconds)}, noise=0.05)
    plain = fixed_rate(machine, Choice())
    assert governed_rate(machine, steps=2_000) >= 0.97 * plain


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("acceptance", [0.4, 0.7, 0.95])
def test_the_length_found_earns_what_the_best_fixed_one_earns(cost: str, acceptance: float) -> None:
    machine = Machine(COSTS[cost], {"draft_model": Drafter(acceptance, 0.001)}, noise=0.05)
    assert governed_rate(machine, steps=2_000) >= 0.95 * best_fixed_rate(machine)


@pytest.mark.parametrize("machine_costs", ["flat", "linear"])
def test_lookup_that_rarely_finds_anything_costs_nothing(machine_costs: str) -> None:
    machine = Machine(COSTS[machine_costs], {"ngram": Drafter(0.2, 0.0, proposal_rate=0.05)}, noise=0.05)
    assert governed_rate(machine, steps=2_000) >= 0.97 * fixed_rate(machine, Choice())


def test_the_better_of_two_drafters_is_found() -> None:
    slow_but_right = Drafter(0.9, 0.002)
    fast_but_wrong = Drafter(0.1, 0.0)
    for drafters in (
        {"draft_model": slow_but_right, "ngram": fast_but_wrong},
        {"draft_model": Drafter(0.1, 0.002), "ngram": Drafter(0.9, 0.0)},
    ):
        machine = Machine(COSTS["slow growth"], drafters, noise=0.05)
        alone = [best_fixed_rate(Machine(machine.verify_seconds, {name: one})) for name, one in drafters.items()]
        assert governed_rate(machine, steps=2_000) >= 0.9 * max(alone)


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    governor = Governor()
    governed_rate(Machine(COSTS["linear"], {"draft_model": Drafter(0.0, 0.001)}), 1_000, governor=governor)
    predictable = Machine(COSTS["linear"], {"draft_model": Drafter(0.95, 0.001)})
    governed_rate(predictable, 1_100, governor=governor)  # the rarest probes are 1,024 steps apart
    assert governed_rate(predictable, 1_000, governor=governor) >= 0.95 * best_fixed_rate(predictable)


def test_a_machine_that_slows_down_on_wide_forwards_is_noticed() -> None:
    governor = Governor()
    governed_rate(Machine(COSTS["flat"], {"draft_model": Drafter(0.6, 0.001)}), 500, governor=governor)
    steep = Machine(COSTS["steep"], {"draft_model": Drafter(0.6, 0.001)})
    governed_rate(steep, 500, governor=governor)
    assert governed_rate(steep, 1_000, governor=governor) >= 0.95 * best_fixed_rate(steep)


def test_plain_decoding_is_measured_first_and_again_later() -> None:
    governor, machine = Governor(), Machine(COSTS["flat"], {"draft_model": Drafter(1.0)})
    lengths = []
    for _ in range(600):
        choice = governor.choose(1, 1, ("draft_model",))
        lengths.append(choice.num_draft_tokens)
        assert choice.num_draft_tokens or "measuring" in choice.reason
        drafts = (DraftObservation(choice.method, choice.num_draft_tokens, choice.num_draft_tokens, 0),)
        width = 1 + choice.num_draft_tokens
        governor.observe(StepObservation(1, width, machine.verify_seconds(width) / width, 0.0, drafts))
    assert lengths[:3] == [0, 0, 0]
    assert 3 < lengths.count(0) < 20


def test_a_plain_choice_says_why_with_numbers() -> None:
    governor = Governor()
    governed_rate(Machine(COSTS["steep"], {"draft_model": Drafter(0.0, 0.01)}), 500, governor=governor)
    choice = governor.choose(1, 1, ("draft_model",))
    assert choice.num_draft_tokens == 0
    numbers = r"drafting 1 with draft_model costs 2\.\dx a plain step, acceptance 0\.[01]\d: plain is faster"
    assert re.fullmatch(numbers, choice.reason), choice.reason


def test_probes_become_rare_while_they_lose() -> None:
    governor, machine = Governor(), Machine(COSTS["steep"], {"draft_model": Drafter(0.0, 0.01)})
    governed_rate(machine, 1_000, governor=governor)
    probed = 0
    for _ in range(2_048):
        choice = governor.choose(1, 1, ("draft_model",))
        probed += choice.num_draft_tokens > 0
        width = 1 + choice.num_draft_tokens
        drafts = (DraftObservation(choice.method, choice.num_draft_tokens, choice.num_draft_tokens, 0),)
        governor.observe(StepObservation(1, width, machine.verify_seconds(width), 0.0, drafts))
    assert 0 < probed <= 16


def test_one_slow_step_does_not_change_the_mind() -> None:
    governor, machine = Governor(), Machine(COSTS["slow growth"], {"draft_model": Drafter(0.9)})
    governed_rate(machine, 500, governor=governor)
    before = governor.choose(1, 1, ("draft_model",))
    drafts = (DraftObservation("draft_model", before.num_draft_tokens, before.num_draft_tokens, 2),)
    governor.observe(StepObservation(1, 1 + before.num_draft_tokens, 30.0, 0.0, drafts))
    assert governor.choose(1, 1, ("draft_model",)).num_draft_tokens > 0


def test_a_step_in_which_the_drafter_read_a_prompt_says_nothing_about_costs() -> None:
    taught, spared = Governor(), Governor()
    machine = Machine(COSTS["linear"], {"draft_model": Drafter(0.7, 0.001)})
    for governor in (taught, spared):
        governed_rate(machine, 300, governor=governor)
    for _ in range(50):
        drafts = (DraftObservation("draft_model", 4, 4, 3),)
        spared.observe(StepObservation(1, 5, 9.0, 5.0, drafts, typical=False))
        taught.observe(StepObservation(1, 5, 9.0, 5.0, drafts))
    assert taught.choose(1, 1, ("draft_model",)).num_draft_tokens == 0
    assert spared.choose(1, 1, ("draft_model",)).num_draft_tokens > 0


def test_lengths_still_compare_on_an_engine_that_measures_no_time() -> None:
    governor = Governor()
    for _ in range(50):
        choice = governor.choose(1, 1, ("ngram",))
        drafts = (DraftObservation(choice.method, choice.num_draft_tokens, choice.num_draft_tokens, 0),)
        governor.observe(StepObservation(1, 1 + choice.num_draft_tokens, 0.0, 0.0, drafts))
    assert governor.choose(1, 1, ("ngram",)).num_draft_tokens <= 1


def test_expected_tokens_are_the_sum_of_the_chances_to_survive() -> None:
    accepts = Acceptance(maximum=3, prior=0.5, proposal_prior=1.0)
    assert accepts.expected_tokens() == [1.0, 1.5, 1.75, 1.875]
    for _ in range(1_000):
        accepts.observe(asked=3, drafted=3, accepted=1)
    assert accepts.expected_tokens()[3] == pytest.approx(2.0, abs=0.05)


def test_a_proposal_that_ends_early_counts_as_a_miss_where_it_ended() -> None:
    accepts = Acceptance(maximum=8, prior=0.9, proposal_prior=0.5)
    for _ in range(1_000):
        accepts.observe(asked=8, drafted=2, accepted=2)
    assert accepts.expected_tokens()[8] == pytest.approx(3.0, abs=0.1)
    for _ in range(1_000):
        accepts.observe(asked=8, drafted=0, accepted=0)
    assert accepts.proposal_rate < 0.05


def test_costs_are_interpolated_between_neighbours_and_optimistic_across_gaps() -> None:
    costs = CostTable()
    for method, width, seconds in (("off", 1, 1.0), ("ngram", 4, 2.0), ("ngram", 5, 4.0)):
        for _ in range(2):
            costs.observe(method, rows=1, width=width, seconds=seconds)
    curve = costs.curve("ngram", rows=1)
    assert [curve.seconds(width) for width in (1, 4, 4.5, 5)] == [1.0, 2.0, 3.0, 4.0]
    assert curve.seconds(3) == pytest.approx(1.04)
    assert curve.seconds(9) == pytest.approx(4.08)
    assert costs.curve("draft_model", rows=1).seconds(5) == pytest.approx(1.08), "methods do not share their costs"


def test_rows_that_never_ran_plainly_borrow_the_narrowest_cost_of_their_neighbours() -> None:
    costs = CostTable()
    for _ in range(2):
        costs.observe("ngram", rows=3, width=5, seconds=2.0)
    assert costs.curve("off", rows=3).narrowest_seconds == 2.0
    assert costs.curve("off", rows=4).narrowest_seconds == 1.0


def test_a_width_that_nobody_ran_for_long_is_tried_again() -> None:
    costs = CostTable()
    for _ in range(2):
        costs.observe("ngram", rows=1, width=9, seconds=50.0)
    for _ in range(2_000):
        costs.observe("off", rows=1, width=1, seconds=1.0)
    assert costs.curve("ngram", rows=1).seconds(9) < 1.2
