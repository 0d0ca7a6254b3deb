"""`/admin/connect`: how other programs use this server, as code to copy."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.admin.context import AdminContext
from app.admin.templating import Pages


def make_router(context: AdminContext, pages: Pages) -> APIRouter:  # noqa: ARG001
    """The page."""
    router = APIRouter()

    @router.get("/admin/connect", response_class=HTMLResponse)
    def get_connect(request: Request) -> HTMLResponse:
        """The page for the address that the browser used."""
        base_url = f"{request.url.scheme}://{request.headers['host']}/v1"
        return pages.render("connect.html", request, area="connect", data={}, base_url=base_url)

    return router
