"""The governor on simulated machines: never slower than plain, near the best fixed setting, and it says why."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.reason import Reason
from app.core.request import Request, SpeculationRequest
from app.core.step import EngineLimits, StepCost
from app.models.draft_lengths import LONGEST_DRAFT
from app.scheduler.estimates import AcceptanceHistory, DraftingRow, DraftObservation
from app.scheduler.governor import PLAIN, DraftChoice, Governor, Option, StepObservation
from app.scheduler.sequence import LiveSequence
from app.scheduler.speculation import Speculation
from tests.scheduler.simulated import (
    PLAIN_SECONDS,
    Drafter,
    Machine,
    Workload,
    best_fixed_rate,
    drain,
    fixed_rate,
    fixed_seconds,
    governed_rate,
    governed_seconds,
    options,
    workload_seconds,
)

COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda width: 0.020 * (1 + 0.002 * (width - 1)),
    "slow growth": lambda width: 0.020 * (1 + 0.05 * (width - 1)),
    "linear": lambda width: 0.020 * (1 + 0.2 * (width - 1)),
    "steep": lambda width: 0.020 * (1 + 0.5 * (width - 1)),
    "every token costs the same": lambda width: 0.020 * width,
    "a step after four": lambda width: 0.020 if width <= 4 else 0.050,
}
ROW = DraftingRow("r")


def model(acceptance: float, seconds_per_token: float = 0.002) -> Drafter:
    return Drafter(acceptance, seconds_per_token)


def block(acceptance: float, seconds: float = 0.006) -> Drafter:
    return Drafter(acceptance, seconds=seconds, block=7)


def lookup(acceptance: float, proposal_rate: float) -> Drafter:
    return Drafter(acceptance, proposal_rate=proposal_rate)


MIXED: dict[str, Workload] = {
    "prose that nothing predicts": Workload(
        COSTS["linear"], [(1_000, {"draft_model": model(0.1), "ngram": lookup(0.1, 0.1)})]
    ),
    "code on a fast machine": Workload(
        COSTS["flat"], [(1_500, {"draft_model": model(0.85, 0.001), "ngram": lookup(0.6, 0.3)})]
    ),
    "copying": Workload(COSTS["slow growth"], [(1_500, {"draft_model": model(0.7), "ngram": lookup(0.97, 0.95)})]),
    "a block drafter beside a weak model": Workload(
        COSTS["slow growth"], [(1_500, {"draft_model": model(0.5), "dflash": block(0.8)})]
    ),
    "a model beside a weak block drafter": Workload(
        COSTS["linear"], [(1_500, {"draft_model": model(0.85, 0.001), "dflash": block(0.3)})]
    ),
    "prose, then a list that repeats itself": Workload(
        COSTS["linear"],
        [
            (800, {"draft_model": model(0.3), "ngram": lookup(0.1, 0.1)}),
            (800, {"draft_model": model(0.3), "ngram": lookup(0.95, 0.9)}),
        ],
    ),
    "code, then prose": Workload(
        COSTS["steep"], [(800, {"draft_model": model(0.95, 0.001)}), (800, {"draft_model": model(0.2, 0.001)})]
    ),
    "every request another drafter's": Workload(
        COSTS["slow growth"],
        [
            (500, {"draft_model": model(0.2), "ngram": lookup(0.1, 0.2), "dflash": block(0.85)}),
            (500, {"draft_model": model(0.2), "ngram": lookup(0.1, 0.2), "dflash": block(0.85)}),
            (500, {"draft_model": model(0.2), "ngram": lookup(0.95, 0.95), "dflash": block(0.1)}),
            (500, {"draft_model": model(0.2), "ngram": lookup(0.95, 0.95), "dflash": block(0.1)}),
        ],
    ),
    "a machine on which every token costs the same": Workload(
        COSTS["every token costs the same"], [(1_000, {"draft_model": model(0.9), "ngram": lookup(0.9, 0.5)})]
    ),
    "short blocks pay, long ones do not": Workload(
        COSTS["a step after four"], [(1_500, {"draft_model": model(0.7, 0.001), "dflash": block(0.6, 0.003)})]
    ),
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("draft_seconds", [0.0, 0.003])
def test_where_nothing_is_accepted_five_hundred_steps_lose_at_most_three_percent(
    cost: str, draft_seconds: float
) -> None:
    drafters = {"draft_model": Drafter(0.0, draft_seconds), "ngram": Drafter(0.0), "dflash": block(0.0)}
    machine = Machine(COSTS[cost], drafters, noise=0.05)
    assert governed_rate(machine, 500, governor=Governor(machine.measured())) >= 0.97 * fixed_rate(machine)


def cheapened(costs: Sequence[StepCost]) -> list[StepCost]:
    """Return the costs as if steps with drafts had been measured while they took a tenth less time."""
    return [replace(cost, seconds=(0.9 if cost.drafts else 1.0) * cost.seconds) for cost in costs]


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("gain", [0.97, 1.0, 1.03])
def test_a_pair_that_draws_with_plain_decoding_loses_at_most_a_hundredth(gain: float, rows: int) -> None:
    """One draft, accepted with probability 0.72, costs about what it gains; more drafts cost more than they gain."""
    machine = Machine(lambda width: 0.1 * (1 + (1.72 / gain - 1) * (width - 1)), {"draft_model": Drafter(0.72)})
    plain = fixed_rate(machine)
    rates = [
        1_500 / governed_seconds(machine, 1_500, governor=governor, chance=random.Random(seed), rows=rows)
        for seed in range(3)
        for governor in [Governor(cheapened(machine.measured(rows)))]
    ]
    assert fmean(rates) >= 0.99 * plain


@pytest.mark.parametrize("cost", COSTS)
def test_without_a_warm_up_useless_drafts_still_cost_little(cost: str) -> None:
    machine = Machine(COSTS[cost], {"draft_model": Drafter(0.0, 0.003)}, noise=0.05)
    assert governed_rate(machine, 2_000) >= 0.97 * fixed_rate(machine)


def test_ten_mixed_workloads_earn_what_the_best_setting_for_each_would() -> None:
    every_where = options(Machine(COSTS["flat"], {"draft_model": model(0), "ngram": model(0)}))
    fixed = dict.fromkeys(every_where, 0.0)
    shares, governed = [], 0.0
    for name, workload in MIXED.items():
        here = options(workload.machines()[0][1])
        best = min(fixed_seconds(workload, option) for option in here)
        plain = fixed_seconds(workload, PLAIN)
        seconds = sum(workload_seconds(workload, seed=seed) for seed in range(3)) / 3
        shares.append(best / seconds)
        assert shares[-1] >= 0.9, name
        governed += math.log(plain / seconds)
        for option in fixed:
            fixed[option] += math.log(plain / fixed_seconds(workload, option))
    assert math.prod(shares) ** (1 / len(shares)) >= 0.95
    assert governed > max(fixed.values()), "one setting for all ten would have been better"


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("acceptance", [0.4, 0.7, 0.9])
def test_the_length_found_earns_what_the_best_fixed_one_earns(cost: str, acceptance: float) -> None:
    machine = Machine(COSTS[cost], {"draft_model": Drafter(acceptance, 0.001)}, noise=0.05)
    governor = Governor(machine.measured())
    assert governed_rate(machine, 4_000, governor=governor) >= 0.95 * best_fixed_rate(machine)


@pytest.mark.parametrize("cost", COSTS)
def test_without_a_warm_up_the_length_is_found_too(cost: str) -> None:
    machine = Machine(COSTS[cost], {"draft_model": Drafter(0.8, 0.001)}, noise=0.05)
    assert governed_rate(machine, 4_000) >= 0.93 * best_fixed_rate(machine)


@pytest.mark.parametrize("machine_costs", ["flat", "linear"])
def test_lookup_that_rarely_finds_anything_costs_nothing(machine_costs: str) -> None:
    machine = Machine(COSTS[machine_costs], {"ngram": Drafter(0.2, 0.0, proposal_rate=0.05)}, noise=0.05)
    assert governed_rate(machine, 2_000) >= 0.97 * fixed_rate(machine)


def test_the_better_of_two_drafters_is_found() -> None:
    slow_but_right = Drafter(0.9, 0.002)
    fast_but_wrong = Drafter(0.1, 0.0)
    for drafters in (
        {"draft_model": slow_but_right, "ngram": fast_but_wrong},
        {"draft_model": Drafter(0.1, 0.002), "ngram": Drafter(0.9, 0.0)},
    ):
        machine = Machine(COSTS["slow growth"], drafters, noise=0.05)
        assert governed_rate(machine, 6_000) >= 0.95 * best_fixed_rate(machine)


def test_a_drafter_that_pays_for_this_request_is_found_within_it() -> None:
    bad = Machine(COSTS["linear"], {"draft_model": model(0.05), "ngram": lookup(0.05, 0.5)})
    good = Machine(COSTS["linear"], {"draft_model": model(0.05), "ngram": lookup(0.98, 0.95)})
    governor, chance = Governor(bad.measured()), random.Random(1)
    for number in range(5):
        governed_seconds(bad, 400, governor=governor, chance=chance, request_id=f"prose {number}")
        governor.forget(f"prose {number}")
    seconds = governed_seconds(good, 400, governor=governor, chance=chance, request_id="copying")
    assert 400 / seconds >= 2 * fixed_rate(good)


def test_a_request_starts_from_what_the_model_taught() -> None:
    machine = Machine(COSTS["linear"], {"draft_model": model(0.9, 0.001)})
    governor, chance = Governor(machine.measured()), random.Random(0)
    governed_seconds(machine, 1_000, governor=governor, chance=chance, request_id="first")
    governor.forget("first")
    assert governor.choose(1, (DraftingRow("second"),), ("draft_model",)).num_draft_tokens >= 4
    assert (
        governed_seconds(machine, 100, governor=governor, chance=chance, request_id="third") * best_fixed_rate(machine)
        <= 1.25 * 100
    )


@pytest.mark.parametrize(("acceptance", "first"), [(1.0, 15), (0.97, 7)])
def test_the_first_step_of_a_text_risks_little_unless_all_former_ones_went_right(acceptance: float, first: int) -> None:
    machine = Machine(COSTS["slow growth"], {"draft_model": model(acceptance, 0.004)})
    governor, chance = Governor(machine.measured()), random.Random(0)
    governed_seconds(machine, 1_000, governor=governor, chance=chance, request_id="former")
    governor.forget("former")
    assert governor.choose(1, (DraftingRow("new"),), ("draft_model",)).num_draft_tokens == first


def test_acceptance_in_short_texts_says_little_about_long_ones() -> None:
    governor = Governor(Machine(COSTS["linear"], {"dflash": block(0.9)}).measured())
    for tokens, accepted in ((500, 7), (20_000, 0)):
        for step in range(200):
            row = DraftingRow(f"{tokens} {step}", tokens)
            draft = DraftObservation("dflash", 7, 7, accepted, row)
            governor.observe(StepObservation(1, 8, 0.0, None, (draft,)))
    assert governor.choose(1, (DraftingRow("short", 600),), ("dflash",)).decision.kind == "draft"
    governor.choose(1, (DraftingRow("long", 30_000),), ("dflash",))
    assert governor.choose(1, (DraftingRow("longer", 30_000),), ("dflash",)).decision.kind == "plain"


def test_a_block_drafter_is_never_asked_for_more_than_its_block() -> None:
    machine = Machine(COSTS["flat"], {"dflash": Drafter(1.0, block=5)})
    governor, chance = Governor(machine.measured(), longest={"dflash": 5}), random.Random(0)
    lengths = set()
    for _ in range(100):
        choice = governor.choose(1, (ROW,), ("dflash",))
        lengths.add(choice.num_draft_tokens)
        governor.observe(machine.step(_option(choice), chance, ROW))
    assert max(lengths) == 5


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    governor = Governor()
    governed_rate(Machine(COSTS["linear"], {"draft_model": Drafter(0.0, 0.001)}), 1_000, governor=governor)
    predictable = Machine(COSTS["linear"], {"draft_model": Drafter(0.95, 0.001)})
    governed_rate(predictable, 1_100, governor=governor)  # time enough for several trials
    assert governed_rate(predictable, 4_000, governor=governor) >= 0.95 * best_fixed_rate(predictable)


def test_a_machine_that_slows_down_on_wide_forwards_is_noticed() -> None:
    governor = Governor()
    governed_rate(Machine(COSTS["flat"], {"draft_model": Drafter(0.6, 0.001)}), 500, governor=governor)
    steep = Machine(COSTS["steep"], {"draft_model": Drafter(0.6, 0.001)})
    governed_rate(steep, 1_000, governor=governor)
    assert governed_rate(steep, 2_000, governor=governor) >= 0.95 * best_fixed_rate(steep)


def test_after_a_warm_up_no_step_is_spent_on_measuring() -> None:
    machine = Machine(COSTS["linear"], {"draft_model": model(0.9, 0.001)})
    governor, chance = Governor(machine.measured()), random.Random(0)
    for _ in range(60):
        choice = governor.choose(1, (ROW,), ("draft_model",))
        assert choice.decision.kind in {"draft", "plain", "probe"}
        governor.observe(machine.step(_option(choice), chance, ROW))


def test_without_one_plain_decoding_is_measured_first() -> None:
    governor, machine = Governor(), Machine(COSTS["flat"], {"draft_model": Drafter(0.3)})
    kinds = []
    for _ in range(10):
        choice = governor.choose(1, (ROW,), ("draft_model",))
        kinds.append(choice.decision.kind)
        governor.observe(machine.step(_option(choice), random.Random(0), ROW))
    assert kinds[:3] == ["measuring"] * 3
    assert "measuring" not in kinds[3:]


def test_a_step_of_rows_with_different_methods_measures_and_tries_nothing() -> None:
    limits = EngineLimits(max_context_tokens=4_096, max_rows=4, drafters=("draft_model", "ngram"))
    speculation = Speculation(limits, policy="auto", default_speculation=SpeculationRequest(), measured=())
    free, held = (
        LiveSequence(
            Request(id=method, prompt_tokens=(1, 2), max_tokens=99, speculation=SpeculationRequest(method=method)), 0.0
        )
        for method in ("auto", "ngram")
    )
    for _ in range(9):
        choices = speculation.choose([free, held], others=1)
        assert not {choice.decision.kind for choice in choices.values() if choice.decision} & {"measuring", "probe"}
    decisions = [speculation.choose([free], others=0)["auto"].decision for _ in range(4)]
    assert [decision and decision.kind for decision in decisions][:3] == ["measuring"] * 3


def test_plain_decoding_is_measured_again_while_its_lead_is_in_doubt() -> None:
    governor, machine = Governor(), Machine(COSTS["linear"], {"draft_model": Drafter(0.5)})
    chance, measured = random.Random(0), 0
    for _ in range(1_000):
        choice = governor.choose(1, (ROW,), ("draft_model",))
        measured += choice.decision.kind == "measuring"
        governor.observe(machine.step(_option(choice), chance, ROW))
    assert 5 <= measured <= 15


def test_a_plain_choice_is_a_value_and_says_why_with_numbers() -> None:
    machine = Machine(COSTS["steep"], {"draft_model": Drafter(0.0, 0.001)})
    governor = Governor(machine.measured())
    drain(governor, machine, 500)
    choice = governor.choose(1, (DraftingRow("r", 500),), ("draft_model",))
    decision = choice.decision
    assert (choice.method, choice.num_draft_tokens) == ("off", 0)
    assert (decision.kind, decision.method, decision.num_draft_tokens) == ("plain", "draft_model", 1)
    assert decision.cost_ratio == pytest.approx(1.55, abs=0.1)
    assert decision.acceptance < 0.3
    numbers = f"costs {decision.cost_ratio:.1f}x a plain step, acceptance {decision.acceptance:.2f}"
    assert str(choice.refusal) == f"plain decoding is faster: draft_model with draft length 1 {numbers}"
    reason = Reason(choice.refusal.code, {**choice.refusal.values, "count": 1.0})
    assert str(reason) == str(choice.refusal), "behind the worker's channel all numbers are floats"


def test_probes_become_rare_while_they_lose_and_take_turns() -> None:
    drafters = {"draft_model": Drafter(0.0, 0.001), "ngram": Drafter(0.0), "dflash": block(0.0)}
    machine = Machine(COSTS["linear"], drafters)
    governor = Governor(machine.measured())
    tried = drain(governor, machine, 3_000)

    def lost(options: Sequence[Option]) -> float:
        """Return the time lost compared with plain decoding, as a share of plain decoding's time."""
        plain = machine.verify_seconds(1)
        seconds = sum(machine.step(option, random.Random(0), ROW).seconds for option in options)
        return seconds / (plain * len(options)) - 1

    early, late = tried[:184], tried[-1_840:]
    assert sum(option != PLAIN for option in late) / 10 < sum(option != PLAIN for option in early) / 2
    assert 0 < lost(late) <= 0.012
    assert {option.method for option in late} == {"off", *drafters}


