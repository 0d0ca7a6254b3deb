"""`/admin/drafts/{id}`: the draft picker of one model, and the calls behind it."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from app.admin.context import AdminContext
from app.admin.draft_view import DraftView
from app.admin.measured_unit import refusal_of
from app.admin.model_page import render_model
from app.admin.model_view import ModelView
from app.admin.templating import Pages
from app.core.errors import SpeculationUnavailable
from app.hub.catalog import CatalogModel
from app.model_settings import SPECULATION, Id
from app.serving.body import read_json

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
