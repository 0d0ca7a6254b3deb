"""The governor's promises on the ten recorded workloads, without a model and without a clock."""

import random

import pytest

from app.serving.sweep.grid import GOVERNOR, PLAIN
from bench.comparison.verdict import summarise
from tests.scheduler.replayed import fixed_rates, rates, recorded, recorded_server

LIVES = 8


@pytest.mark.soak
@pytest.mark.landing
def test_ten_recorded_workloads_earn_nearly_what_the_best_setting_for_each_would() -> None:
    verdict = summarise(rates(range(LIVES)))
    assert verdict.mean >= 0.95
    assert verdict.worst >= 0.9, verdict.worst_name
    assert verdict.mean_over_single >= 1.2, f"{verdict.single.name} for all ten would be nearly as good"


def test_who_meets_them_for_the_first_time_loses_little() -> None:
    verdict = summarise(rates(range(LIVES), rounds=1))
    assert verdict.mean >= 0.93
    assert verdict.worst >= 0.8, verdict.worst_name


@pytest.mark.parametrize("model", ["demo-assistant", "demo-hybrid"])
def test_where_nothing_is_accepted_a_recorded_text_loses_at_most_three_percent(model: str) -> None:
    workload = max(
        (entry for entry in recorded()["workloads"] if entry["model"] == model), key=lambda entry: entry["name"]
    )
    request = max(workload["requests"], key=lambda entry: entry["tokens"])
    traces = {
        method: [proposed * 8, "0" * 8 * len(proposed), matched * 8]
        for method, (proposed, _, matched) in request["traces"].items()
    }
    silent = {"together": False, "requests": [{**request, "tokens": 8 * request["tokens"], "traces": traces}]}
    plain = recorded_server(model, None).answer(silent, PLAIN)
    assert recorded_server(model, random.Random(1)).answer(silent, GOVERNOR) >= 0.97 * plain


def test_fixed_settings_are_told_apart_by_the_workloads() -> None:
    best = {max(settings, key=settings.__getitem__) for settings in fixed_rates().values()}
    assert len(best) >= 4