def test_a_probe_goes_on_while_it_hits() -> None:
    machine = Machine(COSTS["linear"], {"draft_model": Drafter(0.0, 0.001)})
    governor = Governor(machine.measured())
    drain(governor, machine, 200)
    hits = Machine(COSTS["linear"], {"draft_model": Drafter(1.0, 0.001)})
    chance, drafted = random.Random(0), []
    for step in range(400):
        row = DraftingRow("r", 200 + step)
        choice = governor.choose(1, (row,), ("draft_model",))
        drafted.append(choice.num_draft_tokens)
        governor.observe(hits.step(_option(choice), chance, row))
    first = next(place for place, drafts in enumerate(drafted) if drafts)
    assert all(drafted[first : first + 100]), "it never missed, so it never stopped"
    assert drafted[first + 60] >= 8


def _option(choice: DraftChoice) -> Option:
    return Option(choice.method, choice.num_draft_tokens)


def test_one_slow_step_does_not_change_the_mind() -> None:
    governor, machine = Governor(), Machine(COSTS["slow growth"], {"draft_model": Drafter(0.9)})
    governed_rate(machine, 1_000, governor=governor)
    before = governor.choose(1, (ROW,), ("draft_model",))
    drafts = (DraftObservation("draft_model", before.num_draft_tokens, before.num_draft_tokens, 2, ROW),)
    governor.observe(StepObservation(1, 1 + before.num_draft_tokens, 30.0, None, drafts))
    assert governor.choose(1, (ROW,), ("draft_model",)).num_draft_tokens > 0


