"""First run, signing in and out, lock-out, keys: over HTTP, with a real store. No secret is in a log, page or list."""

import asyncio
import logging
import os
import stat
from collections.abc import AsyncGenerator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from app.admin.session_routes import browser_name
from app.main import setup_address
from app.serving.auth import COOKIE
from app.store.store import FILE_NAME
from tests.admin.signing import FAR, OTHER_PASSWORD, PASSWORD, SignInSite, cookie_of, make_sign_in_site

pytestmark = pytest.mark.anyio

MINUTE = 60.0


def first_run(**settings: Any) -> SignInSite:
    return make_sign_in_site(password=None, **settings)


async def post(client: httpx2.AsyncClient, path: str, **body: Any) -> httpx2.Response:
    return await client.post(path, json=body)


def code_of(response: httpx2.Response) -> str:
    code: str = response.json()["error"]["code"]
    return code


async def test_before_the_first_run_every_page_leads_to_the_set_up() -> None:
    client = first_run().browser()
    for path in ("/admin/", "/admin/connect", "/admin/login"):
        response = await client.get(path)
        assert (response.status_code, response.headers["location"]) == (303, "/admin/setup")
    page = await client.get("/admin/setup")
    assert page.status_code == 200
    assert 'autocomplete="new-password"' in page.text


async def test_the_set_up_code_chooses_the_password_once() -> None:
    site = first_run()
    token = site.admin.setup_codes.issue()
    client = site.browser()
    done = await post(client, "/admin/api/setup", token=token, password=PASSWORD)
    assert done.status_code == 200
    assert (await client.get("/admin/")).status_code == 200
    assert site.accounts.is_password(PASSWORD)
    for again in (site.browser(), client):
        assert (await post(again, "/admin/api/setup", token=token, password=OTHER_PASSWORD)).status_code == 404
        assert (await again.get("/admin/setup")).headers["location"] == "/admin/login"
    assert site.accounts.is_password(PASSWORD)
    await site.signed_in()


async def test_a_bad_password_does_not_use_the_code_up() -> None:
    site = first_run()
    token = site.admin.setup_codes.issue()
    assert code_of(await post(site.browser(), "/admin/api/setup", token=token, password="short")) == "password_short"
    assert (
        code_of(await post(site.browser(), "/admin/api/setup", token=token, password="password")) == "password_obvious"
    )
    assert (await post(site.browser(), "/admin/api/setup", token=token, password=PASSWORD)).status_code == 200


async def test_a_wrong_or_late_code_does_nothing() -> None:
    site = first_run()
    for wrong in ("", "x", "é", site.admin.setup_codes.issue()[:-1]):
        response = await post(site.browser(), "/admin/api/setup", token=wrong, password=PASSWORD)
        assert (response.status_code, code_of(response)) == (403, "invalid_setup_code")
    token = site.admin.setup_codes.issue()
    site.time.pass_by(30 * MINUTE)
    assert (
        code_of(await post(site.browser(), "/admin/api/setup", token=token, password=PASSWORD)) == "invalid_setup_code"
    )
    assert not site.accounts.has_account


async def test_without_a_code_issued_nothing_is_one() -> None:
    assert (
        code_of(await post(first_run().browser(), "/admin/api/setup", token="", password=PASSWORD))
        == "invalid_setup_code"
    )


async def test_a_new_code_ends_the_one_before() -> None:
    site = first_run()
    old, new = site.admin.setup_codes.issue(), site.admin.setup_codes.issue()
    assert code_of(await post(site.browser(), "/admin/api/setup", token=old, password=PASSWORD)) == "invalid_setup_code"
    assert (await post(site.browser(), "/admin/api/setup", token=new, password=PASSWORD)).status_code == 200


async def test_another_computer_cannot_set_up_even_with_the_code() -> None:
    site = first_run()
    token = site.admin.setup_codes.issue()
    response = await post(site.browser(FAR), "/admin/api/setup", token=token, password=PASSWORD)
    assert (response.status_code, code_of(response)) == (403, "not_local")
    page = (await site.browser(FAR).get("/admin/setup")).text
    assert "paceline password" in page
    assert "<form class" not in page


async def test_two_at_once_make_one_account() -> None:
    site = first_run()
    token = site.admin.setup_codes.issue()
    attempts = [post(site.browser(), "/admin/api/setup", token=token, password=PASSWORD) for _ in range(5)]
    statuses = [response.status_code for response in await asyncio.gather(*attempts)]
    assert sorted(statuses) == [200, 404, 404, 404, 404]


