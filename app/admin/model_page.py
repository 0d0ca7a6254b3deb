"""A page about one model: the same head and tabs on each, and one page for a model that is not here."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from app.admin.context import AdminContext
from app.admin.model_view import ModelView
from app.admin.templating import Pages
from app.core.errors import ModelNotFound
from app.serving.errors import said


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
