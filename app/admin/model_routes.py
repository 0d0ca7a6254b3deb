"""`/admin/models`: all models on disk, to load and unload; `/admin/models/{id}`: the settings of one model.

These settings are read and written at `/admin/api/models/{id}/settings` (`settings_routes.py`).
"""

import asyncio
import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import Field

from app.admin.context import Admin, AdminContext
from app.admin.setting_rows import model_setting_rows
from app.admin.settings_routes import OPTION_WORDS, sound_models
from app.core.errors import ModelNotFound
from app.machine.prefix_files import cached_prompts, clear_cached_prompts
from app.models.drafters.methods import METHOD_NAMES
from app.serving.auth import SESSION
from app.serving.document import problems
from app.serving.errors import localized_message
from app.serving.gate import Body, JsonBody

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model_settings.replies", (
        "system_prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens",
        "repetition_penalty", "presence_penalty", "frequency_penalty",
    )),
    ("model_settings.memory", ("alias", "pinned", "idle_seconds", "kv_bits", "kv_bits_from")),
    ("model_settings.drafting", (
        "drafts", "methods", "num_draft_tokens", "policy", "acceptance", "prompt_lookup_min", "prompt_lookup_max",
    )),
)  # fmt: skip
TABS = {"settings": "model.html", "drafts": "drafts.html", "pays": "pays.html"}
"""Templates of the pages of one model, by tab."""


class ModelBody(Body):
    """A model, by its id or alias."""

    model: str = Field(min_length=1, max_length=500)


router = APIRouter()


@router.get("/admin/models", response_class=HTMLResponse)
async def get_models_page(request: Request, admin: Admin) -> HTMLResponse:
    """Serve the list; its script fetches the models, since a first look at a large folder takes a while."""
    return admin.pages.render("models.html", request, area="models", data={})


@router.get("/admin/models/{model_id:path}", response_class=HTMLResponse)
def get_model_page(request: Request, admin: Admin, model_id: str) -> HTMLResponse:
    """Serve the settings of one model, or of a profile."""
    live, profile = admin.serving.live, ""
    with contextlib.suppress(ModelNotFound):
        model, profile = admin.serving.resolver.model_and_profile(model_id)
        model_id = model.id
    rows = {row["name"]: row for row in model_setting_rows(live, model_id, profile)}
    return render_model(
        admin,
        request,
        model_id,
        tab="settings",
        data={"settings": list(rows.values()), "place": f"{model_id}:{profile}" if profile else model_id},
        sections=[(title, [rows[name] for name in names if name in rows]) for title, names in SECTIONS],
        profile=profile,
        profiles=live.profiles(model_id),
        option_words=OPTION_WORDS,
        suggestions={"drafts": sound_models(admin, "drafter"), "methods": METHOD_NAMES},
    )


def render_model(
    admin: AdminContext,
    request: Request,
    model_id: str,
    *,
    tab: str,
    data: Mapping[str, Any] = MappingProxyType({}),
    **values: Any,
) -> HTMLResponse:
    """Render a tab of a model's page, or a page with status 404 if there is no such model. Reads the disk."""
    try:
        model = admin.models.describe(admin.serving.resolver.find(model_id))
    except ModelNotFound as error:
        reason = localized_message(error, admin.pages.words(request))
        return admin.pages.render("model_missing.html", request, area="models", data={}, status=404, reason=reason)
    page_data = {"model": model, **data}
    return admin.pages.render(TABS[tab], request, area="models", data=page_data, model=model, tab=tab, **values)


@router.get("/admin/api/models")
def list_models(admin: Admin) -> dict[str, Any]:
    """List all models on disk."""
    return admin.models.listing()


@router.post("/admin/api/models/load", responses=problems(409, 429))
async def load_model(admin: Admin, body: JsonBody[ModelBody]) -> dict[str, Any]:
    """Load a model and wait for it; the topic `state` shows its progress."""
    return await admin.loading.load(body.model)


@router.post("/admin/api/models/unload", responses=problems(409, 429))
async def unload_model(admin: Admin, body: JsonBody[ModelBody]) -> dict[str, Any]:
    """Unload a model, or stop its load. 409 while requests use it."""
    return await admin.loading.unload(body.model)


@router.post("/admin/api/models/reload", responses=problems(429))
async def reload_model(admin: Admin, body: JsonBody[ModelBody]) -> dict[str, Any]:
    """Reload a loaded model with its current choices; outcome `in_use`: it is reloaded once no request uses it."""
    model = await asyncio.to_thread(admin.serving.resolver.id_of, body.model)
    return {"model": model, "became": await admin.loading.reload(model)}


@router.get("/admin/api/prefixes")
def list_prefixes(admin: Admin) -> dict[str, Any]:
    """Return the sizes of the prefix cache on disk and in memory, the tokens restored from it, and any write error."""
    loaded = admin.serving.worker.book.snapshot.models
    return {
        "disk_bytes": sum(prompts.size_bytes for prompts in cached_prompts(admin.serving.settings.prefixes_path)),
        "memory_bytes": sum(model.prefix_cache_bytes for model in loaded),
        "found_tokens": sum(sum(model.prefixes.restored_tokens.values()) for model in loaded),
        "trouble": next((model.prefixes.write_error for model in loaded if model.prefixes.write_error), ""),
    }


@router.post("/admin/api/prefixes/clear")
async def clear_prefixes(admin: Admin) -> dict[str, int]:
    """Clear the prefix cache, in memory and on disk; return the bytes freed on disk."""
    admin.serving.worker.clear_prefixes()
    return {"freed_bytes": await asyncio.to_thread(clear_cached_prompts, admin.serving.settings.prefixes_path)}


@router.post("/admin/api/models/pin", responses=problems(422))
async def pin_model(admin: Admin, body: JsonBody[ModelBody]) -> dict[str, Any]:
    """Keep a model in memory until it is unloaded by hand."""
    # an idle limit would contradict the pin
    return await _set_pinned(admin, body.model, {"pinned": True, "idle_seconds": None})


@router.post("/admin/api/models/unpin", responses=problems(422))
async def unpin_model(admin: Admin, body: JsonBody[ModelBody]) -> dict[str, Any]:
    """Allow a model to be unloaded again when it is idle."""
    return await _set_pinned(admin, body.model, {"pinned": None})


async def _set_pinned(admin: AdminContext, model_id: str, changes: dict[str, Any]) -> dict[str, Any]:
    model = await asyncio.to_thread(admin.serving.resolver.find, model_id)
    await asyncio.to_thread(admin.serving.live.change_model, model.id, changes, SESSION.name)
    return {"model": model.id, "pinned": bool(changes["pinned"])}


@router.post("/admin/api/models/default", responses=problems(422))
async def make_default(admin: Admin, body: JsonBody[ModelBody]) -> dict[str, Any]:
    """Make a model the default for requests that name none."""
    model = await asyncio.to_thread(admin.serving.resolver.main, body.model)
    await asyncio.to_thread(admin.serving.live.change, {"default_model": model.id}, SESSION.name)
    return {"model": model.id, "is_default": True}