def test_a_pause_while_a_drafter_first_reads_a_prompt_does_not_end_drafting() -> None:
    governor, machine = Governor(), Machine(COSTS["slow growth"], {"draft_model": Drafter(0.9)})
    governed_rate(machine, 600, governor=governor)
    stalled = (DraftObservation("draft_model", 4, 4, 3, DraftingRow("0", 600)),)
    governor.observe(StepObservation(1, 5, 100 * PLAIN_SECONDS, 0.0, stalled))
    for _ in range(2):
        choice = governor.choose(1, (DraftingRow("next", 600),), ("draft_model",))
    assert choice.num_draft_tokens > 0


def test_a_step_in_which_the_drafter_read_a_prompt_says_nothing_about_costs() -> None:
    taught, spared = Governor(), Governor()
    machine = Machine(COSTS["linear"], {"draft_model": Drafter(0.7, 0.001)})
    for governor in (taught, spared):
        governed_rate(machine, 600, governor=governor)
    for number in range(50):
        drafts = (DraftObservation("draft_model", 4, 4, 3, DraftingRow(f"{number}", 60)),)
        spared.observe(StepObservation(1, 5, 9.0, 5.0, drafts, typical=False))
        taught.observe(StepObservation(1, 5, 9.0, 5.0, drafts))
    for context in (0, 60):  # at 60 it must catch up first; `spared` learnt no cost of that
        for governor in (taught, spared):
            governor.choose(1, (DraftingRow("next", context),), ("draft_model",))
        assert spared.choose(1, (DraftingRow("next", context),), ("draft_model",)).num_draft_tokens > 0
        assert taught.choose(1, (DraftingRow("next", context),), ("draft_model",)).num_draft_tokens != 4


