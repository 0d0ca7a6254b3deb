"""The arithmetic of a comparison; nothing here is timed."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from app.core.errors import InvalidRequest
from app.serving.sweep.worker_side import DecodeClock
from bench.comparison.__main__ import CASES, UnknownCase, choose_cases, run_cases
from bench.comparison.measure import (
    CaseResult,
    Check,
    Contender,
    Sample,
    Series,
    median_interval,
    paired_ratio,
    take_turns,
)
from bench.comparison.report import as_document, as_markdown, as_table
from tests.architecture.source import ROOT


def series(name: str, *values: float) -> Series:
    return Series(name, tuple(Sample(value, {"acceptance": 0.5}) for value in values))


def test_contenders_take_turns_after_a_warm_up() -> None:
    turns: list[tuple[str, int]] = []

    def contender(name: str) -> Contender:
        def turn(number: int) -> Sample:
            turns.append((name, number))
            return Sample(float(number))

        return Contender(name, turn)

    measured = take_turns([contender("a"), contender("b")], 2, lambda _: None)
    assert turns == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [sample.value for sample in measured["a"].samples] == [0.0, 1.0]


def test_a_ratio_pairs_the_rounds() -> None:
    """A machine that is ten times slower in one round changes nothing."""
    assert paired_ratio(series("ours", 20, 2, 22), series("theirs", 10, 1, 10)) == 2.0


@pytest.mark.parametrize(
    ("count", "ends"),
    [(3, (0, 2)), (5, (0, 4)), (6, (0, 5)), (9, (1, 7)), (10, (1, 8)), (20, (5, 14))],
)
def test_an_interval_of_the_median_leaves_out_what_chance_allows(count: int, ends: tuple[int, int]) -> None:
    """The ranks are those of the binomial tables for 95 %."""
    values = [float(value) for value in reversed(range(count))]
    low, middle, high = median_interval(values)
    assert (low, high) == ends
    assert middle == (count - 1) / 2


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (Check("fast", 1.0, 0.97), True),
        (Check("fast", 0.96, 0.97), False),
        (Check("cheap", 1.05, 1.1, "at most"), True),
        (Check("cheap", 1.2, 1.1, "at most"), False),
    ],
)
def test_a_check_knows_its_direction(check: Check, passed: bool) -> None:
    assert check.passed is passed


def test_the_decode_phase_starts_when_every_row_speaks() -> None:
    times = iter([1.0, 2.0, 3.0, 4.0])
    clock = DecodeClock(["a", "b"], lambda: next(times))
    for row, tokens in (("a", 1), ("b", 1), ("a", 3), ("b", 3)):
        clock.count(row, tokens)
    assert clock.tokens_per_second == 3.0


def test_the_report_holds_numbers_machine_and_versions() -> None:
    result = CaseResult("one", "a case", "tokens/s", (series("ours", 2, 4, 3),), (Check("kept", 2.0, 1.0),))
    document = json.loads(json.dumps(as_document([result], {"rounds": 3})))
    assert document["cases"][0]["series"]["ours"]["median"] == 3
    assert document["cases"][0]["checks"][0]["passed"]
    assert document["versions"]["mlx-lm"]
    assert document["machine"]["cores"] >= 1
    console = Console(record=True, width=120)
    console.print(as_table(result))
    assert "3.0 tokens/s" in console.export_text()


def test_the_readme_table_takes_the_latest_run_of_a_case() -> None:
    checks = (Check("fast", 2.0, 1.0), Check("cheap", 1.2, 1.1, "at most"))
    results = [CaseResult("one", "a case", "tokens/s", (series("ours", value),), checks) for value in (1, 4)]
    table = as_markdown([as_document([result], {}) for result in results]).splitlines()
    assert table[2:] == [
        "| `one` | ours 4.0 tokens/s | fast | ≥ 1.00 | **2.00** |",
        "|  |  | cheap | ≤ 1.10 | 1.20 (missed) |",
    ]


def test_cases_are_chosen_by_name_in_their_order_and_models_by_what_there_is() -> None:
    assert [case.name for case in choose_cases(["ngram", "plain_1"])] == ["plain_1", "ngram"]
    assert len(choose_cases([])) == len(CASES)
    with pytest.raises(UnknownCase, match="plain_1"):
        choose_cases(["nothing"])
    for wrong, message in (({"size": "huge"}, "113M"), ({"bits": 7}, "6, 8")):
        with pytest.raises(InvalidRequest, match=message):
            run_cases([], rounds=1, quick=True, file=None, console=Console(), **wrong)  # type: ignore[arg-type]


def test_every_case_is_described() -> None:
    described = (Path(ROOT) / "bench" / "README.md").read_text(encoding="utf-8")
    assert [name for name in CASES if f"`{name}`" not in described] == []
