"""From the ids in a request to the unit that the worker loads: a main model, its draft, and why there is none.

Which draft: the one that the request names; else the one that the model is loaded with; else `PACELINE_DRAFTS`;
else the best one that fits. A draft that was asked for and does not fit is refused; another one is
left out with its reason. Everything here may read the disk: call it in a thread.
"""

from app.api.ports import Catalog, Pairings, Worker
from app.core.errors import InvalidRequest, ModelNotFound, ModelUnavailable, SpeculationUnavailable
from app.core.messages import LoadedModel, ModelSpecification
from app.hub.catalog import CatalogModel
from app.settings import Settings

OFF = "off"
MAX_LISTED = 20


class Resolver:
    """Turns ids into specifications; remembers the last one of each model, so that loaded units are not changed."""

    def __init__(self, settings: Settings, catalog: Catalog, worker: Worker, pairings: Pairings) -> None:
        self._settings = settings
        self._catalog = catalog
        self._worker = worker
        self._pairings = pairings
        self._last: dict[str, ModelSpecification] = {}

    def resolve(
        self, model_id: str | None, draft_id: str | None = None, *, needs_draft: bool = False
    ) -> ModelSpecification:
        """The unit for a request. `draft_id` is a model, `off`, or None for the usual one.

        Raises ModelNotFound, ModelUnavailable for a broken model, InvalidRequest without a clear model, and
        SpeculationUnavailable when a draft is asked for (`draft_id`, or `needs_draft`) that cannot be had.
        """
        main = self.main(model_id)
        last = self._last.get(main.id)
        if draft_id is None and last is not None and self._is_loaded(last):
            specification = last
        else:
            draft, reason = self._choose_draft(main, draft_id)
            specification = self._specification(main, draft, reason)
        if needs_draft and specification.draft_id is None:
            raise SpeculationUnavailable(specification.draft_unavailable, parameter="speculation")
        self._last[main.id] = specification
        return specification

    def main(self, model_id: str | None) -> CatalogModel:
        """The main model called `model_id`, or the only sensible one when there is no id."""
        model = self._catalog.find(model_id or self._settings.default_model or self._only_model())
        if model.problem:
            raise ModelUnavailable(f"{model.id} cannot be loaded: {model.problem}", parameter="model")
        if model.kind != "main":
            raise InvalidRequest(f"{model.id} is a drafter for another model and cannot answer.", parameter="model")
        return model

    def find(self, model_id: str) -> CatalogModel:
        """Anything in the catalog by its id. Raises ModelNotFound."""
        return self._catalog.find(model_id)

    def models(self) -> list[CatalogModel]:
        """Everything in the catalog."""
        return list(self._catalog.models())

    def last(self, model_id: str) -> ModelSpecification | None:
        """The specification that was last made for a model; None when there was none."""
        return self._last.get(model_id)

    def planned_draft(self, main: CatalogModel) -> str | None:
        """The draft that a request without a wish of its own would get."""
        last = self._last.get(main.id)
        if last is not None:
            return last.draft_id
        draft, _ = self._choose_draft(main, None)
        return draft.id if draft is not None else None

    def loaded(self) -> dict[str, LoadedModel]:
        """The models that the worker holds, by id."""
        return {model.id: model for model in self._worker.snapshot.models}

    def _only_model(self) -> str:
        loaded = list(self.loaded())
        usable = [model.id for model in self._catalog.models() if model.kind == "main" and not model.problem]
        for candidates in (loaded, usable):
            if len(candidates) == 1:
                return candidates[0]
        listed = ", ".join(usable[:MAX_LISTED]) or "none is here yet"
        raise InvalidRequest(f"Say which model: {listed}.", code="model_required", parameter="model")

    def _is_loaded(self, specification: ModelSpecification) -> bool:
        if specification.id in self._worker.progress:
            return True
        loaded = self.loaded().get(specification.id)
        return loaded is not None and loaded.draft_id == specification.draft_id

    def _choose_draft(self, main: CatalogModel, asked: str | None) -> tuple[CatalogModel | None, str]:
        if asked == OFF:
            return None, "the draft model is turned off for this request"
        if asked is not None:
            return self._asked_draft(main, asked), ""
        configured = self._settings.drafts.get(main.id)
        if configured == OFF:
            return None, f"PACELINE_DRAFTS turns the draft model of {main.id} off"
        if configured is not None:
            return self._configured_draft(main, configured)
        draft = self._pairings.default_draft(main, self.models())
        return draft, "" if draft is not None else f"no draft model on this computer fits {main.id}"

    def _asked_draft(self, main: CatalogModel, draft_id: str) -> CatalogModel:
        try:
            draft = self._catalog.find(draft_id)
        except ModelNotFound as error:
            raise ModelNotFound(error.message, parameter="draft_model") from None
        problem = self._misfit(main, draft)
        if problem:
            raise SpeculationUnavailable(f"{draft.id} cannot draft for {main.id}: {problem}", parameter="draft_model")
        return draft

    def _configured_draft(self, main: CatalogModel, draft_id: str) -> tuple[CatalogModel | None, str]:
        try:
            draft = self._catalog.find(draft_id)
        except ModelNotFound as error:
            return None, f"PACELINE_DRAFTS names {draft_id} for {main.id}: {error.message}"
        problem = self._misfit(main, draft)
        return (None, f"{draft.id} cannot draft for {main.id}: {problem}") if problem else (draft, "")

    def _misfit(self, main: CatalogModel, draft: CatalogModel) -> str:
        if draft.problem:
            return draft.problem
        fit = self._pairings.pair(main, draft)
        return "" if fit.fits else fit.reason

    def _specification(self, main: CatalogModel, draft: CatalogModel | None, reason: str) -> ModelSpecification:
        return ModelSpecification(
            id=main.id,
            path=str(main.path),
            draft_id=draft.id if draft else None,
            draft_path=str(draft.path) if draft else None,
            draft_unavailable=reason,
            policy=self._settings.policy,
            num_draft_tokens=self._settings.num_draft_tokens,
            max_rows=self._settings.max_rows,
            queue_limit=self._settings.queue_limit,
        )
