"""Every route × every kind of caller who must not get in. A new route fails here until it has its line in `ROUTES`.

Access: `public` and `entrance` are open to everybody, but an entrance gives nothing without the right secret. `page`
redirects a stranger to the sign-in page. `admin` needs a session or a key of scope admin. Where the server requires
keys, `key` needs any key, and `operator` needs one of scope admin. Paths are the router's templates.
"""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import httpx2
import pytest
from fastapi.routing import iter_route_contexts
from sqlmodel import Session

from app.core.unit import UNSPECIFIED_STAY
from app.serving.auth import COOKIE
from app.store.store import Store
from tests.admin.signing import PASSWORD, SignInSite, make_sign_in_site

pytestmark = pytest.mark.anyio

Access = Literal["public", "entrance", "page", "admin", "key", "operator"]

ROUTES: dict[str, Access] = {
    "GET /": "public",
    "GET /health": "public",
    "GET /health/live": "public",
    "GET /health/ready": "public",
    "GET /metrics": "key",
    "GET /v1/models": "key",
    "GET /v1/models/{model_id:path}": "key",
    "POST /v1/chat/completions": "key",
    "POST /v1/completions": "key",
    "POST /v1/responses": "key",
    "GET /v1/responses/{response_id}": "key",
    "GET /v1/responses/{response_id}/input_items": "key",
    "DELETE /v1/responses/{response_id}": "key",
    "POST /v1/messages": "key",
    "POST /v1/embeddings": "key",
    "POST /v1/rerank": "key",
    "POST /api/chat": "key",
    "POST /api/generate": "key",
    "POST /api/embed": "key",
    "POST /api/embeddings": "key",
    "POST /api/show": "key",
    "GET /api/tags": "key",
    "GET /api/version": "key",
    "POST /tokenize": "key",
    "POST /detokenize": "key",
    "POST /apply-template": "key",
    "POST /v1/messages/count_tokens": "key",
    "POST /v1/responses/input_tokens": "key",
    "GET /v1": "key",
    "GET /openapi.json": "key",
    "GET /api/ps": "key",
    "GET /api/status": "key",
    "POST /api/load": "operator",
    "POST /api/unload": "operator",
    "POST /api/release": "operator",
    "POST /api/cache/clear": "operator",
    # signing in, keys
    "GET /admin/login": "entrance",
    "GET /admin/setup": "entrance",
    "POST /admin/api/login": "entrance",
    "POST /admin/api/setup": "entrance",
    "GET /admin/enter": "entrance",
    "POST /admin/api/enter": "entrance",
    "POST /admin/api/entry": "admin",
    "POST /admin/api/logout": "admin",
    "GET /admin/api/session": "admin",
    "DELETE /admin/api/sessions": "admin",
    "POST /admin/api/password": "admin",
    "GET /admin/api/keys": "admin",
    "POST /admin/api/keys": "admin",
    "DELETE /admin/api/keys/{key_id}": "admin",
    "GET /static/{version}/{name:path}": "public",
    # overview, connect, live
    "GET /admin": "page",
    "GET /admin/": "page",
    "GET /admin/connect": "page",
    "GET /admin/welcome": "page",
    "GET /admin/api/welcome": "admin",
    "POST /admin/api/welcome": "admin",
    "GET /admin/api/menu": "admin",
    "GET /admin/api/state": "admin",
    "POST /admin/api/worker/restart": "admin",
    "POST /admin/api/worker/drain": "admin",
    "POST /admin/api/quarantine/release": "admin",
    "GET /admin/api/live": "admin",
    "GET /admin/api/live/topics": "admin",
    # chat
    "GET /admin/chat": "page",
    "POST /admin/api/v1/chat/completions": "admin",
    "GET /admin/api/conversations": "admin",
    "DELETE /admin/api/conversations": "admin",
    "GET /admin/api/conversations/{conversation_id}": "admin",
    "PATCH /admin/api/conversations/{conversation_id}": "admin",
    "DELETE /admin/api/conversations/{conversation_id}": "admin",
    "POST /admin/api/conversations/{conversation_id}/turns": "admin",
    "POST /admin/api/drafts/attach": "admin",
    "GET /admin/api/drafts/{model_id:path}": "admin",
    "PUT /admin/api/drafts/{model_id:path}": "admin",
    "GET /admin/api/measurements": "admin",
    "POST /admin/api/measurements": "admin",
    "DELETE /admin/api/measurements/current": "admin",
    "DELETE /admin/api/measurements/{number}": "admin",
    "POST /admin/api/measurements/{number}/apply": "admin",
    "GET /admin/api/prefixes": "admin",
    "POST /admin/api/prefixes/clear": "admin",
    "GET /admin/api/models": "admin",
    "POST /admin/api/models/default": "admin",
    "POST /admin/api/models/load": "admin",
    "POST /admin/api/models/pin": "admin",
    "POST /admin/api/models/reload": "admin",
    "POST /admin/api/models/unload": "admin",
    "POST /admin/api/models/unpin": "admin",
    "GET /admin/api/models/{model_id:path}/settings": "admin",
    "PATCH /admin/api/models/{model_id:path}/settings": "admin",
    "POST /admin/api/restart": "admin",
    "GET /admin/api/settings": "admin",
    "PATCH /admin/api/settings": "admin",
    "GET /admin/drafts/{model_id:path}": "page",
    "GET /admin/models": "page",
    "GET /admin/models/{model_id:path}": "page",
    "GET /admin/pays/{model_id:path}": "page",
    "GET /admin/settings": "page",
    "GET /admin/logs": "page",
    "GET /admin/api/logs": "admin",
    "GET /admin/api/logs/download": "admin",
    "GET /admin/requests": "page",
    "GET /admin/requests/{request_id}": "page",
    "GET /admin/api/replies/{request_id}": "admin",
    "GET /admin/api/requests": "admin",
    "DELETE /admin/api/requests": "admin",
    "GET /admin/api/requests/{request_id}": "admin",
    "POST /admin/api/requests/{request_id}/cancel": "admin",
    "GET /admin/api/downloads": "admin",
    "POST /admin/api/downloads": "admin",
    "DELETE /admin/api/downloads/{download_id}": "admin",
    "POST /admin/api/downloads/{download_id}/{verb}": "admin",
    "DELETE /admin/api/files/{model_id:path}": "admin",
    "GET /admin/api/hub": "admin",
    "GET /admin/api/hub/recommended": "admin",
    "GET /admin/api/hub/repository": "admin",
    "GET /admin/api/hub/search": "admin",
    "GET /admin/api/hub/token": "admin",
    "PUT /admin/api/hub/token": "admin",
    "GET /admin/downloads": "page",
}
SECRET = "sk-environment-1234"
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE")
REFUSED = {401, 403, 404, 405}


