"""Model and drafters that a request gets, or the reason why it gets none."""

from typing import Any

import msgspec
import pytest

from app.core.errors import InvalidRequest, ModelNotFound, ModelUnavailable, SpeculationUnavailable
from app.core.messages import Snapshot
from app.core.unit import DrafterSpecification, LoadedModel, ModelSpecification
from app.models.safe_files import TensorInfo
from app.serving.resolver import Resolver
from tests.api.fakes import DRAFTERS, FOLDERS, MODELS, Site, drafter, make_site, model, names_of
from tests.loaded import loaded


def resolver(models: Any = MODELS, **settings: Any) -> Resolver:
    return make_site(models=models, **settings).context.resolver


def test_the_settings_reach_the_specification() -> None:
    made = resolver(policy="auto", max_rows=3, queue_limit=9, num_draft_tokens=5, acceptance="rejection").resolve(
        "demo-main"
    )
    assert (made.id, made.path, made.live.draft_unavailable) == ("demo-main", str(FOLDERS / "demo-main"), "")
    assert made.drafters == (DrafterSpecification("demo-draft", str(FOLDERS / "demo-draft"), "draft_model"),)
    assert (made.live.policy, made.max_rows, made.live.queue_limit, made.live.num_draft_tokens) == ("auto", 3, 9, 5)
    assert (made.acceptance, made.methods, made.prompt_lookup_min) == ("rejection", (), None)


def test_models_that_cannot_answer() -> None:
    with pytest.raises(ModelNotFound):
        resolver().resolve("nothing")
    with pytest.raises(ModelUnavailable, match="missing"):
        resolver().resolve("broken")
    with pytest.raises(InvalidRequest, match="drafter"):
        resolver().resolve("eagle")


@pytest.mark.parametrize("absent", [None, ""])
def test_no_model_named(absent: str | None) -> None:
    with pytest.raises(InvalidRequest, match="demo-draft, demo-main, org/other") as refused:
        resolver().resolve(absent)
    assert refused.value.code == "model_required"
    with pytest.raises(InvalidRequest, match="none is here yet"):
        resolver(models=()).resolve(absent)
    assert resolver(default_model="org/other").resolve(absent).id == "org/other"
    assert resolver(models=(model("one"), MODELS[0], MODELS[3])).resolve(absent).id == "one"
    site = make_site()
    site.worker.book.snapshot = Snapshot(models=(loaded("demo-main"),))
    assert site.context.resolver.resolve(absent).id == "demo-main"


def test_without_a_draft_the_reason_is_told() -> None:
    made = resolver().resolve("org/other")
    assert made.drafters == ()
    assert "no draft model" in made.live.draft_unavailable
    with pytest.raises(SpeculationUnavailable, match="no draft model"):
        resolver().resolve("org/other", method="draft_model")


def test_a_draft_that_was_asked_for_fits_or_is_refused() -> None:
    assert names_of(resolver(drafts="demo-main=off").resolve("demo-main", "demo-draft")) == ["demo-draft"]
    with pytest.raises(SpeculationUnavailable, match="tokenizer") as refused:
        resolver().resolve("demo-main", "org/other")
    assert refused.value.parameter == "draft_model"
    with pytest.raises(SpeculationUnavailable, match="missing"):
        resolver().resolve("demo-main", "broken")
    with pytest.raises(ModelNotFound) as missing:
        resolver().resolve("demo-main", "nothing")
    assert missing.value.parameter == "draft_model"


@pytest.mark.parametrize(
    ("drafts", "reason"),
    [("demo-main=off", "off"), ("demo-main=org/other", "tokenizer"), ("demo-main=gone", "gone")],
)
def test_a_configured_draft_that_cannot_be_used_is_left_out_with_its_reason(drafts: str, reason: str) -> None:
    made = resolver(drafts=drafts).resolve("demo-main")
    assert made.drafters == ()
    assert reason in made.live.draft_unavailable
    with pytest.raises(SpeculationUnavailable, match=reason):
        resolver(drafts=drafts).resolve("demo-main", method="draft_model")


def load(site: Site, unit: ModelSpecification) -> None:
    """Make this unit the only one that the worker has loaded."""
    site.worker.book.snapshot = Snapshot(models=(LoadedModel(unit=unit, state="ready"),))


def test_a_loaded_unit_keeps_its_drafters() -> None:
    site = make_site()
    alone = site.context.resolver.resolve("demo-main", "off")
    load(site, alone)
    assert site.context.resolver.resolve("demo-main") is alone, "loaded without a draft, used without a draft"
    assert names_of(site.context.resolver.resolve("demo-main", "demo-draft")) == ["demo-draft"]
    site.worker.book.snapshot = Snapshot()
    assert names_of(site.context.resolver.resolve("demo-main")) == ["demo-draft"], "unloaded: the usual one again"


def test_a_loaded_unit_does_not_serve_other_weights_that_were_put_in_its_folder() -> None:
    site = make_site()
    before = site.context.resolver.resolve("demo-main")
    load(site, msgspec.structs.replace(before, size_bytes=before.size_bytes + 1))
    after = site.context.resolver.resolve("demo-main")
    assert after == before
    load(site, after)
    assert site.context.resolver.resolve("demo-main") is after


def test_a_unit_that_loads_keeps_its_drafters() -> None:
    site = make_site()
    site.worker.coming["demo-main"] = site.context.resolver.resolve("demo-main", "off")
    assert site.context.resolver.resolve("demo-main").drafters == ()


