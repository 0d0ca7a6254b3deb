"""The menu bar on macOS, with a fake AppKit that breaks where the real one does."""

import ast
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.desktop.menubar import MenuBar
from app.desktop.tray import MenuEntry, Tray, TrayContent
from app.i18n.catalogs import read_words
from app.settings import Settings
from tests.architecture.source import PACKAGE
from tests.cli.fake_server import FakeServer
from tests.desktop import fake_appkit

STUBS = Path(__file__).parent / "stubs"
LINE = MenuEntry()
READY = TrayContent(
    "ready",
    "",
    "Paceline: ready",
    (
        MenuEntry("No requests"),
        LINE,
        MenuEntry("Models in memory", children=(MenuEntry("demo-assistant", "unload demo-assistant"),)),
        MenuEntry("Start at login", "autostart", is_checked=True),
        MenuEntry("Quit", "quit"),
    ),
)


def busy(speed: str) -> TrayContent:
    """Return the same menu with other texts."""
    return TrayContent("busy", speed, f"Paceline: {speed}", (MenuEntry(f"{speed} tokens/s"), *READY.entries[1:]))


LONGER = TrayContent("ready", "", "", (*READY.entries, LINE, MenuEntry("Update", "update")))


@pytest.fixture
def tray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A new tray with a new fake AppKit; its changes to signal handlers are undone at the end."""
    for name, module in fake_appkit.fresh_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "app.desktop.macos", raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made = importlib.import_module("app.desktop.macos").MacTray()
    as_port: Tray = made  # so that mypy checks it against the protocol
    yield as_port
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.modules.pop("app.desktop.macos", None)


def item() -> fake_appkit.NSStatusItem:
    return fake_appkit.NSStatusBar.items[0]


def titles() -> list[str]:
    return [entry.title or "–" for entry in item().menu.items]


def run(tray: Any, *steps: Callable[[], object], chosen: Callable[[str], None] = lambda _action: None) -> None:
    """Run the loop, in which each turn does one of the steps of a user or of another thread; then quit."""
    fake_appkit.NSApplication.shared.steps = [*steps, tray.quit]
    tray.run(chosen)


def test_each_state_has_a_template_image_for_both_densities(tray: Any) -> None:
    for state in ("stopped", "starting", "ready", "busy", "trouble"):
        tray.show(TrayContent(state))
        image = item().button().image
        assert image.is_template
        assert image.size == (18.0, 18.0)
        assert [Path(representation.path).name for representation in image.representations] == [
            f"{state}.png",
            f"{state}@2x.png",
        ]
        assert all(
            Path(representation.path).is_file() and representation.size == (18.0, 18.0)
            for representation in image.representations
        )


def test_the_menu_shows_lines_ticks_and_what_is_below(tray: Any) -> None:
    tray.show(READY)
    assert titles() == ["No requests", "–", "Models in memory", "Start at login", "Quit"]
    said, line, models, autostart, _ = item().menu.items
    assert (said.is_enabled, line.is_separator, autostart.state) == (False, True, 1)
    assert [entry.title for entry in models.below.items] == ["demo-assistant"] if models.below else None
    assert not item().menu.is_automatic


def test_a_menu_that_is_shown_twice_keeps_its_items(tray: Any) -> None:
    tray.show(READY)
    before, below = list(item().menu.items), item().menu.items[2].below
    tray.show(busy("41"))
    assert item().menu.items == before
    assert item().menu.items[2].below is below
    assert titles()[0] == "41 tokens/s"
    assert (item().button().title, item().button().tip) == ("41", "Paceline: 41")
    tray.show(LONGER)
    assert item().menu.items[:5] == before
    tray.show(READY)
    assert item().menu.items == before
    assert fake_appkit.CALLS == [("setMenu:",)]


def test_words_change_in_a_menu_that_is_open_and_items_once_it_closes(tray: Any) -> None:
    tray.show(READY)
    before = list(item().menu.items)
    item().menu.opened()
    tray.show(busy("41"))
    assert titles()[0] == "41 tokens/s"
    tray.show(LONGER)
    assert item().menu.items == before
    assert item().button().image.representations[0].path.endswith("ready.png")
    item().menu.closed()
    assert titles()[-1] == "Update"


def test_what_waited_for_a_menu_to_close_is_forgotten_when_it_fits_again(tray: Any) -> None:
    tray.show(READY)
    item().menu.opened()
    tray.show(LONGER)
    tray.show(busy("12"))
    item().menu.closed()
    assert titles() == ["12 tokens/s", "–", "Models in memory", "Start at login", "Quit"]


def test_an_item_becomes_a_line_and_loses_what_is_below_it(tray: Any) -> None:
    tray.show(READY)
    tray.show(TrayContent("ready", entries=(LINE, MenuEntry("Chat", "chat"), MenuEntry("Models in memory"))))
    assert titles() == ["–", "Chat", "Models in memory"]
    assert item().menu.items[2].below is None


def test_an_entry_that_is_chosen_reaches_who_listens(tray: Any) -> None:
    heard: list[str] = []
    tray.show(READY)
    models = item().menu.items[2].below
    assert models is not None
    run(tray, item().menu.items[4].clicked, models.items[0].clicked, chosen=heard.append)
    assert heard == ["quit", "unload demo-assistant"]


def test_a_menu_that_closes_is_reported_as_seen(tray: Any) -> None:
    heard: list[str] = []
    tray.show(READY)
    run(tray, item().menu.opened, item().menu.closed, chosen=heard.append)
    assert heard == ["seen"]


def test_a_double_click_on_the_app_that_runs_opens_the_dashboard(tray: Any) -> None:
    heard: list[str] = []
    application = fake_appkit.NSApplication.shared
    run(
        tray,
        lambda: application.delegate.applicationShouldHandleReopen_hasVisibleWindows_(application, False),
        chosen=heard.append,
    )
    assert heard == ["dashboard"]


def test_what_other_threads_hand_over_is_done_in_the_loop_also_while_the_menu_is_open(tray: Any) -> None:
    done: list[int] = []

    def hand_over() -> None:
        other = threading.Thread(target=tray.schedule, args=(lambda: done.append(threading.get_ident()),))
        other.start()
        other.join()

    run(tray, hand_over)
    assert done == [threading.get_ident()]
    loop = fake_appkit.NSRunLoop.main
    assert loop.modes == ["kCFRunLoopCommonModes"]
    assert [(timer.repeats, timer.is_valid) for timer in loop.timers] == [(True, False)]


def test_what_fails_in_the_loop_is_logged_and_the_next_thing_is_done(
    tray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    run(tray, lambda: tray.schedule(lambda: 1 / 0), lambda: tray.schedule(lambda: done.append("next")))
    assert done == ["next"]
    assert "ZeroDivisionError" in caplog.text


def test_it_is_no_app_of_the_dock_and_leaves_nothing_behind(tray: Any) -> None:
    tray.show(READY)
    run(tray)
    assert fake_appkit.NSApplication.shared.policy == 1
    assert fake_appkit.NSStatusBar.items == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(tray: Any, number: int) -> None:
    fake_appkit.NSApplication.shared.steps = [lambda: os.kill(os.getpid(), number)]
    tray.run(lambda _action: None)
    assert fake_appkit.NSStatusBar.items == []


def test_text_goes_to_the_pasteboard_and_languages_come_from_the_system(tray: Any) -> None:
    fake_appkit.NSPasteboard.general.text = "before"
    tray.copy("http://127.0.0.1:8710/v1")
    assert fake_appkit.NSPasteboard.general.text == "http://127.0.0.1:8710/v1"
    assert tray.languages() == "ko-KR,en-US"


def test_what_is_scheduled_waits_for_no_timer(tray: Any) -> None:
    fake_appkit.NSApplication.shared.has_timers = False
    done: list[str] = []
    run(tray, lambda: tray.schedule(lambda: done.append("at once")))
    assert done == ["at once"]


def test_a_notification_gets_its_words_as_arguments(tray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "told"
    os.mkfifo(pipe)
    program = tmp_path / "osascript"
    program.write_text(f'#!/bin/sh\nfor word; do printf "[%s]" "$word"; done >{pipe}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tray.notify("Worker restarted", 'He said "x" & do shell script "id"')
    assert pipe.read_text().endswith('[-e][end run][Worker restarted][He said "x" & do shell script "id"]')


def test_the_whole_menu_bar_shows_a_server_and_does_what_is_chosen(
    tray: Any, served: FakeServer, settings: Settings
) -> None:
    """Content of the menu, its process and AppKit together."""
    bar = MenuBar(settings, tray, read_words("ko"), lambda _server, _to: None)

    def unload() -> None:
        memory = next(entry for entry in item().menu.items if entry.title == "메모리에 있는 모델")
        below = memory.below.items[0].below if memory.below else None
        assert below is not None
        next(entry for entry in below.items if entry.title == "언로드").clicked()

    def once(is_so: Callable[[], object], deed: Callable[[], None]) -> Callable[[], None]:
        """Return a step that repeats itself until `is_so`, then does the deed."""

        def step() -> None:
            if is_so():
                deed()
            else:
                fake_appkit.NSApplication.shared.steps.insert(0, step)

        return step

    def is_unloaded() -> bool:
        return ("POST", "/api/unload", {"model": "demo-assistant"}) in [request[:3] for request in served.requests]

    fake_appkit.NSApplication.shared.steps = [
        once(lambda: titles()[0] == "준비됨", unload),
        once(is_unloaded, tray.quit),
    ]
    bar.run()
    assert fake_appkit.NSStatusBar.items == []


def test_the_fake_has_what_the_stubs_say_and_no_other_file_imports_appkit() -> None:
    for name, there in (("AppKit", fake_appkit.APPKIT), ("Foundation", fake_appkit.FOUNDATION)):
        stub = ast.parse((STUBS / f"{name}.pyi").read_text(encoding="utf-8"))
        kinds = [node for node in stub.body if isinstance(node, ast.ClassDef)]
        constants = [node.target.id for node in stub.body if isinstance(node, ast.AnnAssign | ast.Name)]
        assert {*(kind.name for kind in kinds), *constants} == set(there)
        for kind in kinds:
            methods = [member.name for member in kind.body if isinstance(member, ast.FunctionDef)]
            assert [method for method in methods if not callable(getattr(there[kind.name], method, None))] == []
    users = [path.name for path in PACKAGE.rglob("*.py") if "import AppKit" in path.read_text(encoding="utf-8")]
    assert users == ["macos.py"]
