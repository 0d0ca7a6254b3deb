"""The settings page and its routes: the same settings as in the terminal, and when each takes effect."""

import asyncio
import dataclasses
import itertools
import json
import re
from contextlib import closing
from typing import Any, get_args

import httpx2
import pytest

from app.admin.setting_rows import model_setting_rows, setting_rows
from app.admin.settings_routes import OPTION_WORDS
from app.core.errors import ModelInUse
from app.core.messages import Snapshot
from app.core.unit import DEFAULT_STAY, Stay
from app.model_settings import ModelSettings
from app.models.drafters.methods import METHOD_NAMES
from app.serving.live_settings import USER_LANGUAGES
from app.serving.server import bind
from app.settings import SECTIONS, Settings, TakesEffect
from tests.admin.signing import SignInSite, make_sign_in_site
from tests.api.fakes import chat_body
from tests.loaded import loaded

pytestmark = pytest.mark.anyio
ADDRESS = "/admin/api/settings"
MODEL = "/admin/api/models/demo-main/settings"


@pytest.fixture
def site() -> SignInSite:
    return make_sign_in_site()


@pytest.fixture
async def client(site: SignInSite) -> httpx2.AsyncClient:
    return await site.signed_in()


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


async def test_every_setting_is_told_with_all_that_a_form_needs(client: httpx2.AsyncClient) -> None:
    rows = by_name((await client.get(ADDRESS)).json()["settings"])
    assert set(rows) == set(Settings.model_fields)
    for name, row in rows.items():
        assert row["description"], name
        assert row["takes_effect"] in get_args(TakesEffect), name
        assert row["section"] in SECTIONS, name
        assert row["kind"] in {"switch", "number", "text", "choice", "list", "pairs", "json", "secret", "size"}, name
        if row["kind"] == "choice" and name != "language":
            assert list(OPTION_WORDS[name]) == row["options"], name
    assert (rows["port"]["least"], rows["port"]["most"], rows["port"]["whole"]) == (0, 65535, True)
    assert rows["theme"]["options"] == ["system", "light", "dark"]
    assert rows["drain_seconds"]["unit"] == "seconds"
    assert not rows["api_key"]["may_be_stored"]


async def test_a_language_of_the_users_own_can_be_chosen(site: SignInSite, client: httpx2.AsyncClient) -> None:
    own = site.admin.serving.settings.home / USER_LANGUAGES
    own.mkdir(parents=True, exist_ok=True)
    (own / "tlh.json").write_text('{"language.name": "tlhIngan Hol"}')
    row = by_name((await client.get(ADDRESS)).json()["settings"])["language"]
    assert {"", "en", "tlh"} <= set(row["options"])
    assert (await client.patch(ADDRESS, json={"language": "tlh"})).status_code == 200
    assert (await client.patch(ADDRESS, json={"language": "xx"})).status_code == 422


async def test_a_change_is_kept_felt_and_answered(site: SignInSite, client: httpx2.AsyncClient) -> None:
    response = await client.patch(ADDRESS, json={"theme": "dark", "port": 9000, "queue_limit": 5})
    rows = by_name(response.json()["changed"])
    assert [rows[name]["takes_effect"] for name in ("theme", "port", "queue_limit")] == ["now", "restart", "reload"]
    assert [rows[name]["in_effect"] for name in ("theme", "port", "queue_limit")] == [True, False, True]
    assert {row["origin"] for row in rows.values()} == {"store"}
    assert site.admin.serving.settings.theme == "dark"
    assert site.site.storage.values == {"theme": "dark", "port": 9000, "queue_limit": 5}
    assert 'data-theme="dark"' in (await client.get("/admin/settings")).text
    back = by_name((await client.patch(ADDRESS, json={"port": None})).json()["changed"])["port"]
    assert (back["value"], back["origin"], back["in_effect"]) == (8710, "default", True)


