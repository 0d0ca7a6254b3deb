"""`paceline bench MODEL` from the model on disk to the files and the store, with the embedded models."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from app.benchmark.model_command import Wishes, advise, affordable, bench_model, specification_for
from app.benchmark.model_side import ModelSide
from app.benchmark.ours import OurSide
from app.benchmark.prompts import Prompts
from app.core.errors import ModelNotFound
from app.model_settings import ModelSettings
from app.serving.sweep.grid import GOVERNOR, MAIN, PLAIN, Cell, Setting, cells
from app.serving.sweep.report import report_object, report_of
from app.serving.sweep.tasks import TOKENS
from app.settings import Settings
from app.store.measurement_rows import KeptMeasurements
from app.store.settings_rows import StoredSettings
from app.store.store import FILE_NAME, Store
from app.text.template import TextModel
from tests.benchmark.sweeps import measured

DEMO = "demo-assistant"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The embedded models and no others."""
    for name in ("HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return Settings(_env_prefix="PACELINE_IGNORED_IN_TESTS_", home=tmp_path / "home")  # type: ignore[call-arg]


def test_a_model_is_measured_told_drawn_and_kept(tmp_path: Path, settings: Settings) -> None:
    console = Console(record=True, width=140)
    files = {"json": tmp_path / "made" / "speed.json", "svg": tmp_path / "made" / "speed.svg"}
    wishes = Wishes(model=DEMO, prompts=("Count from 1 to 20.",), minutes=0.01, rounds=1, apply=True, **files)
    sweep = bench_model(wishes, settings, console=console, note="none")
    assert {PLAIN, GOVERNOR} <= {point.setting for point in sweep.points_of(MAIN)}
    assert {"draft_model", "ngram"} <= {point.setting.method for point in sweep.points_of(MAIN)}
    shown = console.export_text()
    for part in (
        DEMO,
        "Tokens/s",
        "no drafting",
        "governor",
        "1 request, 0.1k",
        "No time was left for",
        "One round only",
    ):
        assert part in shown
    document = json.loads(files["json"].read_text(encoding="utf-8"))
    assert document["report"]["text"] in shown
    assert document["options"]["prompts"] == ["Count from 1 to 20."]
    assert files["svg"].read_text(encoding="utf-8").startswith("<svg")
    store = Store(settings.home / FILE_NAME)
    kept = KeptMeasurements(store).of(DEMO)
    assert [row.results["model"] for row in kept] == [DEMO]
    assert (kept[0].versions, kept[0].machine) == (document["versions"], document["machine"])
    assert json.loads(json.dumps(report_object(kept[0].results))) == document["report"], "told from the same results"
    stored = StoredSettings(store).model(DEMO)
    assert (stored is None) == ("Nothing to change." in shown)


@pytest.mark.parametrize("apply", [False, True])
def test_apply_stores_what_it_lists_and_nothing_else(settings: Settings, apply: bool) -> None:
    store = Store(settings.home / FILE_NAME)
    kept = StoredSettings(store)
    kept.save_model(DEMO, ModelSettings(acceptance="rejection", temperature=0.4, policy="off"), source="test")
    console = Console(record=True, width=140)
    report = report_of(measured({1: {("off", 0): [10.0] * 3, ("ngram", 2): [30.0] * 3}}))
    advise(report, {}, store, settings, DEMO, console=console, apply=apply)
    shown = console.export_text()
    for line in ("methods: automatic → ngram", "num_draft_tokens: automatic → 2", "policy: off → single"):
        assert line in shown
    after = ModelSettings(acceptance="rejection", temperature=0.4, policy="off")
    if apply:
        after = after.model_copy(update={"policy": "single", "methods": ("ngram",), "num_draft_tokens": 2})
    assert kept.model(DEMO) == after
    assert ("Stored for" in shown) == apply


def test_every_drafter_of_a_model_is_loaded_and_none_is_limited(settings: Settings) -> None:
    specification = specification_for(settings, DEMO)
    assert "demo-draft" in {draft.id for draft in specification.drafts}
    assert (specification.policy, specification.methods, specification.num_draft_tokens) == ("auto", (), None)


def test_a_model_that_is_not_there_is_told(settings: Settings) -> None:
    with pytest.raises(ModelNotFound):
        bench_model(Wishes(model="nowhere"), settings, console=Console(record=True))


def test_cells_that_do_not_fit_into_memory_are_left_out(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    specification = specification_for(settings, DEMO)
    wanted = cells(max_rows=8, max_context_tokens=4096, tokens=TOKENS)
    assert affordable(specification, wanted) == list(wanted)
    monkeypatch.setenv("PACELINE_MEMORY_LIMIT", "1M")
    assert affordable(specification, wanted) == [MAIN]


def test_turns_tell_speed_acceptance_and_method(settings: Settings) -> None:
    specification = specification_for(settings, DEMO)
    text = TextModel.load(Path(specification.path))
    ours = OurSide(specification)
    side = ModelSide(ours, Prompts(text, ["Count from 1 to 20."]), text.stop_token_ids, tokens=24)
    plain = side.turn(MAIN, PLAIN, 0)
    drafted = side.turn(MAIN, Setting("draft_model", 4), 0)
    together = side.turn(Cell(2, 128), Setting("draft_model", 2), 0)
    methods = side.methods
    ours.close()
    assert plain.tokens_per_second > 0
    assert (plain.acceptance, plain.tokens_per_cycle, plain.method) == (None, None, "")
    assert drafted.acceptance is not None
    assert drafted.tokens_per_cycle is not None
    assert 0 <= drafted.acceptance <= 1 <= drafted.tokens_per_cycle <= 5
    assert drafted.method == together.method == "draft_model"
    assert set(methods) >= {"draft_model", "ngram"}
