"""Resolves the ids in a request to the unit that the worker loads: a main model with its drafters, or why it has none.

The drafters are those that the request names; else those that the model is loaded with; else those chosen for the
model, or the best one that fits. Everything here may read the disk: call it in a thread.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from app.core.errors import InvalidRequest, ModelNotFound, ModelUnavailable, SpeculationUnavailable
from app.core.messages import KeepModels, LoadProgress
from app.core.request import OFF, SpeculationRequest
from app.core.unit import (
    DEFAULT_STAY,
    UNSPECIFIED_STAY,
    DrafterSpecification,
    LiveValues,
    LoadedModel,
    ModelSpecification,
    Stay,
)
from app.model_settings import ModelSettings, split_profile
from app.models.catalog import CatalogModel, FolderCatalog
from app.models.config_values import context_tokens
from app.models.drafters.methods import DRAFT_METHODS, TEXT_METHODS
from app.models.pairing import NOT_MEASURED
from app.serving.choosing import Chooser, DrafterChoice, SpeedupLookup
from app.serving.live_settings import LiveSettings
from app.supervision.client import WorkerClient

MAX_LISTED = 20
TURNED_OFF = "the draft model is turned off for this request"
READY = "ready"
HIDDEN_FIELDS = frozenset({"unit", "stay", "last_used", "prefixes"})


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Current state of a model, for API and pages: its files, its state in the worker, and its settings."""

    model: CatalogModel
    settings: ModelSettings
    loaded: LoadedModel | None
    progress: LoadProgress | None
    """Progress of a load under way."""
    quarantine: str
    """Reason why the model is quarantined; empty if it is not."""
    drafters: tuple[DrafterSpecification, ...]
    """Drafters that the model is loaded with, else those that it would be loaded with."""
    looking: bool
    """Whether its drafters are still being searched for."""

    @property
    def problem(self) -> str:
        """Reason why the model cannot be loaded; empty if none is known."""
        return self.model.problem or self.quarantine

    @property
    def state(self) -> str:
        """`loading`, `loaded`, `available` or `unusable`."""
        if self.progress is not None:
            return "loading"
        if self.loaded is not None:
            return "loaded" if self.loaded.state == READY else self.loaded.state
        return "unusable" if self.problem else "available"

    @property
    def context_tokens(self) -> int:
        """Longest context, in tokens; 0 if unknown."""
        known = self.loaded.max_context_tokens if self.loaded is not None else 0
        return known or self.model.context or (context_tokens(self.model.config) if self.model.config else 0)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Capabilities that requests may use."""
        if self.model.kind == "encoder":
            return ("embeddings",)
        chats = ("chat", "tools") if self.model.has_chat_template else ()
        more = {"reasoning": self.model.supports_reasoning, "drafts": self.drafters, "rerank": self.model.reranks}
        return (*chats, "json", "embeddings", *(name for name, can in more.items() if can))

    def as_object(self) -> dict[str, Any]:
        """Return the JSON object that API and pages share."""
        return {
            "id": self.model.id,
            "kind": self.model.kind,
            "source": self.model.source,
            "size_bytes": self.model.size_bytes,
            "state": self.state,
            "looking": self.looking,
            "drafts": drafters_object(self.drafters),
        }


def drafters_object(drafters: Iterable[DrafterSpecification]) -> list[dict[str, str]]:
    """Return the drafters of a unit as JSON."""
    return [{"id": drafter.id, "method": drafter.method} for drafter in drafters]


def loaded_object(model: LoadedModel) -> dict[str, Any]:
    """Return the worker's state of a model as JSON; `draft` is the id of the first drafter."""
    ids = model.draft_ids
    state = msgspec.to_builtins(model)
    return {name: value for name, value in state.items() if name not in HIDDEN_FIELDS} | {
        "id": model.id,
        "draft": ids[0] if ids else None,
        "drafts": drafters_object(model.unit.drafters),
        "draft_ids": ids,
        "pinned": model.stay.pinned,
        "prefix_disk_bytes": model.prefixes.disk_bytes,
        "prefix_found_tokens": model.prefixes.restored_tokens,
        "prefix_trouble": model.prefixes.write_error,
    }


