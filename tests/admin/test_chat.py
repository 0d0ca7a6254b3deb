"""The chat page's routes: replies stream to signed-in browsers, and conversations are stored within their limits."""

import json
from typing import Any

import httpx2
import pytest

from app.admin import chat_routes
from app.core.errors import PacelineError, WorkerGone
from tests.admin.signing import SignInSite, make_sign_in_site
from tests.admin.test_frame import script_data
from tests.api.fakes import chat_body, failing, frames

pytestmark = pytest.mark.anyio

ALL = "/admin/api/conversations"
PATH = f"{ALL}/7"
QUESTION = {"id": "q1", "parent": "", "role": "user", "content": "Hi"}
REPLY = {
    "id": "a1",
    "parent": "q1",
    "role": "assistant",
    "content": "Hello, world",
    "reasoning": "",
    "spans": [[5, 12, "draft_model"]],
    "figures": {"speculation": {"drafted": 4, "accepted": 2}},
}


@pytest.fixture
def site() -> SignInSite:
    return make_sign_in_site(api_key="sk-environment-1234")


async def delete(client: httpx2.AsyncClient, path: str) -> httpx2.Response:
    return await client.delete(path, headers={"content-type": "application/json"})


async def added(
    client: httpx2.AsyncClient, *turns: dict[str, Any], version: int = 0, path: str = PATH, **begin: Any
) -> httpx2.Response:
    """Post turns to a conversation; version 0 begins a new one."""
    body = {"version": version, "turns": turns, "begin": {"title": "Counting", **begin} if not version else None}
    return await client.post(path + "/turns", json=body)


async def test_a_reply_streams_to_a_session_although_endpoints_want_a_key(site: SignInSite) -> None:
    client = await site.signed_in()
    body = chat_body(stream=True)
    response = await client.post("/admin/api/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = frames(response.text)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello, world"
    assert [choice["accepted_spans"] for choice in choices if "accepted_spans" in choice] == [[[0, 7]]]
    assert json.loads(chunks[-1])["speculation"]["accepted"] == 2
    assert done == "[DONE]"
    assert (await site.browser().post("/admin/api/v1/chat/completions", json=body)).status_code == 401
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 401


async def test_a_reply_that_breaks_off_ends_with_its_reason(site: SignInSite) -> None:
    site.site.worker.script = failing(WorkerGone("The worker ended."), after_tokens=True)
    client = await site.signed_in()
    response = await client.post("/admin/api/v1/chat/completions", json=chat_body(stream=True))
    assert json.loads(frames(response.text)[-1])["error"]["code"] == "worker_restarted"


async def test_a_reply_that_breaks_off_says_why_in_the_language_of_the_page(site: SignInSite) -> None:
    site.site.worker.script = failing(PacelineError("short", code="step_failed"), after_tokens=True)
    client = await site.signed_in()
    path, asked = "/admin/api/v1/chat/completions", {"accept-language": "ko"}
    response = await client.post(path, json=chat_body(stream=True), headers=asked)
    assert json.loads(frames(response.text)[-1])["error"]["message"] == "모델 실행 중 오류가 발생했습니다. (short)"


async def test_the_page_names_the_model_that_requests_get(site: SignInSite) -> None:
    client = await site.signed_in()
    site.site.context.live.change({"default_model": "demo-main"}, "test")
    assert script_data((await client.get("/admin/chat")).text) == {
        "model": "demo-main",
        "text_methods": ["ngram"],
        "gains": {},
    }


async def test_a_conversation_is_made_read_renamed_and_deleted(site: SignInSite) -> None:
    client = await site.signed_in()
    made = await added(client, QUESTION, REPLY, model="demo-main", options={"temperature": 0.5, "method": "off"})
    assert (made.status_code, made.json()["version"]) == (200, 1)
    assert (await client.patch(PATH, json={"title": "Greeting"})).json()["title"] == "Greeting"
    assert (await client.patch(PATH, json={"options": {"seed": 7}})).status_code == 200
    stored = (await client.get(PATH)).json()
    assert (stored["title"], stored["model_id"], stored["options"]) == ("Greeting", "demo-main", {"seed": 7})
    assert {name: stored["turns"][1][name] for name in REPLY} == REPLY
    listed = (await client.get(ALL)).json()["conversations"]
    assert [(entry["title"], entry["version"]) for entry in listed] == [("Greeting", stored["version"])]
    assert (await client.get(ALL, params={"search": "WORLD"})).json()["conversations"] == listed
    assert (await client.get(ALL, params={"search": "nothing"})).json()["conversations"] == []
    assert (await delete(client, PATH)).json() == {"deleted": 1}
    gone = await client.get(PATH), await delete(client, PATH), await client.patch(PATH, json={"title": "x"})
    for response in (*gone, await added(client, REPLY, version=1)):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "conversation_not_found")


async def test_calls_and_their_results_are_kept_with_what_was_asked_for(site: SignInSite) -> None:
    client = await site.signed_in()
    call = {"id": "call_1", "name": "look", "arguments": '{"at": 1'}
    asking = {**REPLY, "content": "", "spans": [], "calls": [call]}
    result = {"id": "t1", "parent": "a1", "role": "tool", "content": "nothing"}
    options = {"tools": '[{"name": "look"', "tool_choice": "required", "format": "json_schema", "thinking": "enabled"}
    assert (await added(client, QUESTION, asking, result, options=options)).status_code == 200
    kept = (await client.get(PATH)).json()
    assert [turn["calls"] for turn in kept["turns"]] == [[], [call], []]
    assert (kept["turns"][2]["role"], kept["options"]) == ("tool", options)


