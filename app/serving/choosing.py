"""Chooses the drafters of a main model: those that a request names, else those chosen for the model.

Choices are from command line or environment, else from stored settings. The default is the fitting drafter that was
measured fastest on this computer, else the best by method and size. A name may join several ids by `+`, with at most
one drafter per method. A drafter that does not fit is an error if the request names it; otherwise it is left out with
a reason. Everything here may read the disk.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from app.core.errors import ModelNotFound, SpeculationUnavailable
from app.core.request import OFF
from app.core.unit import DrafterSpecification
from app.model_settings import ModelSettings
from app.models.catalog import CatalogModel, FolderCatalog
from app.models.drafters.methods import DRAFT_METHODS, DRAFT_MODEL, TEXT_METHODS
from app.models.pairing import Speedups, default_draft, is_best_match, refusal
from app.serving.live_settings import UNSET, LiveSettings
from app.speculative_config import SpeculativeConfig

SpeedupLookup = Callable[[str], Speedups]


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """The drafters of a unit, why a chosen one is not used, the ids not found, and other settings of the model."""

    drafters: tuple[DrafterSpecification, ...] = ()
    reason: str = ""
    missing: tuple[str, ...] = ()
    is_intended: bool = False
    """Whether the user asked for no drafter, so that `reason` is not a problem."""
    is_explicit: bool = False
    """Whether the drafters come from a setting rather than the default rule."""
    model_settings: ModelSettings = UNSET
    """All other values that were set explicitly."""

    @property
    def problem(self) -> str:
        """Reason why an explicitly chosen drafter is not used; empty if nothing is wrong."""
        return self.reason if self.is_explicit and not self.is_intended else ""

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that may run; empty: all that can."""
        return self.model_settings.methods or ()


