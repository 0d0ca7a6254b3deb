"""`GET /v1/models` and `GET /v1/models/{id}`: what can answer; with `?all=true` also drafters and what cannot be used,
and why. Never loads, never downloads.

Beyond OpenAI's fields: `state` (available, loading, loaded or unusable), `kind`, `source`, `draft` (the id of the first
drafter), `drafts` (id and method of each), `looking` (its drafters are not known yet), `alias`, `methods`,
`unavailable` (method -> why not), `context` (tokens), `size_bytes` and `problem`.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from app.core.errors import ModelNotFound
from app.core.messages import DraftSpecification, LoadedModel
from app.hub.catalog import CatalogModel
from app.serving.context import Context, context_of
from app.serving.resolver import STATES

All = Annotated[bool, Query(alias="all")]

router = APIRouter()


@router.get("/v1/models")
def list_models(request: Request, *, with_all: All = False) -> dict[str, Any]:
    """The models in the catalog; runs in a thread because it reads the disk."""
    context = context_of(request)
    loaded = context.resolver.loaded()
    models = [model for model in context.resolver.models() if with_all or not _why_mute(context, model)]
    looking = context.resolver.is_looking()
    data = [describe(context, model, loaded.get(model.id), looking=looking) for model in models]
    return {"object": "list", "data": data}


@router.get("/v1/models/{model_id:path}")
def get_model(request: Request, model_id: str, *, with_all: All = False) -> dict[str, Any]:
    """One model; ids may contain slashes. Raises ModelNotFound."""
    context = context_of(request)
    model = context.resolver.find(model_id)
    why = _why_mute(context, model)
    if why and not with_all:
        raise ModelNotFound(f"{model.id} cannot answer: {why}; ?all=true shows it", parameter="model")
    looking = context.resolver.is_looking()
    return describe(context, model, context.resolver.loaded().get(model.id), looking=looking)


def _problem(context: Context, model: CatalogModel) -> str:
    return str(context.worker.quarantined.get(model.id, model.problem))


def _why_mute(context: Context, model: CatalogModel) -> str:
    """Why a model cannot answer; empty when it can."""
    return _problem(context, model) or ("" if model.kind == "main" else "it is a drafter for another model")


def describe(context: Context, model: CatalogModel, loaded: LoadedModel | None, *, looking: bool) -> dict[str, Any]:
    """One entry of the listing."""
    problem = _problem(context, model)
    looking = looking and loaded is None and model.kind == "main" and not model.problem
    drafts = () if looking else context.resolver.drafts_of(model, loaded)
    return {
        "id": model.id,
        "object": "model",
        "created": context.started_at,
        "owned_by": "paceline",
        "alias": context.live.model(model.id).alias,
        "state": _state(problem, loaded),
        "kind": model.kind,
        "source": model.source,
        "draft": drafts[0].id if drafts else None,
        "drafts": drafts_object(drafts),
        "looking": looking,
        "methods": list(loaded.methods) if loaded else [],
        "unavailable": loaded.unavailable_words if loaded else {},
        "context": (loaded.max_context_tokens if loaded else 0) or model.context or None,
        "size_bytes": model.size_bytes,
        "problem": problem or None,
    }


def _state(problem: str, loaded: LoadedModel | None) -> str:
    if loaded is not None:
        return STATES.get(loaded.state, loaded.state)
    return "unusable" if problem else "available"


def drafts_object(drafts: Sequence[DraftSpecification]) -> list[dict[str, str]]:
    """Id and method of each drafter."""
    return [{"id": draft.id, "method": draft.method} for draft in drafts]
