"""The gate before every route: checks of Host and Origin, and limits on headers."""

import asyncio
import json

import pytest
from fastapi.routing import iter_route_contexts
from starlette.types import Receive, Scope, Send

from app.core.errors import InvalidRequest
from app.serving.context import PacedThread
from app.serving.gate import Gate, parse_json
from tests.api.fakes import Site, chat_body, make_site

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"


async def raw_status(site: Site, *headers: tuple[str, str], method: str = "GET", path: str = "/health/live") -> int:
    """Return the status for exactly these headers, sent without an HTTP client, which would correct them."""
    statuses: list[int] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    await site.app(scope | {"headers": encoded, "root_path": ""}, receive, send)
    return statuses[0]


HOSTS = {
    "127.0.0.1": 200,
    "127.0.0.1:8710": 200,
    "localhost": 200,
    "LocalHost:1": 200,
    "[::1]:8710": 200,
    "studio.local": 200,
    "studio.local:443": 200,
    "evil.com": 403,
    "evil.com:8710": 403,
    "127.0.0.1.evil.com": 403,
    "localhost.evil.com": 403,
    "localhost.": 403,
    "127.0.0.2": 403,
    "0.0.0.0": 403,  # noqa: S104
    "::1": 400,
    "": 400,
    " ": 400,
    "127.0.0.1/health?x=": 400,
    "127.0.0.1:": 400,
    "127.0.0.1:99999": 400,
    "127.0.0.1:8710:1": 400,
    "user@127.0.0.1": 400,
    "127.0.0.1, evil.com": 400,
    "localhost\u00e9": 400,
}


@pytest.mark.parametrize(("host", "status"), HOSTS.items(), ids=list(HOSTS))
async def test_host(host: str, status: int) -> None:
    site = make_site(allowed_hosts="Studio.local")
    assert await raw_status(site, ("host", host)) == status


async def test_host_missing_or_twice(site: Site) -> None:
    assert await raw_status(site) == 400
    assert await raw_status(site, ("host", "127.0.0.1"), ("host", "127.0.0.1")) == 400
    assert await raw_status(site, ("host", "127.0.0.1"), ("Host", "evil.com")) == 400


async def test_every_route_checks_the_host(site: Site) -> None:
    for context in iter_route_contexts(site.app.routes):
        for method in context.methods or ():
            path = str(context.path).replace("{model_id:path}", "demo-main")
            headers = (("host", "evil.com"), ("content-type", "application/json"))
            assert await raw_status(site, *headers, method=method, path=path) == 403, path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://127.0.0.1:8710"}, 200),
        ({"origin": "http://127.0.0.1:8710", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "http://localhost:8710"}, 403),
        ({"origin": "https://evil.com"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "http://evil.com"}, 403),
    ],
)
async def test_origin_of_a_state_changing_request(site: Site, headers: dict[str, str], status: int) -> None:
    response = await site.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
    assert response.status_code == status
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert (len(site.worker.commands) > 0) == (status == 200)


async def test_a_foreign_page_cannot_post_even_without_a_body(site: Site) -> None:
    for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
        headers = {"origin": "https://evil.com", "content-type": kind}
        assert (await site.client.post("/api/unload", headers=headers)).status_code == 403


@pytest.mark.parametrize("kind", [None, "application/octet-stream", "application/x-www-form-urlencoded"])
async def test_a_client_of_ollama_need_not_say_that_it_sends_json(site: Site, kind: str | None) -> None:
    """LiteLLM says nothing or octet-stream, `curl -d` says that it sends a form; Ollama takes them all."""
    headers = {"content-type": kind} if kind else {}
    body = json.dumps(chat_body(stream=False)).encode()
    assert (await site.client.post("/api/chat", content=body, headers=headers)).status_code == 200
    for origin, status in (("https://evil.com", 403), (str(site.client.base_url).rstrip("/"), 415)):
        page = headers | {"origin": origin}
        assert (await site.client.post("/api/chat", content=body, headers=page)).status_code == status
    assert (await site.client.post("/v1/chat/completions", content=body, headers=headers)).status_code == 415


async def test_preflight_gets_no_permission(site: Site) -> None:
    headers = {"origin": "https://evil.com", "access-control-request-method": "POST"}
    response = await site.client.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_405_names_every_method_of_its_address(site: Site) -> None:
    response = await site.client.put("/v1/responses/resp_1", json={})
    assert (response.status_code, response.headers["allow"]) == (405, "DELETE, GET")