async def test_a_stranger_who_sends_slowly_does_not_keep_the_owner_out() -> None:
    site = first_run()
    token, end = site.admin.setup_codes.issue(), asyncio.Event()

    async def slowly() -> AsyncGenerator[bytes, None]:
        yield b'{"token": '
        await end.wait()
        yield b'"x", "password": "y"}'

    json_type = {"content-type": "application/json"}
    slow = asyncio.create_task(site.browser().post("/admin/api/setup", content=slowly(), headers=json_type))
    async with asyncio.timeout(60):
        done = await post(site.browser(), "/admin/api/setup", token=token, password=PASSWORD)
    assert done.status_code == 200
    end.set()
    assert (await slow).status_code == 404


async def test_before_anybody_signed_in_bodies_are_small() -> None:
    for site, path in ((first_run(), "/admin/api/setup"), (make_sign_in_site(), "/admin/api/login")):
        response = await post(site.browser(), path, token="x", password="y" * (1 << 20))
        assert (response.status_code, code_of(response)) == (413, "request_too_large")


def test_serve_prints_the_address_only_while_there_is_no_account() -> None:
    site = first_run()
    url = "http://127.0.0.1:8710/"
    address = setup_address(site.admin, url)
    assert address.startswith(f"{url}admin/setup#")
    assert site.admin.setup_codes.matches(address.partition("#")[2])
    site.accounts.set_up(PASSWORD)
    assert setup_address(site.admin, url) == ""
    assert setup_address(first_run(host="192.168.1.5", api_key="k").admin, url) == ""
    assert setup_address(first_run(host="0.0.0.0", api_key="k").admin, url)  # noqa: S104


async def test_signing_in_gives_a_strict_cookie_with_a_secret_of_its_own() -> None:
    site = make_sign_in_site()
    response = await post(site.browser(), "/admin/api/login", password=PASSWORD)
    morsel = SimpleCookie(response.headers["set-cookie"])[COOKIE]
    assert (morsel["path"], morsel["samesite"], morsel["httponly"]) == ("/admin", "strict", True)
    assert not morsel["secure"]
    assert int(morsel["max-age"]) == 30 * 86_400
    assert not morsel["domain"]
    assert len(morsel.value) >= 43
    assert response.headers["cache-control"] == "no-store"
    other = await post(site.browser(), "/admin/api/login", password=PASSWORD)
    assert SimpleCookie(other.headers["set-cookie"])[COOKIE].value != morsel.value


async def test_over_https_the_cookie_is_for_https_alone() -> None:
    site = make_sign_in_site()
    transport = httpx2.ASGITransport(site.site.app)
    client = httpx2.AsyncClient(transport=transport, base_url="https://localhost")
    response = await post(client, "/admin/api/login", password=PASSWORD)
    assert SimpleCookie(response.headers["set-cookie"])[COOKIE]["secure"]


async def test_a_session_id_that_a_stranger_chose_is_not_taken_over() -> None:
    site = make_sign_in_site()
    client = site.browser(cookie=f"{COOKIE}=chosen-by-a-stranger")
    response = await post(client, "/admin/api/login", password=PASSWORD)
    assert "chosen-by-a-stranger" not in response.headers["set-cookie"]
    assert not site.accounts.sessions.is_open("chosen-by-a-stranger")


async def test_signing_in_again_rotates_the_session() -> None:
    site = make_sign_in_site()
    client = await site.signed_in()
    first = cookie_of(client)
    await post(client, "/admin/api/login", password=PASSWORD)
    assert cookie_of(client) != first
    assert not site.accounts.sessions.is_open(first)
    assert len(site.accounts.sessions.list()) == 1


async def test_a_page_that_was_wanted_is_remembered() -> None:
    response = await make_sign_in_site().browser().get("/admin/drafts/caf%C3%A9:fast?x=1&y=%2F")
    (wanted,) = parse_qs(urlsplit(response.headers["location"]).query)["next"]
    assert wanted == "/admin/drafts/caf%C3%A9%3Afast?x=1&y=%2F"


