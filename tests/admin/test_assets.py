"""Static files: only assets are served, whole and typed; only addresses of this version may be cached for a year."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from app.admin.templating import CACHE_FOREVER, FOLDER, REVALIDATE, Assets, read_assets
from tests.admin.sources import scripts, styles, templates
from tests.api.fakes import make_site

pytestmark = pytest.mark.anyio

KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
ASSETS = read_assets()
FILES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*")
    if path.is_file() and path.suffix.removeprefix(".") in KINDS
)
MAX_PAGE_BYTES = 250_000
MAX_SCRIPT_LINES = 450
MAX_TEMPLATE_LINES = 200
LOADED = re.compile(r"static\('([^']+\.(?:js|css))'\)")
FURTHER_TEMPLATE = re.compile(r"{% (?:extends|include|from|import) \"([^\"]+)\"")
FURTHER_SCRIPT = re.compile(r"from \"\./([^\"]+)\"")
PAGES = ("/admin/", "/admin/connect")
OWN = {"authorization": "Bearer k"}


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_whole_to_everybody(name: str) -> None:
    client = make_site(api_key="k").client
    plain = await client.get(ASSETS.address(name))
    part = await client.get(ASSETS.address(name), headers={"range": "bytes=0-3"})
    for response in (plain, part):
        assert (response.status_code, response.content) == (200, (FOLDER / name).read_bytes())
        assert response.headers["content-type"] == KINDS[name.rpartition(".")[2]]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "accept-ranges" not in response.headers


@pytest.mark.parametrize("page", PAGES)
async def test_only_addresses_of_this_version_are_kept(page: str) -> None:
    client = make_site(api_key="k").client
    addresses = set(re.findall(r'"(/static/[^"]+)"', (await client.get(page, headers=OWN)).text))
    assert {address.split("/", 3)[3] for address in addresses} >= {"paceline.css", "boot.js"}
    for address in addresses:
        assert (await client.get(address)).headers["cache-control"] == CACHE_FOREVER
        stale = f"/static/0123456789abcdef/{address.split('/', 3)[3]}"
        assert (await client.get(stale)).headers["cache-control"] == REVALIDATE


def test_any_change_of_any_file_or_name_is_another_version() -> None:
    assets = Assets({"a.js": b"1", "b.js": b"2"})
    changes = (
        {"a.js": b"1", "b.js": b"3"},
        {"a.js": b"2", "b.js": b"1"},
        {"a.js": b"1"},
        {"a.js": b"1", "c.js": b"2"},
    )
    assert len({assets.version, *(Assets(change).version for change in changes)}) == 5
    assert Assets({"b.js": b"2", "a.js": b"1"}).version == assets.version


def test_a_template_cannot_name_a_file_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        ASSETS.address("nothing.js")


@pytest.mark.parametrize(
    "path",
    [
        "/static",
        "/static/",
        "/static/v",
        "/static/v/",
        "/static/v/.",
        "/static/v/..",
        "/static/v/nothing.js",
        "/static/v/vendor",
        "/static/v/vendor/",
        "/static/v/vendor/vendor.lock.json",
        "/static/v/vendor/../core.js",
        "/static/../main.py",
        "/static/v/../../main.py",
        "/static/v/%2e%2e/main.py",
        "/static/v/..%2fmain.py",
        "/static/v/..%2F..%2Fpyproject.toml",
        "/static/v/%2e%2e%2fadmin%2fpages.py",
        "/static/v/..%5cmain.py",
        "/static/v/%252e%252e%252fmain.py",
        "/static/v//etc/passwd",
        "/static/v/%2fetc%2fpasswd",
        "/static/v/core.js/",
        "/static/v/core.js%00",
        "/static/v/CORE.JS",
        "/static/v/./core.js",
        "/static/v/x/../core.js",
        "/static/v/templates/base.html",
    ],
)
async def test_nothing_else_can_be_asked_for(path: str) -> None:
    site = make_site()
    sent: list[dict[str, object]] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(path),  # as uvicorn hands it over: percent escapes are gone, dot segments are not
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8710")],
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 8710),
        "client": ("127.0.0.1", 50000),
    }

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await site.app(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 404
    assert b"import" not in b"".join(bytes(message.get("body", b"")) for message in sent)  # type: ignore[arg-type]


def loaded_by(template: Path) -> set[str]:
    """Return the scripts and styles that a page loads, including those that its scripts import."""
    text = template.read_text()
    loaded = set(LOADED.findall(text))
    for name in FURTHER_TEMPLATE.findall(text):
        loaded |= loaded_by(template.parent / name)
    todo = list(loaded)
    while todo:
        new = set(FURTHER_SCRIPT.findall((FOLDER / todo.pop()).read_text())) - loaded
        loaded |= new
        todo += new
    return loaded


def test_the_scripts_and_styles_of_a_page_stay_small() -> None:
    sizes = {path.name: {name: (FOLDER / name).stat().st_size for name in loaded_by(path)} for path in templates()}
    assert any("vendor/alpine.js" in loaded for loaded in sizes.values())
    too_large = {page: loaded for page, loaded in sizes.items() if sum(loaded.values()) > MAX_PAGE_BYTES}
    assert too_large == {}


def test_scripts_and_templates_fit_their_budget() -> None:
    for path in scripts():
        assert len(path.read_text().splitlines()) <= MAX_SCRIPT_LINES, path.name
    for path in templates():
        assert len(path.read_text().splitlines()) <= MAX_TEMPLATE_LINES, path.name


def test_scripts_never_make_markup_from_text() -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser|setTimeout\(\s*[\"'`]"
    )
    for path in scripts():
        assert re.findall(forbidden, path.read_text()) == [], path.name


def test_templates_hold_no_code_no_style_and_no_markup_from_text() -> None:
    for path in templates():
        text = path.read_text()
        assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:|x-html|\|\s*safe\b", text) == [], path.name
        for script in re.findall(r"<script[^>]*>", text):
            assert "src=" in script or 'type="application/json"' in script, path.name


def test_nothing_of_ours_refers_to_another_host() -> None:
    """Catalogs and code to copy are not searched: they may mention an address, since nothing is loaded from it."""
    allowed = {"http://www.w3.org/2000/svg"}
    for path in (*scripts(), *styles(), *templates(), *FOLDER.glob("*.svg")):
        text = path.read_text()
        assert set(re.findall(r"[a-z]+://[^\s\"'<>)`]*", text)) - allowed == set(), path.name
        assert re.findall(r"(?:src|href|url|action)\s*[=(]\s*[\"']?//", text) == [], path.name
        assert "@import" not in text, path.name
