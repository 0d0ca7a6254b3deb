"""The content of the menu bar in each situation, and its notifications."""

import dataclasses
from typing import Any

import pytest

from app.core.reason import Reason, reason_object
from app.desktop.menu import ServiceState, notifications, tray_content, tray_state
from app.desktop.tray import MenuEntry
from app.i18n.catalogs import languages, read_words

WORDS = read_words("en")
WORKER = {"ready": True, "restarts": 0, "last_exit": {"reason": "", "reason_code": "", "reason_values": {}}}
MODEL = {"id": "demo-assistant", "pinned": False, "draft_ids": ["demo-draft"]}


def state(**changed: Any) -> dict[str, Any]:
    return {"worker": WORKER, "models": [MODEL], "quarantined": [], "running": 0} | changed


def menu(**changed: Any) -> dict[str, Any]:
    """Return the server's answer to a request for the menu."""
    known = {"models": ["demo-assistant", "demo-hybrid"], "full_disk": "", "newer": "", "update_command": "update it"}
    return {"state": state(), "pace": {}, **known, **changed}


STOPPED = ServiceState()
STARTING = ServiceState(is_served=True)
READY = ServiceState(
    is_served=True, address="http://127.0.0.1:8710", state=state(), models=("demo-assistant", "demo-hybrid")
)
BUSY = dataclasses.replace(READY, state=state(running=1), pace={"tokens_per_second": 41.4, "acceptance": 0.823})
BUSY_WORDS = "41 tokens per second · 82% of drafts accepted"
LOADING = dataclasses.replace(READY, state=state(loading=[{"id": "demo-hybrid"}]))
QUARANTINED = dataclasses.replace(READY, state=state(quarantined=[{"id": "demo-hybrid"}]))
FULL_DISK = dataclasses.replace(READY, full_disk="/data/paceline")
NEWER = dataclasses.replace(READY, newer_version="9.0", update_command="brew upgrade paceline")
PORT_TAKEN = ServiceState(problem="port 8710 is taken: `paceline serve --port 0` picks a free one")
RENEWED = {**WORKER, "restarts": 1, "last_exit": {"reason": "it was killed", "reason_code": "no such words"}}


def titles(seen: ServiceState) -> list[str]:
    return [entry.title for entry in tray_content(seen, WORDS).entries if entry.title]


def actions(entries: tuple[MenuEntry, ...]) -> set[str]:
    return {entry.action for entry in entries if entry.action} | {
        action for entry in entries for action in actions(entry.children)
    }


@pytest.mark.parametrize(
    ("seen", "image", "first"),
    [
        (STOPPED, "stopped", "Stopped"),
        (STARTING, "starting", "Starting…"),
        (dataclasses.replace(STOPPED, running_command="start"), "starting", "Starting…"),
        (dataclasses.replace(READY, running_command="stop"), "starting", "Stopping: running requests finish first…"),
        (
            dataclasses.replace(READY, running_command="quit_all"),
            "starting",
            "Stopping: running requests finish first…",
        ),
        (dataclasses.replace(READY, state=state(worker={**WORKER, "ready": False})), "starting", "Starting…"),
        (READY, "ready", "Ready"),
        (BUSY, "busy", BUSY_WORDS),
        (dataclasses.replace(BUSY, pace={"tokens_per_second": 9.0, "acceptance": None}), "busy", "9 tokens per second"),
        (LOADING, "starting", "Loading demo-hybrid…"),
        (dataclasses.replace(BUSY, state=state(running=1, loading=[{"id": "demo-hybrid"}])), "busy", BUSY_WORDS),
        (PORT_TAKEN, "trouble", PORT_TAKEN.problem),
    ],
)
def test_each_situation_has_its_image_and_first_line(seen: ServiceState, image: str, first: str) -> None:
    assert tray_state(seen) == image
    assert titles(seen)[0] == first
    assert tray_content(seen, WORDS).title == (first.split(maxsplit=1)[0] if image == "busy" else "")


def test_a_quarantined_model_is_trouble_that_names_the_next_action() -> None:
    assert tray_state(QUARANTINED) == "trouble"
    assert titles(QUARANTINED)[0].startswith("demo-hybrid is quarantined")
    assert "dashboard" in titles(QUARANTINED)[0]


def test_a_disk_without_room_is_trouble_and_told_once() -> None:
    assert tray_state(FULL_DISK) == "trouble"
    assert titles(FULL_DISK)[0].startswith("The disk of /data/paceline is full: make room")
    assert notifications(READY, FULL_DISK, WORDS) == [titles(FULL_DISK)[0]]
    assert notifications(FULL_DISK, FULL_DISK, WORDS) == []