def listed() -> list[tuple[str, str, Access]]:
    routes = [*ROUTES.items()]
    routes += [(route.replace("GET", "HEAD"), access) for route, access in routes if re.match("GET (?!/admin)", route)]
    return [(*route.split(" ", 1), access) for route, access in routes]  # type: ignore[misc]


def closed_site() -> SignInSite:
    """Return a site with an account, whose API requires a key."""
    return make_sign_in_site(api_key=SECRET)


async def ask(
    client: httpx2.AsyncClient, method: str, path: str, headers: dict[str, str] | None = None, *, body: bool = True
) -> httpx2.Response:
    target = re.sub(r"\{\w+(:\w+)?\}", "1", path)
    kind = {"content-type": "application/json"} if body else {}
    content = b"{}" if body and method not in {"GET", "HEAD", "OPTIONS"} else None
    return await client.request(method, target, content=content, headers={**kind, **(headers or {})})


def check_stranger(response: httpx2.Response, route: str, access: Access) -> None:
    """Assert that a response gives a caller without rights only what the route's access allows."""
    assert "set-cookie" not in response.headers, route
    status = response.status_code
    if access == "page":
        assert status == 303, route
        assert response.headers["location"].startswith("/admin/login"), route
    elif access in {"admin", "key", "operator"}:
        assert status == 401, route
        assert route.startswith("HEAD") or set(response.json()) - {"type"} == {"error"}, route
    elif access == "entrance":
        is_sent_on = status == 303 and response.headers["location"] == "/admin/login"
        assert route in {"GET /admin/login", "GET /admin/enter"} or is_sent_on or status in {400, 403, 404}, route
    else:
        assert status in {200, 303, 404, 503}, route


def test_every_route_is_listed_and_none_is_mounted() -> None:
    contexts = list(iter_route_contexts(closed_site().site.app.routes))
    mounted = [context.path for context in contexts if not context.methods]
    assert mounted == [], "what is mounted does not pass the sign-in: include it as a router"
    routes = {f"{method} {context.path}" for context in contexts for method in context.methods or ()}
    missing = "".join(f'\n    "{route}": "?",' for route in sorted(routes - set(ROUTES)))
    assert missing == "", f"list each new route in ROUTES with who may call it:{missing}"
    assert set(ROUTES) - routes == set(), "take the routes that are gone out of ROUTES"


async def test_nobody_gets_in_without_a_session() -> None:
    site = closed_site()
    client = site.browser()
    for method, path, access in listed():
        check_stranger(await ask(client, method, path), f"{method} {path}", access)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer pl-wrong"},
        {"authorization": f"Bearer {SECRET}x"},
        {"authorization": f"Basic {SECRET}"},
        {"authorization": "Bearer "},
        {"x-api-key": "pl-wrong"},
        {"x-api-key": SECRET, "authorization": "Bearer pl-wrong"},
        {"cookie": f"{COOKIE}={SECRET}"},
        {"cookie": f"{COOKIE}={PASSWORD}"},
    ],
)
async def test_nobody_gets_in_with_a_wrong_key(headers: dict[str, str]) -> None:
    client = closed_site().browser()
    for method, path, access in listed():
        check_stranger(await ask(client, method, path, headers), f"{method} {path}", access)


