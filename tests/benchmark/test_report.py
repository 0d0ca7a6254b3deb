"""Report of a measurement: figures, verdicts, recommendation and changes never contradict one another."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from app.command.bench import doubt_text, measurement_table, omission_text
from app.core.errors import InvalidSetting
from app.model_settings import SPECULATION
from app.serving.live_settings import checked_model
from app.serving.sweep.grid import PLAIN, Setting, Sweep
from app.serving.sweep.report import (
    Advice,
    CellReport,
    Change,
    Report,
    advice_of,
    best_by_drafter,
    changes_to,
    choice_of,
    report_object,
    report_of,
    speedups,
)
from bench import plot
from bench.plot import as_svg
from tests.benchmark.sweeps import measured, swept

PAYS_ALONE = {
    (1, "off", 0): 10.0,
    (1, "auto", 0): 25.0,
    (1, "dflash", 4): 20.0,
    (1, "dflash", 7): 26.0,
    (1, "ngram", 4): 9.0,
    (8, "off", 0): 60.0,
    (8, "auto", 0): 59.0,
    (8, "dflash", 7): 40.0,
}


DRAFTERS = {"dflash": "big-dflash", "draft_model": "small"}
UNSET = {"policy": "auto", "planned": ["big-dflash"]}


def said(speeds: dict[tuple[int, str, int], float]) -> tuple[str, Any]:
    report = report_of(swept(speeds).results(drafts=DRAFTERS))
    return report.text, report.choice


def test_a_method_that_pays_alone_is_kept_with_its_drafts() -> None:
    text, choice = said({**PAYS_ALONE, (1, "auto", 0): 20.0})
    assert text == "dflash, draft length 7: 2.60x (1 request); no clear difference, ±5% (8 requests)"
    assert choice["drafts"] == ["big-dflash"]
    assert (choice["methods"], choice["num_draft_tokens"]) == (["dflash"], 7)
    assert "policy" not in choice, "nothing is clear for several requests"


def test_the_governor_goes_before_a_length_that_is_no_clearly_better() -> None:
    text, choice = said(PAYS_ALONE)
    assert text.startswith("governor, mostly dflash: 2.50x (1 request)")
    assert (choice["methods"], choice["num_draft_tokens"]) == (None, None)
    assert choice["drafts"] == ["big-dflash"], "the governor used no other: it would only take memory"


def test_where_several_requests_gain_the_governor_chooses_the_drafts() -> None:
    speeds = {(4, "off", 0): 40.0, (4, "auto", 0): 44.0, (4, "dflash", 4): 60.0, (4, "ngram", 1): 41.0}
    text, choice = said({**PAYS_ALONE, (1, "auto", 0): 20.0, **speeds})
    assert "dflash, draft length 4: 1.50x (4 requests)" in text
    assert (choice["policy"], choice["methods"], choice["num_draft_tokens"]) == ("auto", ["dflash"], None)


def test_drafting_is_for_one_request_where_it_costs_several_of_them_time() -> None:
    text, choice = said({**PAYS_ALONE, (8, "auto", 0): 50.0})
    assert text.endswith("no drafting is fastest (8 requests)")
    assert choice["policy"] == "single"


def test_where_nothing_pays_no_drafting_is_recommended() -> None:
    text, choice = said({(1, "off", 0): 10.0, (1, "auto", 0): 9.0, (1, "ngram", 1): 8.0})
    assert text == "no drafting is fastest (1 request)"
    assert choice == {"policy": "off", "drafts": None, "methods": None, "num_draft_tokens": None}


def test_a_tie_changes_nothing() -> None:
    text, choice = said({(1, "off", 0): 10.0, (1, "auto", 0): 9.9, (1, "ngram", 1): 10.4})
    assert text == "no clear difference, ±5% (1 request); change nothing"
    assert choice is None


def test_drafting_that_pays_only_in_batches_is_kept_for_them() -> None:
    speeds = {(1, "off", 0): 10.0, (1, "ngram", 1): 8.0, (4, "off", 0): 40.0, (4, "ngram", 1): 50.0}
    text, choice = said(speeds)
    assert text == "no drafting is fastest (1 request); ngram, draft length 1: 1.25x (4 requests)"
    assert (choice["policy"], choice["methods"]) == ("auto", ["ngram"])
    assert "drafts" not in choice, "n-grams need no drafter"


@pytest.mark.parametrize("speeds", [{}, {(1, "off", 0): 10.0}])
def test_without_any_drafting_nothing_is_recommended(speeds: dict[tuple[int, str, int], float]) -> None:
    text, choice = said(speeds)
    assert (text, choice) == ("nothing to compare: no drafting was measured", None)


def test_a_speed_divided_by_that_without_drafting_is_the_shown_ratio() -> None:
    """Plain decoding at 131 and the governor at 97.0 were once shown as 0.59x."""
    rounds = {("off", 0): [131.0, 240.0, 90.0], ("auto", 0): [97.0, 141.0, 40.0]}
    (cell,) = report_of(measured({1: rounds})).cells
    plain, governor = cell.settings
    assert governor.ratio == pytest.approx(141 / 240)
    assert governor.tokens_per_second / plain.tokens_per_second == pytest.approx(governor.ratio)
    assert (governor.low, governor.high) == (pytest.approx(40 / 90), pytest.approx(97 / 131))


def test_a_difference_within_the_noise_is_a_tie_however_the_median_looks() -> None:
    rounds = {("off", 0): [131.0, 240.0, 90.0], ("auto", 0): [150.0, 275.0, 100.0], ("dflash", 4): [140.0, 90.0, 130.0]}
    report = report_of(measured({1: rounds}))
    assert [setting.standing for setting in report.cells[0].settings] == ["plain", "tie", "tie"]
    assert report.choice is None
    (doubt,) = report.doubts
    assert (doubt.kind, round(doubt.amount, 2)) == ("unsteady", 0.83)
    assert "Measure again" in doubt_text(doubt)


def test_one_round_is_a_first_impression_and_says_so() -> None:
    report = report_of(measured({1: {("off", 0): [10.0], ("auto", 0): [12.0], ("ngram", 2): [30.0]}}))
    assert [setting.standing for setting in report.cells[0].settings] == ["plain", "tie", "faster"]
    assert [doubt.kind for doubt in report.doubts] == ["one_round"]


def test_a_drafter_keeps_its_figures_from_the_measurement_that_has_them_and_a_tie_ranks_nothing() -> None:
    older = swept({(1, "off", 0): 10.0, (1, "dflash", 4): 40.0, (1, "draft_model", 4): 5.0}).results(drafts=DRAFTERS)
    newer = swept({(1, "off", 0): 20.0, (1, "dflash", 4): 20.4, (1, "ngram", 4): 30.0}).results(drafts=DRAFTERS)
    best = best_by_drafter([newer, older])
    assert {key: (index, figures.standing) for key, (index, figures) in best.items()} == {
        ("dflash", "big-dflash"): (0, "tie"),
        ("ngram", ""): (0, "faster"),
        ("draft_model", "small"): (1, "slower"),
    }
    assert speedups([newer, older]) == {("ngram", ""): 1.5, ("draft_model", "small"): 0.5}


def test_results_that_name_one_method_only_are_still_read() -> None:
    results = swept(PAYS_ALONE).results(drafts=DRAFTERS)
    for cell in results["cells"]:
        for setting in cell["settings"]:
            setting["used"] = setting["used"][0] if setting["used"] else ""
    assert report_of(results) == report_of(swept(PAYS_ALONE).results(drafts=DRAFTERS))


def test_turns_that_others_disturbed_are_a_reason_to_measure_again() -> None:
    report = report_of(measured({1: {("off", 0): [10.0] * 3, ("auto", 0): [30.0] * 3}}, disturbed=4))
    assert [(doubt.kind, doubt.amount) for doubt in report.doubts] == [("disturbed", 4)]


def test_of_many_rounds_one_odd_one_does_not_decide() -> None:
    plain = [10.0] * 9
    report = report_of(measured({1: {("off", 0): plain, ("ngram", 2): [9.0, *[14.0] * 8]}}))
    assert (report.cells[0].settings[1].low, report.cells[0].settings[1].standing) == (1.4, "faster")


def test_no_step_gains_more_than_the_tokens_that_it_yields() -> None:
    results = measured({1: {("off", 0): [10.0, 2.0, 10.0], ("ngram", 2): [12.0, 12.0, 12.0]}})
    results["cells"][0]["settings"][1]["tokens_per_cycle"] = 1.5
    assert report_of(results).cells[0].settings[1].high == 1.5


def test_what_another_version_wrote_is_no_error() -> None:
    for strange in ({}, {"cells": 3}, {"cells": [{"settings": [{"method": "off"}]}]}, {"cells": [None]}):
        assert report_of(strange).cells == ()


def test_the_changes_are_those_that_differ_and_no_others() -> None:
    current = {**UNSET, "num_draft_tokens": 4, "methods": ["dflash"], "temperature": 0.5, "acceptance": "rejection"}
    changes = changes_to(choice_of(Setting("dflash", 7), DRAFTERS), current)
    assert changes == (Change("num_draft_tokens", 4, 7),), "the drafter is the one that the model gets anyway"
    assert changes_to(choice_of(PLAIN, DRAFTERS), {"policy": "off"}) == ()
    off = changes_to(choice_of(PLAIN, DRAFTERS), current)
    assert {change.name: change.new for change in off} == {"policy": "off", "num_draft_tokens": None, "methods": None}


def test_a_choice_to_draft_switches_drafting_on() -> None:
    changes = changes_to(choice_of(Setting("ngram", 2), DRAFTERS), {"policy": "off"})
    assert Change("policy", "off", "auto") in changes


def test_what_is_in_use_stays_where_the_best_is_no_clearly_better() -> None:
    rounds = {("off", 0): [10.0] * 3, ("dflash", 4): [20.0] * 3, ("dflash", 7): [20.4] * 3}
    report = report_of(measured({1: rounds}))
    current = {**UNSET, "methods": ["dflash"], "num_draft_tokens": 4}
    assert advice_of(report, DRAFTERS, current) == Advice(kept="dflash 4")
    assert advice_of(report, DRAFTERS, UNSET).changes == (
        Change("methods", None, ["dflash"]),
        Change("num_draft_tokens", None, 7),
    )


SPEED = st.floats(0.5, 900.0)
LENGTH = {"off": st.just(0), "auto": st.just(0), "dflash": st.integers(1, 7), "ngram": st.integers(1, 16)}


@st.composite
def result_sets(draw: st.DrawFn) -> dict[str, Any]:
    """Draw any measurement: cells with and without drafting, runs that broke off, machines with any load."""
    cells = {}
    for rows in draw(st.lists(st.sampled_from([1, 2, 4, 8]), unique=True, max_size=3)):
        plain = draw(st.lists(SPEED, min_size=1, max_size=9))
        settings = {("off", 0): plain}
        for method in draw(st.lists(st.sampled_from(["auto", "dflash", "ngram"]), max_size=5)):
            pace = draw(st.floats(0.3, 4.0))
            wobble = draw(st.lists(st.floats(0.8, 1.25), min_size=1, max_size=len(plain)))
            settings[method, draw(LENGTH[method])] = [
                base * pace * factor for base, factor in zip(plain, wobble, strict=False)
            ]
        cells[rows] = settings
    results = measured(cells, disturbed=draw(st.integers(0, 3)))
    drafts = any(method == "dflash" for settings in cells.values() for method, _ in settings)
    results["methods"] = draw(st.sampled_from([{"dflash": "big-dflash"}, DRAFTERS, *([] if drafts else [{}])]))
    return results


CURRENT = st.fixed_dictionaries(
    {"policy": st.sampled_from(["off", "single", "auto"]), "planned": st.sampled_from([[], ["big-dflash"]])},
    optional={
        "drafts": st.sampled_from([["big-dflash"], ["small"], []]),
        "methods": st.sampled_from([["dflash"], ["ngram"], ["dflash", "ngram"]]),
        "num_draft_tokens": st.integers(1, 16),
        "prompt_lookup_min": st.integers(1, 4),
    },
)


def is_possible(current: dict[str, Any]) -> bool:
    try:
        checked_model({name: value for name, value in current.items() if name in SPECULATION and value is not None})
    except InvalidSetting:
        return False
    return True


def as_json(results: Any, current: Any) -> Any:
    return json.loads(json.dumps(report_object(results, current)))


@settings(max_examples=200, deadline=None)
@given(result_sets(), CURRENT.filter(is_possible))
def test_headline_table_history_and_apply_never_contradict_one_another(results: Any, current: Any) -> None:
    report = report_of(json.loads(json.dumps(results)))
    for cell in report.cells:
        agrees_with_its_table(cell)
    agrees_with_its_cells(report)
    shown = as_json(results, current)
    assert shown["text"] == report.text, "history and headline are the same object"
    advice = shown["advice"]
    assert not (advice["changes"] and advice["kept"])
    if report.choice is None:
        assert advice == {"changes": [], "kept": ""}, "a tie changes nothing"
    for changes in (
        advice["changes"],
        *(setting["changes"] for cell in shown["cells"] for setting in cell["settings"]),
    ):
        assert all(change["old"] != change["new"] for change in changes)
        assert is_possible({**current, **{change["name"]: change["new"] for change in changes}}), "it can be stored"
        assert {change["name"] for change in changes} <= set(SPECULATION) - {"acceptance"}
    if report.choice is not None and not advice["kept"]:
        after = {**current, **{change["name"]: change["new"] for change in advice["changes"]}}
        assert as_json(results, after)["advice"]["changes"] == [], "applied twice is applied once"


def agrees_with_its_table(cell: CellReport) -> None:
    plain = cell.settings[0]
    drafting = cell.settings[1:]
    for candidate in cell.settings:
        assert candidate.tokens_per_second / plain.tokens_per_second == pytest.approx(candidate.ratio)
        assert candidate.low <= candidate.ratio * 1.000001
        assert candidate.ratio <= candidate.high * 1.000001
        assert candidate.slowest <= candidate.tokens_per_second * 1.000001
    best = cell.find(cell.best)
    if cell.verdict == "faster":
        assert best is not None
        assert best.standing == "faster"
        assert best.ratio > 1
        assert all(
            setting.ratio <= best.ratio * (1 + cell.noise) * 1.000001
            for setting in drafting
            if setting.standing == "faster"
        )
    elif cell.verdict == "plain":
        assert best is plain
        assert all(setting.ratio < 1 for setting in drafting), "no green row beside a headline that says otherwise"
    else:
        assert best is None
        assert all(setting.standing != "faster" for setting in drafting)
        assert all(setting.ratio <= (1 + cell.noise) * 1.000001 for setting in drafting), (
            "± x % covers what the table shows"
        )


def agrees_with_its_cells(report: Report) -> None:
    verdicts = [cell.verdict for cell in report.cells]
    choice = report.choice
    if choice is None:
        assert "faster" not in verdicts
    elif choice.get("policy") == "off":
        assert "faster" not in verdicts
        assert "plain" in verdicts
    else:
        best = [winner for cell in report.cells if cell.verdict == "faster" and (winner := cell.find(cell.best))]
        assert {setting.method for setting in best} & {"auto", *(choice["methods"] or ["auto"])}
        if choice.get("policy") == "auto":
            assert any(cell.rows > 1 and cell.verdict == "faster" for cell in report.cells)
    for cell in report.cells:
        if cell.verdict == "faster" and (winner := cell.find(cell.best)):
            assert f"{winner.ratio:.2f}x" in report.text


def test_the_table_shows_every_setting() -> None:
    console = Console(record=True, width=80)
    console.print(measurement_table(report_of(swept(PAYS_ALONE).results()), "big on this machine"))
    shown = console.export_text()
    assert "…" not in shown, "it fits a narrow terminal"
    assert "per step" in shown
    for part in (
        "big on this machine",
        "1 request, 0.1k",
        "8 requests, 0.1k",
        "dflash 7",
        "26.0 (26.0-26.0)",
        "2.60 (2.60-2.60)",
        "80%",
        "governor: dflash",
    ):
        assert part in shown


def test_what_is_not_there_is_told() -> None:
    sweep = swept(PAYS_ALONE)
    assert omission_text(sweep.results()) == ""
    sweep.skipped = list(sweep.measured)[1:]
    assert "8 requests, 0.1k" in omission_text(sweep.results())
    assert "--minutes" in omission_text(sweep.results())
    sweep.interrupted = True
    assert "Interrupted" in omission_text(sweep.results())


def parsed(sweep: Sweep, title: str = "big + draft") -> tuple[str, ET.Element]:
    text = as_svg(report_of(sweep.results()), title)
    return text, ET.fromstring(text)  # noqa: S314 - our own text


def test_the_plot_has_a_line_for_each_method_and_plain_as_the_baseline() -> None:
    text, root = parsed(swept(PAYS_ALONE))
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    lines = root.findall(f".//{name}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 1, 1], "dflash and ngram alone, dflash at 8"
    words = [element.text for element in root.iter(f"{name}text")]
    for word in (
        "big + draft",
        "Speed (tokens/s)",
        "Draft length (tokens)",
        "no drafting",
        "governor",
        "dflash",
        "ngram",
    ):
        assert word in words
    assert {"1 request", "8 requests"} <= set(words)
    assert "prefers-color-scheme: dark" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), "it needs no other file"


def test_the_plot_is_pure_and_its_lines_rise_with_speed() -> None:
    assert parsed(swept(PAYS_ALONE), "same")[0] == parsed(swept(PAYS_ALONE), "same")[0]
    _, root = parsed(swept(PAYS_ALONE))
    line = root.find(".//{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    (left, low), (right, high) = (map(float, place.split(",")) for place in line.attrib["points"].split())
    assert left < right
    assert low > high, "SVG counts downwards"


def test_a_title_is_text_and_never_markup() -> None:
    text, root = parsed(swept(PAYS_ALONE), '<script>&"')
    assert "<script>" not in text
    assert root[0].text == '<script>&"'


@pytest.mark.parametrize("speeds", [{}, {(1, "off", 0): 10.0}])
def test_a_plot_of_nothing_says_so(speeds: dict[tuple[int, str, int], float]) -> None:
    text, _ = parsed(swept(speeds))
    assert "No drafting method was measured." in text


def test_the_plot_is_written_from_the_results_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = swept(PAYS_ALONE).results(model="big", drafts={"dflash": "small"})
    (tmp_path / "speed.json").write_text(json.dumps(results))
    monkeypatch.setattr("sys.argv", ["plot", str(tmp_path / "speed.json"), str(tmp_path / "speed.svg")])
    plot.main()
    assert "Speed by draft length: big + small" in (tmp_path / "speed.svg").read_text()