@pytest.mark.parametrize(
    ("body", "code", "parameter"),
    [
        ({"port": 70000}, "invalid_setting", "port"),
        ({"port": [1]}, "invalid_setting", "port"),
        ({"nonsense": 1}, "invalid_setting", "name"),
        ({"__class__": 1}, "invalid_setting", "name"),
        ({"api_key": "k"}, "invalid_setting", "api_key"),
        ({"require_key": True}, "conflicting_settings", "require_key"),
        ({"policy": "off", "num_draft_tokens": 3}, "conflicting_settings", "policy"),
        ({"default_model": "nowhere/nothing"}, "conflicting_settings", "default_model"),
        ({"drafts": {"demo-main": "nowhere"}}, "conflicting_settings", "drafts"),
        ({"drafts": {"nowhere": "off"}}, "conflicting_settings", "drafts"),
        ({"memory_limit": "900T"}, "conflicting_settings", "memory_limit"),
        ({"model_dirs": ["/nowhere/at/all"]}, "conflicting_settings", "model_dirs"),
        ({"downloads_folder": "/nowhere/at/all"}, "conflicting_settings", "downloads_folder"),
    ],
)
async def test_what_cannot_be_is_422_and_changes_nothing(
    site: SignInSite, client: httpx2.AsyncClient, body: dict[str, Any], code: str, parameter: str
) -> None:
    response = await client.patch(ADDRESS, json={"theme": "dark"} | body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (422, code, parameter)
    assert site.site.storage.values == {}


NASTY = ("x" * 4000, "nonsense !", -1, 1e12, 1.5, "", [], ["no://host"], {}, {"a": 1}, True, "900T")


@pytest.mark.parametrize("language", ["ko", "ja", "zh-Hans"])
async def test_every_refusal_is_said_in_the_language_of_the_page(
    site: SignInSite, client: httpx2.AsyncClient, language: str
) -> None:
    said = set()
    for address, fields in ((ADDRESS, Settings.model_fields), (MODEL, ModelSettings.model_fields)):
        for name, value in itertools.product(fields, NASTY):
            response = await client.patch(address, json={name: value}, headers={"accept-language": language})
            if response.status_code == 422 and name not in {"api_key", "home"}:
                said.add((name, response.json()["error"]["message"]))
    assert len(said) > 40
    assert [refusal for refusal in said if re.search("[a-z]{3} [a-z]{3}", refusal[1])] == []


async def test_a_restart_is_refused_for_a_port_that_is_taken_and_told_where_the_server_will_be(
    site: SignInSite,
) -> None:
    restarts: list[str] = []
    site.site.app.state.admin = dataclasses.replace(site.admin, restart=lambda: restarts.append("restart"))
    client = await site.signed_in()
    with closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        await client.patch(ADDRESS, json={"port": port})
        refused = await client.post("/admin/api/restart", json={})
        assert (refused.status_code, refused.json()["error"]["param"], restarts) == (422, "port", [])
    assert (await client.post("/admin/api/restart", json={})).json() == {"new_port": port}
    await client.patch(ADDRESS, json={"port": None})
    assert (await client.post("/admin/api/restart", json={})).json() == {"new_port": None}
    assert restarts == ["restart"] * 2


async def test_a_server_that_cannot_restart_itself_names_the_command(client: httpx2.AsyncClient) -> None:
    assert "<code>paceline restart</code>" in (await client.get("/admin/settings")).text
    refused = await client.post("/admin/api/restart", json={})
    assert (refused.status_code, "paceline restart" in refused.text) == (409, True)


async def test_require_key_is_felt_at_the_next_request(site: SignInSite, client: httpx2.AsyncClient) -> None:
    key = site.key()
    site.site.storage.keys = 1
    program = site.browser()
    assert (await program.get("/v1/models")).status_code == 200
    assert (await client.patch(ADDRESS, json={"require_key": True})).status_code == 200
    assert (await program.get("/v1/models")).status_code == 401
    assert (await program.get("/v1/models", headers={"x-api-key": key})).status_code == 200


async def test_allowed_hosts_and_open_requests_are_felt_at_the_next_request(client: httpx2.AsyncClient) -> None:
    named = {"host": "studio.local"}
    assert (await client.get("/health/live", headers=named)).status_code == 403
    await client.patch(ADDRESS, json={"allowed_hosts": ["studio.local"]})
    assert (await client.get("/health/live", headers=named)).status_code == 200


async def test_the_default_model_is_felt_at_the_next_request(site: SignInSite, client: httpx2.AsyncClient) -> None:
    body = {name: value for name, value in chat_body().items() if name != "model"}
    assert (await site.browser().post("/v1/chat/completions", json=body)).status_code == 400
    await client.patch(ADDRESS, json={"default_model": "org/other"})
    assert (await site.browser().post("/v1/chat/completions", json=body)).json()["model"] == "org/other"


async def test_the_page_has_a_labelled_field_for_each_setting(client: httpx2.AsyncClient) -> None:
    page = (await client.get("/admin/settings")).text
    for name in Settings.model_fields:
        assert f'id="setting-{name}"' in page, name
        assert f'for="setting-{name}"' in page, name
    assert 'id="keys"' in page


async def test_hostile_values_stay_text(site: SignInSite, client: httpx2.AsyncClient) -> None:
    hostile = "</script><script>alert(1)</script>"
    site.admin.serving.live.change({"default_model": hostile}, "test")
    page = (await client.get("/admin/settings")).text
    assert hostile not in page
    assert json.dumps(hostile)[1:-1].replace("<", "\\u003c").replace(">", "\\u003e") in page


# --- one model --------------------------------------------------------------------------------------------------------


async def test_settings_of_a_model_are_told_changed_and_taken_back(client: httpx2.AsyncClient) -> None:
    answer = (await client.get(MODEL)).json()
    assert (answer["model"], set(by_name(answer["settings"]))) == ("demo-main", set(ModelSettings.model_fields))
    changed = (await client.patch(MODEL, json={"temperature": 0.5, "policy": "single"})).json()
    rows = by_name(changed["settings"])
    assert (rows["temperature"]["value"], rows["temperature"]["origin"]) == (0.5, "store")
    assert (rows["policy"]["value"], rows["policy"]["inherited"], changed["reload"]) == ("single", "auto", "not needed")
    await client.patch(MODEL, json={"temperature": None})
    assert by_name((await client.get(MODEL)).json()["settings"])["temperature"]["value"] is None
    assert (await client.get("/admin/api/models/nowhere/settings")).status_code == 404
    assert (await client.patch("/admin/api/models/org/other/settings", json={"top_k": 3})).json()[
        "model"
    ] == "org/other"


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 3},
        {"kv_bits": 5},
        {"kv_bits_from": -1},
        {"nonsense": 1},
        {"pinned": True, "idle_seconds": 5},
        {"alias": "org/other"},
        {"reload": 1},
    ],
)
async def test_a_model_refuses_what_cannot_be(client: httpx2.AsyncClient, body: dict[str, Any]) -> None:
    assert (await client.patch(MODEL, json=body)).status_code == 422