async def test_a_wrong_key_is_not_saved_by_a_good_session() -> None:
    client = await closed_site().signed_in()
    for method, path, access in listed():
        if access in {"page", "admin", "key", "operator"}:
            response = await ask(client, method, path, {"authorization": "Bearer pl-wrong"})
            check_stranger(response, f"{method} {path}", access)


async def test_nobody_gets_in_with_a_revoked_key() -> None:
    site = closed_site()
    keys = [site.key("admin"), site.key("inference")]
    for entry in site.accounts.keys.list():
        assert site.accounts.keys.revoke(entry.id)
    for key in keys:
        for method, path, access in listed():
            response = await ask(site.browser(), method, path, {"x-api-key": key})
            check_stranger(response, f"{method} {path}", access)


@pytest.mark.parametrize("days", [7.001, 31.0])
async def test_nobody_gets_in_with_an_expired_session(days: float) -> None:
    site = closed_site()
    client = await site.signed_in()
    for _ in range(int(days) if days > 30 else 1):
        site.time.pass_by(86_400 * (1.0 if days > 30 else days))
        await client.get("/admin/api/session")
    for method, path, access in listed():
        check_stranger(await ask(client, method, path), f"{method} {path}", access)


async def test_nobody_gets_in_with_a_session_that_was_signed_out() -> None:
    site = closed_site()
    client = await site.signed_in()
    cookie = client.cookies.get(COOKIE)
    assert (await client.post("/admin/api/logout", json={})).status_code == 200
    for method, path, access in listed():
        response = await ask(site.browser(), method, path, {"cookie": f"{COOKIE}={cookie}"})
        check_stranger(response, f"{method} {path}", access)


async def test_a_key_for_inference_opens_no_part_of_the_dashboard() -> None:
    site = closed_site()
    key = site.key("inference")
    for method, path, access in listed():
        if access in {"page", "admin"}:
            response = await ask(site.browser(), method, path, {"x-api-key": key})
            assert response.status_code == 403, path
            assert response.json()["error"]["code"] == "insufficient_scope"


async def test_a_key_for_inference_changes_nothing_that_is_in_memory_for_everybody() -> None:
    site = closed_site()
    bodies = ({"model": "demo-main"}, {"model": "demo-main", "pin": True}, {"model": "demo-main", "ttl": -1})
    for path in (path for _, path, access in listed() if access == "operator"):
        for body in bodies:
            response = await site.browser().post(path, json=body, headers={"x-api-key": site.key("inference")})
            assert response.status_code == 403, path
            assert response.json()["error"]["code"] == "insufficient_scope"
            assert "--scope admin" in response.json()["error"]["message"]
    assert site.site.worker.loads == site.site.worker.unloads == []
    for field, seconds, status in (("keep_alive", "1h", 200), ("ttl", 60, 200), ("keep_alive", 0, 403)):
        body = {"model": "demo-main", "prompt": "" if seconds == 0 else "Hi", field: seconds}
        headers = {"x-api-key": site.key("inference")}
        response = await site.browser().post("/api/generate", json=body | {"stream": False}, headers=headers)
        assert response.status_code == status, response.text
        assert [warning["parameter"] for warning in response.json().get("warnings", [])] == (
            [field] if status == 200 else []
        )
    assert [command.stay for command in site.site.worker.commands] == [UNSPECIFIED_STAY] * 2
    assert site.site.worker.unloads == []
    for path in ("/api/load", "/api/unload"):
        response = await site.browser().post(path, json=bodies[0], headers={"x-api-key": site.key("admin")})
        assert response.status_code == 200, response.text


async def test_where_no_key_is_required_anybody_may_load_and_unload_as_ever() -> None:
    site = make_sign_in_site()
    for headers in ({}, {"x-api-key": site.key("inference")}):
        for path in ("/api/load", "/api/unload"):
            response = await site.browser().post(path, json={"model": "demo-main"}, headers=headers)
            assert response.status_code == 200, response.text


async def test_a_key_that_takes_over_the_name_of_a_revoked_one_is_another_owner() -> None:
    site = closed_site()
    for _ in range(2):
        key = site.key(name="laptop")
        body = {"model": "demo-main", "prompt": "my PIN is 4711"}
        assert (await site.browser().post("/v1/completions", json=body, headers={"x-api-key": key})).status_code == 200
        site.accounts.keys.revoke(site.accounts.keys.list()[0].id)
    owners = [command.owner for command in site.site.worker.commands]
    assert len(set(owners)) == 2
    assert not any("laptop" in owner for owner in owners)