def test_reading_a_text_in_slices_costs_as_much_as_reading_it_at_once() -> None:
    at_once, in_slices = Governor(), Governor()
    for governor in (at_once, in_slices):
        governed_rate(Machine(COSTS["flat"], {"draft_model": Drafter(0.8, 0.001)}), 300, governor=governor)
    for number in range(5):
        row = DraftingRow(f"{number}", 2_000)
        drafts = (DraftObservation("draft_model", 4, 4, 3, row),)
        at_once.observe(StepObservation(1, 5, 1.024, 1.004, drafts))
        for _ in range(4):
            reading = (DraftObservation("draft_model", row=row),)
            in_slices.observe(StepObservation(1, 1, 0.22, None, reading, typical=False))
        in_slices.observe(StepObservation(1, 5, 0.224, 0.204, drafts))
    new = DraftingRow("new", 2_000)
    costs = [governor._catch_up_steps("draft_model", [new]) for governor in (at_once, in_slices)]
    assert costs[1] == pytest.approx(costs[0], rel=0.1)
    assert costs[0] > 30


def test_lengths_still_compare_on_an_engine_that_measures_no_time() -> None:
    governor, choices = Governor(), []
    for _ in range(80):
        choice = governor.choose(1, (ROW,), ("ngram",))
        drafts = (DraftObservation(choice.method, choice.num_draft_tokens, choice.num_draft_tokens, 0, ROW),)
        governor.observe(StepObservation(1, 1 + choice.num_draft_tokens, 0.0, None, drafts))
        choices.append(choice)
    settled = [choice.num_draft_tokens for choice in choices[30:] if choice.decision.kind != "probe"]
    assert len(settled) >= 20
    assert max(settled) <= 1


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 4),
            st.lists(st.sampled_from(("draft_model", "ngram", "dflash")), min_size=1, max_size=3, unique=True),
            st.integers(0, 16),
            st.floats(0, 10),
        ),
        max_size=80,
    ),
    warm=st.booleans(),
)
def test_only_allowed_methods_are_ever_picked(steps: list[tuple[int, list[str], int, float]], warm: bool) -> None:
    governor = Governor([StepCost("off", 1, 0, 0.02), StepCost("dflash", 1, 7, 0.03, 0.01)] if warm else ())
    for rows, methods, accepted, seconds in steps:
        drafting = tuple(DraftingRow(f"r{row}", 100 * row) for row in range(rows))
        choice = governor.choose(rows, drafting, tuple(methods))
        assert choice.method in {"off", *methods}
        assert (choice.method == "off") == (choice.num_draft_tokens == 0)
        assert 0 <= choice.num_draft_tokens <= LONGEST_DRAFT
        assert choice.decision.method in {"off", *methods}
        asked = choice.num_draft_tokens
        drafts = tuple(DraftObservation(choice.method, asked, asked, min(asked, accepted), row) for row in drafting)
        governor.observe(StepObservation(rows, 1 + asked, seconds, seconds / 4 if warm else None, drafts))


