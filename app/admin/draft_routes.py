"""`/admin/drafts/{id}`: the draft picker of one model, and the calls behind it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from app.admin.context import AdminContext
from app.admin.measured_unit import refusal_of
from app.admin.model_view import ModelView, render_model
from app.admin.room import sizes
from app.admin.templating import Pages
from app.core.drafters import TEXT_METHODS
from app.core.errors import SpeculationUnavailable
from app.core.footprint import Footprint
from app.core.messages import DraftSpecification, LoadedModel
from app.core.reason import NO_REASON, Reason, reason_object
from app.hub.catalog import CatalogModel
from app.hub.pairing import Candidate
from app.hub.published import Published, published_for
from app.model_settings import SPECULATION, Id
from app.serving.body import read_json
from app.serving.sweep.report import Figures, best_by_drafter

SHOWN = ("method", "id", "origin", "size_bytes", "tokens", "token_difference", "refusal", "is_usual", "rollback")
Best = Mapping[tuple[str, str], Figures]
GIVEN = ("environment", "command line")
DECIDED_ELSEWHERE = ("drafts", "speculative_config", "num_draft_tokens", "policy", "acceptance")
"""Settings of the server that go before what is chosen for a model, where environment or command line give them."""


class DraftView:
    """Describes what may draft for a model."""

    def __init__(self, context: AdminContext, models: ModelView) -> None:
        self._context = context
        self._models = models

    def describe(self, model_id: str) -> dict[str, Any]:
        """Everything the page needs. Raises ModelNotFound; a drafter, or a broken model, has no candidates."""
        serving, tools = self._context.serving, self._context.models
        main = serving.resolver.find(model_id)
        loaded = serving.resolver.loaded().get(main.id)
        usable = main.kind == "main" and not main.problem
        best = best_by_drafter(row.results for row in tools.kept.of(main.id)) if usable else {}
        candidates = tools.units.candidates(main, {key: each.ratio for key, each in best.items()}) if usable else []
        used = self._used(main, loaded) if usable else set()
        settings = self._context.settings
        return {
            "model": self._models.describe(main, loaded),
            "choice": {name: settings.model(main.id).given().get(name) for name in SPECULATION},
            "usual": {"policy": settings.current.policy, "acceptance": settings.current.acceptance},
            "elsewhere": [name for name in DECIDED_ELSEWHERE if settings.origin(name) in GIVEN],
            "ceiling_bytes": tools.footprints.room.ceiling_bytes,
            "methods": list(loaded.methods) if loaded else [],
            "candidates": [
                {**self._candidate(main, each, best, used), "unavailable": reason_object(_unavailable(each, loaded))}
                for each in candidates
            ],
            "published": self._published(main, {each.id for each in candidates}) if usable else [],
            "counts": serving.measurements.drafting(main.id),
        }

    def _used(self, main: CatalogModel, loaded: LoadedModel | None) -> set[tuple[str, str]]:
        """Method and id of what drafts for the model now, or would if it were loaded."""
        resolver = self._context.serving.resolver
        unit = resolver.last(main.id) if loaded is not None else None
        planned = unit or resolver.planned(main)
        drafts: Sequence[DraftSpecification] = planned.drafts if loaded is None else resolver.loaded_drafts(loaded)
        if planned.policy == "off":
            return set()
        may = loaded.methods if loaded is not None and loaded.state == "ready" else planned.methods
        used = {(draft.method, draft.id) for draft in drafts} | {(name, "") for name in TEXT_METHODS}
        return {each for each in used if not may or each[0] in may}

    def _candidate(
        self, main: CatalogModel, candidate: Candidate, best: Best, used: set[tuple[str, str]]
    ) -> dict[str, Any]:
        key = (candidate.method, candidate.id)
        measured = best.get(key)
        return {
            "key": f"{candidate.method}:{candidate.id}",
            **{name: getattr(candidate, name) for name in SHOWN},
            "extra": sizes(candidate.footprint),
            "has_room": self._has_room(main, candidate.footprint),
            "measured": msgspec.to_builtins(measured),
            "in_use": key in used,
        }

    def _has_room(self, main: CatalogModel, extra: Footprint) -> bool:
        footprints = self._context.models.footprints
        alone = footprints.main(main)
        return alone is None or footprints.room.holds(alone + extra)

    def _published(self, main: CatalogModel, here: set[str]) -> list[dict[str, Any]]:
        return [self._offer(main, each) for each in published_for(main) if each.repository not in here]

    def _offer(self, main: CatalogModel, published: Published) -> dict[str, Any]:
        """A drafter on the hub; how much memory it takes is told roughly, by its size."""
        return {
            "method": published.method,
            "repository": published.repository,
            "size_bytes": published.size_bytes,
            "has_room": self._has_room(main, Footprint(weights_bytes=published.size_bytes)),
        }


def _unavailable(candidate: Candidate, loaded: LoadedModel | None) -> Reason:
    """Why a drafter that is in memory cannot run; what is not there, or on its way, may yet."""
    if loaded is None or loaded.state != "ready" or candidate.id not in {*loaded.draft_ids, ""}:
        return NO_REASON
    return loaded.unavailable.get(candidate.method, NO_REASON)


SOURCE = "dashboard"


class ChoiceBody(BaseModel):
    """How a model drafts. What is absent or null is unset; values and conflicts are checked as everywhere."""

    drafts: list[Id] | None = Field(None, max_length=8)
    methods: list[str] | None = Field(None, max_length=8)
    num_draft_tokens: int | None = None
    policy: Literal["single", "auto", "off"] | None = None
    acceptance: Literal["coupled", "rejection"] | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


class AttachBody(BaseModel):
    """Which drafter joins which model; it is on this computer."""

    model: str = Field(min_length=1, max_length=500)
    draft: str = Field(min_length=1, max_length=500)
    measure: bool = True


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its JSON routes."""
    models = ModelView(context.serving, context.models.footprints)
    view = DraftView(context, models)
    context.live.topic("drafting", lambda: _drafting(context))
    router = APIRouter()

    @router.get("/admin/drafts/{model_id:path}", response_class=HTMLResponse)
    def get_drafts_page(request: Request, model_id: str) -> HTMLResponse:
        """The picker; its script asks for the candidates, since tokenizers are compared."""
        return render_model(context, pages, request, model_id, template="drafts.html", tab="drafts")

    @router.post("/admin/api/drafts/attach")
    async def attach_draft(request: Request) -> dict[str, Any]:
        """Choose a drafter, load the model with it, and begin to measure."""
        body = await read_json(request, AttachBody)
        model = await asyncio.to_thread(context.serving.resolver.main, body.model)
        return await context.models.attaching.attach(model.id, body.draft, measure=body.measure)

    @router.get("/admin/api/drafts/{model_id:path}")
    def get_drafts(model_id: str) -> dict[str, Any]:
        """Every candidate, ranked."""
        return view.describe(model_id)

    @router.put("/admin/api/drafts/{model_id:path}")
    async def put_drafts(request: Request, model_id: str) -> dict[str, Any]:
        """Choose drafters, methods, length, acceptance and policy at once; a loaded model gets them when it is free."""
        body = await read_json(request, ChoiceBody)
        main = await asyncio.to_thread(_choose, context, model_id, body)
        return {"model": main.id, "became": await context.models.loading.renew(main.id)}

    return router


def _drafting(context: AdminContext) -> dict[str, Any]:
    """What was drafted and accepted by each loaded model since the server started."""
    serving = context.serving
    return {model.id: serving.measurements.drafting(model.id) for model in serving.worker.snapshot.models}


def _choose(context: AdminContext, model_id: str, body: ChoiceBody) -> CatalogModel:
    """Store a choice. Raises InvalidSetting, and SpeculationUnavailable for a drafter that does not fit."""
    main = context.serving.resolver.main(model_id)
    if body.drafts:
        fits = {each.id: each for each in context.models.units.candidates(main, {}) if each.id}
        for name in body.drafts:
            if name not in fits or not fits[name].fits:
                raise SpeculationUnavailable(refusal_of(main, name, fits.get(name)), parameter="drafts")
        context.models.units.check_room(main, *(fits[name] for name in body.drafts))
    values = body.model_dump()
    context.settings.change_model(main.id, {name: values[name] for name in SPECULATION}, SOURCE)
    return main