class WatchedStore(Store):
    """A store that counts how often an event loop waits for it."""

    waits = 0

    @contextmanager
    def session(self, *, vital: bool = False) -> Iterator[Session]:
        self._watch()
        with super().session(vital=vital) as session:
            yield session

    @contextmanager
    def read_session(self) -> Iterator[Session]:
        self._watch()
        with super().read_session() as session:
            yield session

    def _watch(self) -> None:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            self.waits += 1


async def test_no_route_lets_all_others_wait_for_the_store() -> None:
    site = make_sign_in_site(password=None, api_key=SECRET, hub_endpoint="http://127.0.0.1:9", open_store=WatchedStore)
    store = site.admin.store
    assert isinstance(store, WatchedStore)
    client = site.browser(**{"x-api-key": SECRET})
    for method, path, _ in listed():
        await ask(client, method, path)
        assert store.waits == 0, f"{method} {path}"
    for method, path, body in (
        ("POST", "/admin/api/welcome", {"done": "language"}),
        ("POST", "/admin/api/keys", {"name": "laptop", "scope": "admin"}),
        ("PATCH", "/admin/api/settings", {"theme": "dark"}),
    ):
        response = await client.request(method, path, json=body)
        assert (response.is_success, store.waits) == (True, 0), f"{path} {response.text}"


FOREIGN = {
    "host": {"host": "evil.example"},
    "host that begins like ours": {"host": "127.0.0.1.evil.example"},
    "origin": {"origin": "https://evil.example"},
    "origin of another port": {"origin": "http://127.0.0.1:9999"},
    "opaque origin": {"origin": "null"},
    "cross-site": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    "same-site": {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    "frame": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize(("closed", "body"), [(True, True), (False, False)], ids=["key, body", "no key, no body"])
async def test_no_other_page_gets_anything_even_with_a_session(
    headers: dict[str, str], *, closed: bool, body: bool
) -> None:
    site = closed_site() if closed else make_sign_in_site()
    client = await site.signed_in()
    for method, path, _ in listed():
        response = await ask(client, method, path, headers, body=body)
        assert response.status_code == 403, f"{method} {path}"
        error = "This Host" if method == "HEAD" else response.json()["error"]
        is_text = isinstance(error, str)  # the form that Ollama's clients expect
        assert (
            error[:9] in {"This Host", "Requests "}
            if is_text
            else error["code"] in {"host_not_allowed", "cross_origin"}
        )
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert site.site.worker.commands == site.site.worker.loads == site.site.worker.unloads == []


async def test_a_form_of_another_page_is_refused_even_when_it_navigates() -> None:
    client = await closed_site().signed_in()
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for method, path, _ in listed():
        if method not in {"GET", "HEAD"}:
            assert (await ask(client, method, path, headers)).status_code == 403, path


async def test_other_methods_open_nothing() -> None:
    client = await closed_site().signed_in()
    paths = {path for _, path, _ in listed()}
    for path in paths:
        for method in set(METHODS) - {known for known, other, _ in listed() if other == path}:
            status = (await ask(client, method, path)).status_code
            assert status in REFUSED, f"{method} {path}"


async def test_without_a_key_set_the_dashboard_stays_closed_and_the_endpoint_is_open() -> None:
    client = make_sign_in_site().browser()
    for method, path, access in listed():
        if access in {"page", "admin"}:
            check_stranger(await ask(client, method, path), f"{method} {path}", access)
    assert (await client.get("/v1/models")).status_code == 200


async def test_unknown_addresses_tell_everybody_the_same() -> None:
    site = closed_site()
    strange = await site.browser().get("/admin/api/nothing")
    known = await (await site.signed_in()).get("/admin/api/nothing")
    assert strange.status_code == known.status_code == 404
    assert strange.json() == known.json()


@pytest.mark.parametrize(
    "path",
    [
        "/admin/../v1/models",
        "/static/../v1/models",
        "/admin//api/keys",
        "//admin/api/keys",
        "/Admin/api/keys",
        "/admin/api/keys/",
        "/admin%2Fapi%2Fkeys",
        "/admin/login/../api/keys",
    ],
)
async def test_no_spelling_of_a_path_goes_around_the_sign_in(path: str) -> None:
    statuses: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(int(str(message["status"])))

    app = closed_site().site.app
    decoded = path.replace("%2F", "/")
    scope = {"type": "http", "method": "GET", "path": decoded, "raw_path": path.encode(), "query_string": b""}
    await app(
        scope | {"headers": [(b"host", b"localhost")], "root_path": "", "client": ("127.0.0.1", 1)}, receive, send
    )
    assert statuses[0] in REFUSED