@pytest.mark.parametrize("bits", [8, "8"])
async def test_keys_and_values_are_quantised_as_the_api_or_the_page_says(
    site: SignInSite, client: httpx2.AsyncClient, bits: int | str
) -> None:
    """Accept bits as a form's text or a program's number; the page says where they have no effect."""
    site.site.worker.book.snapshot = Snapshot(models=(loaded("demo-main"),))
    changed = (await client.patch(MODEL, json={"kv_bits": bits, "kv_bits_from": 0})).json()
    row = by_name(changed["settings"])["kv_bits"]
    assert (row["value"], row["options"], changed["reload"]) == (8, ["8", "4"], "needed")
    page = (await client.get("/admin/models/demo-main")).text
    assert 'id="setting-kv_bits"' in page
    assert 'id="setting-kv_bits_from"' in page
    assert "Has no effect here: the head size of this model is no multiple of 32." in page


async def test_a_reload_is_offered_done_or_too_early(site: SignInSite, client: httpx2.AsyncClient) -> None:
    worker, resolver = site.site.worker, site.site.context.resolver
    size_bytes = resolver.main("demo-main").size_bytes
    worker.book.snapshot = Snapshot(models=(loaded("demo-main", size_bytes=size_bytes),))
    assert (await client.patch(MODEL, json={"num_draft_tokens": 3})).json()["reload"] == "needed"
    assert (await client.patch(MODEL, json={"num_draft_tokens": 4, "reload": True})).json()["reload"] == "done"
    assert worker.unloads == ["demo-main"]
    assert (await client.patch(MODEL, json={"temperature": 0.1, "reload": True})).json()["reload"] == "not needed"

    async def refuse(model_id: str) -> None:
        raise ModelInUse(f"{model_id} is in use")

    worker.unload = refuse  # type: ignore[method-assign]
    assert (await client.patch(MODEL, json={"num_draft_tokens": 5, "reload": True})).json()["reload"] == "busy"
    assert resolver.resolve("demo-main").live.num_draft_tokens is None, "as it is in memory"
    assert resolver.planned(resolver.main("demo-main")).live.num_draft_tokens == 5


