"""The dashboard: its areas, each one module with a `make_router`, behind one set of templates and one live feed."""

from fastapi import APIRouter, FastAPI

from app import __version__
from app.admin import (
    assets,
    chat_routes,
    connect,
    download_routes,
    draft_routes,
    hub_routes,
    key_routes,
    live,
    log_routes,
    measure_routes,
    model_routes,
    overview,
    request_routes,
    session_routes,
    settings_routes,
)
from app.admin.context import AdminContext
from app.admin.templating import Pages, Preference
from app.i18n import Catalogs

AREAS = (
    overview,
    settings_routes,
    model_routes,
    draft_routes,
    measure_routes,
    chat_routes,
    download_routes,
    hub_routes,
    request_routes,
    log_routes,
    connect,
    session_routes,
    key_routes,
)
"""Adding an area is one import and one name in here."""

OWN_CATALOGS = "languages"
"""The folder in `PACELINE_HOME` with catalogs of the user's own."""


def install(app: FastAPI, context: AdminContext) -> None:
    """Every route under `/admin` and `/static`, and the pages of errors; registers the topics of the live feed."""
    files = assets.read_assets()
    catalogs = Catalogs(context.serving.settings.home / OWN_CATALOGS)
    pages = Pages(files, catalogs, version=__version__, preference=lambda: _preference(context))
    app.state.pages = pages
    for router in (
        APIRouter(lifespan=pages.compiling),
        assets.make_router(files),
        live.make_router(context.live),
        *(area.make_router(context, pages) for area in AREAS),
    ):
        app.include_router(router)


def _preference(context: AdminContext) -> Preference:
    current = context.settings.current
    return Preference(language=current.language, theme=current.theme)
