"""The settings page, and the settings of the server and of each model as JSON.

`PATCH` takes an object of names and new values, all or none; null takes a value back. Each answer says when it is felt.
Topic `settings`: a number that grows with every change, wherever it was made.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import psutil
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import RootModel

from app.admin.context import AdminContext
from app.admin.templating import Pages
from app.core.errors import InvalidSetting, ModelUnavailable
from app.hub.catalog import CatalogModel
from app.serving.auth import identity_of
from app.serving.body import read_json
from app.serving.described import describe, describe_model, describe_one
from app.settings import SECTIONS

OPTION_WORDS: Mapping[str, Mapping[str, str]] = {
    "theme": {"system": "theme.system", "light": "theme.light", "dark": "theme.dark"},
    "policy": {"single": "drafts.policy_single", "auto": "drafts.policy_auto", "off": "drafts.policy_off"},
    "acceptance": {"coupled": "drafts.coupled", "rejection": "drafts.rejection"},
    "log_level": {
        "debug": "settings.log_debug",
        "info": "logs.from_info",
        "warning": "logs.from_warning",
        "error": "logs.from_error",
    },
}
"""What there is to choose; languages say their own names."""
RELOAD = "reload"
"""Not a setting: whether the model may be unloaded for the change, once nothing uses it."""


class Changes(RootModel[dict[str, Any]]):
    """Name of a setting -> its new value, null: none."""


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and its routes."""
    context.live.topic("settings", lambda: context.settings.changes)
    router = APIRouter()
    _add_page(router, context, pages)
    _add_server(router, context)
    _add_models(router, context)
    return router


def _add_page(router: APIRouter, context: AdminContext, pages: Pages) -> None:
    @router.get("/admin/settings", response_class=HTMLResponse)
    def get_page(request: Request) -> HTMLResponse:
        """A form made from the schema."""
        rows = describe(context.settings)
        return pages.render(
            "settings.html",
            request,
            area="settings",
            data={"settings": rows},
            sections=[
                (name, f"settings.section_{name}", [row for row in rows if row["section"] == name]) for name in SECTIONS
            ],
            option_words=OPTION_WORDS,
            suggestions=_suggestions(context),
            gigabytes=psutil.virtual_memory().total // 10**8 / 10,
            locked_down=context.store.locked_down,
        )


def _suggestions(context: AdminContext) -> dict[str, list[str]]:
    """What is on disk, for the settings that name models."""
    models = [model for model in context.serving.resolver.models() if not model.problem]
    mains = [model.id for model in models if model.kind == "main"]
    drafts = ["off", *drafters(context)]
    return {"default_model": mains, "drafts": [f"{main}={draft}" for main in mains for draft in drafts]}


def drafters(context: AdminContext) -> list[str]:
    """The drafters on disk that are sound, by name."""
    models = context.serving.resolver.models()
    return [model.id for model in models if model.kind == "drafter" and not model.problem]


def _add_server(router: APIRouter, context: AdminContext) -> None:
    @router.get("/admin/api/settings")
    def get_settings() -> dict[str, Any]:
        """Every setting: value, default, where it comes from, unit, range, and when a change is felt."""
        return {"settings": describe(context.settings)}

    @router.patch("/admin/api/settings")
    async def change_settings(request: Request) -> dict[str, Any]:
        """Change some. 422 for an unknown name, a value out of range, or settings that cannot stand together."""
        changes = (await read_json(request, Changes)).root
        models = {each.id for each in await asyncio.to_thread(context.serving.resolver.models)}
        await asyncio.to_thread(context.settings.change, changes, identity_of(request).name, models=models)
        return {"changed": [describe_one(context.settings, name) for name in changes]}


def _add_models(router: APIRouter, context: AdminContext) -> None:
    def answer(model: CatalogModel) -> dict[str, Any]:
        return {"model": model.id, "settings": describe_model(context.settings, model.id)}

    @router.get("/admin/api/models/{model_id:path}/settings")
    def get_model_settings(model_id: str) -> dict[str, Any]:
        """What is set for one model, and what holds where nothing is."""
        return answer(context.serving.resolver.find(model_id))

    @router.patch("/admin/api/models/{model_id:path}/settings")
    async def change_model_settings(request: Request, model_id: str) -> dict[str, Any]:
        """Change some; with `reload` the model is unloaded unless requests use it, and loads again with the next one.

        The answer's `reload` is `done`, `busy`, `needed` (it was not asked for) or `not needed`.
        """
        changes = dict((await read_json(request, Changes)).root)
        reload = changes.pop(RELOAD, False)
        if not isinstance(reload, bool):
            raise InvalidSetting("reload: give true or false", parameter=RELOAD)
        resolver = context.serving.resolver
        model = await asyncio.to_thread(resolver.find, model_id)
        taken = {each.id for each in await asyncio.to_thread(resolver.models)}
        name = identity_of(request).name
        await asyncio.to_thread(context.settings.change_model, model.id, changes, name, taken=taken)
        changed = [row for row in answer(model)["settings"] if row["name"] in changes]
        waits = any(row["takes_effect"] == RELOAD for row in changed) and model.id in resolver.loaded()
        return answer(model) | {"reload": await _reload(context, model.id, waits=waits, wanted=reload)}


async def _reload(context: AdminContext, model_id: str, *, waits: bool, wanted: bool) -> str:
    if not waits or not wanted:
        return "needed" if waits else "not needed"
    try:
        await context.serving.worker.unload(model_id)
    except ModelUnavailable:
        return "busy"
    return "done"