def test_a_text_that_turned_predictable_is_drafted_for_before_anything_was_tried() -> None:
    """Plain steps teach nothing about drafts, but the target's confidence shows the change."""
    machine = Machine(COSTS["linear"], {"draft_model": Drafter(1.0, 0.001)})
    governor, chance = Governor(machine.measured()), random.Random(0)
    for step in range(200):
        sure = step // 20 % 2
        row = DraftingRow("old", step, confidence=0.999 if sure else 0.3)
        option = Option("draft_model", 5)
        missing = Machine(COSTS["linear"], {"draft_model": Drafter(float(sure), 0.001)})
        governor.observe(missing.step(option, chance, row))
    chosen = [
        governor.choose(1, (DraftingRow("new", 40 + step, confidence=confidence),), ("draft_model",)).num_draft_tokens
        for step, confidence in enumerate((0.3, 0.3, 0.999, 0.999, 0.3))
    ]
    assert [bool(drafts) for drafts in chosen] == [False, False, True, True, False]


def test_what_fails_in_texts_that_the_target_is_sure_of_is_known_to_fail_in_others() -> None:
    history = AcceptanceHistory()
    for step in range(20):
        history.observe(DraftObservation("dflash", 4, 4, 0, DraftingRow("r", step, confidence=0.999)))
    evidence = {
        confidence: history.expected_tokens("dflash", DraftingRow("new", 20, confidence=confidence))[1]
        for confidence in (0.3, 0.95, 0.999)
    }
    assert min(evidence.values()) > 5
    other_way_round = AcceptanceHistory()
    for step in range(20):
        other_way_round.observe(DraftObservation("dflash", 4, 4, 0, DraftingRow("r", step, confidence=0.3)))
    assert other_way_round.expected_tokens("dflash", DraftingRow("new", 20, confidence=0.999))[1] == 0


