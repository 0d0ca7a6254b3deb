"""Requests on the dashboard: running ones with their phase, past ones in pages, one in full, cancel, clear, speed."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import ModelUnavailable
from app.core.messages import Accepted, Delta, Finished, Generate, LoadProgress, Snapshot
from app.core.reason import Reason
from app.core.request import FinishedRequest
from app.main import create_app
from app.serving.journal import Journal
from app.serving.live_settings import LiveSettings
from app.settings import Settings
from app.store.rows import RequestHistory, StoredSettings
from app.store.store import FILE_NAME, Store
from tests.admin.test_frame import HOSTILE, OWN, get, script_data
from tests.api.fakes import MODELS, USAGE, FakeCatalog, FakeWorker, Site, failing, make_site, say_hello, served
from tests.loaded import loaded

pytestmark = pytest.mark.anyio


def make_request_site(home: Path, **settings: Any) -> Site:
    """Return a site whose journal writes to the real store in `home`."""
    history = RequestHistory(Store(home / FILE_NAME))
    limit, keeps_texts = settings.get("history_limit", 1000), settings.get("keep_texts", False)
    journal = Journal(history, limit=lambda: limit, keeps_texts=lambda: keeps_texts)
    return make_site(home=home, api_key="k", context={"journal": journal}, **settings)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_request_site(tmp_path)


class Steps:
    """A script for the fake worker that yields each event only when the test calls `go`."""

    def __init__(self) -> None:
        self.moves: asyncio.Queue[object] = asyncio.Queue()
        self.done: asyncio.Queue[object] = asyncio.Queue()

    async def __call__(self, command: Generate) -> AsyncIterator[Accepted | Delta | Finished]:
        while True:
            event = await self.moves.get()
            if event is None:
                return
            yield event  # type: ignore[misc]
            self.done.put_nowait(event)

    async def go(self, event: object) -> None:
        self.moves.put_nowait(event)
        async with asyncio.timeout(60):
            assert await self.done.get() is event


async def ask(site: Site, path: str, method: str = "GET", **options: Any) -> Any:
    response = await site.client.request(method, f"/admin/api/{path}", headers=OWN, **options)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(site: Site, **fields: Any) -> Any:
    return await site.client.post(
        "/v1/chat/completions",
        headers=OWN,
        json={"model": "demo-main", "messages": [{"role": "user", "content": "Hi"}], **fields},
    )


async def test_a_running_request_tells_its_phase_and_how_far_it_is(site: Site) -> None:
    steps = Steps()
    site.worker.script = steps
    client = asyncio.create_task(chat(site, max_tokens=10))
    await site.worker.wait_asked()

    async def now() -> Any:
        (running,) = (await ask(site, "requests"))["running"]
        return running

    name = site.worker.commands[0].id
    assert ((await now())["phase"], (await now())["progress"]) == ("queued", None)
    site.worker.book.progress = {"demo-main": LoadProgress(model_id="demo-main", phase="weights", fraction=0.25)}
    assert ((await now())["phase"], (await now())["progress"]) == ("loading", 0.25)
    site.worker.book.progress = {}
    await steps.go(Accepted(id=name, prompt_tokens=40))
    assert (await now())["phase"] == "queued"
    held = loaded("demo-main", reading={f"{name}#0": 10, "another#0": 3})
    site.worker.book.snapshot = Snapshot(models=(held,))
    view = await now()
    assert (view["phase"], view["progress"], view["read_tokens"], view["prompt_tokens"]) == ("prefill", 0.25, 10, 40)
    await steps.go(Delta(id=name, index=0, text="a", tokens=4, drafted=4, accepted=3, method="draft_model"))
    view = await now()
    assert (view["phase"], view["progress"], view["method"], view["acceptance"]) == ("decode", 0.4, "draft_model", 0.75)
    await steps.go(Delta(id=name, index=0, text="b", tokens=1, why_not_drafted=Reason("batched")))
    view = await now()
    assert (view["reason_code"], view["method"], view["completion_tokens"]) == ("batched", "off", 5)
    full = (await ask(site, f"requests/{name}"))["request"]
    assert full["figures"]["asked"]["max_tokens"] == 10
    page = await get(site, f"/admin/requests/{name}")
    assert script_data(page.text)["request"]["phase"] == "decode"
    steps.moves.put_nowait(Finished(id=name, index=0, finish_reason="stop", usage=USAGE))
    steps.moves.put_nowait(None)
    assert (await client).status_code == 200
    assert (await ask(site, "requests"))["running"] == []


async def test_what_ran_is_listed_with_its_numbers_and_told_in_full(site: Site) -> None:
    reply = (await chat(site)).json()
    await chat(site, stream=True, seed=7, temperature=0.25, frequency_penalty=0.5)
    listed = await ask(site, "requests")
    assert (listed["total"], listed["next"], listed["models"]) == (2, "", ["demo-main"])
    second, first = listed["requests"]
    assert first["id"] == reply["id"]
    assert first["outcome"] == "stop"
    assert first["endpoint"] == "/v1/chat/completions"
    assert first["key"] == "PACELINE_API_KEY"
    assert (first["prompt_tokens"], first["completion_tokens"], first["acceptance"]) == (5, 3, 0.5)
    assert first["tokens_per_second"] == 50.0
    full = (await ask(site, f"requests/{second['id']}"))["request"]
    assert full["figures"]["timings"] == reply["timings"]
    assert full["figures"]["speculation"] == reply["speculation"]
    asked = full["figures"]["asked"]["sampling"]
    assert (asked["temperature"], asked["frequency_penalty"]) == (0.25, 0.5)
    assert full["figures"]["asked"]["streamed"] is True
    assert full["figures"]["seconds"]["decode"] == 0.06
    assert (full["prompt"], full["reply"]) == (None, None)
    live = site.context.journal.recent
    assert [past.id for past in live] == [second["id"], first["id"]]


async def test_errors_and_clients_that_leave_are_outcomes(site: Site) -> None:
    site.worker.script = failing(ModelUnavailable("its weights are broken"))
    assert (await chat(site)).status_code == 503
    site.worker.script = failing(ModelUnavailable("the worker ended"), after_tokens=True)
    await chat(site, stream=True)
    site.worker.script = Steps()
    async with served(site) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"model": "demo-main", "messages": [{"role": "user", "content": "Hi"}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer k\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await site.worker.wait_asked(3)
        writer.close()
        await site.worker.wait_cancelled()
        del reader
    listed = (await ask(site, "requests"))["requests"]
    assert [entry["outcome"] for entry in listed] == ["cancelled", "model_unavailable", "model_unavailable"]
    assert listed[1]["completion_tokens"] == 1
    failed = (await ask(site, "requests", params={"outcome": "failed"}))["requests"]
    assert len(failed) == 2
    assert (await ask(site, f"requests/{failed[1]['id']}"))["request"]["figures"]["problem"] == "its weights are broken"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_request_is_cancelled_and_its_client_told(site: Site, stream: bool) -> None:
    steps = Steps()
    site.worker.script = steps
    client = asyncio.create_task(chat(site, stream=stream))
    await site.worker.wait_asked()
    name = site.worker.commands[0].id
    await steps.go(Accepted(id=name, prompt_tokens=5))
    await ask(site, f"requests/{name}/cancel", "POST", json={})
    response = await client
    assert response.status_code == (200 if stream else 499)
    assert '"code":"cancelled"' in response.text
    await site.worker.wait_cancelled()
    assert [entry["outcome"] for entry in (await ask(site, "requests"))["requests"]] == ["cancelled"]
    again = await site.client.post(f"/admin/api/requests/{name}/cancel", json={}, headers=OWN)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "not_running")


async def test_pages_and_filters(site: Site) -> None:
    for model in ("demo-main", "org/other", "demo-main", "demo-main", "org/other"):
        await chat(site, model=model)
    first = await ask(site, "requests", params={"count": 2})
    second = await ask(site, "requests", params={"count": 2, "before": first["next"]})
    third = await ask(site, "requests", params={"count": 2, "before": second["next"]})
    names = [entry["id"] for page in (first, second, third) for entry in page["requests"]]
    assert names == [command.id for command in reversed(site.worker.commands)]
    assert third["next"] == ""
    others = await ask(site, "requests", params={"model": "org/other"})
    assert {entry["model"] for entry in others["requests"]} == {"org/other"}
    assert (await ask(site, "requests", params={"outcome": "cancelled"}))["requests"] == []
    for wrong in ({"count": 0}, {"count": 201}, {"count": "x"}, {"model": "x" * 501}):
        assert (await site.client.get("/admin/api/requests", params=wrong, headers=OWN)).status_code == 400


async def test_the_history_is_cleared_for_good(site: Site, tmp_path: Path) -> None:
    await chat(site)
    assert await ask(site, "requests", "DELETE", json={}) == {"cleared": 1}
    listed = await ask(site, "requests")
    assert (listed["requests"], listed["total"], list(site.context.journal.recent)) == ([], 0, [])
    assert RequestHistory(Store(tmp_path / FILE_NAME)).count() == 0


async def test_texts_are_shown_where_they_are_kept(tmp_path: Path) -> None:
    site = make_request_site(tmp_path, keep_texts=True)
    reply = (await chat(site, n=2)).json()
    full = (await ask(site, f"requests/{reply['id']}"))["request"]
    assert json.loads(full["prompt"]) == [{"role": "user", "content": "Hi"}]
    assert full["reply"] == "Hello, world\n\nHello, world"
    assert "Hi" not in json.dumps((await ask(site, "requests"))["requests"])


async def test_several_prompts_are_one_request_by_the_id_that_the_client_got(site: Site) -> None:
    reply = (
        await site.client.post("/v1/completions", headers=OWN, json={"model": "demo-main", "prompt": ["a", "b"]})
    ).json()
    (only,) = (await ask(site, "requests"))["requests"]
    assert (only["id"], only["completion_tokens"], only["endpoint"]) == (reply["id"], 6, "/v1/completions")


async def test_what_nobody_remembers_is_a_page_with_a_way_on(site: Site) -> None:
    response = await site.client.get("/admin/requests/chatcmpl-nobody", headers=OWN)
    assert response.status_code == 404
    assert "text/html" in response.headers["content-type"]
    assert 'href="/admin/requests"' in response.text
    missing = await site.client.get("/admin/api/requests/nobody", headers=OWN)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_a_damaged_store_leaves_what_runs_and_says_why(site: Site, tmp_path: Path) -> None:
    await chat(site)
    await site.context.journal.flush()
    site.app.state.admin.store.close()
    _replace_by_a_folder(tmp_path / FILE_NAME)
    assert (await chat(site)).status_code == 200
    data = script_data((await get(site, "/admin/requests")).text)
    assert data["problem"]
    assert len(data["now"]["recent"]) == 2


@pytest.mark.parametrize("text", HOSTILE)
async def test_nothing_in_a_request_becomes_markup(site: Site, tmp_path: Path, text: str) -> None:
    history = RequestHistory(Store(tmp_path / FILE_NAME))
    pasts = [_past("plain", "plain"), _past("id", text)]
    history.save(pasts, 10)
    for path in ("/admin/requests", "/admin/requests/id"):
        page = (await get(site, path)).text
        assert text not in page or "<" not in text
        assert page.count("<script") == page.count("</script>")


def _replace_by_a_folder(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    path.mkdir()


def _past(name: str, text: str, created_at: float = 1.0) -> FinishedRequest:
    asked = {"sampling": {}, "drafters": [text], "choices": 1, "streamed": True, "max_tokens": None}
    drafts = {"drafted": 8, "accepted": 6, "cycles": 4, "accepted_per_position": [4, 2], "tokens_per_cycle": 2.5}
    figures = {
        "usage": {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 9},
        "seconds": {"queue": 0.1, "load": 0.0, "prefill": 0.2, "decode": 1.5, "total": 1.9},
        "timings": {"predicted_per_second": 6.0, "first_token_ms": 300, "draft_ms": 100, "verify_ms": 900},
        "speculation": {**drafts, "method": text, "reason": text, "methods": {text: drafts}, "decision": None},
        "asked": {**asked, "method": "auto", "num_draft_tokens": None},
        "problem": text,
    }
    return FinishedRequest(
        id=name,
        endpoint="/v1/chat/completions",
        model_id=text,
        key_name=text,
        created_at=created_at,
        outcome=text,
        figures=figures,
        prompt=text,
        reply=text,
    )


async def test_with_a_thousand_requests_the_pages_are_there_in_time(site: Site, tmp_path: Path) -> None:
    pasts = [_past(f"chatcmpl-{number:024x}", "demo-main", created_at=float(number)) for number in range(1000)]
    RequestHistory(Store(tmp_path / FILE_NAME)).save(pasts, 1000)
    for path in ("/admin/", "/admin/requests", "/admin/requests/chatcmpl-0000000000000000000003e7"):
        await get(site, path)
        seconds = []
        for _ in range(3):
            began = time.process_time()
            await get(site, path)
            seconds.append(time.process_time() - began)
        assert min(seconds) < 0.3, path


async def test_the_menu_bar_gets_the_models_that_were_used_last_first(tmp_path: Path) -> None:
    main = next(model for model in MODELS if model.id == "demo-main")
    site = make_site(home=tmp_path, api_key="k", models=[replace(main, id=name) for name in "abcd"])
    used = [_past(f"r{number}", name, created_at=float(number)) for number, name in enumerate(["c", "gone", "b", "c"])]
    RequestHistory(Store(tmp_path / FILE_NAME)).save(used, 1000)
    menu = await ask(site, "menu")
    assert menu["models"] == ["c", "b", "a", "d"]
    assert menu["state"] == (await ask(site, "state"))["state"]


@pytest.mark.skipif(sys.platform != "linux", reason="no file system without room at hand")
async def test_the_menu_bar_is_told_of_a_disk_without_room(tmp_path: Path) -> None:
    assert (await ask(make_request_site(tmp_path), "menu"))["full_disk"] == ""
    full = make_request_site(tmp_path, downloads_folder=Path("/proc"))
    assert (await ask(full, "menu"))["full_disk"] == "/proc"


async def test_a_started_server_writes_by_itself_and_remembers_after_a_restart(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, api_key="k")  # type: ignore[arg-type]
    for expected in (1, 2):
        worker = FakeWorker()
        worker.script = say_hello
        store = Store(tmp_path / FILE_NAME)
        app = create_app(LiveSettings(settings, StoredSettings(store)), store, worker, FakeCatalog())
        site = replace(make_site(home=tmp_path), app=app, worker=worker, context=app.state.context)
        site.client = site.connect()
        async with app.router.lifespan_context(app):
            await chat(site)
        assert len(RequestHistory(Store(tmp_path / FILE_NAME)).page(count=9)) == expected
        assert len(site.context.journal.recent) == expected