async def test_whose_session_has_ended_is_told_so_where_it_signs_in() -> None:
    site = make_sign_in_site()
    client = await site.signed_in()
    site.accounts.sessions.end_all()
    response = await client.get("/admin/chat")
    assert (response.status_code, response.headers["location"]) == (303, "/admin/login?ended=1&next=/admin/chat")
    assert "Your session has expired." in (await client.get(response.headers["location"])).text
    assert "Your session has expired." not in (await client.get("/admin/login?next=/admin/chat")).text


async def test_who_is_signed_in_needs_no_sign_in_page() -> None:
    client = await make_sign_in_site().signed_in()
    response = await client.get("/admin/login")
    assert (response.status_code, response.headers["location"]) == (303, "/admin/")


async def test_a_wrong_password_tells_nothing() -> None:
    site, empty = make_sign_in_site(), first_run()
    for wrong in ("", PASSWORD[:-1], PASSWORD + " ", PASSWORD.upper(), "x" * 4096):
        response = await post(site.browser(FAR), "/admin/api/login", password=wrong)
        same = await post(empty.browser(FAR), "/admin/api/login", password=wrong)
        assert (response.status_code, code_of(response)) == (same.status_code, code_of(same)) == (403, "wrong_password")
        assert "set-cookie" not in response.headers
    assert site.accounts.sessions.list() == []


async def test_guessing_is_slowed_down_and_the_right_password_must_wait_too() -> None:
    site = make_sign_in_site()
    for _ in range(5):
        assert (await post(site.browser(FAR), "/admin/api/login", password="a guess")).status_code == 403
    response = await post(site.browser(FAR), "/admin/api/login", password=PASSWORD)
    assert (response.status_code, code_of(response)) == (429, "too_many_attempts")
    assert int(response.headers["retry-after"]) == 1
    assert (await post(site.browser("192.168.1.10"), "/admin/api/login", password=PASSWORD)).status_code == 200
    site.time.pass_by(1)
    assert (await post(site.browser(FAR), "/admin/api/login", password=PASSWORD)).status_code == 200


async def test_many_guesses_at_once_gain_nothing() -> None:
    site = make_sign_in_site()
    guesses = [post(site.browser(FAR), "/admin/api/login", password=f"guess {number}") for number in range(40)]
    statuses = [response.status_code for response in await asyncio.gather(*guesses)]
    assert statuses.count(403) == 5
    assert statuses.count(429) == 35


async def test_signing_out_ends_this_session_and_everywhere_ends_all() -> None:
    site = make_sign_in_site()
    first, second, third = [await site.signed_in() for _ in range(3)]
    assert [row["current"] for row in (await first.get("/admin/api/session")).json()["sessions"]].count(True) == 1
    old = cookie_of(first)
    response = await post(first, "/admin/api/logout")
    assert 'paceline_session=""' in response.headers["set-cookie"]
    assert not site.accounts.sessions.is_open(old)
    assert (await second.get("/admin/api/session")).status_code == 200
    headers = {"content-type": "application/json"}
    assert (await second.request("DELETE", "/admin/api/sessions", headers=headers, content=b"{}")).status_code == 200
    assert (await third.get("/admin/api/session")).status_code == 401


async def test_a_new_password_signs_all_others_out() -> None:
    site = make_sign_in_site()
    first, second = await site.signed_in(), await site.signed_in()
    wrong = await post(first, "/admin/api/password", current="not it", password=OTHER_PASSWORD)
    assert (wrong.status_code, code_of(wrong)) == (403, "wrong_password")
    short = await post(first, "/admin/api/password", current=PASSWORD, password="short")
    assert (short.status_code, code_of(short)) == (400, "password_short")
    before = cookie_of(first)
    assert (await post(first, "/admin/api/password", current=PASSWORD, password=OTHER_PASSWORD)).status_code == 200
    assert cookie_of(first) != before
    assert (await first.get("/admin/api/session")).status_code == 200
    assert (await second.get("/admin/api/session")).status_code == 401
    assert (await post(second, "/admin/api/login", password=PASSWORD)).status_code == 403
    await site.signed_in(password=OTHER_PASSWORD)