def test_a_pause_that_was_taken_for_the_cost_of_plain_decoding_is_found_out_soon() -> None:
    paused = [StepCost("off", 1, 0, 0.1), StepCost("dflash", 1, 1, 0.03), StepCost("dflash", 1, 7, 0.03)]
    governor, choices = Governor(paused), []
    for step in range(80):
        row = DraftingRow("r", step, confidence=0.3)
        choice = governor.choose(1, (row,), ("dflash",))
        asked = choice.num_draft_tokens
        drafts = (DraftObservation(choice.method, asked, asked, 0, row),) if asked else ()
        governor.observe(StepObservation(1, 1 + asked, 0.03 if asked else 0.01, 0.0, drafts))
        choices.append(choice.decision.kind)
    assert choices.count("measuring") >= 4, "one run of it in 32 steps"


@pytest.mark.parametrize("cost", sorted(COSTS))
@pytest.mark.parametrize("acceptance", [0.07, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("known", [(), (1,), (4,), (1, 16)])
def test_the_first_request_beside_a_drafter_as_dear_as_the_target_is_nearly_plain(
    cost: str, acceptance: float, known: tuple[int, ...]
) -> None:
    """This holds whichever draft lengths (`known`) the warm-up timed before its time ran out."""
    machine = Machine(COSTS[cost], {"draft_model": Drafter(acceptance, PLAIN_SECONDS)}, noise=0.05)
    timed = [step for step in machine.measured() if step.method == "off" or step.drafts in known]
    rates = [governed_rate(machine, 32, seed, Governor(timed)) for seed in range(10)]
    assert fmean(rates) >= 0.9 * fixed_rate(machine)
