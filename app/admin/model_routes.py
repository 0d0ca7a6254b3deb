"""`/admin/models`: everything on disk, into memory and out of it; `/admin/models/{id}`: what is set for one model.

What is set for a model is read and written at `/admin/api/models/{id}/settings` (`settings_routes.py`).
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from app.admin.context import AdminContext
from app.admin.model_view import ModelView, render_model
from app.admin.settings_routes import OPTION_WORDS, drafters
from app.admin.templating import Pages
from app.core.drafters import METHOD_NAMES
from app.serving.body import read_json
from app.serving.described import describe_model

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model_settings.replies", (
        "system_prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens",
        "repetition_penalty", "presence_penalty", "frequency_penalty",
    )),
    ("model_settings.memory", ("alias", "pinned", "idle_seconds")),
    ("model_settings.drafting", (
        "drafts", "methods", "num_draft_tokens", "policy", "acceptance", "prompt_lookup_min", "prompt_lookup_max",
    )),
)  # fmt: skip


SOURCE = "dashboard"


class ModelBody(BaseModel):
    """Which model is meant, by its id or alias."""

    model: str = Field(min_length=1, max_length=500)


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The pages and their JSON routes."""
    view = ModelView(context.serving, context.models.footprints)
    router = APIRouter()
    _add_pages(router, context, pages)
    _add_memory_routes(router, context, view)
    _add_choices(router, context)
    return router


def _add_pages(router: APIRouter, context: AdminContext, pages: Pages) -> None:
    @router.get("/admin/models", response_class=HTMLResponse)
    async def get_models_page(request: Request) -> HTMLResponse:
        """The list; its script asks for the models, since a first look at a large folder takes a while."""
        folders = [str(folder) for folder in context.settings.current.model_dirs]
        return pages.render("models.html", request, area="models", data={"folders": folders})

    @router.get("/admin/models/{model_id:path}", response_class=HTMLResponse)
    def get_model_page(request: Request, model_id: str) -> HTMLResponse:
        """One model and its settings."""
        named = context.settings.named(model_id)
        rows = {row["name"]: row for row in describe_model(context.settings, named or model_id)}
        return render_model(
            context,
            pages,
            request,
            model_id,
            template="model.html",
            tab="settings",
            data={"settings": list(rows.values())},
            sections=[(title, [rows[name] for name in names]) for title, names in SECTIONS],
            option_words=OPTION_WORDS,
            suggestions={"drafts": drafters(context), "methods": METHOD_NAMES},
        )


def _add_memory_routes(router: APIRouter, context: AdminContext, view: ModelView) -> None:
    @router.get("/admin/api/models")
    def list_models() -> dict[str, Any]:
        """Everything on disk."""
        return view.listing()

    @router.post("/admin/api/models/load")
    async def load_model(request: Request) -> dict[str, Any]:
        """Load a model and wait for it; the topic `state` tells its progress."""
        body = await read_json(request, ModelBody)
        return await context.models.loading.load(body.model)

    @router.post("/admin/api/models/unload")
    async def unload_model(request: Request) -> dict[str, Any]:
        """Unload a model, or stop its load."""
        body = await read_json(request, ModelBody)
        return await context.models.loading.unload(body.model)

    @router.post("/admin/api/models/reload")
    async def reload_model(request: Request) -> dict[str, Any]:
        """Load a loaded model anew, with what is chosen for it now; `in_use`: as soon as no request uses it."""
        body = await read_json(request, ModelBody)
        return {"model": body.model, "became": await context.models.loading.renew(body.model)}


def _add_choices(router: APIRouter, context: AdminContext) -> None:
    settings, resolver = context.settings, context.serving.resolver

    def set_pinned(model_id: str, *, pinned: bool) -> dict[str, Any]:
        model = resolver.find(model_id)
        changes: dict[str, Any] = {"pinned": pinned or None}
        if pinned:
            changes["idle_seconds"] = None  # the two exclude one another
        settings.change_model(model.id, changes, SOURCE)
        return {"model": model.id, "pinned": pinned}

    @router.post("/admin/api/models/pin")
    async def pin_model(request: Request) -> dict[str, Any]:
        """Keep a model in memory until it is unloaded by hand."""
        body = await read_json(request, ModelBody)
        return await asyncio.to_thread(lambda: set_pinned(body.model, pinned=True))

    @router.post("/admin/api/models/unpin")
    async def unpin_model(request: Request) -> dict[str, Any]:
        """Let an idle model be unloaded again."""
        body = await read_json(request, ModelBody)
        return await asyncio.to_thread(lambda: set_pinned(body.model, pinned=False))

    @router.post("/admin/api/models/default")
    async def make_default(request: Request) -> dict[str, Any]:
        """The model of requests that name none."""
        body = await read_json(request, ModelBody)
        model = await asyncio.to_thread(lambda: resolver.main(body.model))
        await asyncio.to_thread(lambda: settings.change({"default_model": model.id}, SOURCE))
        return {"model": model.id, "is_default": True}
