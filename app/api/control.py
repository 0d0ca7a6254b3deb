"""`GET /v1/models` and `GET /v1/models/{id}`: models that can answer; with `?all=true` also drafters and unusable
models, with the reason. Neither call loads or downloads a model.

Beyond OpenAI's fields: `state` (available, loading, loaded or unusable), `kind`, `source`, `draft` (the id of the first
drafter), `drafts` (id and method of each), `looking` (the model's drafters are not known yet), `alias`, `profile_of`,
`methods`, `unavailable` (method -> reason), `context` and `context_length` (tokens), `capabilities`, `size_bytes` and
`problem`.

`POST /api/load`, `/api/unload`, `/api/release` and `/api/cache/clear`, `GET /api/status`: used by the command line.

`GET /v1`: the list of endpoints. `GET /health/live`: the event loop runs. `GET /health/ready`, `GET /health`: a request
would be accepted now. Health checks need no key. `GET /metrics`: the server's counters in Prometheus text form.
"""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field

from app.api.answer import cancel_on_disconnect
from app.api.commands import ModelName
from app.api.shapes import Model, ModelList
from app.core.errors import ModelNotFound, ModelUnavailable
from app.core.request import OFF
from app.core.unit import LoadedModel, Stay
from app.machine.prefix_files import clear_cached_prompts
from app.models.catalog import CatalogModel
from app.serving.auth import authorize_operator
from app.serving.context import Context, context_of
from app.serving.document import document, problems, success
from app.serving.errors import endpoints
from app.serving.gate import Body, JsonBody
from app.serving.resolver import drafters_object, loaded_object

router = APIRouter()


class LoadBody(Body):
    """`POST /api/load`. `draft`: drafters joined by `+`, or `off`; `pin` keeps the model from being unloaded; `ttl`:
    idle seconds after which it is unloaded (-1: never)."""

    model: ModelName
    draft: ModelName | None = None
    pin: bool | None = None
    ttl: float | None = Field(None, ge=-1, le=31_536_000)


class NamedModel(Body):
    """`POST /api/unload` and `POST /api/release`."""

    model: ModelName


@router.post("/api/load", dependencies=[Depends(authorize_operator)], responses=problems(409, 429))
async def load_model(request: Request, body: JsonBody[LoadBody]) -> dict[str, Any]:
    """Load a model with its drafters and wait; a client that disconnects cancels the load. `seconds`: the load time."""
    context = context_of(request)
    context.activity.check_open()
    draft = OFF if body.draft == "" else body.draft
    model = await asyncio.to_thread(context.resolver.resolve_load, body.model, draft)
    stay = Stay(pinned=body.pin, idle_seconds=body.ttl)
    loaded = await cancel_on_disconnect(request, context.worker.load(model, stay))
    loaded_model = context.worker.book.loaded().get(model.id)
    left_out = loaded_model.unavailable if loaded_model is not None else {}
    drafts = [drafter for drafter in model.drafters if drafter.method not in left_out]
    reasons = [f"{drafter.id}: {left_out[drafter.method]}" for drafter in model.drafters if drafter not in drafts]
    return {
        "model": model.id,
        "draft": drafts[0].id if drafts else None,
        "drafts": drafters_object(drafts),
        "draft_unavailable": "; ".join([*reasons, *filter(None, [model.live.draft_unavailable])]),
        "seconds": round(loaded.seconds, 3),
    }


@router.post("/api/unload", dependencies=[Depends(authorize_operator)], responses=problems(409, 429))
async def unload_model(request: Request, body: JsonBody[NamedModel]) -> dict[str, Any]:
    """Unload a model; 409 while requests use it."""
    context = context_of(request)
    model_id = await asyncio.to_thread(context.resolver.id_of, body.model)
    was_loaded = model_id in context.resolver.loaded()
    await context.worker.unload(model_id)
    return {"model": model_id, "state": "available", "was_loaded": was_loaded}


@router.post("/api/cache/clear", dependencies=[Depends(authorize_operator)])
async def clear_cache(request: Request) -> dict[str, int]:
    """Clear the prefix cache, in memory and on disk; return the bytes freed on disk."""
    context = context_of(request)
    context.worker.clear_prefixes()
    return {"freed_bytes": await asyncio.to_thread(clear_cached_prompts, context.settings.prefixes_path)}


@router.get("/openapi.json")
def get_document(request: Request) -> dict[str, Any]:
    """Return every route with its body, answers and errors, as OpenAPI 3.1."""
    return document(request.app)


@router.get("/v1")
async def list_endpoints(request: Request) -> dict[str, Any]:
    """List the endpoints."""
    return {"object": "list", "data": endpoints(request.app)}


@router.post("/api/release", dependencies=[Depends(authorize_operator)])
async def release_model(request: Request, body: JsonBody[NamedModel]) -> dict[str, Any]:
    """Release a model from quarantine."""
    return {"model": await context_of(request).resolver.release(body.model), "released": True}


