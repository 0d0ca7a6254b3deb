"""Models as the pages show them: what is on disk, what the worker says of it, what is set for it. Reads the disk."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from app.admin.context import AdminContext
from app.admin.room import Footprints
from app.admin.templating import Pages
from app.core.config_values import context_tokens
from app.core.errors import ModelNotFound
from app.core.footprint import cache_families
from app.core.messages import LoadedModel
from app.hub.catalog import CatalogModel
from app.serving.context import Context
from app.serving.errors import said
from app.serving.resolver import STATES


def render_model(
    context: AdminContext,
    pages: Pages,
    request: Request,
    model_id: str,
    *,
    template: str,
    tab: str,
    data: Mapping[str, Any] | None = None,
    **values: Any,
) -> HTMLResponse:
    """The template with the model; with 404 the page that says that there is no such model. Reads the disk."""
    try:
        model = ModelView(context.serving, context.models.footprints).one(model_id)
    except ModelNotFound as error:
        reason = said(error, pages.words(request))
        return pages.render("model_missing.html", request, area="models", data={}, status=404, reason=reason)
    shown = {"model": model, "topics": context.live.topics, **(data or {})}
    return pages.render(template, request, area="models", data=shown, model=model, tab=tab, **values)


class ModelView:
    """Describes models; call it in a thread."""

    def __init__(self, context: Context, footprints: Footprints) -> None:
        self._context = context
        self._footprints = footprints

    def listing(self) -> dict[str, Any]:
        """Everything on disk, broken folders with their problem."""
        loaded = self._context.resolver.loaded()
        models = self._context.resolver.models()
        looking = self._context.resolver.is_looking()
        room = self._footprints.room
        return {
            "models": [self.describe(model, loaded.get(model.id), looking=looking) for model in models],
            "ceiling_bytes": room.ceiling_bytes,
            "folders": [str(folder) for folder in self._context.settings.model_dirs],
        }

    def one(self, model_id: str) -> dict[str, Any]:
        """One model by its id or alias. Raises ModelNotFound."""
        model = self._context.resolver.find(model_id)
        return self.describe(model, self._context.resolver.loaded().get(model.id))

    def describe(self, model: CatalogModel, loaded: LoadedModel | None, *, looking: bool = False) -> dict[str, Any]:
        """One entry. Bytes and seconds as the names say; 0 and empty where nobody knows, or nobody knows yet."""
        settings, live = self._context.live.model(model.id), self._context.live.current
        quarantine = str(self._context.worker.quarantined.get(model.id, ""))
        footprint = self._footprints.describe(self._footprints.main(model))
        progress = self._context.worker.progress.get(model.id)
        looking = looking and loaded is None and model.kind == "main" and not model.problem
        drafts = () if looking else self._context.resolver.drafts_of(model, loaded)
        return {
            "id": model.id,
            "kind": model.kind,
            "method": model.method,
            "source": model.source,
            "size_bytes": model.size_bytes,
            "parameter_count": model.parameter_count,
            "bits": model.bits,
            "context": context_of(model, loaded),
            "model_type": model.model_type,
            "chats": model.has_chat_template,
            "families": list(families_of(model, loaded)),
            "state": state_of(model, loaded, footprint, loads=progress is not None, quarantine=quarantine),
            "fraction": progress.fraction if progress is not None else 0.0,
            "problem": model.problem or quarantine,
            "is_downloaded": model.path.is_relative_to(live.downloads_path),
            "is_quarantined": bool(quarantine),
            "footprint": footprint,
            "alias": settings.alias or "",
            "pinned": loaded.pinned if loaded is not None else bool(settings.pinned),
            "idle_seconds": settings.idle_seconds,
            "is_default": bool(live.default_model) and live.default_model in {model.id, settings.alias},
            "settings": settings.given(),
            "looking": looking,
            "drafts": [{"id": draft.id, "method": draft.method} for draft in drafts],
        }


def context_of(model: CatalogModel, loaded: LoadedModel | None) -> int:
    """The longest context in tokens."""
    if loaded is not None and loaded.max_context_tokens:
        return loaded.max_context_tokens
    return model.context or (context_tokens(model.config) if model.config else 0)


def families_of(model: CatalogModel, loaded: LoadedModel | None) -> tuple[str, ...]:
    """How its caches roll back: what the worker found out, else what the config tells; `alone`: not at all."""
    if loaded is not None and loaded.state == "ready":
        return loaded.cache_families or ("alone",)
    return cache_families(model.config) if model.config and model.kind == "main" else ()


def state_of(
    model: CatalogModel, loaded: LoadedModel | None, footprint: dict[str, Any] | None, *, loads: bool, quarantine: str
) -> str:
    """`loaded`, `loading`, `unloading`, `available`, `too_large`, or `unusable`."""
    if loads:
        return "loading"
    if loaded is not None:
        return STATES.get(loaded.state, loaded.state)
    if model.problem or quarantine:
        return "unusable"
    return "too_large" if footprint is not None and not footprint["fits"] else "available"
