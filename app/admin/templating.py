"""Pages from templates: `Pages.render` is the only way to one, so that each has its words, its theme and its policy.

Templates escape everything and stop at an unknown name. They get `t` (words), `static` (the address of a file),
`area` (which part of the navigation is open) and `data`, which is also in the page as JSON for its script.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app import __version__
from app.admin.assets import Assets
from app.core.errors import PacelineError
from app.i18n import PLURAL_FORMS, Catalogs, Words
from app.serving.errors import said
from app.settings import Settings

TEMPLATES = Path(__file__).parent / "templates"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
THEMES = ("system", "light", "dark")
LANGUAGE_COOKIE, THEME_COOKIE = "paceline_language", "paceline_theme"
"""What a browser chose for itself; its script writes them."""
QUOTED_KEY = re.compile(r"[\"'`]([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)[\"'`]")


class Pages:
    """Renders templates for one application; an empty language follows the browser, the theme `system` its colours."""

    def __init__(self, assets: Assets, catalogs: Catalogs, settings: Callable[[], Settings]) -> None:
        self._catalogs = catalogs
        self._settings = settings
        self._script_keys = frozenset(key for text in assets.scripts().values() for key in QUOTED_KEY.findall(text))
        self._templates = make_templates(assets)
        self._templates.globals.update(version=__version__)

    def words(self, request: Request) -> Words:
        """The words for who asks: what the browser chose, else the setting, else what the browser accepts."""
        chosen = request.cookies.get(LANGUAGE_COOKIE, "")
        language = chosen if chosen in self._catalogs.names else self._settings().language
        return self._catalogs.words(language or self._catalogs.choose(request.headers.get("accept-language", "")))

    def render(
        self, name: str, request: Request, *, area: str = "", data: Any = None, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """The template `name` as an answer that nobody keeps; `data` is for the page's script, `values` are not."""
        words = self.words(request)
        themes = (request.cookies.get(THEME_COOKIE), self._settings().theme)
        page = self._templates.get_template(name).render(
            t=words,
            area=area,
            data=data,
            languages=self._catalogs.names,
            theme=next((theme for theme in themes if theme in THEMES), "system"),
            script_words=self._for_scripts(words.entries),
            **values,
        )
        return HTMLResponse(page, status, headers={"content-security-policy": POLICY, "cache-control": "no-store"})

    def problem(self, request: Request, error: PacelineError) -> HTMLResponse:
        """A page in the place of one that is not there, or cannot be shown now; it tells nothing of this server."""
        message = "" if error.code == "unknown_url" else said(error, self.words(request))
        return self.render("problem.html", request, status=error.status, message=message)

    @contextlib.asynccontextmanager
    async def compiling(self, _app: object) -> AsyncGenerator[None, None]:
        """While the server runs: the templates are compiled in a thread at its start, not at the first visit."""
        task = asyncio.create_task(asyncio.to_thread(self._compile))
        yield
        await task

    def _compile(self) -> None:
        for name in self._templates.list_templates():
            self._templates.get_template(name)

    def _for_scripts(self, entries: Mapping[str, str]) -> dict[str, str]:
        """What the scripts name, with every plural form of it, and what the methods are called."""
        return {
            key: words
            for key, words in entries.items()
            if key in self._script_keys or _without_form(key) in self._script_keys or key.startswith("method.")
        }


def _without_form(key: str) -> str:
    stem, _, form = key.rpartition(".")
    return stem if form in PLURAL_FORMS else key


def make_templates(assets: Assets) -> Environment:
    """Jinja2 that escapes everything and stops at an unknown name."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.globals.update(static=assets.address)
    return templates
