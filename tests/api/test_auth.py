"""API keys on the main endpoints; `tests/admin/test_route_matrix.py` tests every route with every kind of caller."""

import asyncio
import threading

import pytest

from tests.api.fakes import Site, chat_body, make_site

pytestmark = pytest.mark.anyio

KEY = "sk-paceline-1234"
PUBLIC = {"/", "/health/live", "/health/ready"}
PROTECTED = {
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id:path}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1"),
    ("GET", "/api/ps"),
    ("GET", "/api/status"),
    ("POST", "/api/load"),
    ("POST", "/api/unload"),
}
BODIES = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "demo-main", "prompt": "x"},
    "/api/load": {"model": "demo-main"},
    "/api/unload": {"model": "demo-main"},
}


async def status(site: Site, method: str, path: str, headers: dict[str, str] | list[tuple[bytes, bytes]]) -> int:
    target = path.replace("{model_id:path}", "org/other")
    body = BODIES.get(path) if method == "POST" else None
    response = await site.client.request(method, target, json=body, headers=headers)
    if response.status_code == 401:
        error = response.json()["error"]
        assert "API key" in error if path == "/api/ps" else error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    return response.status_code


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"x-api-key": ""},
        {"x-api-key": "other"},
        {"x-api-key": KEY, "authorization": "Bearer other"},
        [(b"authorization", "Bearer é\u00ff".encode("latin-1"))],
        [(b"authorization", "Bearer ключ".encode())],
        [(b"x-api-key", b"\xff\xfe")],
        [(b"authorization", f"Bearer {KEY}".encode()), (b"authorization", b"Bearer other")],
    ],
)
async def test_no_route_opens_without_the_key(headers: dict[str, str] | list[tuple[bytes, bytes]]) -> None:
    site = make_site(api_key=KEY)
    for method, path in PROTECTED:
        assert await status(site, method, path, headers) == 401, path
    assert site.worker.commands == site.worker.loads == site.worker.unloads == []
    for path in PUBLIC:
        assert await status(site, "GET", path, headers) == (303 if path == "/" else 200)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "authorization": f"Bearer {KEY}"},
    ],
)
async def test_every_route_opens_with_the_key(headers: dict[str, str]) -> None:
    site = make_site(api_key=KEY)
    for method, path in PROTECTED:
        assert await status(site, method, path, headers) == 200, path


async def test_without_a_key_set_any_key_is_fine(site: Site) -> None:
    for method, path in PROTECTED:
        for headers in ({}, {"authorization": "Bearer anything"}):
            assert await status(site, method, path, headers) == 200, path


async def test_a_refusal_comes_before_the_body_is_looked_at() -> None:
    site = make_site(api_key=KEY)
    response = await site.client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 401


async def test_a_disk_that_does_not_answer_keeps_nobody_from_signing_in() -> None:
    site, answers = make_site(api_key=KEY), threading.Event()
    waiting = [asyncio.create_task(asyncio.to_thread(answers.wait)) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            assert (await site.client.get("/api/ps", headers={"x-api-key": "other"})).status_code == 401
    finally:
        answers.set()
    await asyncio.gather(*waiting)


async def test_the_key_is_told_nowhere() -> None:
    site = make_site(api_key=KEY)
    assert KEY not in repr(site.context.settings)
    for path in ("/", "/admin/setup", "/admin/connect"):
        assert KEY not in (await site.client.get(path, headers={"x-api-key": KEY})).text


async def test_a_request_belongs_to_the_key_that_it_came_with() -> None:
    keyed, open_ = make_site(api_key=KEY), make_site()
    await keyed.client.post("/v1/chat/completions", json=chat_body(), headers={"authorization": f"Bearer {KEY}"})
    await open_.chat()
    assert [site.worker.commands[0].owner for site in (keyed, open_)] == ["environment 0", "anonymous 0"]


@pytest.mark.parametrize("switched_on", [True, False])
async def test_earlier_requests_draft_only_where_that_is_switched_on(switched_on: bool) -> None:
    site = make_site(ngram_across_requests=switched_on)
    await site.chat()
    assert site.worker.commands[0].model.ngram_across_requests is switched_on
