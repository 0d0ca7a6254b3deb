"""Pages from templates: `Pages.render` is the only way to one, so that each has its words, its theme and its policy.

Templates escape everything and stop at an unknown name. They get `t` (words), `static` (the address of a file),
`area` (which part of the navigation is open) and `data`, which is also in the page as JSON for its script.

`GET /static/{version}/{name}` gives the files of `app/static/`, read once; nothing else can be asked for. The version
is the hash of all files together: a script finds the others by relative addresses, a browser may keep every one for a
year, and no page ever mixes two versions. Ranges are not offered: the answer is the whole file.
"""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from starlette.exceptions import HTTPException

from app import __version__
from app.core.errors import PacelineError
from app.i18n import PLURAL_FORMS, Catalogs, Words
from app.serving.errors import said
from app.settings import Settings

FOLDER = Path(__file__).parents[1] / "static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain"}
HASH_CHARACTERS = 16
KEEP = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content: bytes
    kind: str


class Assets:
    """The static files by name, such as `core.js` or `vendor/alpine.js`."""

    def __init__(self, assets: Mapping[str, Asset]) -> None:
        self._assets = dict(assets)
        digest = hashlib.sha256()
        for name, asset in sorted(self._assets.items()):
            digest.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(asset.content).digest())
        self.version = digest.hexdigest()[:HASH_CHARACTERS]

    def address(self, name: str) -> str:
        """Where the page finds a file. Raises KeyError for one that is not there."""
        if name not in self._assets:
            raise KeyError(name)
        return f"/static/{self.version}/{name}"

    def find(self, name: str) -> Asset | None:
        """The file called `name`; None when there is none."""
        return self._assets.get(name)

    def scripts(self) -> dict[str, str]:
        """The text of our own scripts, by name."""
        own = {name: asset for name, asset in self._assets.items() if name.endswith(".js") and "/" not in name}
        return {name: asset.content.decode() for name, asset in own.items()}


def read_assets(folder: Path = FOLDER) -> Assets:
    """Every file of the folder, and of the folders in it, whose kind a page may load."""
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in KINDS and path.is_file())
    return Assets({path.relative_to(folder).as_posix(): Asset(path.read_bytes(), KINDS[path.suffix]) for path in paths})


def make_static_router(assets: Assets) -> APIRouter:
    """The route of the files; a name is looked up in memory and never becomes a path."""
    router = APIRouter()

    @router.get("/static/{version}/{name:path}")
    async def get_static(version: str, name: str) -> Response:
        """One file, kept for long only under the version that it belongs to."""
        asset = assets.find(name)
        if asset is None:
            raise HTTPException(404)
        headers = {
            "cache-control": KEEP if version == assets.version else ASK_AGAIN,
            "x-content-type-options": "nosniff",
        }
        return Response(asset.content, media_type=asset.kind, headers=headers)

    return router


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
        self.assets = assets
        self._catalogs = catalogs
        self._settings = settings
        self._script_keys = frozenset(key for text in assets.scripts().values() for key in QUOTED_KEY.findall(text))
        self._script_words = cache(self._for_scripts)
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
            script_words=self._script_words(words.language),
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

    def _for_scripts(self, language: str) -> Markup:
        """JSON of what the scripts name, with every plural form of it, and of what the methods are called."""
        named = {
            key: words
            for key, words in self._catalogs.words(language).entries.items()
            if key in self._script_keys or _without_form(key) in self._script_keys or key.startswith("method.")
        }
        return htmlsafe_json_dumps(named)


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