async def test_pages_of_allowed_origins_may_call_the_endpoint_and_nothing_else() -> None:
    page = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    site = make_site(allowed_origins="https://Chat.example, tauri://localhost", api_key="sk-test")
    preflight = await site.client.options("/v1/chat/completions", headers=page | wish)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "DELETE" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = await site.client.post("/v1/chat/completions", json=chat_body(), headers=page)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")
    for kind, body, status in (("text/plain", b"{}", 415), ("application/json", b"{" * 40_000_000, 413)):
        refused = await site.client.post("/v1/embeddings", content=body, headers=page | {"content-type": kind})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (status, "https://chat.example")
    for path in ("/v1/models", "/v1/models/"):
        answer = await site.client.get(path, headers=page | {"authorization": "Bearer sk-test"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    for path in ("/admin/api/state", "/api/status", "/metrics", "/v1x", "/"):
        assert (await site.client.get(path, headers=page)).status_code == 403
        preflight = await site.client.options(path, headers=page | wish)
        assert not [name for name in preflight.headers if name.startswith("access-control")]
    for other in ("https://evil.example", "http://chat.example", "https://chat.example:444", "null"):
        assert (await site.client.get("/v1/models", headers={"origin": other})).status_code == 403


async def test_a_delete_without_a_body_needs_no_content_type(site: Site) -> None:
    assert (await site.client.delete("/admin/api/sessions")).status_code == 401
    assert (await site.client.request("DELETE", "/admin/api/sessions", content=b"x")).status_code == 415


async def test_header_caps(site: Site) -> None:
    assert (await site.client.get("/health/live", headers={"x": "y" * 33_000})).status_code == 431
    assert (await site.client.get("/health/live", headers={"x": "y" * 20_000})).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
async def test_a_body_that_is_encoded_is_refused(site: Site, encoding: str) -> None:
    response = await site.client.post(CHAT, json=chat_body(), headers={"content-encoding": encoding})
    assert (response.status_code, "Content-Encoding" in response.json()["error"]["message"]) == (415, True)
    response = await site.client.post(CHAT, json=chat_body(), headers={"content-encoding": "Identity"})
    assert response.status_code == 200


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PROPFIND"])
async def test_a_method_that_is_unknown_is_a_405_with_or_without_a_type(site: Site, method: str) -> None:
    for headers in ({}, JSON, {"content-type": "text/plain"}):
        response = await site.client.request(method, "/v1/models", headers=headers)
        assert response.status_code == 405
        assert "GET" in response.headers["allow"]
    assert await raw_status(site, ("host", "localhost"), method="CONNECT", path="localhost:8710") == 405


@pytest.mark.parametrize("path", ["/v1/models", "/admin", "/static/app.js"])
@pytest.mark.parametrize("cookie", [b'a="' + b"\\" * 20_000 + b'"', b"a=\\054", b'a="\\"; paceline_session=x\\y'])
async def test_no_cookie_comes_with_a_backslash(path: str, cookie: bytes) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    gate = Gate(application, lambda: (), lambda: (), lambda *_: None)
    headers = [(b"host", b"localhost"), (b"cookie", cookie), (b"x-path", b"a\\b")]
    await gate({"type": "http", "method": "GET", "path": path, "headers": headers}, None, None)  # type: ignore[arg-type]
    assert seen == [(b"host", b"localhost"), (b"cookie", cookie.replace(b"\\", b"")), (b"x-path", b"a\\b")]


@pytest.mark.parametrize("length", ["invalid", "-1", "+1", "1_0", "1" * 20, ""])
async def test_content_length_must_be_a_number(site: Site, length: str) -> None:
    headers = (("host", "localhost"), ("content-type", "application/json"), ("content-length", length))
    assert await raw_status(site, *headers, method="POST", path="/v1/completions") == 400


async def test_every_answer_has_the_protective_headers(site: Site) -> None:
    for path in ("/health/live", "/nothing", "/metrics"):
        headers = (await site.client.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["referrer-policy"] == "no-referrer"


async def test_websockets_are_refused(site: Site) -> None:
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def receive() -> dict:
        return {"type": "websocket.connect"}

    await site.app({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_what_needs_the_interpreter_rests_after_each_piece_and_what_fails_too() -> None:
    done: list[object] = []
    thread = PacedThread(rest=lambda seconds: done.append(seconds >= 0))

    def fails() -> None:
        done.append("fails")
        raise KeyError("x")

    ended = await asyncio.gather(
        *(thread.run("k", done.append, "first"), thread.run("k", fails), thread.run("k", done.append, "last")),
        return_exceptions=True,
    )
    assert [type(end) for end in ended] == [type(None), KeyError, type(None)]
    assert done[:5] == ["first", True, "fails", True, "last"]


def test_an_object_of_too_many_members_is_refused_before_they_are_looked_at() -> None:
    members = ",".join(f'"k{number}":0' for number in range(10_001))
    with pytest.raises(InvalidRequest, match="more than 10,000 members"):
        parse_json(f"{{{members}}}".encode())
    assert parse_json(f"{{{members.rpartition(',')[0]}}}".encode())["k9999"] == 0