class Chooser:
    """Consults the settings of the server, then those of the model; the first value wins.

    `measured` maps a model id to the measured speedups of its drafters over plain decoding, by method and drafter id.
    """

    def __init__(
        self,
        settings: LiveSettings,
        catalog: FolderCatalog,
        measured: SpeedupLookup = lambda _model_id: {},
    ) -> None:
        self._live = settings
        self._catalog = catalog
        self._measured = measured

    def choose(self, main: CatalogModel, *, by_measured: bool = True) -> DrafterChoice:
        """Return everything chosen for `main`. Never raises for a drafter that cannot be used.

        Without `by_measured`, measurements are ignored.
        """
        explicit, chosen = self._from_settings(main)
        stored = self._live.model(main.id)
        if chosen is not None:
            model_settings = explicit.over(stored.model_copy(update={"methods": None}))
            return replace(chosen, is_explicit=True, model_settings=model_settings)
        model_settings = explicit.over(stored)
        if stored.drafts is None:
            chosen = self._default(main, model_settings.methods, by_measured=by_measured)
            return replace(chosen, model_settings=model_settings)
        chosen = self.find_named(main, stored.drafts, "the choice for this model")
        if not stored.drafts:
            chosen = DrafterChoice(reason=f"drafters are turned off for {main.id}", is_intended=True)
        return replace(_allowed(chosen, model_settings.methods), is_explicit=True, model_settings=model_settings)

    def names(self, text: str) -> tuple[str, ...]:
        """Return the ids in `a+b`; an id may contain a plus sign itself."""
        if "+" not in text or any(model.id == text for model in self._catalog.models()):
            return (text,)
        return tuple(name.strip() for name in text.split("+") if name.strip())

    def find_named(self, main: CatalogModel, ids: Sequence[str], chooser: str = "") -> DrafterChoice:
        """Return the drafters with these ids; the main model's own id means the multi-token head in its checkpoint.

        If `chooser` (a setting or the stored choice) names them, unusable ones are left out with a reason. Without
        `chooser`, a request names them, and an unusable one raises ModelNotFound or SpeculationUnavailable.
        """
        drafters: dict[str, DrafterSpecification] = {}
        reasons: list[str] = []
        missing: list[str] = []
        for id_ in ids:
            try:
                draft = main.head if id_ == main.id and main.head is not None else self._catalog.find(id_)
            except ModelNotFound as error:
                if not chooser:
                    raise ModelNotFound(error.message, parameter="draft_model") from None
                reasons.append(f"{chooser} names {id_} for {main.id}: {error.message}")
                missing.append(id_)
                continue
            if problem := self._misfit(main, draft, drafters.get(draft.method)):
                message = f"{draft.id} cannot draft for {main.id}: {problem}"
                if not chooser:
                    raise SpeculationUnavailable(message, parameter="draft_model")
                reasons.append(message)
            else:
                drafters[draft.method] = draft.as_draft
        return DrafterChoice(tuple(drafters.values()), "; ".join(reasons), tuple(missing))

    def best(self, main: CatalogModel, methods: Collection[str], *, by_measured: bool = True) -> DrafterChoice:
        """Return the best drafter among these methods, or the reason why there is none."""
        models = list(self._catalog.models())
        measured = self._measured(main.id) if by_measured else {}
        draft = default_draft(main, models, methods, measured)
        if draft is not None:
            return DrafterChoice((draft.as_draft,))
        refusals = (
            (model.id, refusal(main, model))
            for model in (main.head, *models)
            if model is not None
            and model.kind == "drafter"
            and model.method in methods
            and is_best_match(main, model, models)
        )
        nearest = next((f' ("{name}" cannot draft: {problem})' for name, problem in refusals if problem), "")
        kind = "draft model" if DRAFT_MODEL.name in methods else f"{' or '.join(methods)} drafter"
        return DrafterChoice(reason=f"no {kind} on this computer fits {main.id}{nearest}")

    def may_mean(self, main: CatalogModel, draft_id: str) -> bool:
        """Return whether a drafter named without a main model can be for `main`: no other model's name is closer."""
        if draft_id == main.id:
            return main.head is not None
        models = list(self._catalog.models())
        draft = next((model for model in models if model.id == draft_id), None)
        return draft is None or is_best_match(main, draft, models)

    def _default(self, main: CatalogModel, methods: tuple[str, ...] | None, *, by_measured: bool) -> DrafterChoice:
        """Return the best drafter; with `methods` set, the best drafter of each method."""
        if methods is None:
            return self.best(main, DRAFT_METHODS, by_measured=by_measured)
        allowed = (method for method in DRAFT_METHODS if method in methods)
        best = [self.best(main, (method,), by_measured=by_measured) for method in allowed]
        drafters = tuple(drafter for chosen in best for drafter in chosen.drafters)
        reasons = "; ".join(chosen.reason for chosen in best if chosen.reason)
        return DrafterChoice(drafters, reasons or _only(main, methods))

    def _from_settings(self, main: CatalogModel) -> tuple[ModelSettings, DrafterChoice | None]:
        """Return the values that the server's settings have for this model, and the drafters that they name."""
        settings = self._live.current
        fields_set = settings.model_fields_set
        explicit = ModelSettings(
            num_draft_tokens=settings.num_draft_tokens if "num_draft_tokens" in fields_set else None,
            policy=settings.policy if "policy" in fields_set else None,
            acceptance=settings.acceptance if "acceptance" in fields_set else None,
        )
        config = settings.speculative_config
        if config is not None and self._applies(config, main):
            return self._from_config(explicit, config, main)
        chosen_ids = settings.drafts.get(main.id)
        if chosen_ids == OFF:
            reason = f"PACELINE_DRAFTS turns the draft model of {main.id} off"
            return explicit, DrafterChoice(reason=reason, is_intended=True)
        if chosen_ids is None:
            return explicit, None
        return explicit, self.find_named(main, self.names(chosen_ids), "PACELINE_DRAFTS")

    def _applies(self, config: SpeculativeConfig, main: CatalogModel) -> bool:
        target = config.target or self._live.current.default_model
        if target or config.method in TEXT_METHODS or not config.model:
            return target in {"", main.id}
        return self.may_mean(main, config.model)

    def _from_config(
        self, explicit: ModelSettings, config: SpeculativeConfig, main: CatalogModel
    ) -> tuple[ModelSettings, DrafterChoice]:
        methods: tuple[str, ...] | None = (config.method,) if config.method else None
        if config.method in TEXT_METHODS:
            chosen = DrafterChoice(reason=_only(main, (config.method,)), is_intended=True)
        elif config.model:
            chosen = self.find_named(main, self.names(config.model), "speculative_config")
            methods = methods or tuple(drafter.method for drafter in chosen.drafters) or None
        else:
            chosen = self.best(main, methods or ())
        explicit = ModelSettings.model_validate(
            explicit.given()
            | {"methods": methods, "num_draft_tokens": config.num_speculative_tokens or explicit.num_draft_tokens}
            | {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
        )
        return explicit, _allowed(chosen, methods)

    def _misfit(self, main: CatalogModel, draft: CatalogModel, other: DrafterSpecification | None) -> str:
        """Return why a drafter cannot be used; `other` is a drafter of the same method, named earlier."""
        if problem := refusal(main, draft):
            return problem
        return f"{other.id} is its {draft.method} drafter already; name one for each method" if other else ""


def _allowed(chosen: DrafterChoice, methods: tuple[str, ...] | None) -> DrafterChoice:
    """Return `chosen` with only the drafters of these methods; the others are left out with a reason."""
    if methods is None:
        return chosen
    drafters = tuple(drafter for drafter in chosen.drafters if drafter.method in methods)
    others = [
        f"{drafter.id} drafts by {drafter.method}, chosen is {' or '.join(methods)}"
        for drafter in chosen.drafters
        if drafter not in drafters
    ]
    return replace(chosen, drafters=drafters, reason="; ".join([*others, *([chosen.reason] if chosen.reason else [])]))


def _only(main: CatalogModel, methods: tuple[str, ...]) -> str:
    """Return why no drafter is loaded, if all allowed methods need none; else an empty string."""
    return "" if set(methods) & set(DRAFT_METHODS) else f"only {' and '.join(methods) or OFF} may draft for {main.id}"
