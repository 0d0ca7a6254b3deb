"""Which model and which draft a request gets, and why not."""

from typing import Any

import pytest

from app.api.resolver import Resolver
from app.core.errors import InvalidRequest, ModelNotFound, ModelUnavailable, SpeculationUnavailable
from app.core.messages import LoadedModel, LoadProgress, Snapshot
from tests.api.fakes import MODELS, Site, make_site, model


def resolver(models: Any = MODELS, **settings: Any) -> Resolver:
    return make_site(models=models, **settings).context.resolver


def test_the_settings_reach_the_specification() -> None:
    made = resolver(policy="auto", max_rows=3, queue_limit=9, num_draft_tokens=5).resolve("demo-main")
    assert (made.id, made.path, made.draft_id) == ("demo-main", "/models/demo-main", "demo-draft")
    assert (made.draft_path, made.draft_unavailable) == ("/models/demo-draft", "")
    assert (made.policy, made.max_rows, made.queue_limit, made.num_draft_tokens) == ("auto", 3, 9, 5)


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
    site.worker.snapshot = Snapshot(models=(LoadedModel(id="demo-main", state="ready"),))
    assert site.context.resolver.resolve(absent).id == "demo-main"


def test_without_a_draft_the_reason_is_told() -> None:
    made = resolver().resolve("org/other")
    assert made.draft_id is None
    assert "no draft model" in made.draft_unavailable
    with pytest.raises(SpeculationUnavailable, match="no draft model"):
        resolver().resolve("org/other", needs_draft=True)


def test_a_draft_that_was_asked_for_fits_or_is_refused() -> None:
    assert resolver(drafts="demo-main=off").resolve("demo-main", "demo-draft").draft_id == "demo-draft"
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
    assert made.draft_id is None
    assert reason in made.draft_unavailable
    with pytest.raises(SpeculationUnavailable, match=reason):
        resolver(drafts=drafts).resolve("demo-main", needs_draft=True)


def site_with(draft_id: str | None) -> Site:
    site = make_site()
    site.worker.snapshot = Snapshot(models=(LoadedModel(id="demo-main", state="ready", draft_id=draft_id),))
    return site


def test_a_loaded_unit_keeps_its_draft() -> None:
    site = site_with(None)
    loaded = site.context.resolver.resolve("demo-main", "off")
    assert site.context.resolver.resolve("demo-main") == loaded, "loaded without a draft, used without a draft"
    assert site.context.resolver.resolve("demo-main", "demo-draft").draft_id == "demo-draft"
    site.worker.snapshot = Snapshot()
    assert site.context.resolver.resolve("demo-main").draft_id == "demo-draft", "unloaded: the usual one again"


def test_a_unit_that_loads_keeps_its_draft() -> None:
    site = make_site()
    site.context.resolver.resolve("demo-main", "off")
    site.worker.progress["demo-main"] = LoadProgress(model_id="demo-main", phase="weights", fraction=0.1)
    assert site.context.resolver.resolve("demo-main").draft_id is None
