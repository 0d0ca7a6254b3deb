"""Pages from templates, always rendered by `Pages.render`, which sets their language, theme and security policy.

Templates escape everything and fail on an unknown name. They get `t` (translations), `static` (the address of a file),
`area` (the open part of the navigation), `news` (a newer version that this browser has not dismissed, or None) and
`data`, which is also in the page as JSON for its script.

The files of `app/static/` are read once; a name is looked up in memory and never becomes a path. The version in their
addresses is the hash of all files: scripts import each other by relative addresses, a browser may cache every file for
a year, and no page mixes two versions. Ranges are not supported: the answer is the whole file.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from app import __version__
from app.core.errors import PacelineError
from app.i18n.catalogs import PLURAL_FORMS, Catalogs, Words
from app.serving.errors import localized_message
from app.settings import Settings

FOLDER = Path(__file__).parents[1] / "static"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain"}
HASH_CHARACTERS = 16
CACHE_FOREVER = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"


class Assets:
    """The static files by name, such as `core.js` or `vendor/alpine.js`; only types that a page may load."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = {name: content for name, content in files.items() if Path(name).suffix in MEDIA_TYPES}
        digest = hashlib.sha256()
        for name, content in sorted(self._files.items()):
            digest.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(content).digest())
        self.version = digest.hexdigest()[:HASH_CHARACTERS]

    def address(self, name: str) -> str:
        """Return the address of a file. Raises KeyError for an unknown name."""
        if name not in self._files:
            raise KeyError(name)
        return f"/static/{self.version}/{name}"

    def response(self, version: str, name: str) -> Response | None:
        """Return the file `name`, cacheable for a year only at the current version; None if there is no such file."""
        content = self._files.get(name)
        if content is None:
            return None
        cache_control = CACHE_FOREVER if version == self.version else REVALIDATE
        headers = {"cache-control": cache_control, "content-security-policy": STATIC_POLICY}
        return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)

    def scripts(self) -> list[str]:
        """Return the texts of Paceline's own scripts."""
        own = (name for name in self._files if name.endswith(".js") and "/" not in name)
        return [self._files[name].decode() for name in own]


@cache
def read_assets(folder: Path = FOLDER) -> Assets:
    """Read every file of the folder and of its subfolders."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return Assets({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})


TEMPLATES = Path(__file__).parent / "templates"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
STATIC_POLICY = "default-src 'none'; script-src 'self'; frame-ancestors 'none'"
"""Policy of static files: a web worker imports scripts under its own policy, not under its page's."""
THEMES = ("system", "light", "dark")
LANGUAGE_COOKIE, THEME_COOKIE, UPDATE_COOKIE = "paceline_language", "paceline_theme", "paceline_update"
"""Cookies for a browser's language and theme, and for the version that it dismissed; written by page scripts."""
QUOTED_KEY = re.compile(r"[\"'`]([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)[\"'`]")


@cache
def _templates(assets: Assets) -> Environment:
    """Return the templates, with links to `assets`; each is compiled once in a process."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.globals.update(static=assets.address, version=__version__)
    return templates


class Pages:
    """Renders templates for one application; an empty language and the theme `system` follow the browser."""

    def __init__(
        self,
        assets: Assets,
        catalogs: Catalogs,
        settings: Callable[[], Settings],
        update: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.assets = assets
        self._catalogs = catalogs
        self._settings = settings
        self._update = update
        self._script_keys = frozenset(key for text in assets.scripts() for key in QUOTED_KEY.findall(text))
        self._script_words = cache(self._for_scripts)
        self._templates = _templates(assets)

    def words(self, request: Request) -> Words:
        """Return the translations for a request: the browser's choice, else the setting, else its Accept-Language."""
        chosen = request.cookies.get(LANGUAGE_COOKIE, "")
        language = chosen if chosen in self._catalogs.names else self._settings().language
        return self._catalogs.words(language or self._catalogs.choose(request.headers.get("accept-language", "")))

    def render(
        self, name: str, request: Request, *, area: str = "", data: Any = None, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """Render the template `name` as an uncached answer; the page's script gets `data`, but not `values`."""
        words = self.words(request)
        themes = (request.cookies.get(THEME_COOKIE), self._settings().theme)
        update = self._update()
        page = self._templates.get_template(name).render(
            t=words,
            area=area,
            data=data,
            languages=self._catalogs.names,
            news=None if update["newer"] in {"", request.cookies.get(UPDATE_COOKIE)} else update,
            theme=next((theme for theme in themes if theme in THEMES), "system"),
            script_words=self._script_words(words.language),
            **values,
        )
        return HTMLResponse(page, status, headers={"content-security-policy": POLICY, "cache-control": "no-store"})

    def problem(self, request: Request, error: PacelineError) -> HTMLResponse:
        """Render a page in place of one that is missing or unavailable; it reveals nothing about this server."""
        message = "" if error.code == "unknown_url" else localized_message(error, self.words(request))
        return self.render("problem.html", request, status=error.status, message=message)

    def compile(self) -> None:
        """Compile every template, so that the first visit to a page does not wait for it; takes a while."""
        for name in self._templates.list_templates():
            self._templates.get_template(name)

    def _for_scripts(self, language: str) -> Markup:
        """Return as JSON the translations that scripts use, with all plural forms, and the names of methods, reasons
        and settings, whose keys do not appear in scripts."""
        entries = self._catalogs.words(language).entries
        used = {
            key: words
            for key, words in entries.items()
            if {key, _without_form(key)} & self._script_keys
            or key.startswith(("method.", "reason."))
            or (key.startswith("settings.") and f"{key}_about" in entries)
        }
        return htmlsafe_json_dumps(used)


def _without_form(key: str) -> str:
    stem, _, form = key.rpartition(".")
    return stem if form in PLURAL_FORMS else key
