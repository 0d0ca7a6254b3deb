"""What a measurement recommends, in words and as a choice."""

import json
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from app.benchmark.plot import as_svg
from app.benchmark.sweep_report import left_out, sweep_document, sweep_table
from app.model_settings import ModelSettings
from app.serving.sweep.recommendation import recommend
from app.serving.sweep.turns import Sweep
from tests.benchmark.sweeps import swept

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


def said(speeds: dict[tuple[int, str, int], float]) -> tuple[str, ModelSettings]:
    found = recommend(swept(speeds), {"dflash": "big-dflash", "draft_model": "small"})
    assert found is not None
    return found.text, found.choice


def test_a_method_that_pays_alone_is_kept_with_its_drafts() -> None:
    text, choice = said(PAYS_ALONE)
    assert text == "dflash with 7 drafts: 2.6x plain (1 row); off at 8 rows"
    assert choice == ModelSettings(drafts=("big-dflash",), methods=("dflash",), num_draft_tokens=7, policy="single")


def test_where_several_requests_gain_the_governor_chooses_the_drafts() -> None:
    speeds = {(4, "off", 0): 40.0, (4, "auto", 0): 44.0, (4, "dflash", 4): 60.0, (4, "ngram", 1): 41.0}
    text, choice = said({**PAYS_ALONE, **speeds})
    assert text == "dflash with 7 drafts: 2.6x plain (1 row); dflash with 4 drafts: 1.5x plain (4 rows); off at 8 rows"
    assert (choice.policy, choice.methods, choice.num_draft_tokens) == ("auto", ("dflash",), None)


def test_where_the_governor_is_best_nothing_is_fixed() -> None:
    text, choice = said({**PAYS_ALONE, (1, "auto", 0): 30.0})
    assert text == "the governor, mostly with dflash: 3.0x plain (1 row); off at 8 rows"
    assert (choice.policy, choice.methods, choice.num_draft_tokens) == ("single", None, None)
    assert choice.drafts == ("big-dflash", "small")


def test_where_nothing_pays_plain_is_recommended() -> None:
    text, choice = said({(1, "off", 0): 10.0, (1, "auto", 0): 9.9, (1, "ngram", 1): 10.4})
    assert text == "plain is fastest here"
    assert choice == ModelSettings(policy="off")


def test_drafting_that_pays_only_in_batches_is_off_for_one() -> None:
    speeds = {(1, "off", 0): 10.0, (1, "ngram", 1): 8.0, (4, "off", 0): 40.0, (4, "ngram", 1): 50.0}
    text, choice = said(speeds)
    assert text == "ngram with 1 draft: 1.2x plain (4 rows); off at 1 row"
    assert choice == ModelSettings(methods=("ngram",), policy="auto"), "n-grams need no drafter"


def test_several_rows_are_listed_together() -> None:
    speeds = {(rows, "off", 0): 50.0 for rows in (2, 4)} | {(rows, "dflash", 7): 40.0 for rows in (2, 4)}
    assert said({**PAYS_ALONE, **speeds})[0].endswith("; off at 2, 4 and 8 rows")


@pytest.mark.parametrize("speeds", [{}, {(1, "off", 0): 10.0}])
def test_without_any_drafting_nothing_is_recommended(speeds: dict[tuple[int, str, int], float]) -> None:
    assert recommend(swept(speeds), {}) is None


def test_the_table_shows_every_setting() -> None:
    console = Console(record=True, width=120)
    console.print(sweep_table(swept(PAYS_ALONE), "big on this machine"))
    shown = console.export_text()
    for part in (
        "big on this machine",
        "1 row, 0.1k",
        "8 rows, 0.1k",
        "dflash 7",
        "2.60",
        "80 %",
        "governor: dflash",
    ):
        assert part in shown


def test_the_document_holds_numbers_machine_versions_and_recommendation() -> None:
    sweep = swept(PAYS_ALONE)
    made = sweep_document(
        sweep, recommend(sweep, {"dflash": "draft"}), model="big", drafts={"dflash": "draft"}, options={"minutes": 3.0}
    )
    document = json.loads(json.dumps(made))
    assert document["versions"]["mlx-lm"]
    assert document["machine"]["cores"] >= 1
    assert document["recommendation"]["choice"]["num_draft_tokens"] == 7
    assert [cell["rows"] for cell in document["cells"]] == [1, 8]
    fastest = document["cells"][0]["settings"][3]
    assert (fastest["method"], fastest["num_draft_tokens"], fastest["to_plain"]) == ("dflash", 7, 2.6)


def test_what_is_not_there_is_told() -> None:
    sweep = swept(PAYS_ALONE)
    assert left_out(sweep) == ""
    sweep.skipped = sweep.cells()[1:]
    assert "8 rows, 0.1k" in left_out(sweep)
    assert "--minutes" in left_out(sweep)
    sweep.interrupted = True
    assert "Interrupted" in left_out(sweep)


def parsed(sweep: Sweep, title: str = "big + draft") -> tuple[str, ET.Element]:
    text = as_svg(sweep, title)
    return text, ET.fromstring(text)  # noqa: S314 - our own text


def test_the_plot_has_a_line_for_each_method_and_plain_as_the_baseline() -> None:
    text, root = parsed(swept(PAYS_ALONE))
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    lines = root.findall(f".//{name}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 1, 1], "dflash and ngram alone, dflash at 8"
    words = [element.text for element in root.iter(f"{name}text")]
    for word in ("big + draft", "Speed (tokens/s)", "Drafts per step (tokens)", "plain", "governor", "dflash", "ngram"):
        assert word in words
    assert {"1 row", "8 rows"} <= set(words)
    assert "prefers-color-scheme: dark" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), "it needs no other file"


def test_the_plot_is_pure_and_its_lines_rise_with_speed() -> None:
    sweep = swept(PAYS_ALONE)
    assert as_svg(sweep, "same") == as_svg(sweep, "same")
    _, root = parsed(sweep)
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
