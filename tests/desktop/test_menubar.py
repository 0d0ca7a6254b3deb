"""The menu bar's process: what it sees of a server, and that each entry does what it says."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from app.command.server import running_server as home_server
from app.command.service import setup_address
from app.core.errors import CommandError
from app.desktop.menubar import MenuBar, only_one, read_service_state, show_menu_bar
from app.desktop.tray import MenuEntry, TrayContent
from app.desktop.window import address_of
from app.i18n.catalogs import Words, read_words
from app.machine.server_file import RunningServer, lock_home
from app.settings import Settings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from tests.cli.fake_server import FakeServer, running_server
from tests.desktop.test_menu import STOPPED, actions, menu, state

SECONDS = 30.0


class FakeTray:
    """A tray whose `story` plays the user: it waits for content, and chooses entries."""

    def __init__(self) -> None:
        self.contents: list[TrayContent] = []
        self.notices: list[str] = []
        self.copied: list[str] = []
        self.opened: list[str] = []
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        self.story: Callable[[Callable[[str], None]], None] = lambda _choose: None

    def show(self, content: TrayContent) -> None:
        with self._changed:
            self.contents.append(content)
            self._changed.notify_all()

    def run(self, on_choose: Callable[[str], None]) -> None:
        self.story(on_choose)
        on_choose("quit")
        self.wait_for_quit()

    def wait_for_quit(self) -> None:
        assert self._is_over.wait(SECONDS)

    def schedule(self, call: Callable[[], None]) -> None:
        call()
        with self._changed:
            self._changed.notify_all()

    def notify(self, title: str, text: str) -> None:
        self.notices.append(text)

    def copy(self, text: str) -> None:
        self.copied.append(text)

    def languages(self) -> str:
        return "en"

    def quit(self) -> None:
        self._is_over.set()

    def until(self, is_so: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_so, SECONDS)


def play(settings: Settings, story: Callable[[FakeTray, Callable[[str], None]], None], program: str = "") -> FakeTray:
    """Run a menu bar with `story` as its user; return its tray."""
    tray = FakeTray()
    tray.story = lambda choose: story(tray, choose)
    own = (sys.executable, "-c", program)
    MenuBar(settings, tray, read_words("en"), lambda _server, to: tray.opened.append(to), program=own).run()
    return tray


def test_a_home_without_a_server_is_stopped_and_one_that_answers_tells_its_state(
    settings: Settings, fake: FakeServer
) -> None:
    assert not read_service_state(settings, STOPPED).is_served
    with lock_home(settings.home) as write:
        assert (read_service_state(settings, STOPPED).is_served, read_service_state(settings, STOPPED).state) == (
            True,
            {},
        )
        write(RunningServer("127.0.0.1", fake.port, "key"))
        seen = read_service_state(settings, STOPPED)
    assert seen.address.endswith(str(fake.port))
    assert seen.state == state()
    assert seen.models == ("demo-assistant", "demo-hybrid")


def test_a_server_that_hangs_holds_up_neither_menu_bar_nor_window(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("desktop.menubar", "desktop.window", "command.service"):
        monkeypatch.setattr(f"app.{module}.ANSWER_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as hanging, lock_home(settings.home) as write:
        write(RunningServer("127.0.0.1", hanging.getsockname()[1], "key"))
        assert (read_service_state(settings, STOPPED).is_served, read_service_state(settings, STOPPED).state) == (
            True,
            {},
        )
        server = home_server(settings)
        assert server is not None
        assert address_of(server, "/admin/chat") == f"{server.address}/admin/chat", "it asks for the password there"
        with pytest.raises(CommandError, match="timed out"):
            setup_address(settings)


def asked(fake: FakeServer) -> list[tuple[str, Any]]:
    return [(path, body) for method, path, body, _ in fake.requests if method == "POST"]


def test_entries_of_models_ask_the_server(settings: Settings, served: FakeServer) -> None:
    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        for number, action in enumerate(("load demo-hybrid", "pin demo-hybrid", "unpin demo-hybrid", "unload a b")):
            choose(action)
            tray.until(lambda expected=number + 1: len(asked(served)) == expected)

    play(settings, story)
    assert asked(served) == [
        ("/api/load", {"model": "demo-hybrid"}),
        ("/api/load", {"model": "demo-hybrid", "pin": True}),
        ("/api/load", {"model": "demo-hybrid", "pin": False}),
        ("/api/unload", {"model": "a b"}),
    ]


def test_pages_open_signed_in_and_the_address_is_copied(settings: Settings, served: FakeServer) -> None:
    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("copy")
        tray.until(lambda: tray.copied)
        choose("chat")
        tray.until(lambda: tray.opened)

    tray = play(settings, story)
    assert tray.copied == [f"http://127.0.0.1:{served.port}/v1"]
    assert tray.opened == ["/admin/chat"]


def test_a_key_that_is_made_for_it_is_copied_and_named(settings: Settings, served: FakeServer) -> None:
    served.answers["/admin/api/keys"] = (200, {"text": "pl-secret", "key": {"id": 7}, "keys": []})

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("copy_key")
        tray.until(lambda: tray.notices)

    tray = play(settings, story)
    assert tray.copied == ["pl-secret"]
    ((path, body),) = asked(served)
    assert (path, body["scope"]) == ("/admin/api/keys", "inference")
    assert body["name"].startswith("Menu bar, 2")
    assert body["name"] in tray.notices[0]
    assert "pl-secret" not in tray.notices[0]


@pytest.mark.parametrize(("used_at", "revoked"), [(None, ["/admin/api/keys/7"]), (1.0, [])])
def test_another_key_takes_the_place_of_one_that_nobody_used(
    settings: Settings, served: FakeServer, used_at: float | None, revoked: list[str]
) -> None:
    listed = [{"id": 6, "used_at": None}, {"id": 7, "used_at": used_at}]
    served.answers["/admin/api/keys"] = (200, {"text": "pl-secret", "key": {"id": 7}, "keys": listed})
    served.answers["/admin/api/keys/7"] = (200, {})

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        for count in (1, 2):
            choose("copy_key")
            tray.until(lambda expected=count: len(tray.notices) == expected)

    play(settings, story)
    assert [path for method, path, _, _ in served.requests if method == "DELETE"] == revoked


def test_the_command_that_updates_is_copied_and_told(settings: Settings, served: FakeServer) -> None:
    served.answers["/admin/api/menu"] = (200, menu(newer="9.0", update_command="brew upgrade paceline"))

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("update")
        tray.until(lambda: tray.notices)

    tray = play(settings, story)
    assert tray.copied == ["brew upgrade paceline"]
    assert "brew upgrade paceline" in tray.notices[0]


def test_a_server_that_comes_back_on_another_port_is_followed(settings: Settings, fake: FakeServer) -> None:
    with running_server() as other, lock_home(settings.home) as write:
        other.answers["/admin/api/menu"] = (200, menu(models=["elsewhere"]))
        write(RunningServer("127.0.0.1", fake.port, "key"))

        def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
            tray.until(lambda: "load demo-hybrid" in offered(tray))
            write(RunningServer("127.0.0.1", other.port, "key"))
            choose("nothing that exists")  # it looks again at once
            tray.until(lambda: "load elsewhere" in offered(tray))
            choose("copy")
            tray.until(lambda: tray.copied)

        assert play(settings, story).copied == [f"http://127.0.0.1:{other.port}/v1"]


def test_the_server_of_another_home_is_not_this_ones(settings: Settings, fake: FakeServer) -> None:
    with lock_home(settings.home.parent / "other") as write:
        write(RunningServer("127.0.0.1", fake.port, "key"))
        assert not read_service_state(settings, STOPPED).is_served
        other = settings.with_values({"home": settings.home.parent / "other"})
        assert read_service_state(other, STOPPED).state == state()
    assert {path for _, path, _, _ in fake.requests} == {"/admin/api/menu"}


def offered(tray: FakeTray) -> set[str]:
    """Return the actions of the current menu."""
    return actions(tray.contents[-1].entries) if tray.contents else set()


def test_start_runs_our_command_and_shows_that_it_starts(settings: Settings) -> None:
    said = settings.home.parent / "said"

    go_on = settings.home.parent / "go on"

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("start")
        tray.until(lambda: tray.contents[-1].state == "starting")
        assert tray.contents[-1].entries[0].title == "Starting…"
        go_on.touch()
        tray.until(lambda: tray.contents[-1].state == "stopped")

    program = f"""import sys, pathlib, time
