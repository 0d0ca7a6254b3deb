"""The settings page, and the settings of the server and of each model as JSON.

`PATCH` takes an object of names and new values, and sets all of them or none; null unsets a setting. Each answer states
when a change takes effect. Topic `settings`: a number that grows with every change, wherever it was made.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import psutil
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import RootModel

from app.admin.context import Admin, AdminContext
from app.admin.request_routes import EmptyBody
from app.admin.setting_rows import model_setting_rows, setting_row, setting_rows
from app.core.errors import InvalidSetting, ModelInUse
from app.models.catalog import Kind
from app.serving.auth import identity_of
from app.serving.document import problems
from app.serving.errors import Rejected
from app.serving.gate import JsonBody
from app.serving.server import AddressError, bind
from app.settings import SECTIONS

OPTION_WORDS: Mapping[str, Mapping[str, str]] = {
    "theme": {"system": "theme.system", "light": "theme.light", "dark": "theme.dark"},
    "policy": {"auto": "drafts.policy_auto", "single": "drafts.policy_single", "off": "drafts.policy_off"},
    "wire": {"auto": "settings.wire_auto", "off": "settings.wire_off"},
    "acceptance": {"coupled": "drafts.coupled", "strict": "drafts.strict", "rejection": "drafts.rejection"},
    "log_level": {
        "debug": "settings.log_debug",
        "info": "logs.from_info",
        "warning": "logs.from_warning",
        "error": "logs.from_error",
    },
}
"""Text keys of the options, by setting; languages are shown by their own names."""
RELOAD = "reload"
"""Field that is not a setting: whether to unload the model for the change, unless requests use it."""


class Changes(RootModel[dict[str, Any]]):
    """New values by name of setting; null unsets a setting."""


router = APIRouter()


@router.get("/admin/settings", response_class=HTMLResponse)
def get_settings_page(request: Request, admin: Admin) -> HTMLResponse:
    """Serve a form made from the schema."""
    rows = setting_rows(admin.serving.live)
    mains = sound_models(admin, "main")
    is_set = admin.serving.settings.memory_limit is not None
    drafts = ["off", *sound_models(admin, "drafter")]
    return admin.pages.render(
        "settings.html",
        request,
        area="settings",
        data={
            "settings": rows,
            "automatic": {"memory_limit": 0 if is_set else admin.serving.memory_ceiling_bytes},
            "folders": admin.models.folders(),
        },
        sections=[
            (name, f"settings.section_{name}", [row for row in rows if row["section"] == name]) for name in SECTIONS
        ],
        option_words=OPTION_WORDS,
        suggestions={"default_model": mains, "drafts": [f"{main}={draft}" for main in mains for draft in drafts]},
        gigabytes=psutil.virtual_memory().total // 10**8 / 10,
        locked_down=admin.store.locked_down,
        can_restart=admin.restart is not None and admin.serving.live.pending.port != 0,
    )


def sound_models(admin: AdminContext, kind: Kind) -> list[str]:
    """Return the ids of the usable models of a kind that are on disk."""
    return [model.id for model in admin.serving.resolver.models() if model.kind == kind and not model.problem]


@router.get("/admin/api/settings")
def get_settings(admin: Admin) -> dict[str, Any]:
    """List every setting: value, default, origin, unit, range, and when a change takes effect."""
    return {"settings": setting_rows(admin.serving.live)}


@router.patch("/admin/api/settings", responses=problems(422))
async def change_settings(request: Request, admin: Admin, body: JsonBody[Changes]) -> dict[str, Any]:
    """Change settings. 422 for an unknown name, a value out of range, or settings that contradict each other."""
    changes = body.root
    models = {model.id for model in await asyncio.to_thread(admin.serving.resolver.models)}
    await asyncio.to_thread(admin.serving.live.change, changes, identity_of(request).name, models=models)
    return {"changed": [setting_row(admin.serving.live, name) for name in changes]}


@router.post("/admin/api/restart", status_code=202, responses=problems(409, 422))
async def restart_server(admin: Admin, _body: JsonBody[EmptyBody]) -> dict[str, int | None]:
    """Restart the server once its running requests have finished; return its new port, None if it keeps its port.

    409 if this server cannot restart itself, 422 for a port that cannot be used.
    """
    port = admin.serving.live.pending.port
    if admin.restart is None:
        raise Rejected(409, "this server cannot start itself again: run `paceline restart`", "cannot_restart")
    if port != admin.serving.settings.port:
        try:
            bind(admin.serving.live.pending.host, port).close()
        except AddressError as error:
            raise InvalidSetting(str(error), parameter="port", translation_key="port") from None
    admin.restart()
    return {"new_port": port if port != admin.serving.settings.port else None}


@router.get("/admin/api/models/{model_id:path}/settings")
def get_model_settings(admin: Admin, model_id: str) -> dict[str, Any]:
    """Return the settings of one model or its profile (`MODEL:PROFILE`), with inherited values."""
    model, profile = admin.serving.resolver.model_and_profile(model_id)
    return {
        "model": model.id,
        "profile": profile,
        "settings": model_setting_rows(admin.serving.live, model.id, profile),
    }


@router.patch("/admin/api/models/{model_id:path}/settings", responses=problems(422, 429))
async def change_model_settings(
    request: Request, admin: Admin, body: JsonBody[Changes], model_id: str
) -> dict[str, Any]:
    """Change settings of a model, or of a profile, which is created if it does not exist.

    With `reload` the model is unloaded unless requests use it; the next request loads it again. The answer's `reload`
    is `done`, `busy` (requests use the model), `needed` (but not requested) or `not needed`.
    """
    changes = dict(body.root)
    reload = changes.pop(RELOAD, False)
    if not isinstance(reload, bool):
        raise InvalidSetting("reload: give true or false", parameter=RELOAD)
    resolver = admin.serving.resolver
    model, profile = await asyncio.to_thread(resolver.model_and_profile, model_id)
    taken = {other.id for other in await asyncio.to_thread(resolver.models)}
    change, author = admin.serving.live.change_model, identity_of(request).name
    await asyncio.to_thread(change, model.id, changes, author, reserved=taken, profile=profile)
    rows = model_setting_rows(admin.serving.live, model.id, profile)
    needs_reload = not profile and any(row["takes_effect"] == RELOAD for row in rows if row["name"] in changes)
    if not needs_reload or model.id not in resolver.loaded():
        reload_state = "not needed"
    else:
        reload_state = await _unloaded(admin, model.id) if reload else "needed"
    return {"model": model.id, "profile": profile, "settings": rows, "reload": reload_state}


async def _unloaded(admin: AdminContext, model_id: str) -> str:
    try:
        await admin.loading.unload(model_id)
    except ModelInUse:
        return "busy"
    return "done"


TOPICS = {"settings": lambda admin: admin.serving.live.changes}
