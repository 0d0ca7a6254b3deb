"""The chat page's routes: replies stream to who is signed in, and conversations are kept within their bounds."""

import json
from typing import Any

import httpx2
import pytest

from app.admin import chat_routes
from app.core.errors import WorkerGone
from tests.admin.signing import SignInSite, make_sign_in_site
from tests.admin.test_frame import script_data
from tests.api.fakes import chat_body, failing, frames

pytestmark = pytest.mark.anyio

ALL = "/admin/api/conversations"
REPLY = {
    "role": "assistant",
    "content": "Hello, world",
    "reasoning": "",
    "spans": [[5, 12, "draft_model"]],
    "figures": {"speculation": {"drafted": 4, "accepted": 2}},
}
QUESTION = {"role": "user", "content": "Hi"}


@pytest.fixture
def site() -> SignInSite:
    return make_sign_in_site(api_key="sk-environment-1234")


async def delete(client: httpx2.AsyncClient, path: str) -> httpx2.Response:
    return await client.delete(path, headers={"content-type": "application/json"})


async def created(client: httpx2.AsyncClient, **fields: Any) -> str:
    response = await client.post(ALL, json={"title": "Counting", **fields})
    assert response.status_code == 201, response.text
    return f"{ALL}/{response.json()['id']}"


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


async def test_the_page_names_the_model_that_requests_get(site: SignInSite) -> None:
    client = await site.signed_in()
    site.site.keeper.values["default_model"] = "demo-main"
    site.site.context.live.refresh()
    assert script_data((await client.get("/admin/chat")).text) == {"model": "demo-main"}


async def test_a_conversation_is_made_read_renamed_and_deleted(site: SignInSite) -> None:
    client = await site.signed_in()
    path = await created(client, model="demo-main", options={"temperature": 0.5, "method": "off"})
    put = await client.put(path + "/messages", json={"after": 0, "messages": [QUESTION, REPLY]})
    ids = [message["id"] for message in put.json()["messages"]]
    assert (await client.patch(path, json={"title": "Greeting"})).json()["title"] == "Greeting"
    assert (await client.patch(path, json={"options": {"seed": 7}})).status_code == 200
    found = (await client.get(path)).json()
    assert (found["title"], found["model_id"], found["options"]) == ("Greeting", "demo-main", {"seed": 7})
    assert [message["id"] for message in found["messages"]] == ids
    assert {name: found["messages"][1][name] for name in REPLY} == REPLY
    listed = (await client.get(ALL)).json()["conversations"]
    assert [each["title"] for each in listed] == ["Greeting"]
    assert (await client.get(ALL, params={"search": "WORLD"})).json()["conversations"] == listed
    assert (await client.get(ALL, params={"search": "nothing"})).json()["conversations"] == []
    assert (await delete(client, path)).json() == {"deleted": 1}
    for response in (await client.get(path), await delete(client, path), await client.patch(path, json={"title": "x"})):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "conversation_not_found")


async def test_all_conversations_are_deleted_at_once(site: SignInSite) -> None:
    client = await site.signed_in()
    for _ in range(3):
        await created(client)
    assert (await delete(client, ALL)).json() == {"deleted": 3}
    assert (await client.get(ALL)).json() == {"conversations": []}


@pytest.mark.parametrize("number", ["0", "-1", "99", str(1 << 63), str(1 << 70)])
async def test_an_unknown_conversation_is_told_as_such(site: SignInSite, number: str) -> None:
    client = await site.signed_in()
    await created(client)
    body = {"after": 0, "messages": [QUESTION]}
    for response in (await client.get(f"{ALL}/{number}"), await client.put(f"{ALL}/{number}/messages", json=body)):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "conversation_not_found")


BAD_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "x"},
    {"role": "user"},
    {"role": "user", "content": "x" * (chat_routes.MAX_MESSAGE_CHARACTERS + 1)},
    {"role": "user", "content": "x", "html": "<b>"},
    {"role": "assistant", "content": "x", "spans": [[-1, 2, "ngram"]]},
    {"role": "assistant", "content": "x", "spans": [[0, 2]]},
    {"role": "assistant", "content": "x", "spans": [[0, 1, "n" * 61]]},
    {"role": "assistant", "content": "x", "figures": {"x": "y" * chat_routes.MAX_FIGURES_BYTES}},
]


@pytest.mark.parametrize("message", BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
async def test_a_message_that_is_none_is_refused(site: SignInSite, message: dict[str, Any]) -> None:
    client = await site.signed_in()
    path = await created(client)
    response = await client.put(path + "/messages", json={"after": 0, "messages": [message]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert (await client.get(path)).json()["messages"] == []


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
        {"unknown": 1},
    ],
)
async def test_options_out_of_range_are_refused(site: SignInSite, options: dict[str, Any]) -> None:
    client = await site.signed_in()
    response = await client.post(ALL, json={"title": "x", "options": options})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "options")


async def test_a_change_of_another_window_is_no_reason_to_lose_a_message(site: SignInSite) -> None:
    client = await site.signed_in()
    path = await created(client)
    put = await client.put(path + "/messages", json={"after": 0, "messages": [QUESTION]})
    old = put.json()["messages"][0]["id"]
    await client.put(path + "/messages", json={"after": 0, "messages": [QUESTION, REPLY]})
    response = await client.put(path + "/messages", json={"after": old, "messages": []})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "conversation_changed")
    assert len((await client.get(path)).json()["messages"]) == 2
