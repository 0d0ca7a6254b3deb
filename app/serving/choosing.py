"""How a model drafts when the request does not say: command line and environment, what is stored, then defaults."""

from dataclasses import dataclass

from app.core.speculative_config import SpeculativeConfig
from app.hub.catalog import CatalogModel
from app.hub.pairing import DRAFT_METHODS
from app.model_settings import ModelSettings
from app.serving.drafts import OFF, DraftFinder, FoundDrafters
from app.serving.live_settings import LiveSettings


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is chosen for one model: `found` are its drafters, `choice` has every other value that somebody gave."""

    found: FoundDrafters
    choice: ModelSettings
    by_hand: bool
    """Whether somebody chose the drafters, rather than the usual rule."""

    @property
    def problem(self) -> str:
        """Why a drafter that somebody chose is not used; empty when nothing is wrong."""
        return self.found.reason if self.by_hand and not self.found.is_wish else ""

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that may run; empty: every one that can."""
        return self.choice.methods or ()


class Chooser:
    """Asks the settings and the store, in this order; the first one that gives a value decides it."""

    def __init__(self, settings: LiveSettings, finder: DraftFinder) -> None:
        self._live = settings
        self._finder = finder

    def choose(self, main: CatalogModel) -> Chosen:
        """Everything that is chosen for `main`. Never raises for a drafter that cannot be used."""
        told, found = self._told(main)
        stored = self._live.model(main.id)
        if found is not None:
            return Chosen(found, told.over(stored.model_copy(update={"methods": None})), by_hand=True)
        choice = told.over(stored)
        if stored.drafts is not None:
            found = self._finder.chosen(main, stored.drafts, "the choice for this model")
            if not stored.drafts:
                found = FoundDrafters(reason=f"drafters are turned off for {main.id}", is_wish=True)
            return Chosen(_allowed(found, choice.methods), choice, by_hand=True)
        return Chosen(self._usual(main, choice.methods), choice, by_hand=False)

    def _usual(self, main: CatalogModel, methods: tuple[str, ...] | None) -> FoundDrafters:
        """The best drafter; with `methods` chosen by hand, the best one of each of them."""
        if methods is None:
            return self._finder.best(main, DRAFT_METHODS)
        best = [self._finder.best(main, (method,)) for method in DRAFT_METHODS if method in methods]
        drafts = tuple(draft for found in best for draft in found.drafts)
        return FoundDrafters(drafts, "; ".join(found.reason for found in best if found.reason) or _only(main, methods))

    def _told(self, main: CatalogModel) -> tuple[ModelSettings, FoundDrafters | None]:
        """What settings say about this model, and the drafters that they name."""
        settings = self._live.current
        given = settings.model_fields_set
        told = ModelSettings(
            num_draft_tokens=settings.num_draft_tokens if "num_draft_tokens" in given else None,
            policy=settings.policy if "policy" in given else None,
            acceptance=settings.acceptance if "acceptance" in given else None,
        )
        config = settings.speculative_config
        if config is not None and self._applies(config, main):
            return self._from_config(told, config, main)
        named = settings.drafts.get(main.id)
        if named == OFF:
            return told, FoundDrafters(reason=f"PACELINE_DRAFTS turns the draft model of {main.id} off", is_wish=True)
        if named is None:
            return told, None
        return told, self._finder.chosen(main, self._finder.names(named), "PACELINE_DRAFTS")

    def _applies(self, config: SpeculativeConfig, main: CatalogModel) -> bool:
        target = config.target or self._live.current.default_model
        if target or config.method == "ngram" or not config.model:
            return target in {"", main.id}
        return self._finder.may_mean(main, config.model)

    def _from_config(
        self, told: ModelSettings, config: SpeculativeConfig, main: CatalogModel
    ) -> tuple[ModelSettings, FoundDrafters]:
        methods: tuple[str, ...] | None = (config.method,) if config.method else None
        if config.method == "ngram":
            found = FoundDrafters(reason=_only(main, ("ngram",)), is_wish=True)
        elif config.model:
            found = self._finder.chosen(main, self._finder.names(config.model), "speculative_config")
            methods = methods or tuple(draft.method for draft in found.drafts) or None
        else:
            found = self._finder.best(main, methods or ())
        told = ModelSettings.model_validate(
            told.given()
            | {"methods": methods, "num_draft_tokens": config.num_speculative_tokens or told.num_draft_tokens}
            | {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
        )
        return told, _allowed(found, methods)


def _allowed(found: FoundDrafters, methods: tuple[str, ...] | None) -> FoundDrafters:
    """The drafters of these methods; the others are left out with a reason."""
    if methods is None:
        return found
    drafts = tuple(draft for draft in found.drafts if draft.method in methods)
    others = [
        f"{draft.id} drafts by {draft.method}, chosen is {' or '.join(methods)}"
        for draft in found.drafts
        if draft not in drafts
    ]
    return FoundDrafters(drafts, "; ".join([*others, *([found.reason] if found.reason else [])]), found.is_wish)


def _only(main: CatalogModel, methods: tuple[str, ...]) -> str:
    """Why no drafter is loaded where only methods without one are allowed."""
    return "" if set(methods) & set(DRAFT_METHODS) else f"only {' and '.join(methods) or OFF} may draft for {main.id}"