async def test_a_key_is_made_shown_once_used_and_revoked() -> None:
    site = make_sign_in_site()
    client = await site.signed_in()
    made = await post(client, "/admin/api/keys", name="laptop", scope="admin")
    assert made.status_code == 201
    text, key = made.json()["text"], made.json()["key"]
    listed = (await client.get("/admin/api/keys")).json()
    assert [entry["id"] for entry in listed["keys"]] == [key["id"]]
    assert text not in str(listed)
    program = site.browser(FAR, authorization=f"Bearer {text}")
    assert (await program.get("/admin/api/keys")).json()["keys"][0]["used_at"] == site.time.now
    assert (await program.get("/admin/api/session")).json()["kind"] == "key"
    gone = await client.request("DELETE", f"/admin/api/keys/{key['id']}", headers={"content-type": "application/json"})
    assert gone.status_code == 200
    assert (await program.get("/admin/api/keys")).status_code == 401
    for wrong in (key["id"], 99, 0, -1, 1 << 70):
        again = await client.request("DELETE", f"/admin/api/keys/{wrong}", headers={"content-type": "application/json"})
        assert again.status_code == 404


@pytest.mark.parametrize("body", [{}, {"name": ""}, {"name": "x", "scope": "root"}, {"name": "x" * 500}, {"name": 7}])
async def test_a_key_that_means_nothing_is_refused(body: dict[str, Any]) -> None:
    client = await make_sign_in_site().signed_in()
    assert (await post(client, "/admin/api/keys", **body)).status_code == 400
    assert (await client.get("/admin/api/keys")).json()["keys"] == []


async def test_stored_keys_and_the_one_of_the_environment_open_the_endpoint() -> None:
    site = make_sign_in_site(api_key="sk-environment")
    for key in ("sk-environment", site.key("inference"), site.key("admin")):
        assert (await site.browser(FAR, authorization=f"Bearer {key}").get("/v1/models")).status_code == 200
    assert (await site.browser(FAR).get("/v1/models")).status_code == 401
    assert (await site.browser(FAR, authorization="Bearer sk-environment").get("/admin/api/keys")).status_code == 200


async def test_a_session_of_the_dashboard_is_no_key_of_the_endpoint() -> None:
    client = await make_sign_in_site(api_key="sk-environment").signed_in()
    assert (await client.get("/v1/models", headers={"cookie": f"{COOKIE}={cookie_of(client)}"})).status_code == 401


async def test_where_other_machines_reach_the_server_a_key_is_always_asked_for() -> None:
    site = make_sign_in_site(host="0.0.0.0")  # noqa: S104
    assert (await site.browser().get("/v1/models")).status_code == 401
    key = site.key()
    assert (await site.browser(FAR, **{"x-api-key": key}).get("/v1/models")).status_code == 200


async def test_the_setting_require_key_closes_the_endpoint_at_once() -> None:
    site = make_sign_in_site()
    site.site.storage.keys = 1
    client, key = site.browser(), site.key()
    assert (await client.get("/v1/models")).status_code == 200
    site.admin.serving.live.change({"require_key": True}, "test")
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/v1/models", headers={"x-api-key": key})).status_code == 200
    assert (await (await site.signed_in()).get("/admin/api/keys")).json()["required"] is True
    site.admin.serving.live.change({"require_key": False}, "test")
    assert (await client.get("/v1/models")).status_code == 200


async def test_a_damaged_store_closes_everything_until_a_new_set_up() -> None:
    site = make_sign_in_site()
    client, key = await site.signed_in(), site.key("admin")
    site.admin.store.close()
    path = site.admin.serving.settings.home / FILE_NAME
    path.write_bytes(path.read_bytes()[:6000])
    assert site.admin.store.start()
    for caller in (client, site.browser(), site.browser(authorization=f"Bearer {key}")):
        assert (await caller.get("/v1/models")).status_code == 401
        assert (await caller.get("/admin/api/keys")).status_code == 401
    assert (await site.browser().get("/admin/")).headers["location"] == "/admin/setup"
    assert (await post(site.browser(), "/admin/api/login", password=PASSWORD)).status_code == 403
    token = site.admin.setup_codes.issue()
    assert "has been set aside" in (await site.browser().get("/admin/setup")).text
    assert (await post(site.browser(), "/admin/api/setup", token=token, password=OTHER_PASSWORD)).status_code == 200
    assert (await site.browser().get("/v1/models")).status_code == 200
    await site.signed_in(password=OTHER_PASSWORD)


async def test_a_store_that_fails_opens_nothing() -> None:
    site = make_sign_in_site()
    client = await site.signed_in()
    site.admin.store.close()
    (site.admin.serving.settings.home / FILE_NAME).write_bytes(b"no database at all " * 1000)
    for path in ("/v1/models", "/admin/", "/admin/api/keys", "/api/ps"):
        assert (await client.get(path)).status_code in {401, 503}, path


