"""The routes of the models page and the draft picker: models on disk, what fits or why not, stored choices."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.admin.model_routes import SECTIONS
from app.command.listing import models_for_greeting
from app.core.download import Download
from app.core.errors import ModelInUse
from app.core.messages import Heartbeat, ModelLoaded, Ready, Snapshot
from app.core.reason import Reason
from app.model_settings import ModelSettings
from app.models.catalog import FolderCatalog, default_catalog
from tests.admin.model_site import DEMO, ModelSite, Somebody, make_model_site
from tests.models.folders import write_model
from tests.tiny import write_tiny_model
from tests.tiny_encoders import write_tiny_encoder

pytestmark = pytest.mark.anyio


@pytest.fixture
def site(tmp_path: Path) -> ModelSite:
    return make_model_site(tmp_path)


async def models(site: ModelSite) -> dict[str, dict[str, Any]]:
    answer = await site.call("GET", "/admin/api/models")
    return {model["id"]: model for model in answer["models"]}


async def drafts(site: ModelSite, model: str = DEMO) -> dict[str, Any]:
    view: dict[str, Any] = await site.call("GET", f"/admin/api/drafts/{model}")
    return view


def candidate(view: dict[str, Any], name: str) -> dict[str, Any]:
    match: dict[str, Any] = next(entry for entry in view["candidates"] if entry["id"] == name)
    return match


async def test_everything_on_disk_is_listed_with_what_it_is_and_what_it_takes(site: ModelSite) -> None:
    listed = await models(site)
    demo, hybrid, drafter = listed[DEMO], listed["demo-hybrid"], listed["demo-assistant-dflash"]
    assert (demo["state"], demo["kind"], demo["families"], demo["context"]) == ("available", "main", ["trim"], 4096)
    assert hybrid["families"] == ["trim", "snapshot"]
    assert demo["drafts"] == [{"id": "demo-assistant-dflash", "method": "dflash"}]
    parts = demo["footprint"]
    assert parts["weights_bytes"] == 2 * demo["size_bytes"], "this device computes in float32"
    assert parts["total_bytes"] == parts["weights_bytes"] + parts["cache_bytes"] + parts["peak_bytes"]
    assert parts["fits"]
    assert (drafter["kind"], drafter["method"], drafter["footprint"]) == ("drafter", "dflash", None)


async def test_a_model_that_does_not_fit_shows_the_sum_against_the_ceiling(site: ModelSite) -> None:
    site.worker.ready_info = Ready(process_id=1, device="x (cpu)", memory_ceiling_bytes=190_000_000)
    demo = (await models(site))[DEMO]
    assert demo["state"] == "too_large"
    assert demo["footprint"]["ceiling_bytes"] == 190_000_000 < demo["footprint"]["total_bytes"]
    view = await drafts(site, "demo-draft")
    assert view["model"]["state"] == "available"
    started = await site.client.post("/admin/api/measurements", json={"model": DEMO})
    assert started.status_code == 202
    ended = await site.admin.measuring.wait()
    assert ended is not None
    assert "needs 234 MB, the ceiling is 190 MB" in ended.problem


async def test_a_model_is_loaded_with_its_drafters_and_unloaded(site: ModelSite) -> None:
    answer = await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    assert (answer["model"], answer["state"]) == (DEMO, "loaded")
    assert (await models(site))[DEMO]["state"] == "loaded"
    assert await site.call("POST", "/admin/api/models/unload", {"model": DEMO}) == {
        "model": DEMO,
        "state": "available",
    }
    assert (await models(site))[DEMO]["state"] == "available"
    await site.call("POST", "/admin/api/models/load", {"model": "nowhere"}, status=404)
    await site.call("POST", "/admin/api/models/unload", {"model": "nowhere"}, status=404)
    await site.call("POST", "/admin/api/models/load", {"model": "demo-hybrid-mtp"}, status=400)


async def test_what_a_model_in_use_refuses_is_a_conflict_that_waiting_ends(site: ModelSite) -> None:
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    site.worker.in_use = True
    for path in ("unload", "load"):
        refused = await site.call("POST", f"/admin/api/models/{path}", {"model": DEMO}, status=409)
        assert (refused["error"]["code"], refused["error"]["type"]) == ("model_in_use", "invalid_request_error")
    assert (await models(site))[DEMO]["state"] == "loaded"
    site.worker.in_use = False
    await site.call("POST", "/admin/api/models/unload", {"model": DEMO})


@pytest.mark.parametrize(
    ("language", "words"), [("ko", "이 컴퓨터에 없는"), ("ja", "このコンピューターに"), ("zh-Hans", "这台电脑上没有")]
)
async def test_an_error_is_told_in_the_language_of_the_page_and_in_english_to_programs(
    site: ModelSite, language: str, words: str
) -> None:
    asked = {"accept-language": language}
    body = {"model": "nowhere"}
    toast = (await site.client.post("/admin/api/models/load", json=body, headers=asked)).json()["error"]
    assert (toast["code"], words in toast["message"]) == ("model_not_found", True)
    assert words in (await site.client.get("/admin/models/nowhere", headers=asked)).text
    program = await site.client.get("/v1/models/nowhere", headers=asked)
    assert program.json()["error"]["message"].startswith("no model")


async def test_a_load_can_be_stopped(site: ModelSite) -> None:
    waiting, loading = asyncio.Event(), asyncio.Event()

    async def endless(*_: Any, **__: Any) -> Any:
        loading.set()
        await waiting.wait()

    site.worker.load = endless  # type: ignore[method-assign]
    load = asyncio.create_task(site.call("POST", "/admin/api/models/load", {"model": DEMO}, status=503))
    await loading.wait()
    await site.call("POST", "/admin/api/models/unload", {"model": DEMO})
    assert (await load)["error"]["code"] == "load_cancelled"


async def test_pin_alias_and_default_are_settings_that_stay(site: ModelSite) -> None:
    await site.call("POST", "/admin/api/models/pin", {"model": DEMO})
    await site.call("PATCH", f"/admin/api/models/{DEMO}/settings", {"alias": "helper"})
    await site.call("POST", "/admin/api/models/default", {"model": "helper"})
    again = make_model_site(site.admin.serving.settings.home)
    demo = (await models(again))[DEMO]
    assert (demo["pinned"], demo["alias"], demo["is_default"]) == (True, "helper", True)
    assert (await drafts(again, "helper"))["model"]["id"] == DEMO
    await again.call("POST", "/admin/api/models/unpin", {"model": "helper"})
    assert not (await models(again))[DEMO]["pinned"]


async def test_the_picker_ranks_what_fits_and_says_why_the_rest_does_not(site: ModelSite) -> None:
    view = await drafts(site)
    assert [entry["method"] for entry in view["candidates"]][:4] == ["dflash", "eagle3", "draft_model", "ngram"]
    used = candidate(view, "demo-assistant-dflash")
    assert (used["in_use"], used["tokens"], used["rollback"], used["measured"]) == (True, "borrowed", ["trim"], None)
    assert used["extra"]["cache_bytes"] > 0
    assert candidate(view, "demo-draft")["tokens"] == "same"
    assert "cannot run here" in candidate(view, "demo-hybrid-mtp")["refusal"]
    assert candidate(view, "")["in_use"], "n-grams may always draft"
    await site.measured()
    measured = await drafts(site)
    first = measured["candidates"][0]
    assert (first["id"], first["measured"]["ratio"]) == ("demo-draft", pytest.approx(2.0, rel=1e-3))
    assert first["measured"]["num_draft_tokens"] == 1
    assert first["in_use"], "the best measured one is the usual one from now on"
    assert not candidate(measured, "demo-assistant-dflash")["in_use"]
    listed = {row.id: row.draft for row in models_for_greeting(site.catalog, site.admin.serving.live)}
    assert listed[DEMO] == "demo-draft", "and the command line says so too"


async def test_another_tokenizer_is_told_token_by_token(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "main", rows=16)
    write_model(tmp_path / "models" / "stranger", pieces="abxdyfgh")
    site = make_model_site(tmp_path / "home", catalog=FolderCatalog([tmp_path / "models"]))
    stranger = candidate(await drafts(site, "main"), "stranger")
    assert stranger["tokens"] == "other"
    assert "token 2 is 'c' in the main model and 'x' in the draft" in stranger["token_difference"]
    refused = await site.call("PUT", "/admin/api/drafts/main", {"drafts": ["stranger"]}, status=400)
    assert refused["error"]["code"] == "speculation_unavailable"
    assert site.admin.serving.live.model("main").given() == {}


async def test_a_drafter_without_room_beside_the_model_is_marked(site: ModelSite) -> None:
    footprint = (await models(site))[DEMO]["footprint"]
    ceiling = footprint["total_bytes"] + 15_000_000
    site.worker.ready_info = Ready(process_id=1, device="x (cpu)", memory_ceiling_bytes=ceiling)
    view = await drafts(site)
    assert (candidate(view, "demo-draft")["has_room"], candidate(view, "demo-assistant-dflash")["has_room"]) == (
        True,
        False,
    )
    refused = {"model": DEMO, "draft": "demo-assistant-dflash"}
    answer = await site.call("POST", "/admin/api/drafts/attach", refused, status=503)
    assert answer["error"]["code"] == "insufficient_memory"
    assert site.admin.serving.live.model(DEMO).given() == {}, "nothing was chosen"


async def test_a_choice_is_stored_as_the_same_settings_that_everybody_sees(site: ModelSite) -> None:
    body = {
        "drafts": ["demo-draft"],
        "methods": ["draft_model", "ngram"],
        "num_draft_tokens": 5,
        "policy": "auto",
        "acceptance": "rejection",
    }
    assert await site.call("PUT", f"/admin/api/drafts/{DEMO}", body) == {"model": DEMO, "became": "not_loaded"}
    answer = await site.call("GET", f"/admin/api/models/{DEMO}/settings")
    assert {row["name"]: row["value"] for row in answer["settings"] if row["value"] is not None} == body
    again = make_model_site(site.admin.serving.settings.home)
    view = await drafts(again)
    assert {name: value for name, value in view["choice"].items() if value is not None} == body
    assert {entry["method"] for entry in view["candidates"] if entry["in_use"]} == {"draft_model", "ngram"}
    unit = again.admin.serving.resolver.resolve(DEMO)
    assert ([drafter.id for drafter in unit.drafters], unit.live.num_draft_tokens, unit.live.policy) == (
        ["demo-draft"],
        5,
        "auto",
    )
    await again.call("PUT", f"/admin/api/drafts/{DEMO}", {"acceptance": None})
    given = again.admin.serving.live.model(DEMO).given()
    assert given == {name: value for name, value in body.items() if name != "acceptance"}, "the rest is kept"
    await again.call("PUT", f"/admin/api/drafts/{DEMO}", dict.fromkeys(body))
    assert again.admin.serving.live.model(DEMO).given() == {}, "nothing is chosen any more"


async def test_a_loaded_model_gets_a_choice_at_once_unless_it_is_used(site: ModelSite) -> None:
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    chosen = await site.call("PUT", f"/admin/api/drafts/{DEMO}", {"drafts": ["demo-draft"], "policy": "auto"})
    assert chosen["became"] == "loaded"
    assert site.worker.book.snapshot.models[0].draft_ids == ("demo-draft",)
    site.worker.in_use = True
    chosen = await site.call("PUT", f"/admin/api/drafts/{DEMO}", {"drafts": []})
    assert chosen["became"] == "in_use"
    assert [draft.id for draft in site.admin.serving.resolver.resolve(DEMO).drafters] == ["demo-draft"]
    site.worker.in_use = False
    assert (await site.call("POST", "/admin/api/models/reload", {"model": DEMO}))["became"] == "loaded"
    assert not site.worker.book.snapshot.models[0].draft_ids


async def test_a_choice_for_a_model_in_use_comes_as_soon_as_no_request_uses_it(site: ModelSite) -> None:
    await site.call("PUT", f"/admin/api/drafts/{DEMO}", {"drafts": ["demo-draft"]})
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    site.worker.in_use = True
    assert (await site.call("PUT", f"/admin/api/drafts/{DEMO}", {"drafts": []}))["became"] == "in_use"
    on_event, resolver, loads = site.admin.loading.on_event, site.admin.serving.resolver, len(site.worker.loads)
    (used,) = site.worker.book.snapshot.models
    on_event(Heartbeat(pending=True, snapshot=Snapshot(models=(msgspec.structs.replace(used, leases=1),))))
    assert resolver.resolve(DEMO).drafters, "until then requests get what is in memory"
    site.worker.in_use = False
    on_event(Heartbeat(pending=False, snapshot=Snapshot(models=(used,))))
    await site.worker.wait_for(lambda: len(site.worker.loads) > loads)
    assert not site.worker.book.snapshot.models[0].draft_ids
    assert not resolver.resolve(DEMO).drafters
    on_event(Heartbeat(pending=False, snapshot=Snapshot(models=(used,))))
    assert len(site.worker.loads) == loads + 1, "it came once"


async def test_a_choice_comes_too_where_the_last_request_ends_as_the_model_is_said_to_be_in_use(
    site: ModelSite,
) -> None:
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    (used,) = site.worker.book.snapshot.models
    load = site.worker.load

    async def refuse_and_end(*values: Any) -> ModelLoaded:
        site.worker.load = load  # type: ignore[method-assign]
        site.worker.book.snapshot = Snapshot(models=(used,))
        site.admin.loading.on_event(Heartbeat(pending=False, snapshot=site.worker.book.snapshot))
        raise ModelInUse("it is in use", retry_after_seconds=1)

    site.worker.load = refuse_and_end  # type: ignore[method-assign]
    loads = len(site.worker.loads)
    chosen = await site.call("PUT", f"/admin/api/drafts/{DEMO}", {"drafts": ["demo-draft"]})
    assert chosen["became"] == "in_use"
    await site.worker.wait_for(lambda: len(site.worker.loads) > loads)
    assert site.worker.book.snapshot.models[0].draft_ids == ("demo-draft",)


async def test_conflicts_are_refused_as_everywhere(site: ModelSite) -> None:
    body = {"policy": "off", "methods": ["ngram"]}
    refused = await site.call("PUT", f"/admin/api/drafts/{DEMO}", body, status=422)
    assert refused["error"]["code"] == "conflicting_settings"
    await site.call("PUT", f"/admin/api/drafts/{DEMO}", {"num_draft_tokens": 65}, status=422)
    await site.call("PUT", f"/admin/api/drafts/{DEMO}", {"methods": ["magic"]}, status=422)


async def test_one_click_chooses_loads_and_measures(site: ModelSite) -> None:
    answer = await site.call("POST", "/admin/api/drafts/attach", {"model": DEMO, "draft": "demo-draft"})
    assert answer == {"model": DEMO, "drafts": ["demo-draft"], "became": "not_loaded", "measuring": True}
    ended = await site.admin.measuring.wait()
    assert ended is not None
    assert (ended.outcome, ended.model_id) == ("done", DEMO)
    assert site.worker.book.snapshot.models[0].draft_ids == ("demo-draft",), "it stays loaded as it was chosen"
    view = await drafts(site)
    assert candidate(view, "demo-draft")["measured"]["ratio"] == pytest.approx(2.0, rel=1e-3)
    await site.call("POST", "/admin/api/drafts/attach", {"model": DEMO, "draft": "demo-hybrid"}, status=400)


async def test_a_second_drafter_joins_the_first_of_another_method(site: ModelSite) -> None:
    attach = {"model": DEMO, "measure": False}
    await site.call("POST", "/admin/api/drafts/attach", {**attach, "draft": "demo-draft"})
    await site.call("POST", "/admin/api/drafts/attach", {**attach, "draft": "demo-assistant-eagle3"})
    assert site.admin.serving.live.model(DEMO).drafts == ("demo-assistant-eagle3", "demo-draft")
    assert set(site.worker.book.snapshot.models[0].draft_ids) == {"demo-assistant-eagle3", "demo-draft"}


async def test_a_drafter_that_was_downloaded_for_a_model_joins_it_by_itself(site: ModelSite) -> None:
    site.admin.loading.on_download_done(Download(id=1, repository="demo-draft", state="done", drafts_for=DEMO))
    await site.worker.wait_asked()
    ended = await site.admin.measuring.wait()
    assert ended is not None
    assert ended.outcome == "done"
    assert site.admin.serving.live.model(DEMO).drafts == ("demo-draft",)
    site.admin.loading.on_download_done(Download(id=2, repository="demo-hybrid", state="done"))
    assert site.admin.measuring.active == "", "it was not asked to draft for any model"


async def test_what_fails_behind_a_download_is_in_the_log(site: ModelSite, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: Any) -> None:
        raise OSError("the disk is gone")

    logged = asyncio.Event()
    monkeypatch.setattr("app.admin.loading.logger.exception", lambda *_: logged.set())
    monkeypatch.setattr(site.admin.serving.resolver, "main", unreadable)
    site.admin.loading.on_download_done(Download(id=1, repository="demo-draft", state="done", drafts_for=DEMO))
    await logged.wait()


async def test_what_may_be_downloaded_is_offered_until_it_is_here(tmp_path: Path) -> None:
    embedded = default_catalog([], environment={}, home=tmp_path)
    main = replace(embedded.find(DEMO), id="mlx-community/Qwen3-8B-4bit", parameter_count=8_000_000_000)
    site = make_model_site(tmp_path, catalog=Listed(embedded, main))  # type: ignore[arg-type]
    view = await drafts(site, main.id)
    offered = {entry["repository"]: entry for entry in view["published"]}
    assert offered["z-lab/Qwen3-8B-DFlash-b16"]["method"] == "dflash"
    assert offered["mlx-community/Qwen3-0.6B-4bit"]["has_room"]
    here = replace(embedded.find("demo-draft"), id="mlx-community/Qwen3-0.6B-4bit")
    site = make_model_site(tmp_path, catalog=Listed(embedded, main, here))  # type: ignore[arg-type]
    view = await drafts(site, main.id)
    assert "mlx-community/Qwen3-0.6B-4bit" not in {entry["repository"] for entry in view["published"]}
    assert candidate(view, "mlx-community/Qwen3-0.6B-4bit")["tokens"] == "same"


class Listed:
    """A catalog that lists further models besides those of `catalog`."""

    def __init__(self, catalog: FolderCatalog, *more: Any) -> None:
        self._models = {model.id: model for model in (*catalog.models(), *more)}

    def models(self) -> tuple[Any, ...]:
        return tuple(self._models.values())

    def find(self, id: str) -> Any:  # noqa: A002 - the name in `FolderCatalog`
        return self._models[id]

    def refresh(self) -> None:
        """Do nothing: the list is fixed."""


async def test_an_encoder_is_listed_weighed_and_drafts_for_nobody(tmp_path: Path) -> None:
    write_tiny_encoder(tmp_path / "models" / "encoder")
    write_tiny_model(tmp_path / "models" / "answers", "qwen3")
    site = make_model_site(tmp_path, catalog=FolderCatalog([tmp_path / "models"]))
    model = (await models(site))["encoder"]
    assert (model["kind"], model["state"], model["families"], model["drafts"]) == ("encoder", "available", [], [])
    assert model["footprint"]["weights_bytes"] > 0
    assert model["footprint"]["cache_bytes"] == 0
    view = await drafts(site, "answers")
    assert "embeddings" in candidate(view, "encoder")["refusal"]
    assert (await drafts(site, "encoder"))["candidates"] == []
    for path in ("measurements", "models/default"):
        refused = await site.call("POST", f"/admin/api/{path}", {"model": "encoder"}, status=400)
        assert "/v1/embeddings" in refused["error"]["message"]
    for page in ("models", "drafts"):
        answer = await site.client.get(f"/admin/{page}/encoder")
        assert "/v1/embeddings" in answer.text


async def test_a_drafter_and_a_broken_model_have_no_candidates(tmp_path: Path) -> None:
    site = make_model_site(tmp_path)
    view = await drafts(site, "demo-hybrid-mtp")
    assert (view["model"]["kind"], view["candidates"]) == ("drafter", [])
    await site.call("GET", "/admin/api/drafts/nowhere", status=404)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    broken = make_model_site(tmp_path / "home", catalog=FolderCatalog([tmp_path]))
    view = await drafts(broken, "broken")
    assert view["model"]["state"] == "unusable"
    assert view["model"]["problem"]
    assert view["candidates"] == []


@pytest.mark.parametrize("page", ["models", f"models/{DEMO}", f"drafts/{DEMO}", f"pays/{DEMO}", "models/demo-draft"])
async def test_every_page_about_models_is_there(site: ModelSite, page: str) -> None:
    response = await site.client.get(f"/admin/{page}")
    assert response.status_code == 200
    assert "<h1" in response.text


@pytest.mark.parametrize("page", ["models/nowhere", "drafts/<script>alert(1)</script>", "pays/a/b/c"])
async def test_a_model_that_is_not_here_has_a_page_that_says_so(site: ModelSite, page: str) -> None:
    response = await site.client.get(f"/admin/{page}")
    assert response.status_code == 404
    assert "<script>alert" not in response.text
    assert "/admin/models" in response.text


def test_every_setting_of_a_model_has_its_place() -> None:
    assert sorted(name for _, names in SECTIONS for name in names) == sorted(ModelSettings.model_fields)


async def test_what_a_model_takes_is_counted_in_its_bits_of_keys_and_values(site: ModelSite) -> None:
    whole = (await models(site))[DEMO]["footprint"]
    await site.call("PATCH", f"/admin/api/models/{DEMO}/settings", {"kv_bits": 8})
    shown = (await models(site))[DEMO]
    assert shown["footprint"]["cache_bytes"] < whole["cache_bytes"]
    assert shown["kv_refusal"] == ""
    assert "Has no effect here" not in (await site.client.get(f"/admin/models/{DEMO}")).text


async def test_a_load_is_refused_while_the_server_ends(site: ModelSite) -> None:
    activity = site.admin.serving.activity
    somebody = Somebody()
    activity.enter(somebody)
    activity.draining = True
    await site.call("POST", "/admin/api/models/load", {"model": DEMO}, status=503)
    await site.call("POST", "/admin/api/measurements", {"model": DEMO}, status=503)


async def test_a_drafter_that_is_on_its_way_shows_no_error_of_the_unit_before_it(site: ModelSite) -> None:
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    (loaded,) = site.worker.book.snapshot.models
    reasons = {name: Reason("cannot_draft", {"detail": f"{name}: too long"}) for name in ("draft_model", "dflash")}
    held = msgspec.structs.replace(loaded, unavailable=reasons)
    site.worker.book.snapshot = Snapshot(models=(held,))
    view = await drafts(site)
    why_not = candidate(view, "demo-draft")["unavailable"]
    assert why_not["reason"] == "", "it was chosen, and the reload has not begun yet"
    assert candidate(view, "demo-assistant-dflash")["unavailable"]["reason"] == "dflash: too long"
    site.worker.book.snapshot = Snapshot(models=(msgspec.structs.replace(held, state="loading"),))
    assert candidate(await drafts(site), "demo-assistant-dflash")["unavailable"]["reason"] == ""


async def test_earlier_prompts_are_counted_and_forgotten(site: ModelSite) -> None:
    folder = site.admin.serving.settings.prefixes_path / "demo-0123"
    folder.mkdir(parents=True)
    (folder / f"rows-{1:064x}.safetensors").write_bytes(bytes(5000))
    answer = await site.call("GET", "/admin/api/prefixes")
    assert (answer["disk_bytes"], answer["memory_bytes"], answer["trouble"]) == (5000, 0, "")
    assert await site.call("POST", "/admin/api/prefixes/clear") == {"freed_bytes": 5000}
    assert not folder.exists()
