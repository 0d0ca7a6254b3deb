"""The ten workloads and how settings answer them, with the embedded models; nothing here is timed."""

from collections.abc import Iterator

import pytest

from app.core.request import SpeculationRequest
from app.serving.sweep.grid import GOVERNOR, PLAIN, Setting
from bench.comparison.governor_case import (
    LoadedModel,
    WorkloadRunner,
    notes_of,
    rates_of,
    rotated,
    run_rounds,
    series_of,
    speculation_of,
)
from bench.comparison.verdict import Rates
from bench.comparison.workloads import ASSISTANT, WORKLOADS, Workload, single_turns


@pytest.fixture(scope="module")
def assistant() -> Iterator[LoadedModel]:
    model = LoadedModel(ASSISTANT)
    yield model
    model.close()


def test_there_are_ten_and_each_has_its_own_requests(assistant: LoadedModel) -> None:
    assert len({workload.name for workload in WORKLOADS}) == 10
    for workload in WORKLOADS:
        prompts = workload.prompts(assistant.text, assistant.text.vocabulary_size)
        assert prompts == workload.prompts(assistant.text, assistant.text.vocabulary_size)
        assert all(prompts)
    long = next(workload for workload in WORKLOADS if workload.name == "1.5k context")
    assert 1_300 < len(long.prompts(assistant.text, assistant.text.vocabulary_size)[0]) < 1_700


def test_every_method_runs_at_lengths_that_it_can_draft(assistant: LoadedModel) -> None:
    settings = assistant.settings((1, 4, 16))
    assert settings[0] == PLAIN
    assert {setting.method for setting in settings} == {"off", "draft_model", "dflash", "eagle3", "ngram"}
    assert {setting.drafts for setting in settings if setting.method == "dflash"} == {1, 4, 7}


def test_every_setting_says_as_much_and_the_governor_learns_alone(assistant: LoadedModel) -> None:
    workload = Workload("short", single_turns("Hello, who are you?", "Spell window."))
    turns = [WorkloadRunner(workload, assistant, max_tokens=12, quick=False)]
    fixed, progress = (PLAIN, Setting("draft_model", 4)), list[str]()
    swept = run_rounds(turns, [fixed], 1, progress.append)
    answers = run_rounds(turns, [(*fixed, GOVERNOR)], 2, progress.append)
    assert progress == ["short: round 1 of 1", "short: round 1 of 2", "short: round 2 of 2"]
    assert (
        len({answer.tokens for taken in (*swept, *answers) for answered in taken.values() for answer in answered}) == 1
    )
    assert swept[0][PLAIN][0].shares() == {"plain": 100.0}
    assert assistant.side(GOVERNOR) is assistant.side(GOVERNOR)
    assert assistant.side(PLAIN) is assistant.side(Setting("ngram", 2))
    assert assistant.side(GOVERNOR) is not assistant.side(PLAIN)
    rates = Rates("short", rates_of(swept[0]), rates_of(answers[0]))
    best, governor = series_of(rates, answers[0][GOVERNOR])
    assert (best.name, governor.name) == (f"short: {rates.best.name}", "short: governor")
    assert len(best.samples) == len(governor.samples) == 2
    notes = dict(notes_of(rates, swept[0], answers[0]))
    assert notes["short / of the best"] == pytest.approx(rates.ratio)
    assert notes["short / tokens"] == swept[0][PLAIN][0].tokens
    assert notes["short / same text"] == 1.0


def test_settings_ask_as_clients_do() -> None:
    assert speculation_of(PLAIN) == SpeculationRequest(method="off")
    assert speculation_of(GOVERNOR) == SpeculationRequest()
    assert speculation_of(Setting("ngram", 4)) == SpeculationRequest(method="ngram", num_draft_tokens=4)


def test_the_order_turns() -> None:
    assert rotated((PLAIN, GOVERNOR, Setting("ngram", 2)), 1) == [GOVERNOR, Setting("ngram", 2), PLAIN]