async def test_what_is_secret_is_in_no_log_page_address_or_list(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    site = first_run(api_key="sk-environment-secret")
    token = site.admin.setup_codes.issue()
    client = site.browser()
    await post(client, "/admin/api/setup", token="wrong-token-value", password=PASSWORD)
    await post(client, "/admin/api/setup", token=token, password=PASSWORD)
    first = cookie_of(client)
    await post(client, "/admin/api/login", password="wrong-password-value")
    await post(client, "/admin/api/login", password=PASSWORD)
    made = await post(client, "/admin/api/keys", name="laptop", scope="inference")
    await post(client, "/admin/api/password", current=PASSWORD, password=OTHER_PASSWORD)
    key = made.json()["text"]
    await site.browser(authorization="Bearer wrong-key-value").get("/v1/models")
    await site.browser(authorization=f"Bearer {key}").get("/v1/models")
    texts = [caplog.text]
    for path in ("/admin/", "/admin/connect", "/admin/login", "/admin/api/keys", "/admin/api/session", "/metrics"):
        for caller in (client, site.browser(), site.browser(authorization=f"Bearer {key}")):
            response = await caller.get(path)
            texts += [response.text, str(response.headers.get("location")), str(response.url)]
    secrets = (PASSWORD, OTHER_PASSWORD, token, first, cookie_of(client), key, "sk-environment-secret")
    tried = ("wrong-token-value", "wrong-password-value", "wrong-key-value")
    assert [word for word in (*secrets, *tried) if any(word in text for text in texts)] == []
    assert "A wrong password was tried" in caplog.text
    assert "An API key was created" in caplog.text


async def test_pages_of_the_sign_in_have_no_inline_script_and_the_strict_policy() -> None:
    for response in (
        await first_run().browser().get("/admin/setup"),
        await make_sign_in_site().browser().get("/admin/login"),
    ):
        assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert response.headers["cache-control"] == "no-store"
        assert "unsafe" not in response.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605 Version/17 Safari/605", "Safari, macOS"),
        ("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537 Chrome/140.0 Safari/537", "Chrome, Linux"),
        ("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537 Chrome/140 Safari/537 Edg/140", "Edge, Windows"),
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 18 like Mac OS X) Version/18 Safari/604", "Safari, iPhone"),
        ("<script>alert(1)</script>", ""),
        ("", ""),
    ],
)
def test_a_browser_is_named_by_words_of_ours(sent: str, name: str) -> None:
    assert browser_name(sent) == name


async def test_the_key_of_the_servers_file_opens_everything_from_this_computer_and_nothing_from_elsewhere() -> None:
    site = make_sign_in_site(require_key=True)
    own = {"authorization": f"Bearer {site.site.app.state.access_policy.local_key}"}
    near, far = site.browser(**own), site.browser(address=FAR, **own)
    for path in ("/v1/models", "/admin/api/settings"):
        assert (await near.get(path)).status_code == 200
        assert (await far.get(path)).status_code == 401
        assert (await near.get(path, headers={"x-api-key": "another"})).status_code == 401
    assert (await near.get("/admin/api/session")).json()["kind"] == "command"
    refused = await near.patch("/admin/api/settings", json={"port": 70000}, headers={"accept-language": "ko"})
    assert refused.json()["error"]["message"] == "port: use 65535 or less"


# --- one-time addresses -----------------------------------------------------------------------------------------


async def entry_of(site: SignInSite, to: str = "/admin/chat#7") -> tuple[str, Path]:
    """Return the one-time code that a command on this computer gets, and the file that opens it in a browser."""
    command = site.browser(authorization=f"Bearer {site.site.app.state.access_policy.local_key}")
    answer = (await post(command, "/admin/api/entry", to=to)).json()
    assert answer["address"].startswith("http://127.0.0.1:8710/admin/enter#")
    return answer["address"].partition("#")[2], Path(answer["file"])


async def test_a_command_opens_a_page_signed_in_once() -> None:
    site = make_sign_in_site()
    code, file = await entry_of(site)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"/admin/enter#{code}" in file.read_text(encoding="utf-8")
    browser = site.browser()
    page = await browser.get("/admin/enter")
    assert (page.status_code, page.headers["referrer-policy"]) == (200, "no-referrer")
    answer = await post(browser, "/admin/api/enter", code=code)
    assert answer.json() == {"signed_in": True, "to": "/admin/chat#7"}
    assert not file.exists()
    assert (await browser.get("/admin/api/session")).json()["kind"] == "session"
    again = await post(site.browser(), "/admin/api/enter", code=code)
    assert (again.status_code, code_of(again)) == (403, "invalid_entry_code")


