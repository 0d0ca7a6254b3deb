"""Static files: only those that are there, whole, typed, and kept for a year only under their own hash."""

import re
from urllib.parse import unquote

import pytest

from app.admin.assets import ASK_AGAIN, FOLDER, KEEP
from tests.api.fakes import make_site

pytestmark = pytest.mark.anyio

FILES = sorted(path.name for path in FOLDER.iterdir())
KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
MAX_BYTES = 60_000
MAX_SCRIPT_LINES = 250
MAX_TEMPLATE_LINES = 120


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_whole(name: str) -> None:
    client = make_site(api_key="k").client
    plain = await client.get(f"/static/{name}")
    part = await client.get(f"/static/{name}", headers={"range": "bytes=0-3"})
    for response in (plain, part):
        assert (response.status_code, response.content) == (200, (FOLDER / name).read_bytes())
        assert response.headers["content-type"] == KINDS[name.rpartition(".")[2]]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "accept-ranges" not in response.headers


async def test_only_the_address_with_the_right_hash_is_kept() -> None:
    client = make_site().client
    addresses = set(re.findall(r'"(/static/[^"]+)"', (await client.get("/")).text))
    assert {address.partition("?")[0] for address in addresses} >= {"/static/paceline.css", "/static/start.js"}
    for address in addresses:
        assert (await client.get(address)).headers["cache-control"] == KEEP
        for stale in (address.partition("?")[0], address + "0", address.partition("?")[0] + "?v="):
            assert (await client.get(stale)).headers["cache-control"] == ASK_AGAIN


@pytest.mark.parametrize(
    "path",
    [
        "/static",
        "/static/",
        "/static/.",
        "/static/..",
        "/static/nothing.js",
        "/static/../main.py",
        "/static/%2e%2e/main.py",
        "/static/..%2fmain.py",
        "/static/..%2F..%2Fpyproject.toml",
        "/static/%2e%2e%2fadmin%2fpages.py",
        "/static/..%5cmain.py",
        "/static/%252e%252e%252fmain.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/start.js/",
        "/static/start.js%00",
        "/static/START.JS",
        "/static/./start.js",
        "/static/x/../start.js",
        "/static/templates/start.html",
    ],
)
async def test_nothing_else_can_be_asked_for(path: str) -> None:
    site = make_site()
    sent: list[dict[str, object]] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": _decoded(path),
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
    assert b"import" not in b"".join(bytes(each.get("body", b"")) for each in sent)  # type: ignore[arg-type]


def _decoded(path: str) -> str:
    """As uvicorn hands it over: percent escapes are gone, dot segments are not."""
    return unquote(path)


def test_scripts_and_styles_stay_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.suffix in {".js", ".css"}}
    assert sum(sizes.values()) <= MAX_BYTES, sizes


def test_scripts_and_templates_fit_their_budget() -> None:
    templates = FOLDER.parent / "admin" / "templates"
    for path in FOLDER.glob("*.js"):
        assert len(path.read_text().splitlines()) <= MAX_SCRIPT_LINES, path.name
    for path in templates.glob("*.html"):
        assert len(path.read_text().splitlines()) <= MAX_TEMPLATE_LINES, path.name


def test_scripts_never_make_markup_from_text() -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser|setTimeout\(\s*[\"'`]"
    )
    for path in FOLDER.glob("*.js"):
        assert re.findall(forbidden, path.read_text()) == [], path.name


def test_nothing_refers_to_another_host() -> None:
    allowed = {"http://www.w3.org/2000/svg"}
    folders = (FOLDER, FOLDER.parent / "admin" / "templates", FOLDER.parent / "i18n")
    for path in (each for folder in folders for each in folder.iterdir() if each.is_file()):
        text = path.read_text()
        assert set(re.findall(r"[a-z]+://[^\s\"'<>)]*", text)) - allowed == set(), path.name
        assert re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?//", text) == [], path.name
        assert "@import" not in text, path.name