def test_a_loaded_unit_serves_a_request_that_names_one_of_its_drafters() -> None:
    site = make_site(models=DRAFTERS)
    both = site.context.resolver.resolve("demo-main", "demo-main-dflash+demo-draft")
    assert names_of(both) == ["demo-main-dflash", "demo-draft"]
    load(site, both)
    assert site.context.resolver.resolve("demo-main", "demo-draft") is both
    assert names_of(site.context.resolver.resolve("demo-main", "demo-main-eagle3")) == ["demo-main-eagle3"]
    assert names_of(site.context.resolver.resolve("demo-main", "off")) == [], "off is another unit"


# --- several drafters -------------------------------------------------------------------------------------------


def test_what_is_loaded_by_hand_has_the_drafters_named_and_no_others() -> None:
    site = make_site(models=DRAFTERS)
    both = site.context.resolver.resolve_load("demo-main", "demo-main-dflash+demo-draft")
    load(site, both)
    assert site.context.resolver.resolve_load("demo-main", None) is both
    alone = site.context.resolver.resolve_load("demo-main", "demo-draft")
    assert names_of(alone) == ["demo-draft"]
    load(site, alone)
    assert site.context.resolver.resolve("demo-main") is alone


def test_a_drafter_and_a_method_that_it_does_not_draft_by_are_refused() -> None:
    site = make_site(models=DRAFTERS)
    load(site, site.context.resolver.resolve("demo-main", "demo-main-dflash+demo-draft"))
    for method in ("draft_model", "ngram", "mtp"):
        with pytest.raises(SpeculationUnavailable, match=f"demo-main-dflash does not draft by {method}"):
            site.context.resolver.resolve("demo-main", "demo-main-dflash", method=method)
    assert site.context.resolver.resolve("demo-main", "demo-main-dflash", method="dflash")
    assert site.context.resolver.resolve("demo-main", "demo-main-dflash", method="off")


def test_two_drafters_of_one_method_are_refused() -> None:
    models = (*DRAFTERS, drafter("dflash", "demo-main-other"))
    with pytest.raises(SpeculationUnavailable, match="demo-main-dflash is its dflash drafter already"):
        resolver(models).resolve("demo-main", "demo-main-dflash+demo-main-other")
    made = resolver(models, drafts="demo-main=demo-main-dflash+demo-main-other").resolve("demo-main")
    assert names_of(made) == ["demo-main-dflash"]
    assert "already" in made.live.draft_unavailable


def test_one_misfit_of_several_chosen_drafters_is_left_out_with_its_reason() -> None:
    made = resolver(DRAFTERS, drafts="demo-main=demo-main-dflash+eagle+gone").resolve("demo-main")
    assert names_of(made) == ["demo-main-dflash"]
    assert (
        "eagle cannot draft for demo-main: it was made for a hidden size of 8, the main model has 4"
        in made.live.draft_unavailable
    )
    assert "gone" in made.live.draft_unavailable


def test_an_id_may_hold_a_plus_sign() -> None:
    models = (*DRAFTERS, drafter("eagle3", "demo-main-a+b"))
    assert names_of(resolver(models).resolve("demo-main", "demo-main-a+b")) == ["demo-main-a+b"]


def test_the_best_drafter_is_the_usual_one_and_a_named_method_adds_its_own() -> None:
    site = make_site(models=DRAFTERS)
    usual = site.context.resolver.resolve("demo-main")
    assert names_of(usual) == ["demo-main-dflash"]
    load(site, usual)
    assert site.context.resolver.resolve("demo-main", method="ngram") is usual
    assert site.context.resolver.resolve("demo-main", method="dflash") is usual
    more = site.context.resolver.resolve("demo-main", method="draft_model")
    assert names_of(more) == ["demo-main-dflash", "demo-draft"], "best first"
    load(site, more)
    assert site.context.resolver.resolve("demo-main") is more
    with pytest.raises(SpeculationUnavailable, match="no mtp drafter on this computer fits demo-main") as refusal:
        site.context.resolver.resolve("demo-main", method="mtp")
    assert refusal.value.parameter == "speculation"


def test_a_named_method_that_no_drafter_here_can_serve_says_what_is_wrong_with_the_nearest() -> None:
    refusal = r'no eagle3 drafter .* \("eagle" cannot draft: it was made for a hidden size of 8, .*\)'
    with pytest.raises(SpeculationUnavailable, match=refusal):
        resolver().resolve("demo-main", method="eagle3")


def test_a_named_method_does_not_overrule_the_drafters_that_were_chosen() -> None:
    with pytest.raises(SpeculationUnavailable, match="no dflash drafter was chosen for demo-main"):
        resolver(DRAFTERS, drafts="demo-main=demo-draft").resolve("demo-main", method="dflash")
    with pytest.raises(SpeculationUnavailable, match="demo-draft does not draft by dflash"):
        resolver(DRAFTERS).resolve("demo-main", "demo-draft", method="dflash")
    site = make_site(models=DRAFTERS)
    load(site, site.context.resolver.resolve("demo-main", "off"))
    with pytest.raises(SpeculationUnavailable, match="turned off"):
        site.context.resolver.resolve("demo-main", method="dflash")


def test_the_head_inside_a_checkpoint_is_named_by_the_model() -> None:
    head = {"mtp.fc.weight": TensorInfo("F16", (4, 8), 64, "model.safetensors")}
    main = model("demo-main-next", tensors=head)
    site = make_site(models=(main, model("demo-main")))
    with pytest.raises(SpeculationUnavailable, match="cannot draft for demo-main"):
        resolver((model("demo-main"),)).resolve("demo-main", "demo-main")
    held = loaded(main.id, DrafterSpecification(main.id, "", "mtp"))
    site.worker.book.snapshot = Snapshot(models=(held,))
    assert site.context.resolver.entry(main).drafters == held.unit.drafters