async def test_usual_values_are_used_where_the_request_says_nothing(
    site: SignInSite, client: httpx2.AsyncClient
) -> None:
    usual = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "max_tokens": 99,
        "system_prompt": "Be kind.",
    }
    await client.patch(MODEL, json=usual | {"repetition_penalty": 1.5, "alias": "assistant"})
    program = site.browser()
    await program.post("/v1/chat/completions", json=chat_body(model="assistant"))
    command = site.site.worker.commands[-1]
    sampling = command.sampling
    assert (command.model.id, command.max_tokens) == ("demo-main", 99)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 7, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.0)
    assert [message["role"] for message in command.messages or ()] == ["system", "user"]
    own = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    await program.post("/v1/chat/completions", json=chat_body(messages=own, temperature=0, top_k=-1, max_tokens=5))
    command = site.site.worker.commands[-1]
    assert (command.sampling.temperature, command.sampling.top_k, command.max_tokens) == (0, 0, 5)
    assert [message["content"] for message in command.messages or ()] == ["Be brief.", "Hi"]
    await program.post("/v1/completions", json={"model": "assistant", "prompt": "Once"})
    assert site.site.worker.commands[-1].max_tokens == 99


async def test_an_alias_is_shown_and_found_everywhere(site: SignInSite, client: httpx2.AsyncClient) -> None:
    await client.patch(MODEL, json={"alias": "assistant"})
    program = site.browser()
    entries = {entry["id"]: entry["alias"] for entry in (await program.get("/v1/models")).json()["data"]}
    assert (entries["demo-main"], entries["org/other"]) == ("assistant", None)
    assert (await program.get("/v1/models/assistant")).json()["id"] == "demo-main"
    assert (await program.post("/api/load", json={"model": "assistant"})).json()["model"] == "demo-main"
    assert (await program.post("/api/unload", json={"model": "assistant"})).json()["model"] == "demo-main"


async def test_pins_and_idle_times_are_felt_at_load_and_now(site: SignInSite, client: httpx2.AsyncClient) -> None:
    worker, stay = site.site.worker, DEFAULT_STAY
    async with site.site.app.router.lifespan_context(site.site.app):
        for body, pinned, idle_seconds in (
            ({"pinned": True}, True, 3600.0),
            ({"pinned": None, "idle_seconds": 60}, False, 60.0),
            ({"idle_seconds": None}, False, 3600.0),
        ):
            await client.patch(MODEL, json=body)
            await asyncio.sleep(0)
            stay = worker.kept.of("demo-main")
            assert stay == Stay(pinned=pinned, idle_seconds=idle_seconds), body
    assert worker.loads == [], "telling it loads nothing"


async def test_a_profile_is_made_and_unmade_by_what_is_set_for_it(client: httpx2.AsyncClient) -> None:
    page, call = "/admin/models/demo-main%3Acareful", MODEL.replace("demo-main", "demo-main:careful")
    assert "Requests for demo-main:careful use these settings" in (await client.get(page)).text
    changed = (await client.patch(call, json={"temperature": 0.1})).json()
    assert (changed["model"], changed["profile"], changed["reload"]) == ("demo-main", "careful", "not needed")
    assert {row["takes_effect"] for row in changed["settings"]} == {"now"}
    assert f'href="{page}"' in (await client.get("/admin/models/demo-main")).text
    assert (await client.patch(call, json={"pinned": True})).status_code == 422
    await client.patch(call, json={"temperature": None})
    assert f'href="{page}"' not in (await client.get("/admin/models/demo-main")).text
    assert (await client.get("/admin/models/nothing:careful")).status_code == 404


def test_methods_and_descriptions_are_complete(site: SignInSite) -> None:
    rows = by_name(model_setting_rows(site.admin.serving.live, "demo-main"))
    assert rows["methods"]["options"] == list(METHOD_NAMES)
    assert rows["system_prompt"]["kind"] == "long_text"
    assert all(row["description"] for row in rows.values())
    assert len(setting_rows(site.admin.serving.live)) == len(Settings.model_fields)


async def test_a_store_that_cannot_be_used_is_told_in_words_and_never_where_it_lies(
    site: SignInSite, client: httpx2.AsyncClient
) -> None:
    store = site.admin.store
    store.close()
    store.path.write_bytes(b"no database at all")
    for response in (await client.patch(ADDRESS, json={"theme": "dark"}), await site.browser().get("/admin/login")):
        assert response.status_code == 503
        assert response.json()["error"]["message"].startswith("paceline.sqlite3 is damaged (it is not a database): ")
        assert str(store.path.parent) not in response.text
