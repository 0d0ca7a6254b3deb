"""Measurements on the serving worker: undisturbed, one at a time, stored, applied; memory is restored afterwards."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.core.messages import MEASUREMENT, Heartbeat, Snapshot
from app.core.request import SpeculationRequest
from app.core.statistics import Statistics
from app.serving.sweep.grid import TASKS
from app.serving.sweep.worker_side import rate_of
from tests.admin.model_site import DEMO, ModelSite, Somebody, make_model_site, too_little_memory

pytestmark = pytest.mark.anyio


@pytest.fixture
def site(tmp_path: Path) -> ModelSite:
    return make_model_site(tmp_path)


def cell(row: dict[str, Any], rows: int) -> dict[tuple[str, int], dict[str, Any]]:
    measured = next(entry for entry in row["report"]["cells"] if entry["rows"] == rows)
    return {(setting["method"], setting["num_draft_tokens"]): setting for setting in measured["settings"]}


async def test_every_method_is_compared_with_plain_decoding_alone_and_four_at_once(site: ModelSite) -> None:
    row = await site.measured()
    for rows in (1, 4):
        settings = cell(row, rows)
        assert {method for method, _ in settings} == {"off", "auto", "dflash", "eagle3", "draft_model", "ngram"}
        assert settings["draft_model", 4]["ratio"] == pytest.approx(2.0, rel=1e-3)
        assert settings["dflash", 7]["acceptance"] == 0.75
        assert settings["auto", 0]["used"] == ["draft_model"]
    assert ("dflash", 8) not in cell(row, 1), "it never drafts so many"
    assert row["results"]["methods"]["draft_model"] == "demo-draft"
    assert row["versions"]["mlx-lm"]
    assert row["machine"]["cores"] >= 1
    assert row["results"]["options"]["device"] == "Test (cpu)"


async def test_requests_are_greedy_name_their_method_and_ask_all_settings_the_same(site: ModelSite) -> None:
    await site.measured(grid="one")
    commands = site.worker.commands
    assert {command.sampling.temperature for command in commands} == {0.0}
    assert commands[0].speculation == commands[1].speculation == SpeculationRequest(method="off")
    assert {command.messages[0]["content"] for command in commands if command.messages} <= set(TASKS)
    measured = [command for command in commands if command.max_tokens == commands[1].max_tokens][1:]
    by_prompt: dict[str, set[tuple[str, int | None]]] = {}
    for command in measured:
        asked = (command.speculation.method, command.speculation.num_draft_tokens)
        by_prompt.setdefault(str(command.messages), set()).add(asked)
    assert len(by_prompt) == 3, "one prompt a round"
    assert len({frozenset(asked) for asked in by_prompt.values()}) == 1, "every setting gets each of them"


async def test_an_own_prompt_is_asked_in_the_place_of_the_built_in_ones(site: ModelSite) -> None:
    row = await site.measured(prompts=["Name ten rivers."], rounds=1, grid="one")
    assert {str(command.messages) for command in site.worker.commands} == {
        str([{"role": "user", "content": "Name ten rivers."}])
    }
    assert row["results"]["options"]["prompts"] == ["Name ten rivers."]


async def test_what_was_in_memory_is_there_again_afterwards(site: ModelSite) -> None:
    site.admin.serving.live.change_model(DEMO, {"drafts": ("demo-assistant-dflash",)}, "test")
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    before = site.worker.book.snapshot.models[0].draft_ids
    await site.measured(rounds=1)
    assert site.worker.book.snapshot.models[0].draft_ids == before == ("demo-assistant-dflash",)
    assert len(site.worker.loads[1].drafters) == 3, "measured was with the best drafter of each method"
    assert site.admin.serving.resolver.resolve(DEMO).drafters == site.worker.loads[0].drafters


async def test_a_model_whose_drafters_nobody_chose_goes_on_with_the_one_measured_fastest(site: ModelSite) -> None:
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    assert site.worker.book.snapshot.models[0].draft_ids == ("demo-assistant-dflash",)
    await site.measured(rounds=1)
    assert site.worker.book.snapshot.models[0].draft_ids == ("demo-draft",)


async def test_what_was_not_in_memory_is_not_afterwards(site: ModelSite) -> None:
    await site.measured(rounds=1)
    assert site.worker.book.snapshot.models == ()


async def test_the_recommendation_is_listed_applied_and_nothing_else(site: ModelSite) -> None:
    other: dict[str, Any] = {"acceptance": "rejection", "temperature": 0.3}
    site.admin.serving.live.change_model(DEMO, {**other, "policy": "single"}, "test")
    row = await site.measured()
    listed = row["report"]["advice"]["changes"]
    assert {change["name"]: (change["old"], change["new"]) for change in listed} == {
        "drafts": (None, ["demo-draft"]),
        "methods": (None, ["draft_model"]),
        "policy": ("single", "auto"),
    }
    answer = await site.call("POST", f"/admin/api/measurements/{row['id']}/apply", {})
    assert (answer["became"], answer["changes"]) == ("not_loaded", listed)
    expected = {"drafts": ["demo-draft"], "methods": ["draft_model"], "policy": "auto", **other}
    assert site.admin.serving.live.model(DEMO).given() == expected
    again = make_model_site(site.admin.serving.settings.home)
    unit = again.admin.serving.resolver.resolve(DEMO)
    assert ([drafter.id for drafter in unit.drafters], unit.methods) == (["demo-draft"], ("draft_model",))
    (row,) = (await site.call("GET", f"/admin/api/measurements?model={DEMO}"))["measurements"]
    assert row["report"]["advice"]["changes"] == []
    await site.call("POST", f"/admin/api/measurements/{row['id']}/apply", {}, status=400)


async def test_the_latest_measurement_is_what_every_page_says_and_others_are_marked(
    site: ModelSite,
) -> None:
    await site.measured(drafts=["demo-assistant-dflash", "demo-draft"], grid="one")
    site.worker.speeds = {
        method: speed if method in ("off", "auto", "draft_model") else 300.0
        for method, speed in site.worker.speeds.items()
    }
    await site.measured(drafts=["demo-draft"], grid="one")
    view = await site.call("GET", f"/admin/api/drafts/{DEMO}")
    listed = [(entry["id"], entry["measured"] and entry["measured"]["is_latest"]) for entry in view["candidates"]]
    (row, _) = (await site.call("GET", f"/admin/api/measurements?model={DEMO}"))["measurements"]
    ratios = {method: setting["ratio"] for (method, _), setting in cell(row, 1).items()}
    assert ratios["ngram"] > ratios["draft_model"]
    assert {name: is_latest for name, is_latest in listed if is_latest is not None} == {
        "": True,
        "demo-draft": True,
        "demo-assistant-dflash": False,
    }
    gain = site.admin.measuring.gains()[DEMO]
    assert view["gain"] == json.loads(json.dumps(gain))
    (main,) = (entry for entry in row["report"]["cells"] if entry["rows"] == 1)
    assert (gain["verdict"], gain["settings"][0]["name"]) == (main["verdict"], main["best"])
    await site.call("DELETE", f"/admin/api/measurements/{row['id']}")
    assert site.admin.measuring.gains()[DEMO]["measured_at"] < gain["measured_at"]


async def test_the_setting_in_use_is_the_one_that_changes_nothing(site: ModelSite) -> None:
    row = await site.measured(grid="one")
    body = {"method": "dflash", "num_draft_tokens": 7}
    await site.call("POST", f"/admin/api/measurements/{row['id']}/apply", body)
    (row,) = (await site.call("GET", f"/admin/api/measurements?model={DEMO}"))["measurements"]
    assert [key for key, setting in cell(row, 1).items() if not setting["changes"]] == [("dflash", 7)]


async def test_where_nothing_differs_nothing_is_recommended(site: ModelSite) -> None:
    site.worker.speeds = dict.fromkeys(site.worker.speeds, 100.0)
    row = await site.measured(grid="one")
    assert row["report"]["text"] == "no clear difference, ±5% (1 request); change nothing"
    refused = await site.call("POST", f"/admin/api/measurements/{row['id']}/apply", {}, status=400)
    assert "no clear difference" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"method": "off"}, {"policy": "off"}),
        ({"method": "ngram", "num_draft_tokens": 3}, {"methods": ["ngram"], "num_draft_tokens": 3}),
        ({"method": "dflash", "num_draft_tokens": 7}, {"methods": ["dflash"], "num_draft_tokens": 7}),
    ],
)
async def test_any_measured_setting_can_be_used(site: ModelSite, body: Any, expected: Any) -> None:
    row = await site.measured(rounds=1, grid="one")
    await site.call("POST", f"/admin/api/measurements/{row['id']}/apply", body)
    assert site.admin.serving.live.model(DEMO).given() == expected


async def test_what_was_not_measured_cannot_be_used(site: ModelSite) -> None:
    row = await site.measured(rounds=1, grid="one")
    body = {"method": "dflash", "num_draft_tokens": 12}
    await site.call("POST", f"/admin/api/measurements/{row['id']}/apply", body, status=400)


async def test_a_turn_that_others_would_share_is_done_again_without_them(site: ModelSite) -> None:
    activity, worker = site.admin.serving.activity, site.worker
    worker.hold = asyncio.Event()
    await site.call("POST", "/admin/api/measurements", {"model": DEMO, "minutes": 60, "rounds": 1}, status=202)
    await worker.wait_asked()
    other = Somebody()
    activity.enter(other)
    await worker.wait_cancelled()
    asked = len(worker.commands)
    worker.hold = None
    assert len(worker.commands) == asked, "nothing is asked while somebody uses Paceline"
    activity.leave(other)
    ended = await site.admin.measuring.wait()
    assert ended is not None
    assert ended.outcome == "done"
    (row,) = (await site.call("GET", "/admin/api/measurements"))["measurements"]
    assert row["results"]["options"]["disturbed"] == 1
    assert cell(row, 1)["draft_model", 4]["ratio"] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, SpeculationRequest(methods=("dflash", "ngram"), policy="auto")),
        (
            {"methods": ["ngram"], "num_draft_tokens": 3, "policy": "auto"},
            SpeculationRequest(methods=("ngram",), num_draft_tokens=3, policy="auto"),
        ),
        ({"policy": "off"}, SpeculationRequest(method="off", policy="off")),
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True])
async def test_requests_that_come_meanwhile_keep_their_own_drafters(
    site: ModelSite, is_loaded: bool, chosen: Any, expected: SpeculationRequest
) -> None:
    site.admin.serving.live.change_model(DEMO, chosen, "test")
    if is_loaded:
        await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    site.worker.hold = asyncio.Event()
    await site.call("POST", "/admin/api/measurements", {"model": DEMO}, status=202)
    await site.worker.wait_asked()
    measured = site.worker.commands[0].model
    body = {"model": DEMO, "messages": [{"role": "user", "content": "Hello"}]}
    site.worker.hold = None
    await site.call("POST", "/v1/chat/completions", body)
    (asked,) = [command for command in site.worker.commands if command.owner != MEASUREMENT]
    assert (asked.model, asked.speculation) == (measured, expected), "no other unit is loaded in between"
    resolver = site.admin.serving.resolver
    await site.admin.loading.reload(DEMO)
    assert resolver.limit_speculation(DEMO, SpeculationRequest()) == SpeculationRequest(), (
        "what is chosen now is used whole"
    )
    site.admin.measuring.stop()
    await site.admin.measuring.wait()
    assert resolver.limit_speculation(DEMO, SpeculationRequest()) == SpeculationRequest()


async def test_one_measurement_runs_at_a_time(site: ModelSite) -> None:
    site.worker.hold = asyncio.Event()
    await site.call("POST", "/admin/api/measurements", {"model": DEMO}, status=202)
    refused = await site.call("POST", "/admin/api/measurements", {"model": "demo-hybrid"}, status=409)
    assert refused["error"]["code"] == "already_measuring"
    assert await site.call("DELETE", "/admin/api/measurements/current") == {"stopping": True}
    ended = await site.admin.measuring.wait()
    assert ended is not None
    assert (ended.outcome, ended.number) == ("stopped", 0), "nothing was known yet, so nothing is kept"
    assert site.worker.book.snapshot.models == ()
    assert await site.call("DELETE", "/admin/api/measurements/current") == {"stopping": False}


async def test_a_model_that_cannot_be_loaded_says_why(site: ModelSite) -> None:
    too_little_memory(site.worker)
    await site.call("POST", "/admin/api/measurements", {"model": DEMO}, status=202)
    await site.admin.measuring.wait()
    last = (await site.call("GET", "/admin/api/measurements"))["last"]
    assert (last["outcome"], last["problem"]) == ("failed", "no room")


async def test_drafters_without_room_are_left_out_and_named(site: ModelSite) -> None:
    assert site.worker.ready_info is not None
    candidates = (await site.call("GET", f"/admin/api/drafts/{DEMO}"))["candidates"]
    alone = site.admin.models.footprint(site.catalog.find(DEMO))
    assert alone is not None
    dflash = next(candidate["extra"] for candidate in candidates if candidate["id"] == "demo-assistant-dflash")
    peak = max(alone.peak_bytes, dflash["peak_bytes"]) - alone.peak_bytes
    room = alone.total_bytes + dflash["weights_bytes"] + dflash["cache_bytes"] + peak + 1000
    site.worker.ready_info = type(site.worker.ready_info)(process_id=1, device="x (cpu)", memory_ceiling_bytes=room)
    row = await site.measured(rounds=1, grid="one")
    assert row["results"]["drafts"] == ["demo-assistant-dflash"]
    assert row["results"]["options"]["left_out"] == [
        "demo-assistant-eagle3: not enough memory beside the other drafters",
        "demo-draft: not enough memory beside the other drafters",
    ]


async def test_named_drafters_only_are_measured(site: ModelSite) -> None:
    row = await site.measured(drafts=["demo-draft"], rounds=1, grid="one")
    assert {method for method, _ in cell(row, 1)} == {"off", "auto", "draft_model", "ngram"}
    site.worker.commands.clear()
    await site.call("POST", "/admin/api/measurements", {"model": DEMO, "drafts": ["demo-hybrid-mtp"]}, status=202)
    await site.admin.measuring.wait()
    last = (await site.call("GET", "/admin/api/measurements"))["last"]
    assert last["outcome"] == "failed"
    assert "demo-hybrid-mtp" in last["problem"]
    assert site.worker.commands == []


async def test_results_can_be_deleted(site: ModelSite) -> None:
    row = await site.measured(rounds=1, grid="one")
    assert await site.call("DELETE", f"/admin/api/measurements/{row['id']}") == {"deleted": row["id"]}
    assert (await site.call("GET", "/admin/api/measurements"))["measurements"] == []
    gone = await site.call("DELETE", f"/admin/api/measurements/{row['id']}", status=404)
    never = await site.call("POST", "/admin/api/measurements/99/apply", {}, status=404)
    assert gone["error"]["code"] == never["error"]["code"] == "not_found", "the address is right"


async def test_what_is_chosen_while_requests_run_is_in_memory_after_the_measurement(site: ModelSite) -> None:
    await site.call("PUT", f"/admin/api/drafts/{DEMO}", {"drafts": ["demo-assistant-eagle3"]})
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    other = Somebody()
    site.admin.serving.activity.enter(other)
    site.worker.in_use = True
    attached = await site.call("POST", "/admin/api/drafts/attach", {"model": DEMO, "draft": "demo-draft"})
    assert (attached["became"], attached["measuring"]) == ("in_use", True)
    site.worker.in_use, site.worker.hold = False, asyncio.Event()
    site.admin.serving.activity.leave(other)
    await site.worker.wait_asked()
    site.admin.loading.on_event(Heartbeat(pending=False, snapshot=site.worker.book.snapshot))
    site.worker.hold.set()
    ended = await site.admin.measuring.wait()
    assert ended is not None
    assert ended.outcome == "done"
    await site.worker.wait_for(lambda: "demo-draft" in site.worker.book.snapshot.models[0].draft_ids)


async def test_what_waits_to_be_loaded_is_not_forgotten_where_the_worker_is_replaced(site: ModelSite) -> None:
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    site.worker.in_use = True
    assert await site.admin.loading.reload(DEMO) == "in_use"
    site.worker.in_use, held, loads = False, site.worker.book.snapshot, len(site.worker.loads)
    site.worker.book.snapshot = Snapshot()
    site.admin.loading.on_event(Heartbeat(pending=False, snapshot=Snapshot()))  # a new worker, before it loads again
    await site.call("GET", "/admin/api/models")
    site.worker.book.snapshot = held
    site.admin.loading.on_event(Heartbeat(pending=False, snapshot=held))
    await site.worker.wait_for(lambda: len(site.worker.loads) == loads + 1)


async def test_one_that_is_stopped_before_it_began_leaves_in_memory_what_came_meanwhile(
    site: ModelSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Somebody()
    site.admin.serving.activity.enter(other)
    await site.call("POST", "/admin/api/measurements", {"model": DEMO}, status=202)
    paused = asyncio.Event()
    monkeypatch.setattr(site.admin.serving.activity.idle, "wait", lambda: paused.set() or asyncio.Event().wait())
    await paused.wait()
    await site.call("POST", "/admin/api/models/load", {"model": DEMO})
    await site.call("DELETE", "/admin/api/measurements/current")
    ended = await site.admin.measuring.wait()
    assert ended is not None
    assert ended.outcome == "stopped"
    assert [model.id for model in site.worker.book.snapshot.models] == [DEMO]
    assert site.worker.unloads == []


async def test_the_end_of_the_server_ends_a_measurement(site: ModelSite) -> None:
    site.worker.hold = asyncio.Event()
    await site.call("POST", "/admin/api/measurements", {"model": DEMO}, status=202)
    await site.worker.wait_asked()
    await site.admin.measuring.close()
    assert site.admin.measuring.active == ""
    assert site.worker.unloads == [], "the worker ends anyway"


def test_tokens_that_arrive_in_one_lump_are_as_fast_as_the_worker_says() -> None:
    usage = Statistics(completion_tokens=40, decode_seconds=0.5)
    assert rate_of([usage], arrival_rate=2_000_000.0, seconds=1.0) == 80.0
    assert rate_of([usage], arrival_rate=79.0, seconds=1.0) == 79.0
    assert rate_of([usage], arrival_rate=0.0, seconds=1.0) == 80.0
    assert rate_of([Statistics(completion_tokens=40)], arrival_rate=0.0, seconds=2.0) == 20.0
    assert rate_of([usage, usage], arrival_rate=150.0, seconds=1.0) == 150.0