async def test_a_one_time_address_that_is_late_guessed_or_from_afar_opens_nothing() -> None:
    site = make_sign_in_site()
    code, _ = await entry_of(site)
    far = await post(site.browser(FAR), "/admin/api/enter", code=code)
    assert (far.status_code, code_of(far)) == (403, "invalid_entry_code")
    site.time.pass_by(60)
    assert code_of(await post(site.browser(), "/admin/api/enter", code=code)) == "invalid_entry_code"
    guesses = [code_of(await post(site.browser(), "/admin/api/enter", code="x" * 43)) for _ in range(9)]
    assert guesses[-1] == "too_many_attempts"
    assert set(guesses) == {"invalid_entry_code", "too_many_attempts"}


async def test_where_the_server_has_an_address_of_the_network_its_own_computer_is_let_in_and_no_other() -> None:
    site = first_run(host=FAR)
    own, there = f"http://{FAR}:8710", {"authorization": f"Bearer {site.site.app.state.access_policy.local_key}"}

    async def fragment() -> str:
        answer = await site.browser(FAR, **there).post(f"{own}/admin/api/entry", json={})
        assert answer.json()["address"].startswith(own)
        return str(answer.json()["address"]).partition("#")[2]

    for address, status in (("192.168.1.10", 403), (FAR, 200)):
        body = {"token": await fragment(), "password": PASSWORD}
        assert (await site.browser(address).post(f"{own}/admin/api/setup", json=body)).status_code == status
    for address, status in (("192.168.1.10", 403), (FAR, 200)):
        answer = await site.browser(address).post(f"{own}/admin/api/enter", json={"code": await fragment()})
        assert answer.status_code == status


async def test_only_a_command_of_this_computer_gets_a_one_time_address() -> None:
    site = make_sign_in_site()
    own = f"Bearer {site.site.app.state.access_policy.local_key}"
    for client in (await site.signed_in(), site.browser(authorization=f"Bearer {site.key('admin')}")):
        answer = await post(client, "/admin/api/entry")
        assert (answer.status_code, code_of(answer)) == (403, "not_a_command")
    assert (await post(site.browser(FAR, authorization=own), "/admin/api/entry")).status_code == 401
    for to in (
        "/v1/models",
        "https://elsewhere.example/",
        "//elsewhere.example",
        "/admin/api/keys",
        "/admin/%61pi/keys",
        "/admin/./api/keys",
        "/admin/../v1/models",
        "/admin/%2e%2e/v1/models",
        "/admin/..",
        "/admin//elsewhere.example",
        '/admin/"><script>',
    ):
        assert (await post(site.browser(authorization=own), "/admin/api/entry", to=to)).status_code in {400, 422}, to


async def test_before_there_is_a_password_a_command_gets_the_address_of_the_set_up() -> None:
    site = first_run()
    command = site.browser(authorization=f"Bearer {site.site.app.state.access_policy.local_key}")
    address = (await post(command, "/admin/api/entry")).json()["address"]
    assert address.startswith("http://127.0.0.1:8710/admin/setup#")
    done = await post(site.browser(), "/admin/api/setup", token=address.partition("#")[2], password=PASSWORD)
    assert done.status_code == 200


async def test_only_the_newest_one_time_addresses_open_anything_and_old_files_go() -> None:
    site = make_sign_in_site()
    home = site.site.context.settings.home
    left, others = home / f"open-{'0' * 16}.html", [home / "open-door.html", home / f"open-{'1' * 16}.html"]
    first, file = await entry_of(site)
    for old in (left, others[0]):
        old.write_text("of a server that was killed, or somebody else's", encoding="utf-8")
        os.utime(old, (0, 0))
    others[1].symlink_to(others[0])
    codes = [(await entry_of(site))[0] for _ in range(8)]
    assert not left.exists()
    assert all(path.exists() for path in (file, *others))
    assert code_of(await post(site.browser(), "/admin/api/enter", code=first)) == "invalid_entry_code"
    assert (await post(site.browser(), "/admin/api/enter", code=codes[0])).status_code == 200
