"""`GET /`: the start page. Everything in it comes from this server, and its policy lets nothing else in.

With an API key set the page names no model and asks for nothing: it has no key to ask with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.admin.assets import Assets
from app.admin.examples import PROMPT, curl_example, python_example
from app.i18n import Words

TEMPLATES = Path(__file__).parent / "templates"
POLICY = "default-src 'self'; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
NO_MODEL = "MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartView:
    """What the page shows of the application; `model_names` may read the disk and is called in a thread."""

    version: str
    has_key: bool
    model_names: Callable[[], Sequence[str]]
    """The models that can answer, the one to try first at the front."""


def make_router(view: StartView, assets: Assets, words: Words) -> APIRouter:
    """The route of the page."""
    router = APIRouter()
    templates = make_templates(assets, words)

    @router.get("/", response_class=HTMLResponse)
    def get_start(request: Request) -> HTMLResponse:
        """The page for the address that the browser used."""
        names = [] if view.has_key else view.model_names()
        base_url = f"{request.url.scheme}://{request.headers['host']}/v1"
        model = names[0] if names else NO_MODEL
        page = templates.get_template("start.html").render(
            version=view.version,
            has_key=view.has_key,
            base_url=base_url,
            curl=curl_example(base_url, model, has_key=view.has_key),
            python=python_example(base_url, model, has_key=view.has_key),
            script_data={"language": words.language, "words": dict(words.entries), "live": not view.has_key},
        )
        return HTMLResponse(page, headers={"content-security-policy": POLICY, "cache-control": "no-store"})

    return router


def make_templates(assets: Assets, words: Words) -> Environment:
    """Jinja2 that escapes everything and stops at an unknown name."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.globals.update(t=words.t, language=words.language, static=assets.address, example_prompt=PROMPT)
    return templates
