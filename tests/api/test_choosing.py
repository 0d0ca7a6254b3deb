"""Drafters and options chosen for a model when the request names none, and vLLM's speculative_config."""

from typing import Any

import pytest

from app.core.errors import SpeculationUnavailable
from app.core.reason import Reason
from app.core.request import UNQUANTISED, Quantisation
from app.model_settings import ModelSettings
from app.serving.resolver import Resolver
from tests.api.fakes import DRAFTERS, Site, make_site, names_of


def keep(site: Site, **chosen: Any) -> None:
    """Set the settings of `demo-main` as if an earlier run, of any version, had stored them."""
    site.context.live._models = {"demo-main": ModelSettings(**chosen)}


def make_resolver(**settings: str) -> Resolver:
    return make_site(models=DRAFTERS, **settings).context.resolver


def test_a_stored_choice_decides_where_settings_say_nothing() -> None:
    site = make_site(models=DRAFTERS)
    keep(
        site,
        drafts=("demo-main-eagle3", "demo-draft"),
        methods=("eagle3", "draft_model", "ngram"),
        num_draft_tokens=3,
        policy="auto",
        acceptance="rejection",
        prompt_lookup_min=2,
        prompt_lookup_max=4,
    )
    made = site.context.resolver.resolve("demo-main")
    assert names_of(made) == ["demo-main-eagle3", "demo-draft"]
    assert (made.methods, made.live.num_draft_tokens) == (("eagle3", "draft_model", "ngram"), 3)
    assert (made.live.policy, made.acceptance, made.prompt_lookup_min, made.prompt_lookup_max) == (
        "auto",
        "rejection",
        2,
        4,
    )
    assert names_of(site.context.resolver.resolve("demo-main", "demo-main-dflash")) == ["demo-main-dflash"]


def test_how_keys_and_values_are_kept_reaches_the_specification() -> None:
    site = make_site(models=DRAFTERS, policy="off")
    assert site.context.resolver.resolve("demo-main").quantisation == UNQUANTISED
    for chosen, wanted in (({"kv_bits": 4}, (4, 1024)), ({"kv_bits": 8, "kv_bits_from": 0}, (8, 0))):
        keep(site, **chosen)
        assert site.context.resolver.resolve("demo-main").quantisation == Quantisation(*wanted)


def test_settings_go_before_a_stored_choice() -> None:
    site = make_site(
        models=DRAFTERS, drafts="demo-main=demo-draft", policy="single", acceptance="coupled", num_draft_tokens=9
    )
    keep(
        site,
        drafts=("demo-main-eagle3",),
        methods=("eagle3",),
        num_draft_tokens=3,
        policy="off",
        acceptance="rejection",
    )
    made = site.context.resolver.resolve("demo-main")
    assert (names_of(made), made.methods) == (["demo-draft"], ())
    assert (made.live.num_draft_tokens, made.live.policy, made.acceptance) == (9, "single", "coupled")


def test_a_stored_choice_may_turn_drafters_off_or_allow_methods_only() -> None:
    site = make_site(models=DRAFTERS)
    keep(site, drafts=())
    made = site.context.resolver.resolve("demo-main")
    assert (made.drafters, made.live.draft_unavailable) == ((), "drafters are turned off for demo-main")
    keep(site, methods=("ngram",))
    made = site.context.resolver.resolve("demo-main")
    assert (made.drafters, made.methods) == ((), ("ngram",))
    assert made.live.draft_unavailable == "only ngram may draft for demo-main"
    with pytest.raises(SpeculationUnavailable, match="only ngram may draft for demo-main, not dflash"):
        site.context.resolver.resolve("demo-main", method="dflash")
    keep(site, methods=("draft_model", "dflash"))
    assert names_of(site.context.resolver.resolve("demo-main")) == ["demo-main-dflash", "demo-draft"]


def test_a_stored_drafter_that_is_gone_is_left_out_with_its_reason() -> None:
    site = make_site(models=DRAFTERS)
    keep(site, drafts=("gone", "demo-main-dflash"), methods=("dflash",))
    made = site.context.resolver.resolve("demo-main")
    assert names_of(made) == ["demo-main-dflash"]
    assert "the choice for this model names gone" in made.live.draft_unavailable
    assert made.no_drafter == Reason("missing_some", {"names": "gone"})
    keep(site, drafts=("gone", "lost"))
    assert site.context.resolver.resolve("demo-main").no_drafter == Reason("missing_all", {"names": "gone, lost"})
    keep(site, drafts=("demo-draft",), methods=("dflash",))
    assert site.context.resolver.resolve("demo-main").live.draft_unavailable == (
        "demo-draft drafts by draft_model, chosen is dflash"
    )


# --- vLLM's speculative_config ----------------------------------------------------------------------------------


def test_a_speculative_config_chooses_for_its_target() -> None:
    config = '{"method": "dflash", "model": "demo-main-dflash", "num_speculative_tokens": 7, "target": "demo-main"}'
    site = make_site(models=DRAFTERS, speculative_config=config, drafts="demo-main=demo-draft", num_draft_tokens=2)
    made = site.context.resolver.resolve("demo-main")
    assert (names_of(made), made.methods, made.live.num_draft_tokens) == (["demo-main-dflash"], ("dflash",), 7)
    other = site.context.resolver.resolve("org/other")
    assert (other.methods, other.live.num_draft_tokens) == ((), 2)


@pytest.mark.parametrize(
    ("settings", "applies"),
    [({"default_model": "demo-main"}, True), ({"default_model": "org/other"}, False), ({}, True)],
)
def test_without_a_target_a_speculative_config_is_for_the_default_model(
    settings: dict[str, str], applies: bool
) -> None:
    config = '{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
    made = make_resolver(speculative_config=config, **settings).resolve("demo-main")
    assert (made.methods == ("ngram",)) == applies
    assert ((made.prompt_lookup_min, made.prompt_lookup_max) == (2, 5)) == applies
    assert (made.drafters == ()) == applies


def test_without_a_default_model_the_drafter_of_a_speculative_config_finds_its_main_model() -> None:
    config = '{"model": "demo-main-eagle3"}'
    made = make_resolver(speculative_config=config)
    assert names_of(made.resolve("demo-main")) == ["demo-main-eagle3"]
    assert made.resolve("demo-main").methods == ("eagle3",)
    assert "no draft model" in made.resolve("org/other").live.draft_unavailable


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"method": "eagle", "model": "demo-draft"}', "demo-draft drafts by draft_model, chosen is eagle3"),
        ('{"method": "dflash", "model": "gone"}', "speculative_config names gone for demo-main"),
        ('{"method": "mtp"}', "no mtp drafter on this computer fits demo-main"),
    ],
)
def test_a_speculative_config_that_cannot_be_had_says_why(config: str, reason: str) -> None:
    made = make_resolver(speculative_config=config, default_model="demo-main").resolve(None)
    assert made.drafters == ()
    assert reason in made.live.draft_unavailable


def test_a_speculative_config_without_a_model_takes_the_best_drafter_of_its_method() -> None:
    made = make_resolver(speculative_config='{"method": "eagle3"}', default_model="demo-main").resolve(None)
    assert (names_of(made), made.methods, made.live.draft_unavailable) == (["demo-main-eagle3"], ("eagle3",), "")
