"""Every way to draft for a model, in the order in which a person should try them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.unit import DrafterSpecification, ModelSpecification
from app.models.catalog import CatalogModel, FolderCatalog, default_catalog
from app.models.footprint import unit_footprint
from app.models.pairing import Candidate, candidates_for, default_draft, rank
from tests.models.folders import write_model


def specification(main: CatalogModel) -> ModelSpecification:
    return ModelSpecification(id=main.id, path=str(main.path))


def candidates_of(main: CatalogModel, catalog: FolderCatalog) -> dict[tuple[str, str], Candidate]:
    candidates = candidates_for(main, catalog.models(), specification(main), widen=False)
    return {(candidate.method, candidate.id): candidate for candidate in candidates}


@pytest.fixture
def embedded(tmp_path: Path) -> FolderCatalog:
    """Return a catalog of the embedded models and no others."""
    return default_catalog([], environment={}, home=tmp_path)


def test_everything_that_could_draft_is_told_with_what_it_takes(embedded: FolderCatalog) -> None:
    main = embedded.find("demo-assistant")
    candidates = candidates_of(main, embedded)
    for method, name in (("dflash", "demo-assistant-dflash"), ("eagle3", "demo-assistant-eagle3")):
        drafter = candidates[method, name]
        assert (drafter.fits, drafter.is_usual, drafter.tokens, drafter.rollback) == (True, True, "borrowed", ("trim",))
    draft = candidates["draft_model", "demo-draft"]
    assert (draft.fits, draft.tokens, draft.rollback) == (True, "same", ("trim",))
    assert draft.footprint.weights_bytes == draft.size_bytes
    assert draft.footprint.cache_bytes > 0, "its keys and values count"
    refused = candidates["mtp", "demo-hybrid-mtp"]
    assert "cannot run here" in refused.refusal
    assert main.id not in {candidate.id for candidate in candidates.values()}


def test_what_is_told_of_each_adds_up_to_what_the_worker_reserves(embedded: FolderCatalog) -> None:
    main = embedded.find("demo-assistant")
    draft = embedded.find("demo-draft")
    alone = specification(main)
    unit = ModelSpecification(
        id=main.id, path=str(main.path), drafters=(DrafterSpecification(draft.id, str(draft.path)),)
    )
    extra = candidates_of(main, embedded)["draft_model", "demo-draft"].footprint
    whole = unit_footprint(unit, widen=False)
    assert whole == unit_footprint(alone, widen=False) + extra
    assert whole.total_bytes == whole.weights_bytes + whole.cache_bytes + whole.peak_bytes


def test_n_grams_need_nothing_and_are_always_there(tmp_path: Path) -> None:
    write_model(tmp_path / "lonely")
    catalog = FolderCatalog([tmp_path])
    (ngram,) = candidates_for(
        catalog.find("lonely"), catalog.models(), specification(catalog.find("lonely")), widen=True
    )
    assert (ngram.method, ngram.id, ngram.origin, ngram.tokens) == ("ngram", "", "text", "unneeded")
    assert ngram.fits
    assert ngram.footprint.total_bytes == 0


def test_another_tokenizer_is_named_token_by_token(tmp_path: Path) -> None:
    write_model(tmp_path / "main", rows=16)
    write_model(tmp_path / "stranger", pieces="abxdyfgh")
    catalog = FolderCatalog([tmp_path])
    stranger = candidates_of(catalog.find("main"), catalog)["draft_model", "stranger"]
    assert stranger.tokens == "other"
    assert "token 2 is 'c' in the main model and 'x' in the draft" in stranger.token_difference
    assert stranger.token_difference in stranger.refusal


def test_a_broken_folder_is_told_and_breaks_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "main", rows=16)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    catalog = FolderCatalog([tmp_path])
    broken = candidates_of(catalog.find("main"), catalog)["draft_model", "broken"]
    assert broken.refusal
    assert broken.footprint.total_bytes == 0


def test_a_state_that_cannot_be_cut_is_a_snapshot(embedded: FolderCatalog) -> None:
    main = replace(embedded.find("demo-assistant"), size_bytes=1 << 40)
    candidates = candidates_for(main, embedded.models(), specification(main), widen=False)
    hybrid = next(candidate for candidate in candidates if candidate.id == "demo-hybrid")
    assert hybrid.rollback == ("trim", "snapshot")


def test_what_was_measured_to_pay_comes_first_and_what_does_not_fit_last() -> None:
    main = CatalogModel("main", Path("main"), "folder")

    def candidate(method: str, name: str, **more: Any) -> Candidate:
        return Candidate(method=method, draft=replace(main, id=name), **more)

    candidates = [
        candidate("draft_model", "refused", refusal="it has a different tokenizer"),
        Candidate(method="ngram", origin="text"),
        candidate("draft_model", "slow"),
        candidate("eagle3", "stranger", is_usual=False),
        candidate("draft_model", "quick"),
        candidate("dflash", "new"),
    ]
    speedups = {("draft_model", "slow"): 0.8, ("draft_model", "quick"): 1.7, ("draft_model", "refused"): 9.0}
    ranked = rank(main, (replace(entry, measured=speedups.get((entry.method, entry.id))) for entry in candidates))
    assert [entry.id or entry.method for entry in ranked] == ["quick", "new", "ngram", "stranger", "slow", "refused"]
    assert [entry.measured for entry in ranked[:2]] == [1.7, None]


def test_of_equal_drafters_the_first_one_is_the_one_that_is_chosen_by_itself(tmp_path: Path) -> None:
    write_model(tmp_path / "demo-main", rows=64)
    write_model(tmp_path / "demo-small", rows=16)
    write_model(tmp_path / "another", rows=8)
    catalog = FolderCatalog([tmp_path])
    main = catalog.find("demo-main")
    first, second, *_ = candidates_of(main, catalog).values()
    assert (first.id, second.id) == ("demo-small", "another"), "the same family goes before a smaller one"
    assert first.draft == default_draft(main, catalog.models())