def test_a_newer_version_is_an_entry_and_told_once() -> None:
    assert tray_state(NEWER) == "ready"
    assert titles(NEWER)[:2] == ["Ready", "Update to 9.0: copy command"]
    assert actions(tray_content(NEWER, WORDS).entries) - actions(tray_content(READY, WORDS).entries) == {"update"}
    assert [text.partition(":")[0] for text in notifications(READY, NEWER, WORDS)] == ["Paceline 9.0 is available"]
    assert notifications(NEWER, NEWER, WORDS) == []


def test_what_is_loaded_is_offered_in_the_servers_order_and_only_a_handful() -> None:
    many = dataclasses.replace(READY, models=("z", "demo-assistant", *"abcdefghi"))
    load = next(entry for entry in tray_content(many, WORDS).entries if entry.title == "Load a model")
    assert [entry.title for entry in load.children] == ["z", *"abcdefg"]


def test_what_can_be_done_fits_the_situation() -> None:
    always = {"quit", "login"}
    assert actions(tray_content(STOPPED, WORDS).entries) == always | {"start"}
    assert actions(tray_content(dataclasses.replace(STOPPED, running_command="start"), WORDS).entries) == always
    assert actions(tray_content(STARTING, WORDS).entries) == always | {"stop", "restart", "quit_all"}
    assert actions(tray_content(READY, WORDS).entries) == always | {
        "stop",
        "restart",
        "quit_all",
        "dashboard",
        "chat",
        "copy",
        "copy_key",
        "load demo-hybrid",
        "unload demo-assistant",
        "pin demo-assistant",
    }


def test_a_pinned_model_and_start_at_login_are_ticked_and_can_be_undone() -> None:
    seen = dataclasses.replace(READY, state=state(models=[{**MODEL, "pinned": True}]), starts_at_login=True)
    entries = tray_content(seen, WORDS).entries
    assert {"unpin demo-assistant", "logout"} <= actions(entries)
    ticked = [item.title for entry in entries for item in (entry, *entry.children) if item.is_checked]
    assert ticked == ["Start at login"]
    model = entries[2].children[0]
    assert [item.title for item in model.children if item.is_checked] == ["Pin"]
    assert model.children[0] == MenuEntry("demo-draft")


def test_the_menu_keeps_its_shape_while_only_numbers_change() -> None:
    other = dataclasses.replace(BUSY, pace={"tokens_per_second": 7.0, "acceptance": 0.5})
    shapes = [[entry.shape for entry in tray_content(seen, WORDS).entries] for seen in (READY, BUSY, other)]
    assert shapes[0] == shapes[1] == shapes[2]


def test_only_what_is_new_and_nobody_asked_for_is_told() -> None:
    assert notifications(READY, READY, WORDS) == []
    assert notifications(STOPPED, READY, WORDS) == []
    assert notifications(READY, QUARANTINED, WORDS) == [titles(QUARANTINED)[0]]
    assert notifications(QUARANTINED, QUARANTINED, WORDS) == []
    assert notifications(READY, STOPPED, WORDS) == ["The server ended. Start it again from the menu."]
    assert notifications(dataclasses.replace(READY, running_command="start"), STOPPED, WORDS) == []
    assert notifications(STOPPED, PORT_TAKEN, WORDS) == [PORT_TAKEN.problem]
    assert notifications(PORT_TAKEN, PORT_TAKEN, WORDS) == []


def test_a_worker_that_restarted_is_told_with_the_reason() -> None:
    renewed = dataclasses.replace(READY, state=state(worker=RENEWED))
    assert notifications(READY, renewed, WORDS) == [
        "The worker restarted: it was killed. Requests that ran ended with an error: send them again."
    ]
    assert notifications(renewed, renewed, WORDS) == []
    assert notifications(STOPPED, renewed, WORDS) == []


def restarted_because(reason: Reason) -> ServiceState:
    worker = {**WORKER, "restarts": 1, "last_exit": reason_object(reason)}
    return dataclasses.replace(READY, state=state(worker=worker))


@pytest.mark.parametrize("code", ["exit_restarted", "exit_stopped"])
def test_a_restart_that_was_asked_for_is_not_told(code: str) -> None:
    assert notifications(READY, restarted_because(Reason(code, {"code": "0"})), WORDS) == []


@pytest.mark.parametrize(
    ("language", "silence"), [("en", "for 120 s"), ("ja", "120秒間"), ("ko", "120초 동안"), ("zh-Hans", "120 秒内")]
)
def test_seconds_in_a_reason_have_their_unit(language: str, silence: str) -> None:
    hung = restarted_because(Reason("exit_hung", {"seconds": 120.0}))
    [text] = notifications(READY, hung, read_words(language))
    assert silence in text


@pytest.mark.parametrize("language", languages())
def test_every_situation_can_be_told_in_every_language(language: str) -> None:
    words = read_words(language)
    for seen in (STOPPED, STARTING, READY, BUSY, LOADING, QUARANTINED, PORT_TAKEN, FULL_DISK, NEWER):
        assert tray_content(seen, words).entries
    assert notifications(READY, dataclasses.replace(READY, state=state(worker=RENEWED)), words)
