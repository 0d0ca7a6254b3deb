"""A page about one model: the same head and tabs on each, and one page for a model that is not here."""

from fastapi import Request
from fastapi.responses import HTMLResponse

from app.admin.model_view import ModelView
from app.admin.templating import Pages
from app.core.errors import ModelNotFound


def render_model(
    pages: Pages, request: Request, view: ModelView, model_id: str, *, template: str, tab: str
) -> HTMLResponse:
    """The template with the model; with 404 the page that says that there is no such model. Reads the disk."""
    try:
        model = view.one(model_id)
    except ModelNotFound as error:
        return pages.render("model_missing.html", request, area="models", data={}, status=404, reason=error.message)
    return pages.render(template, request, area="models", data={"model": model}, model=model, tab=tab)
