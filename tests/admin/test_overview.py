"""The overview: the server's state, and the actions on worker and quarantine."""

from dataclasses import replace

import pytest

from app.admin.feed import LiveFeed
from app.core.errors import StoreUnavailable
from app.core.messages import Delta, LoadProgress, Ready, Snapshot
from app.core.reason import Reason
from app.core.unit import DrafterSpecification
from app.main import build
from app.serving.metrics import Pace
from app.store.rows import RequestHistory
from tests.admin.signing import Time
from tests.admin.test_frame import OWN, get, script_data
from tests.api.fakes import Site, make_site
from tests.loaded import loaded

pytestmark = pytest.mark.anyio


@pytest.fixture
def site() -> Site:
    site = make_site(api_key="k")
    site.worker.ready_info = Ready(process_id=1, device="Apple M9", memory_ceiling_bytes=8_000_000_000)
    site.worker.book.snapshot = Snapshot(
        models=(
            loaded(
                "demo-main",
                DrafterSpecification("demo-draft", "/private/draft"),
                DrafterSpecification("demo-main", "/private/main", "mtp"),
                weights_bytes=3_000,
                methods=("draft_model", "ngram"),
                unavailable={"eagle3": Reason("cannot_draft", {"detail": "no drafter fits"})},
                running=1,
                waiting=2,
                pinned=True,
            ),
        ),
        active_bytes=4_000,
        cached_bytes=500,
        peak_bytes=6_000,
        text_bytes=120_000_000,
        memory_pressure="warning",
    )
    site.worker.book.progress = {"org/other": LoadProgress(model_id="org/other", phase="weights", fraction=0.25)}
    site.worker.quarantined = {"bad": Reason("exit_code", {"code": 3})}
    site.worker.last_exit = Reason("exit_killed")
    return site


async def test_the_state_names_worker_memory_models_loads_and_quarantine(site: Site) -> None:
    response = await site.client.get("/admin/api/state", headers=OWN)
    state = response.json()["state"]
    assert state["worker"] == {
        "ready": True,
        "renewing": False,
        "restarts": 0,
        "last_exit": {
            "reason": "killed (SIGKILL), usually out of memory",
            "reason_code": "exit_killed",
            "reason_values": {},
        },
        "draining": False,
        "device": "Apple M9",
    }
    assert state["memory"] == {
        "ceiling_bytes": 8_000_000_000,
        "active_bytes": 4_000,
        "cached_bytes": 500,
        "peak_bytes": 6_000,
        "text_bytes": 120_000_000,
        "pressure": "warning",
    }
    (loaded,) = state["models"]
    assert "/private" not in str(loaded), "no path of this computer"
    assert loaded["drafts"] == [
        {"id": "demo-draft", "method": "draft_model"},
        {"id": "demo-main", "method": "mtp"},
    ]
    assert loaded["unavailable"]["eagle3"]["reason"] == "no drafter fits"
    assert (state["running"], state["waiting"], state["open_requests"]) == (1, 2, 0)
    assert state["loading"] == [{"id": "org/other", "phase": "weights", "fraction": 0.25}]
    failure = {"reason": "exited with code 3, see the log", "reason_code": "exit_code", "reason_values": {"code": 3}}
    assert state["quarantined"] == [{"id": "bad", **failure}]


async def test_the_page_has_the_same_state_at_once(site: Site) -> None:
    data = script_data((await get(site)).text)
    answer = (await site.client.get("/admin/api/state", headers=OWN)).json()
    assert data["state"] == answer["state"]
    assert data["minutes"] == answer["minutes"]


async def test_the_menu_bar_gets_its_models_even_while_the_store_cannot_be_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[str]:
        raise StoreUnavailable("the disk is gone")

    monkeypatch.setattr(RequestHistory, "last_models", refuse)
    menu = (await get(site, "/admin/api/menu")).json()
    assert "demo-main" in menu["models"]


async def test_the_pace_is_what_the_worker_told(site: Site) -> None:
    time = Time()
    app = build(replace(site.app.state.admin, feed=LiveFeed(), pace=Pace(clock=time)))
    async with app.router.lifespan_context(app), replace(site, app=app).client as client:
        for listener in site.worker.listeners:
            listener(Delta(id="r", index=0, text="x", tokens=7, drafted=4, accepted=3))
        time.pass_by(1)
        pace = (await client.get("/admin/api/state", headers=OWN)).json()["pace"]
    assert sum(pace["tokens"]) == 7
    assert pace["acceptance"] == 0.75


async def test_restart_is_at_once_and_drain_has_patience(site: Site) -> None:
    for path, body, patience in (
        ("restart", {}, 0.0),
        ("drain", {}, 600.0),
        ("drain", {"seconds": 5}, 5.0),
    ):
        response = await site.client.post(f"/admin/api/worker/{path}", json=body, headers=OWN)
        assert response.status_code == 200
        assert response.json()["renewing"] is True
        assert site.worker.renewals.pop() == patience
    refused = await site.client.post("/admin/api/worker/drain", json={"seconds": -1}, headers=OWN)
    assert refused.status_code == 400
    assert site.worker.renewals == []


async def test_a_quarantined_model_is_released_by_its_alias_too(site: Site) -> None:
    site.worker.quarantined = {"demo-main": Reason("exit_code", {"code": 3})}
    site.context.live.change_model("demo-main", {"alias": "helper"}, "test")
    response = await site.client.post("/admin/api/quarantine/release", json={"model": "helper"}, headers=OWN)
    assert response.json() == {"model": "demo-main", "released": True}


async def test_a_quarantined_model_is_released_once(site: Site) -> None:
    for status in (200, 400):
        response = await site.client.post("/admin/api/quarantine/release", json={"model": "bad"}, headers=OWN)
        assert response.status_code == status
    assert response.json()["error"]["code"] == "not_quarantined"
    assert site.worker.quarantined == {}


@pytest.mark.parametrize("path", ["worker/restart", "worker/drain", "quarantine/release"])
async def test_actions_need_a_session_and_json(site: Site, path: str) -> None:
    assert (await site.client.post(f"/admin/api/{path}", json={"model": "bad"})).status_code == 401
    form = await site.client.post(f"/admin/api/{path}", data={"model": "bad"}, headers=OWN)
    assert form.status_code == 415
    assert site.worker.renewals == []
    assert site.worker.quarantined