def _status(context: Context, model: LoadedModel) -> dict[str, Any]:
    now = context.clock()
    times = {"idle_seconds": model.idle_seconds(now), "seconds_left": model.seconds_left(now)}
    return loaded_object(model) | times | {"unavailable": model.unavailable_texts}


@router.get("/api/status")
async def get_status(request: Request) -> dict[str, Any]:
    """Return the state of the worker, its memory and its models with their drafters; field names carry the units."""
    context = context_of(request)
    worker = context.worker
    snapshot = msgspec.to_builtins(worker.book.snapshot)
    return {
        "worker": {
            "ready": worker.ready,
            "restarts": worker.restarts,
            "info": msgspec.to_builtins(worker.ready_info),
        },
        "draining": context.activity.draining,
        "open_requests": len(context.activity),
        "quarantined": {name: str(why) for name, why in worker.quarantined.items()},
        "loading": {name: msgspec.to_builtins(progress) for name, progress in worker.book.progress.items()},
        **snapshot,
        "models": [_status(context, model) for model in worker.book.snapshot.models],
    }


@router.get("/health/live")
async def get_live() -> dict[str, str]:
    """Return 200 while the server process answers."""
    return {"status": "live"}


@router.get("/health")
@router.get("/health/ready")
async def get_ready(request: Request) -> dict[str, str]:
    """Return 200 if a request would be accepted now, else 503 with the reason in `error.message`."""
    context = context_of(request)
    if context.activity.draining:
        raise ModelUnavailable("Paceline is shutting down.", code="shutting_down", retry_after_seconds=5)
    if not context.worker.ready:
        reason = "The model worker ended and is being restarted."
        if context.worker.draining:
            reason = "The model worker finishes its requests, and is then restarted."
        elif not context.worker.last_exit:
            reason = "The model worker is starting."
        raise ModelUnavailable(reason, code="worker_not_ready", retry_after_seconds=context.worker.retry_after_seconds)
    return {"status": "ready"}


@router.get("/metrics", response_class=Response, responses=success(media_type="text/plain"))
async def get_metrics(request: Request) -> Response:
    """Return everything measured since the server started."""
    context = context_of(request)
    return Response(context.metrics.expose(context.worker), media_type=CONTENT_TYPE_LATEST)


All = Annotated[bool, Query(alias="all")]


@router.get("/v1/models", responses=success(ModelList))
def list_models(request: Request, *, with_all: All = False) -> dict[str, Any]:
    """List the models that can answer; with `all` also drafters and unusable models."""
    context = context_of(request)  # a sync route runs in a thread: this reads the disk
    models = [model for model in context.resolver.models() if with_all or not _unusable_reason(context, model)]
    looking = context.resolver.is_reading_tokenizers()
    data = [describe(context, model, name, looking=looking) for model in models for name in _names(context, model.id)]
    return {"object": "list", "data": data}


@router.get("/v1/models/{model_id:path}", responses=success(Model))
def get_model(request: Request, model_id: str, *, with_all: All = False) -> dict[str, Any]:
    """Return one model; ids may contain slashes."""
    context = context_of(request)
    model = context.resolver.find(model_id)
    why = _unusable_reason(context, model)
    if why and not with_all:
        raise ModelNotFound(f"{model.id} cannot answer: {why}; ?all=true shows it", parameter="model")
    name = model_id if model_id in _names(context, model.id) else model.id
    return describe(context, model, name, looking=context.resolver.is_reading_tokenizers())


def _names(context: Context, model_id: str) -> list[str]:
    """Return the model's id and the names of its profiles."""
    return [model_id, *context.live.profiles(model_id)]


def _unusable_reason(context: Context, model: CatalogModel) -> str:
    """Return why a model cannot answer; empty if it can."""
    problem = model.problem or str(context.worker.quarantined.get(model.id, ""))
    return problem or ("" if model.kind != "drafter" else "it is a drafter for another model")


def describe(context: Context, model: CatalogModel, name: str, *, looking: bool) -> dict[str, Any]:
    """Build one entry of the listing, for a model or for its profile `name`."""
    entry = context.resolver.entry(model, looking=looking)
    loaded = entry.loaded
    return {
        "object": "model",
        "created": context.started_at,
        "owned_by": "paceline",
        **entry.as_object(),
        "id": name,
        "display_name": name,
        "profile_of": model.id if name != model.id else None,
        "alias": entry.settings.alias if name == model.id else None,
        "draft": entry.drafters[0].id if entry.drafters else None,
        "methods": list(loaded.methods) if loaded else [],
        "unavailable": loaded.unavailable_texts if loaded else {},
        "context": entry.context_tokens or None,
        "context_length": entry.context_tokens or None,
        "capabilities": entry.capabilities,
        "problem": entry.problem or None,
    }