async def test_all_conversations_are_deleted_at_once(site: SignInSite) -> None:
    client = await site.signed_in()
    for number in (1, 2, 3):
        await added(client, path=f"{ALL}/{number}")
    assert (await delete(client, ALL)).json() == {"deleted": 3}
    assert (await client.get(ALL)).json() == {"conversations": []}


@pytest.mark.parametrize("number", ["0", "-1", "99", str(1 << 63), str(1 << 70)])
async def test_an_unknown_conversation_is_told_as_such(site: SignInSite, number: str) -> None:
    client = await site.signed_in()
    await added(client)
    path = f"{ALL}/{number}"
    for response in (await client.get(path), await added(client, QUESTION, version=1, path=path)):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "conversation_not_found")


BAD_TURNS: list[dict[str, Any]] = [
    {"role": "system"},
    {"role": None},
    {"id": ""},
    {"id": "A-1"},
    {"id": "x" * 41},
    {"parent": None},
    {"parent": "<b>"},
    {"parent": "nowhere"},
    {"content": "x" * (chat_routes.MAX_MESSAGE_CHARACTERS + 1)},
    {"html": "<b>"},
    {"created_at": -1},
    {"calls": [{"name": "x" * 201}]},
    {"calls": [{"arguments": {}}]},
    {"calls": [{}] * 129},
    {"spans": [[-1, 2, "ngram"]]},
    {"spans": [[0, 2]]},
    {"spans": [[0, 1, "n" * 61]]},
    {"figures": {"timings": {"predicted_per_second": "fast"}}},
    {"figures": {"speculation": {"method": ["<b>"]}}},
    {"figures": {"problem": {"message": "y" * (chat_routes.MAX_PROBLEM_CHARACTERS + 1)}}},
]


@pytest.mark.parametrize("wrong", BAD_TURNS, ids=range(len(BAD_TURNS)))
async def test_a_turn_that_is_none_is_refused(site: SignInSite, wrong: dict[str, Any]) -> None:
    client = await site.signed_in()
    await added(client)
    response = await added(client, {**QUESTION, **wrong}, version=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "turns"
    assert (await client.get(PATH)).json()["turns"] == []


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 3},
        {"top_p": 0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"max_tokens": 0},
        {"seed": 1 << 53},
        {"method": "<b>"},
        {"num_draft_tokens": 65},
        {"system": "x" * 100_001},
        {"format": "xml"},
        {"json_schema": {"type": "object"}},
        {"tools": "x" * 100_001},
        {"thinking": True},
        {"unknown": 1},
    ],
)
async def test_options_out_of_range_are_refused(site: SignInSite, options: dict[str, Any]) -> None:
    client = await site.signed_in()
    for response in (await added(client, options=options), await client.patch(PATH, json={"options": options})):
        assert response.status_code == 400
        assert response.json()["error"]["param"] in {"begin", "options"}


async def test_figures_that_no_page_shows_are_not_kept(site: SignInSite) -> None:
    client = await site.signed_in()
    assert (await added(client, {**QUESTION, "figures": {"stopped": True, "x": "y" * 10_000}})).status_code == 200
    assert (await client.get(PATH)).json()["turns"][0]["figures"] == {"stopped": True}


async def test_two_windows_that_write_learn_of_each_other_and_nothing_is_lost(site: SignInSite) -> None:
    client = await site.signed_in()
    await added(client, QUESTION)
    await added(client, REPLY, version=1)
    other = {**QUESTION, "id": "q2", "parent": "q1"}
    refused = await added(client, other, version=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stale_version")
    present = refused.json()["conversation"]
    assert present == (await client.get(PATH)).json()
    assert [turn["id"] for turn in present["turns"]] == ["q1", "a1"]
    assert (await added(client, other, version=present["version"])).status_code == 200
    assert [turn["id"] for turn in (await client.get(PATH)).json()["turns"]] == ["q1", "a1", "q2"]


async def test_what_got_no_answer_is_sent_again_and_is_there_once(site: SignInSite) -> None:
    client = await site.signed_in()
    assert (await added(client, QUESTION)).status_code == 200
    repeated = await added(client, QUESTION)
    assert repeated.status_code == 409
    assert [turn["id"] for turn in repeated.json()["conversation"]["turns"]] == ["q1"]


async def test_other_tabs_are_told_of_every_change(site: SignInSite) -> None:
    client = await site.signed_in()
    listener = site.admin.feed.join(["conversations"])

    async def is_notified() -> bool:
        await site.admin.feed.tick()
        return bool(listener.take_pending())

    assert await is_notified()
    assert not await is_notified()
    await added(client, QUESTION)
    assert await is_notified()
    await client.patch(PATH, json={"title": "Greeting"})
    assert await is_notified()
    await client.get(PATH)
    assert not await is_notified()
    await delete(client, PATH)
    assert await is_notified()
    site.admin.feed.leave(listener)
