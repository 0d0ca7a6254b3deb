"""`/admin/connect`: how other programs use this server, as code to copy with the user's own models in it."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.admin.context import AdminContext
from app.admin.snippets import DEFAULT_CONTEXT_TOKENS, SNIPPETS, ClientTarget
from app.admin.templating import Pages
from app.hub.catalog import CatalogModel

NO_MODEL = "MODEL"


def make_router(context: AdminContext, pages: Pages) -> APIRouter:
    """The page and the same as JSON."""
    router = APIRouter()

    @router.get("/admin/connect", response_class=HTMLResponse)
    def get_connect(request: Request, model: str = "") -> HTMLResponse:
        """The page for the address that the browser used, and for one of the models."""
        target, models = _target(context, request, model)
        snippets = [(each, each.write(target)) for each in SNIPPETS]
        return pages.render(
            "connect.html", request, area="connect", data={}, target=target, models=models, snippets=snippets
        )

    @router.get("/admin/api/connect")
    def get_snippets(request: Request, model: str = "") -> dict[str, Any]:
        """Address, models and code."""
        target, models = _target(context, request, model)
        return {
            "base_url": target.base_url,
            "model": target.model,
            "models": models,
            "needs_key": target.has_key,
            "snippets": [
                {"id": each.id, "name": each.name, "place": each.place, "code": each.write(target)} for each in SNIPPETS
            ],
        }

    return router


def _target(context: AdminContext, request: Request, wanted: str) -> tuple[ClientTarget, list[str]]:
    """What the code is written for, and the names to choose from, those in memory first."""
    resolver = context.serving.resolver
    loaded, first = resolver.loaded(), context.settings.current.default_model
    usable = {each.id: each for each in resolver.models() if each.kind == "main" and not each.problem}
    names = sorted(usable, key=lambda name: (name != first, name not in loaded))
    name = wanted if wanted in usable else next(iter(names), NO_MODEL)
    target = ClientTarget(
        base_url=f"{request.url.scheme}://{request.headers['host']}/v1",
        model=name,
        has_key=request.app.state.door.is_closed,
        context_tokens=_context_tokens(usable.get(name)),
    )
    return target, names


def _context_tokens(model: CatalogModel | None) -> int:
    return model.context if model is not None and model.context else DEFAULT_CONTEXT_TOKENS