while not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)
pathlib.Path({str(said)!r}).write_text(sys.argv[1])"""
    tray = play(settings, story, program)
    assert said.read_text() == "start"
    assert tray.notices == []


def test_a_quick_action_beside_a_long_one_leaves_it_shown(settings: Settings) -> None:
    go_on = settings.home.parent / "go on"

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("start")
        tray.until(lambda: tray.contents[-1].state == "starting")
        choose("update")
        tray.until(lambda: tray.copied)
        shown = len(tray.contents)
        tray.until(lambda: len(tray.contents) > shown + 1)  # of two new states, one was read after the action
        assert tray.contents[-1].state == "starting"
        go_on.touch()
        tray.until(lambda: tray.contents[-1].state == "stopped")

    play(settings, story, f"import pathlib, time\nwhile not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)")


def test_a_server_that_no_longer_starts_at_login_runs_on(settings: Settings, served: FakeServer) -> None:
    said = settings.home.parent / "said"
    note = f"import sys; print(*sys.argv[1:], file=open({str(said)!r}, 'a'))"

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("logout")
        tray.until(lambda: said.exists() and len(said.read_text().splitlines()) == 2)

    play(settings, story, note)
    assert said.read_text() == "service uninstall\nstart\n"


def test_what_a_command_could_not_do_is_told_once_and_shown_until_the_menu_was_seen(settings: Settings) -> None:
    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("start")
        tray.until(lambda: tray.contents[-1].state == "trouble")
        shown.append(tray.contents[-1].entries[0].title)

        choose("seen")
        tray.until(lambda: tray.contents[-1].state == "stopped")

    shown: list[str] = []
    tray = play(settings, story, "import sys; sys.exit('first\\nport 8710 is taken')")
    assert tray.notices == ["port 8710 is taken"]
    assert shown == ["port 8710 is taken"]


def test_a_port_that_another_program_has_is_named_with_it_and_another_one_is_kept_before_the_next_start(
    settings: Settings,
) -> None:
    said = settings.home.parent / "said"

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("start")
        tray.until(lambda: tray.contents[-1].state == "trouble")
        shown.extend(entry for entry in tray.contents[-1].entries if entry.title)
        choose(shown[1].action)
        tray.until(lambda: said.exists() and len(said.read_text().splitlines()) == 3)

    shown: list[MenuEntry] = []
    program = f"import sys; print(*sys.argv[1:], file=open({str(said)!r}, 'a')); sys.exit(sys.argv[1] == 'start')"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        play(settings.with_values({"port": port}), story, program)
    name = psutil.Process().name()
    assert shown[0].title == f"Port {port} is used by {name} (process {os.getpid()})."
    other = int(shown[1].action.removeprefix("port "))
    assert port < other
    assert [(entry.title, entry.action) for entry in shown[1:3]] == [
        (f"Use another port ({other})", f"port {other}"),
        ("Try again", "start"),
    ]
    assert said.read_text() == f"start\nconfig set port {other}\nstart\n"


def test_a_program_that_is_gone_is_said_and_the_menu_lives_on(settings: Settings) -> None:
    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("start")
        tray.until(lambda: tray.contents[-1].state == "trouble")
        choose("update")
        tray.until(lambda: tray.copied)

    tray = FakeTray()
    tray.story = lambda choose: story(tray, choose)
    MenuBar(settings, tray, read_words("en"), lambda *_: None, program=("/nowhere/paceline",)).run()
    assert any("/nowhere/paceline" in notice for notice in tray.notices)


def test_a_server_that_ends_by_itself_is_told(settings: Settings, fake: FakeServer) -> None:
    home = lock_home(settings.home)
    write = home.__enter__()
    write(RunningServer("127.0.0.1", fake.port, "key"))

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        tray.until(lambda: tray.contents[-1].state == "ready")
        home.__exit__(None, None, None)
        choose("nothing that exists")  # it looks again at once
        tray.until(lambda: tray.contents[-1].state == "stopped")

    tray = play(settings, story)
    assert tray.notices == ["The server ended. Start it again from the menu."]


def test_quit_leaves_the_server_and_quit_all_stops_it_first(settings: Settings) -> None:
    said = settings.home.parent / "said"
    note = f"import sys, pathlib; pathlib.Path({str(said)!r}).write_text(sys.argv[1])"
    play(settings, lambda _tray, _choose: None, note)
    assert not said.exists()

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("quit_all")
        tray.wait_for_quit()
        assert said.read_text() == "stop"

    play(settings, story, note)


def test_a_home_has_one_menu_bar(settings: Settings) -> None:
    with only_one(settings.home) as first, only_one(settings.home) as second:
        assert (first, second) == (True, False)
    with only_one(settings.home) as later:
        assert later


@pytest.mark.skipif(sys.platform == "darwin", reason="there it is drawn")
def test_the_menu_speaks_the_language_that_is_stored(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class ShownMenuBar:
        def __init__(self, _settings: Settings, _tray: FakeTray, words: Words, _open_page: object) -> None:
            shown.append(words.language)

        def run(self) -> None:
            """Quit at once."""

    monkeypatch.setattr("app.desktop.menubar.has_tray", lambda: True)
    monkeypatch.setattr("app.desktop.menubar.TRAYS", {sys.platform: ("", "tests.desktop.test_menubar", "FakeTray")})
    monkeypatch.setattr("app.desktop.menubar.MenuBar", ShownMenuBar)
    store = Store(settings.home / FILE_NAME)
    for language in ("ko", "ja"):
        StoredSettings(store).change_settings({"language": language}, source="a person")
        assert show_menu_bar(settings, lambda _server, _to: None)
    assert shown == ["ko", "ja"]


def test_where_no_menu_bar_can_be_drawn_the_next_action_is_told(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CommandError, match="paceline desktop"):
        show_menu_bar(settings, lambda _server, _to: None)
