"""`GET /v1/models` and `GET /v1/models/{id}`: what can answer; with `?all=true` also drafters and what cannot be used,
and why. Never loads, never downloads.

Beyond OpenAI's fields: `state` (available, loading, loaded or unusable), `kind`, `source`, `draft` (the id of the first
drafter), `drafts` (id and method of each), `looking` (its drafters are not known yet), `alias`, `methods`,
`unavailable` (method -> why not), `context` (tokens), `size_bytes` and `problem`.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from app.core.errors import ModelNotFound
from app.hub.catalog import CatalogModel
from app.serving.context import Context, context_of
from app.serving.model_entry import entry_of

All = Annotated[bool, Query(alias="all")]

router = APIRouter()


@router.get("/v1/models")
def list_models(request: Request, *, with_all: All = False) -> dict[str, Any]:
    """The models in the catalog; runs in a thread because it reads the disk."""
    context = context_of(request)
    models = [model for model in context.resolver.models() if with_all or not _why_mute(context, model)]
    looking = context.resolver.is_looking()
    return {"object": "list", "data": [describe(context, model, looking=looking) for model in models]}


@router.get("/v1/models/{model_id:path}")
def get_model(request: Request, model_id: str, *, with_all: All = False) -> dict[str, Any]:
    """One model; ids may contain slashes. Raises ModelNotFound."""
    context = context_of(request)
    model = context.resolver.find(model_id)
    why = _why_mute(context, model)
    if why and not with_all:
        raise ModelNotFound(f"{model.id} cannot answer: {why}; ?all=true shows it", parameter="model")
    return describe(context, model, looking=context.resolver.is_looking())


def _why_mute(context: Context, model: CatalogModel) -> str:
    """Why a model cannot answer; empty when it can."""
    problem = model.problem or str(context.worker.quarantined.get(model.id, ""))
    return problem or ("" if model.kind == "main" else "it is a drafter for another model")


def describe(context: Context, model: CatalogModel, *, looking: bool) -> dict[str, Any]:
    """One entry of the listing."""
    entry = entry_of(context, model, looking=looking)
    loaded = entry.loaded
    return {
        "object": "model",
        "created": context.started_at,
        "owned_by": "paceline",
        **entry.as_object(),
        "alias": entry.settings.alias,
        "draft": entry.drafts[0].id if entry.drafts else None,
        "methods": list(loaded.methods) if loaded else [],
        "unavailable": loaded.unavailable_words if loaded else {},
        "context": entry.context_tokens or None,
        "problem": entry.problem or None,
    }
