"""Endpoints that report or change the server's state: models, health, metrics, ps, load and unload."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from app.core.errors import InvalidRequest, ModelInUse, WorkerGone
from app.core.messages import Accepted, Generate, Heartbeat, KeepModels, LoadProgress, Snapshot, TextWork
from app.core.reason import NO_REASON, Reason
from app.core.unit import UNSPECIFIED_STAY, DrafterSpecification, PrefixState, Stay
from tests.api.fakes import DRAFTERS, FOLDERS, Site, chat_body, failing, make_site
from tests.loaded import loaded

pytestmark = pytest.mark.anyio

LOADED = loaded(
    "demo-main",
    DrafterSpecification("demo-draft", "/private/draft"),
    weights_bytes=1000,
    cache_bytes=200,
    prefix_cache_bytes=30,
    prefixes=PrefixState(disk_bytes=4000, restored_tokens={"memory": 50, "disk": 6}),
    methods=("draft_model", "ngram"),
    unavailable={"dflash": Reason("cannot_draft", {"detail": "no drafter"})},
    max_context_tokens=2048,
    running=2,
    waiting=1,
)


async def test_models_lists_what_can_answer(site: Site) -> None:
    async def ids(query: str = "") -> list[str]:
        return [model["id"] for model in (await site.client.get(f"/v1/models{query}")).json()["data"]]

    assert await ids() == ["demo-draft", "demo-main", "org/other"]
    site.worker.quarantined["org/other"] = Reason("exit_killed")
    assert await ids() == ["demo-draft", "demo-main"]
    assert await ids("?all=true") == ["broken", "demo-draft", "demo-main", "eagle", "org/other"]
    for name, why in (("eagle", "drafter"), ("broken", "missing"), ("org/other", "killed (SIGKILL)")):
        response = await site.client.get(f"/v1/models/{name}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert why in response.json()["error"]["message"]
        assert (await site.client.get(f"/v1/models/{name}?all=true")).json()["id"] == name


async def test_all_models_are_listed_on_request_and_none_is_loaded(site: Site) -> None:
    listing = (await site.client.get("/v1/models?all=true")).json()
    assert listing["object"] == "list"
    entries = {entry["id"]: entry for entry in listing["data"]}
    assert list(entries) == ["broken", "demo-draft", "demo-main", "eagle", "org/other"]
    main = entries["demo-main"]
    assert (main["object"], main["owned_by"]) == ("model", "paceline")
    assert isinstance(main["created"], int)
    assert (main["context_length"], main["capabilities"]) == (4096, ["chat", "tools", "json", "embeddings", "drafts"])
    assert (main["state"], main["draft"], main["context"], main["problem"]) == ("available", "demo-draft", 4096, None)
    assert (entries["broken"]["state"], entries["org/other"]["draft"]) == ("unusable", None)
    assert "missing" in entries["broken"]["problem"]
    assert entries["eagle"]["kind"] == "drafter"
    assert site.worker.loads == site.worker.commands == []


async def test_a_loaded_model_tells_what_it_can(site: Site) -> None:
    site.worker.book.snapshot = Snapshot(models=(LOADED,))
    site.worker.quarantined["org/other"] = Reason("exit_killed")
    entry = (await site.client.get("/v1/models/demo-main")).json()
    assert (entry["state"], entry["draft"], entry["context"]) == ("loaded", "demo-draft", 2048)
    assert entry["methods"] == ["draft_model", "ngram"]
    assert entry["unavailable"] == {"dflash": "no drafter"}
    other = (await site.client.get("/v1/models/org/other?all=true")).json()
    assert (other["id"], other["state"], "killed" in other["problem"]) == ("org/other", "unusable", True)


@pytest.mark.parametrize("name", ["nothing", "org/nothing", "..%2F..%2Fetc%2Fpasswd", "%00", "%FF"])
async def test_an_unknown_model_is_404(site: Site, name: str) -> None:
    response = await site.client.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_live_does_not_depend_on_the_worker_but_ready_does(site: Site) -> None:
    assert (await site.client.get("/health/ready")).json() == {"status": "ready"}
    site.worker.ready = False
    states = ((False, NO_REASON, "starting"), (False, Reason("exit_killed"), "ended"), (True, NO_REASON, "finishes"))
    for draining, last_exit, word in states:
        site.worker.draining, site.worker.last_exit = draining, last_exit
        response = await site.client.get("/health/ready")
        assert response.status_code == 503
        assert word in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) > 0
    assert (await site.client.get("/health/live")).status_code == 200


async def test_draining_refuses_new_work_only(site: Site) -> None:
    await site.context.activity.drain(0)
    assert (await site.client.get("/health/ready")).status_code == 503
    response = await site.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    for path in ("/api/load", "/api/generate", "/api/chat"):
        assert (await site.client.post(path, json={"model": "demo-main"})).status_code == 503, path
    assert (await site.client.get("/v1/models")).status_code == 200


async def test_draining_ends_what_does_not_finish(site: Site) -> None:
    async def hold(command: Generate) -> AsyncIterator[Accepted]:
        yield Accepted(id=command.id, prompt_tokens=1)
        await asyncio.Event().wait()

    site.worker.script = hold
    asked = asyncio.create_task(site.chat())
    await site.worker.wait_asked()
    await site.context.activity.drain(0.01)
    response = await asked
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    await site.worker.wait_cancelled()


async def test_metrics(site: Site) -> None:
    async with site.app.router.lifespan_context(site.app):
        for listener in site.worker.listeners:
            listener(Heartbeat(pending=True, step_seconds=(0.02,)))
            listener(TextWork(seconds={"render": 0.5, "stream": 0.25}))
            listener(TextWork(seconds={"render": 0.25}))
        site.worker.book.snapshot = Snapshot(
            models=(LOADED,), active_bytes=5000, peak_bytes=6000, memory_pressure="critical"
        )
        site.worker.restarts = 2
        await site.chat()
        await site.chat(stream=True, n=2)
        site.worker.script = failing(InvalidRequest("no"))
        await site.chat()
        site.worker.script = failing(WorkerGone("gone"), after_tokens=True)
        await site.chat(stream=True)
        text = (await site.client.get("/metrics")).text
    assert site.worker.listeners == []
    lines = set(text.splitlines())
    labels = 'method="draft_model",model="demo-main"'
    for expected in (
        'paceline_requests_total{endpoint="/v1/chat/completions",method="POST",status="200"} 3.0',
        'paceline_requests_total{endpoint="/v1/chat/completions",method="POST",status="400"} 1.0',
        'paceline_stream_errors_total{code="worker_restarted"} 1.0',
        'paceline_prompt_tokens_total{model="demo-main"} 15.0',
        'paceline_cached_prompt_tokens_total{model="demo-main"} 4.0',
        'paceline_generated_tokens_total{model="demo-main"} 10.0',
        'paceline_time_to_first_token_seconds_count{model="demo-main"} 4.0',
        'paceline_time_between_tokens_seconds_count{model="demo-main"} 3.0',
        "paceline_step_seconds_count 1.0",
        'paceline_text_seconds_total{work="render"} 0.75',
        'paceline_text_seconds_total{work="stream"} 0.25',
        f"paceline_spec_decode_num_drafts_total{{{labels}}} 6.0",
        f"paceline_spec_decode_num_draft_tokens_total{{{labels}}} 12.0",
        f"paceline_spec_decode_num_accepted_tokens_total{{{labels}}} 6.0",
        f'paceline_spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 6.0',
        f"paceline_spec_decode_draft_seconds_total{{{labels}}} 0.046875",
        f"paceline_spec_decode_verify_seconds_total{{{labels}}} 0.09375",
        'paceline_requests_running{model="demo-main"} 2.0',
        'paceline_requests_waiting{model="demo-main"} 1.0',
        'paceline_model_bytes{kind="prefix_cache",model="demo-main"} 30.0',
        'paceline_prefix_disk_bytes{model="demo-main"} 4000.0',
        'paceline_prefix_found_tokens{model="demo-main",tier="memory"} 50.0',
        'paceline_prefix_found_tokens{model="demo-main",tier="disk"} 6.0',
        'paceline_memory_bytes{kind="active"} 5000.0',
        "paceline_memory_pressure 2.0",
        "paceline_worker_restarts_total 2.0",
        "paceline_worker_ready 1.0",
    ):
        assert expected in lines, expected
    named = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert {kind for name, kind in named.items() if name.endswith("_total")} == {"counter"}


async def test_a_model_on_its_way_into_memory_is_loading(site: Site) -> None:
    site.worker.book.progress["org/other"] = LoadProgress(model_id="org/other", phase="weights", fraction=0.5)
    assert (await site.client.get("/v1/models/org/other")).json()["state"] == "loading"


async def test_labels_stay_bounded(site: Site) -> None:
    await site.client.get("/a-random-path")
    await site.client.request("BREW", "/health/live", headers={"content-type": "application/json"})
    await site.client.get("/v1/models/org/other")
    text = (await site.client.get("/metrics")).text
    assert "random" not in text
    assert "BREW" not in text
    assert 'endpoint="/v1/models/{model_id:path}"' in text


async def test_ps_tells_clients_of_ollama_what_is_loaded() -> None:
    site = make_site(context={"clock": lambda: 100.0})
    site.worker.book.snapshot = Snapshot(models=(LOADED, loaded("org/other", state="loading")))
    (model,) = (await site.client.get("/api/ps")).json()["models"]
    assert (model["name"], model["model"], model["context_length"]) == ("demo-main", "demo-main", 2048)
    assert (model["size"], model["size_vram"]) == (1200, 1200)

    async def seconds_left() -> float:
        (model,) = (await site.client.get("/api/ps")).json()["models"]
        return (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()

    for used, leases, left in ((100.0, 0, 3600), (90.0, 0, 3590), (10.0, 1, 3600)):
        site.worker.book.snapshot = Snapshot(models=(loaded("demo-main", last_used=used, leases=leases),))
        assert left - 5 < await seconds_left() <= left
    for stay in (Stay(pinned=True, idle_seconds=60.0), Stay(pinned=False, idle_seconds=-1.0)):
        site.worker.book.snapshot = Snapshot(models=(msgspec.structs.replace(LOADED, stay=stay),))
        assert await seconds_left() > 365 * 86400


async def test_v1_names_what_there_is_to_call(site: Site) -> None:
    listed = (await site.client.get("/v1")).json()["data"]
    assert {"GET /v1/models", "POST /v1/chat/completions", "GET /v1/models/{model_id}", "GET /health"} <= set(listed)
    assert not [route for route in listed if "admin" in route or "static" in route]


async def test_status(site: Site) -> None:
    site.worker.book.snapshot = Snapshot(models=(LOADED,), active_bytes=5000)
    site.worker.book.progress["org/other"] = LoadProgress(model_id="org/other", phase="weights", fraction=0.5)
    state = (await site.client.get("/api/status")).json()
    assert state["models"][0]["draft"] == "demo-draft"
    assert state["models"][0]["drafts"] == [{"id": "demo-draft", "method": "draft_model"}]
    prefixes = {name: value for name, value in state["models"][0].items() if name.startswith("prefix")}
    assert prefixes == {
        "prefix_cache_bytes": 30,
        "prefix_disk_bytes": 4000,
        "prefix_found_tokens": {"memory": 50, "disk": 6},
        "prefix_trouble": "",
    }
    assert state["active_bytes"] == 5000
    assert state["worker"]["info"]["device"] == "cpu"
    assert state["loading"]["org/other"]["fraction"] == 0.5
    assert (state["draining"], state["open_requests"]) == (False, 0)


async def test_load_and_unload(site: Site) -> None:
    asked = {"model": "demo-main", "draft": "demo-draft", "pin": True, "ttl": 60}
    answer = (await site.client.post("/api/load", json=asked)).json()
    assert answer == {
        "model": "demo-main",
        "draft": "demo-draft",
        "drafts": [{"id": "demo-draft", "method": "draft_model"}],
        "draft_unavailable": "",
        "seconds": 1.5,
    }
    (specification,) = site.worker.loads
    assert specification.drafters == (DrafterSpecification("demo-draft", str(FOLDERS / "demo-draft")),)
    await site.client.post("/api/load", json={"model": "demo-main", "draft": "off", "ttl": -1})
    assert site.worker.loads[1].drafters == ()
    assert site.worker.stays == [Stay(pinned=True, idle_seconds=60), Stay(idle_seconds=-1)], "never"
    for held in ((LOADED,), ()):
        site.worker.book.snapshot = Snapshot(models=held)
        answer = (await site.client.post("/api/unload", json={"model": "demo-main"})).json()
        assert answer == {"model": "demo-main", "state": "available", "was_loaded": bool(held)}
    assert site.worker.unloads == ["demo-main", "demo-main"]
    assert (await site.client.post("/api/unload", json={"model": "nothing"})).status_code == 404
    assert (await site.client.post("/api/load", json={"model": "nothing"})).status_code == 404
    misfit = await site.client.post("/api/load", json={"model": "demo-main", "draft": "org/other"})
    assert (misfit.status_code, misfit.json()["error"]["code"]) == (400, "speculation_unavailable")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/unload", {"model": "demo-main"}),
        ("/api/load", {"model": "demo-main", "draft": "off"}),
        ("/api/generate", {"model": "demo-main", "keep_alive": 0}),
        ("/v1/chat/completions", chat_body()),
        ("/v1/messages", chat_body(max_tokens=5)),
    ],
)
async def test_a_model_in_use_is_a_conflict_on_every_route(site: Site, path: str, body: dict[str, Any]) -> None:
    async def refuse(*_asked: object) -> Any:
        raise ModelInUse("demo-main is in use: retry when its requests have finished", retry_after_seconds=3)

    site.worker.unload = site.worker.load = refuse  # type: ignore[method-assign]
    site.worker.script = failing(ModelInUse("demo-main is in use", retry_after_seconds=3))
    answer = await site.client.post(path, json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "3")
    assert "in use" in answer.text


async def test_a_load_names_the_drafters_that_were_left_out(site: Site) -> None:
    reason = Reason("cannot_draft", {"detail": "its weights cannot be read"})
    draft = DrafterSpecification("demo-draft", str(FOLDERS / "demo-draft"))
    site.worker.book.snapshot = Snapshot(models=(loaded("demo-main", draft, unavailable={"draft_model": reason}),))
    answer = (await site.client.post("/api/load", json={"model": "demo-main", "draft": "demo-draft"})).json()
    assert (answer["draft"], answer["drafts"]) == (None, [])
    assert answer["draft_unavailable"] == f"demo-draft: {reason}"


async def test_load_takes_several_drafters() -> None:
    site = make_site(models=DRAFTERS)
    answer = (
        await site.client.post("/api/load", json={"model": "demo-main", "draft": "demo-main-eagle3+demo-draft"})
    ).json()
    assert answer["draft"] == "demo-main-eagle3"
    assert answer["drafts"] == [
        {"id": "demo-main-eagle3", "method": "eagle3"},
        {"id": "demo-draft", "method": "draft_model"},
    ]


TURN: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", TURN),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", TURN),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/api/chat", TURN | {"stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
        ("/api/embed", {"input": "Hi"}),
    ],
)
async def test_every_request_may_say_how_long_its_model_stays(site: Site, path: str, body: dict[str, Any]) -> None:
    stays: tuple[tuple[dict[str, Any], float], ...] = (
        ({"keep_alive": "1h30m"}, 5400),
        ({"keep_alive": "500ms"}, 0.5),
        ({"keep_alive": "300"}, 300),
        ({"keep_alive": -1}, -1),
        ({"keep_alive": "-5m"}, -1),
        ({"ttl": 60}, 60),
    )
    for given in [*(given for given, _ in stays), {"ttl": 60, "keep_alive": 0}]:
        answer = await site.client.post(path, json={"model": "demo-main"} | body | given)
        assert answer.status_code == 200, answer.text
    said = [command.stay.idle_seconds for command in site.worker.commands]
    assert said == [*(seconds for _, seconds in stays), 0]
    for wrong in ("soon", "1d", "", "1" * 60 + "x", True, [1]):
        answer = await site.client.post(path, json={"model": "demo-main"} | body | {"keep_alive": wrong})
        assert answer.status_code == 400, wrong
        assert "keep_alive" in answer.text
    await site.client.post(path, json={"model": "demo-main"} | body | {"keep_alive": None})
    assert site.worker.commands[-1].stay == UNSPECIFIED_STAY


async def test_settings_say_how_long_models_stay_where_no_request_does() -> None:
    site = make_site(idle_seconds=90)
    async with site.app.router.lifespan_context(site.app):
        assert site.worker.kept == KeepModels(usual=Stay(pinned=False, idle_seconds=90.0))
        site.context.live.change_model("demo-main", {"pinned": True}, "test")
        await asyncio.sleep(0)
        assert site.worker.kept.of("demo-main") == Stay(pinned=True, idle_seconds=90.0)
        assert site.worker.kept.of("org/other") == Stay(pinned=False, idle_seconds=90.0)
    assert site.worker.loads == [], "telling it loads nothing"