def stays(settings: LiveSettings) -> KeepModels:
    """Return how long models stay in memory, by the settings of the server and of each model."""
    usual = Stay(idle_seconds=settings.current.idle_seconds).over(DEFAULT_STAY)
    models = {
        name: Stay(pinned=model.pinned, idle_seconds=model.idle_seconds) for name, model in settings.models.items()
    }
    return KeepModels(usual=usual, models={name: stay for name, stay in models.items() if stay != UNSPECIFIED_STAY})


class Resolver:
    """Turns ids into specifications; a request gets the unit in memory if that has the drafters that it names."""

    def __init__(
        self,
        settings: LiveSettings,
        catalog: FolderCatalog,
        worker: WorkerClient,
        measured: SpeedupLookup = lambda _model_id: NOT_MEASURED,
    ) -> None:
        self._live = settings
        self._catalog = catalog
        self._worker = worker
        self._chooser = Chooser(settings, catalog, measured)
        self._measured_units: dict[str, tuple[ModelSpecification, ModelSpecification]] = {}
        """Measured and usual unit of each model under measurement; requests draft as in the usual one."""

    def resolve(self, model_id: str | None, drafts: str | None = None, *, method: str = "auto") -> ModelSpecification:
        """Return the unit for a request. `drafts` is a drafter id, several joined by `+`, `off`, or None: the default.

        Raises ModelNotFound, ModelUnavailable for a broken model, InvalidRequest if no model is clearly meant, and
        SpeculationUnavailable if a drafter that `drafts` names or `method` needs is not available.
        """
        main = self.usable(model_id)
        loaded = self._worker.unit(main.id)
        serves = loaded is not None and loaded.size_bytes == main.size_bytes and self._has_drafters(loaded, drafts)
        specification = loaded if loaded is not None and serves else self.planned(main, drafts)
        if drafts not in {None, OFF}:
            if method not in {"auto", OFF, *self.named_methods(specification, drafts)}:
                reason = f"{drafts} does not draft by {method}: name a {method} drafter, or leave draft_model out"
                raise SpeculationUnavailable(reason, parameter="speculation")
        elif method in DRAFT_METHODS and all(drafter.method != method for drafter in specification.drafters):
            specification = self._with_method(main, specification, method)
        return specification

    def named_methods(self, specification: ModelSpecification, drafts: str | None) -> tuple[str, ...]:
        """Return the methods of the drafters that a request names in `drafts`; empty if it names none."""
        names = () if drafts in {None, OFF} else self._chooser.names(drafts)
        return tuple(drafter.method for drafter in specification.drafters if drafter.id in names)

    def resolve_load(self, model_id: str, drafts: str | None) -> ModelSpecification:
        """Return the unit for an explicit load: with exactly the drafters in `drafts`; if None, as for a request."""
        return self.resolve(model_id) if drafts is None else self.planned(self.usable(model_id), drafts)

    def main(self, model_id: str | None) -> CatalogModel:
        """Return the main model `model_id`, or the default or only model if no id is given."""
        model = self.usable(model_id)
        if model.kind == "encoder":
            message = f"{model.id} makes embeddings and nothing else: use /v1/embeddings, or choose another model."
            raise InvalidRequest(message, parameter="model")
        return model

    def usable(self, model_id: str | None) -> CatalogModel:
        """Return the model as `main` does, but accept an encoder, too."""
        model = self.find(model_id or self._live.current.default_model or self._only_model())
        if model.reason:
            raise ModelUnavailable(f"{model.id} cannot be loaded: {model.reason}", parameter="model")
        if model.kind == "drafter":
            raise InvalidRequest(f"{model.id} is a drafter for another model and cannot answer.", parameter="model")
        return model

    def find(self, model_id: str) -> CatalogModel:
        """Return a catalog entry by its id, alias or profile. Raises ModelNotFound."""
        model, profile = self.model_and_profile(model_id)
        if profile and f"{model.id}:{profile}" not in self._live.profiles(model.id):
            raise ModelNotFound(
                f"{model.id} has no profile {profile}: `paceline config set --model {model_id} …` makes one",
                parameter="model",
            )
        return model

    def id_of(self, name: str) -> str:
        """Return the id of the model that `name` means: an id, alias or profile. A loaded or quarantined model need not
        be on disk any more. Raises ModelNotFound."""
        is_known = name in self.loaded() or name in self._worker.quarantined
        return name if is_known else self.find(name).id

    async def release(self, name: str) -> str:
        """Release a model from quarantine, given by id, alias or profile; return its id.
        Raises InvalidRequest if it is not quarantined. Called on the event loop."""
        with contextlib.suppress(ModelNotFound):
            name = await asyncio.to_thread(self.id_of, name)
        self._worker.release_quarantine(name)
        return name

    def model_and_profile(self, name: str) -> tuple[CatalogModel, str]:
        """Return the model and profile that `name` means; the profile need not exist. Raises ModelNotFound."""
        try:
            return self._by_name(name), ""
        except ModelNotFound:
            model, profile = split_profile(name)
            if not profile:
                raise
            return self._by_name(model), profile

    def _by_name(self, model_id: str) -> CatalogModel:
        named = self._live.id_of_alias(model_id)
        if named is None or any(model.id == model_id for model in self._catalog.models()):
            return self._catalog.find(model_id)
        return self._catalog.find(named)

    def models(self) -> list[CatalogModel]:
        """Return everything in the catalog."""
        return list(self._catalog.models())

    def refresh(self) -> None:
        """Read the disk again at the next query: files were added or removed."""
        self._catalog.refresh()

    def is_reading_tokenizers(self) -> bool:
        """Return whether drafters are still being searched for; meanwhile, a model's drafters are not shown."""
        return self._catalog.is_reading_tokenizers()

    def begin_measurement(self, measured: ModelSpecification, usual: ModelSpecification) -> None:
        """Let requests use `measured`, a unit under measurement, while it is loaded, but draft only as in `usual`, the
        unit that the model has otherwise. In effect until `end_measurement`."""
        self._measured_units[measured.id] = measured, usual

    def end_measurement(self, model_id: str) -> None:
        """Let requests use every drafter of the loaded unit again."""
        self._measured_units.pop(model_id, None)

    def limit_speculation(self, model_id: str, request: SpeculationRequest) -> SpeculationRequest:
        """Return `request`; while its model is being measured, limited to drafting as in the usual unit."""
        loaded, units = self.loaded().get(model_id), self._measured_units.get(model_id)
        if loaded is None or units is None:
            return request
        measured, usual = units
        if not loaded.unit.same_unit(measured):
            return request
        request = msgspec.structs.replace(request, policy=usual.live.policy)
        if request.method != "auto" or request.methods:
            return request
        allowed = usual.methods or (*(drafter.method for drafter in usual.drafters), *TEXT_METHODS)
        methods = tuple(method for method in loaded.methods if method in allowed)
        if usual.live.policy == OFF or not methods:
            return msgspec.structs.replace(request, method=OFF)
        length = usual.live.num_draft_tokens if request.num_draft_tokens is None else request.num_draft_tokens
        return msgspec.structs.replace(request, methods=methods, num_draft_tokens=length)

    def planned(
        self, main: CatalogModel, requested: str | None = None, *, by_measured: bool = True
    ) -> ModelSpecification:
        """Return the unit that a request for the drafters `requested` would get if the model were not loaded.

        None: the request names no drafters. Without `by_measured`, measurements are ignored.
        """
        chosen, settings = self._chooser.choose(main, by_measured=by_measured), self._live.current
        model_settings, selected, methods = chosen.model_settings, chosen, chosen.methods
        if requested is not None:
            names = self._chooser.names(requested)
            selected = DrafterChoice(reason=TURNED_OFF) if requested == OFF else self._chooser.find_named(main, names)
            methods = () if selected.drafters else methods
        return ModelSpecification(
            id=main.id,
            path=str(main.path),
            size_bytes=main.size_bytes,
            drafters=selected.drafters,
            acceptance=model_settings.acceptance or settings.acceptance,
            methods=methods,
            prompt_lookup_min=model_settings.prompt_lookup_min,
            prompt_lookup_max=model_settings.prompt_lookup_max,
            ngram_across_requests=settings.ngram_across_requests,
            quantisation=self._live.model(main.id).quantisation,
            max_rows=settings.max_rows,
            prefix_cache_bytes=settings.prefix_cache_memory,
            live=LiveValues(
                policy=model_settings.policy or settings.policy,
                num_draft_tokens=model_settings.num_draft_tokens or settings.num_draft_tokens,
                queue_limit=settings.queue_limit,
                draft_unavailable=selected.reason,
                missing_drafters=selected.missing,
                context_tokens=context_tokens(main.config),
                longest_token_bytes=main.tokenizer.longest_bytes(),
            ),
        )

    def entry(self, model: CatalogModel, *, looking: bool = False) -> ModelEntry:
        """Return the current state of a model; with `looking`, without waiting for its drafters."""
        loaded = self.loaded().get(model.id)
        looking = looking and loaded is None and model.kind == "main" and not model.problem
        return ModelEntry(
            model=model,
            settings=self._live.model(model.id),
            loaded=loaded,
            progress=self._worker.book.progress.get(model.id),
            quarantine=str(self._worker.quarantined.get(model.id, "")),
            drafters=() if looking else self._drafters(model, loaded),
            looking=looking,
        )

    def _drafters(self, model: CatalogModel, loaded: LoadedModel | None) -> tuple[DrafterSpecification, ...]:
        """Return the drafters that a model is loaded with, else those that it would get; none if that is not known."""
        unit = loaded.unit if loaded is not None else self._worker.unit(model.id)
        if unit is not None:
            return unit.drafters
        if model.kind != "main" or model.problem:
            return ()
        try:
            return self._chooser.choose(model).drafters
        except ModelUnavailable:  # a folder that cannot be read for the moment
            return ()

    def loaded(self) -> dict[str, LoadedModel]:
        """Return the models in the worker's memory, by id."""
        return self._worker.book.loaded()

    def _only_model(self) -> str:
        usable = [model.id for model in self._catalog.models() if model.kind == "main" and not model.problem]
        loaded = [name for name in self.loaded() if name in usable]
        for candidates in (loaded, usable):
            if len(candidates) == 1:
                return candidates[0]
        listed = ", ".join(usable[:MAX_LISTED]) or "none is here yet"
        raise InvalidRequest(f"Say which model: {listed}.", code="model_required", parameter="model")

    def _has_drafters(self, specification: ModelSpecification, requested: str | None) -> bool:
        """Return whether a loaded unit has the drafters that a request names."""
        if requested is None:
            return True
        names = () if requested == OFF else self._chooser.names(requested)
        loaded = {drafter.id for drafter in specification.drafters}
        return loaded.issuperset(names) and bool(names or not loaded)

    def _with_method(self, main: CatalogModel, specification: ModelSpecification, method: str) -> ModelSpecification:
        """Return the unit plus the best drafter of `method`. Raises if settings exclude it or no drafter fits."""
        chosen = self._chooser.choose(main)
        reason = specification.live.draft_unavailable
        if chosen.methods and method not in chosen.methods:
            reason = f"only {' and '.join(chosen.methods)} may draft for {main.id}, not {method}"
        elif chosen.is_explicit or reason == TURNED_OFF:
            reason = reason or f"no {method} drafter was chosen for {main.id}: name one in draft_model"
        else:
            best = self._chooser.best(main, (method,))
            if best.drafters:
                drafters = sorted(
                    (*specification.drafters, *best.drafters), key=lambda drafter: DRAFT_METHODS.index(drafter.method)
                )
                return msgspec.structs.replace(specification, drafters=tuple(drafters))
            reason = best.reason
        raise SpeculationUnavailable(reason, parameter="speculation")
