"""Which drafters a main model gets: those that are named, or the best one that fits, and why not.

A name may hold several ids, joined by `+`: at most one drafter for each method. A drafter that the request names and
that does not fit is refused; another one is left out with its reason. Everything here may read the disk.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.core.errors import ModelNotFound, SpeculationUnavailable
from app.core.messages import DraftSpecification
from app.hub.catalog import CatalogModel, FolderCatalog
from app.hub.pairing import Pairing


class Pairings(Protocol):
    """Which drafter fits which main model. Calls may read the disk: make them in a thread."""

    def pair(self, main: CatalogModel, draft: CatalogModel) -> Pairing: ...

    def default_draft(
        self, main: CatalogModel, models: Sequence[CatalogModel], methods: Collection[str]
    ) -> CatalogModel | None:
        """The best drafter of one of `methods` for a model that nobody chose one for."""
        ...

    def suits(self, main: CatalogModel, draft: CatalogModel, models: Sequence[CatalogModel]) -> bool:
        """Whether no other model's name is nearer to the drafter's."""
        ...


OFF = "off"


@dataclass(frozen=True, slots=True)
class FoundDrafters:
    """The drafters of a unit, and why one that was chosen is not among them."""

    drafts: tuple[DraftSpecification, ...] = ()
    reason: str = ""
    is_wish: bool = False
    """The reason is that nobody wants a drafter: nothing is wrong."""


class DraftFinder:
    """Looks for drafters in the catalog."""

    def __init__(self, catalog: FolderCatalog, pairings: Pairings) -> None:
        self._catalog = catalog
        self._pairings = pairings

    def names(self, text: str) -> tuple[str, ...]:
        """The ids in `a+b`; an id may hold a plus sign itself."""
        if "+" not in text or any(model.id == text for model in self._catalog.models()):
            return (text,)
        return tuple(name.strip() for name in text.split("+") if name.strip())

    def asked(self, main: CatalogModel, ids: Sequence[str]) -> FoundDrafters:
        """The drafters that a request names. Raises ModelNotFound and SpeculationUnavailable."""
        drafts: dict[str, DraftSpecification] = {}
        for id_ in ids:
            try:
                draft = self._drafter(main, id_)
            except ModelNotFound as error:
                raise ModelNotFound(error.message, parameter="draft_model") from None
            problem = self._misfit(main, draft) or _taken(drafts, draft)
            if problem:
                message = f"{draft.id} cannot draft for {main.id}: {problem}"
                raise SpeculationUnavailable(message, parameter="draft_model")
            drafts[draft.method] = _specification(draft)
        return FoundDrafters(tuple(drafts.values()))

    def chosen(self, main: CatalogModel, ids: Sequence[str], chooser: str) -> FoundDrafters:
        """The drafters that `chooser` (a setting, or what is stored) names, less those that cannot be used."""
        drafts: dict[str, DraftSpecification] = {}
        reasons: list[str] = []
        for id_ in ids:
            try:
                draft = self._drafter(main, id_)
            except ModelNotFound as error:
                reasons.append(f"{chooser} names {id_} for {main.id}: {error.message}")
                continue
            problem = self._misfit(main, draft) or _taken(drafts, draft)
            if problem:
                reasons.append(f"{draft.id} cannot draft for {main.id}: {problem}")
            else:
                drafts[draft.method] = _specification(draft)
        return FoundDrafters(tuple(drafts.values()), "; ".join(reasons))

    def best(self, main: CatalogModel, methods: Collection[str]) -> FoundDrafters:
        """The best drafter of one of these methods."""
        models = list(self._catalog.models())
        draft = self._pairings.default_draft(main, models, methods)
        if draft is not None:
            return FoundDrafters((_specification(draft),))
        refusals = (
            self._pairings.pair(main, model).reason
            for model in (main.head, *models)
            if model is not None
            and model.kind == "drafter"
            and model.method in methods
            and self._pairings.suits(main, model, models)
        )
        nearest = next((f" ({refusal})" for refusal in refusals if refusal), "")
        kind = "draft model" if "draft_model" in methods else f"{' or '.join(methods)} drafter"
        return FoundDrafters(reason=f"no {kind} on this computer fits {main.id}{nearest}")

    def may_mean(self, main: CatalogModel, draft_id: str) -> bool:
        """Whether a drafter named without its main model is for this one: no other name here is nearer."""
        if draft_id == main.id:
            return main.head is not None
        models = list(self._catalog.models())
        draft = next((model for model in models if model.id == draft_id), None)
        return draft is None or self._pairings.suits(main, draft, models)

    def _drafter(self, main: CatalogModel, id_: str) -> CatalogModel:
        """The drafter of that id; a main model's own id means the multi-token head in its checkpoint."""
        if id_ == main.id and main.head is not None:
            return main.head
        return self._catalog.find(id_)

    def _misfit(self, main: CatalogModel, draft: CatalogModel) -> str:
        if draft.problem:
            return draft.problem.removeprefix(f'model "{draft.id}": ')
        fit = self._pairings.pair(main, draft)
        return "" if fit.fits else fit.reason.removeprefix(f'"{draft.id}" cannot draft: ')


def _taken(drafts: dict[str, DraftSpecification], draft: CatalogModel) -> str:
    other = drafts.get(draft.method)
    return f"{other.id} is its {draft.method} drafter already; name one for each method" if other else ""


def _specification(draft: CatalogModel) -> DraftSpecification:
    return DraftSpecification(draft.id, str(draft.path), draft.method)
