"""Ollama's `/api/version`, `tags`, `ps` and `show`: the models that can answer, and those in memory."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request

from app.api.commands import ModelName
from app.api.shapes import OllamaModel, OllamaModels
from app.core.unit import LoadedModel
from app.models.catalog import CatalogModel
from app.serving.context import Context, context_of
from app.serving.document import success
from app.serving.gate import Body, JsonBody

API_VERSION = "0.12.6"
"""Version of Ollama whose API this server implements; clients refuse older versions."""
OLLAMA_WORDS = {"tools": "tools", "reasoning": "thinking"}
"""Ollama's names of capabilities, by Paceline's."""
FOR_EVER_SECONDS = 100 * 365 * 86400.0
"""Time until the reported expiry of a model that is never unloaded, in seconds: clients expect a date."""

router = APIRouter()


class NamedBody(Body):
    """`POST /api/show`."""

    model: ModelName | None = None
    name: ModelName | None = None


def plain_name(name: str) -> str:
    """Remove the tag `latest`, which Ollama's clients add to names without a tag."""
    return name.removesuffix(":latest")


@router.get("/api/version")
async def ollama_version() -> dict[str, str]:
    """Return the version of Ollama whose API this server implements."""
    return {"version": API_VERSION}


@router.get("/api/tags", responses=success(OllamaModels))
def ollama_tags(request: Request) -> dict[str, Any]:
    """List the models that can answer."""
    context = context_of(request)
    usable = [model for model in context.resolver.models() if model.kind != "drafter" and not model.problem]
    return {"models": [_listed(context, model) for model in usable]}


@router.get("/api/ps", responses=success(OllamaModels))
async def ollama_processes(request: Request) -> dict[str, Any]:
    """List the models that are in memory."""
    context = context_of(request)
    ready = [model for model in context.resolver.loaded().values() if model.state == "ready"]
    listed = await asyncio.to_thread(context.resolver.models)
    families = {model.id: _family(model) for model in listed}
    return {"models": [_in_memory(model, families.get(model.id, ""), context.clock()) for model in ready]}


def _in_memory(model: LoadedModel, family: str, now: float) -> dict[str, Any]:
    """Describe a loaded model of `family`; `now` is in monotonic seconds."""
    size_bytes, left = model.weights_bytes + model.cache_bytes, model.seconds_left(now)
    expires_at = datetime.now(UTC) + timedelta(seconds=FOR_EVER_SECONDS if left is None else left)
    return _described(model.id, size_bytes, family) | {
        "size_vram": size_bytes,
        "expires_at": expires_at.isoformat(),
        "context_length": model.max_context_tokens,
    }


@router.post("/api/show", responses=success(OllamaModel))
async def ollama_show(request: Request, body: JsonBody[NamedBody]) -> dict[str, Any]:
    """Return one model."""
    context = context_of(request)
    model = await asyncio.to_thread(context.resolver.find, plain_name(body.model or body.name or ""))
    entry = await asyncio.to_thread(context.resolver.entry, model, looking=False)
    more = [word for name, word in OLLAMA_WORDS.items() if name in entry.capabilities]
    family = _family(model)
    return _listed(context, model) | {
        "modelfile": f"FROM {model.id}",
        "parameters": "",
        "template": "",
        "model_info": {
            "general.architecture": family,
            "general.basename": model.id,
            f"{family}.context_length": entry.context_tokens,
        },
        "capabilities": [*(() if model.kind == "encoder" else ("completion",)), "embedding", *more],
    }


def _listed(context: Context, model: CatalogModel) -> dict[str, Any]:
    return _described(model.id, model.size_bytes, _family(model)) | {
        "modified_at": datetime.fromtimestamp(context.started_at, UTC).isoformat()
    }


def _family(model: CatalogModel) -> str:
    return str((model.config or {}).get("model_type", ""))


def _described(model_id: str, size_bytes: int, family: str) -> dict[str, Any]:
    """Describe a model as Ollama does; unknown values are empty."""
    unknown = {"parent_model": "", "parameter_size": "", "quantization_level": ""}
    details = unknown | {"format": "mlx", "family": family, "families": [family] if family else []}
    return {"name": model_id, "model": model_id, "size": size_bytes, "digest": "", "details": details}
