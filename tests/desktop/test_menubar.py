"""The menu bar's process: what it sees of a server, and that each entry does what it says."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from app.core.errors import CommandError
from app.core.server_file import RunningServer, held_home
from app.desktop.menubar import MenuBar, look, only_one, show_menu_bar
from app.desktop.tray import Face
from app.i18n import read_words
from app.settings import Settings
from tests.cli.fake_server import FakeServer
from tests.desktop.test_menu import state

SECONDS = 30.0


class FakeTray:
    """A menu bar whose person waits for what they wait for, then chooses."""

    def __init__(self) -> None:
        self.faces: list[Face] = []
        self.told: list[str] = []
        self.copied: list[str] = []
        self.opened: list[str] = []
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        self.story: Callable[[Callable[[str], None]], None] = lambda _choose: None

    def show(self, face: Face) -> None:
        with self._changed:
            self.faces.append(face)
            self._changed.notify_all()

    def run(self, chosen: Callable[[str], None]) -> None:
        self.story(chosen)
        chosen("quit")
        assert self._is_over.wait(SECONDS)

    def hand_over(self, call: Callable[[], None]) -> None:
        call()
        with self._changed:
            self._changed.notify_all()

    def notify(self, title: str, text: str) -> None:
        self.told.append(text)

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
    """A menu bar over a story."""
    tray = FakeTray()
    tray.story = lambda choose: story(tray, choose)
    own = (sys.executable, "-c", program)
    MenuBar(settings, tray, read_words("en"), lambda _server, to: tray.opened.append(to), program=own).run()
    return tray


def test_a_home_without_a_server_is_stopped_and_one_that_answers_tells_its_state(
    settings: Settings, fake: FakeServer
) -> None:
    assert not look(settings).is_served
    with held_home(settings.home) as write:
        assert (look(settings).is_served, look(settings).state) == (True, {})
        write(RunningServer("127.0.0.1", fake.port, "key"))
        seen = look(settings)
    assert seen.address.endswith(str(fake.port))
    assert seen.state == state()
    assert seen.models == ("demo-assistant", "demo-hybrid")


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
    served.answers["/admin/api/keys"] = (201, {"text": "pl-secret"})

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("copy_key")
        tray.until(lambda: tray.told)

    tray = play(settings, story)
    assert tray.copied == ["pl-secret"]
    ((path, body),) = asked(served)
    assert (path, body["scope"]) == ("/admin/api/keys", "inference")
    assert body["name"].startswith("Menu bar, 2")
    assert body["name"] in tray.told[0]
    assert "pl-secret" not in tray.told[0]


def test_start_runs_our_command_and_shows_that_it_starts(settings: Settings) -> None:
    said = settings.home.parent / "said"

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("start")
        tray.until(said.exists)
        tray.until(lambda: tray.faces[-1].state == "stopped")

    tray = play(settings, story, f"import sys, pathlib; pathlib.Path({str(said)!r}).write_text(sys.argv[1])")
    assert said.read_text() == "start"
    assert tray.told == []


def test_a_server_that_no_longer_starts_at_login_runs_on(settings: Settings, served: FakeServer) -> None:
    said = settings.home.parent / "said"
    note = f"import sys; print(*sys.argv[1:], file=open({str(said)!r}, 'a'))"

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("logout")
        tray.until(lambda: said.exists() and len(said.read_text().splitlines()) == 2)

    play(settings, story, note)
    assert said.read_text() == "service uninstall\nstart\n"


def test_what_a_command_could_not_do_is_told_once_and_shown_until_the_next_one(settings: Settings) -> None:
    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        choose("start")
        tray.until(lambda: tray.faces[-1].state == "trouble")
        shown.append(tray.faces[-1].entries[0].title)

    shown: list[str] = []
    tray = play(settings, story, "import sys; sys.exit('first\\nport 8710 is taken')")
    assert tray.told == ["port 8710 is taken"]
    assert shown == ["port 8710 is taken"]


def test_a_server_that_ends_by_itself_is_told(settings: Settings, fake: FakeServer) -> None:
    home = held_home(settings.home)
    write = home.__enter__()
    write(RunningServer("127.0.0.1", fake.port, "key"))

    def story(tray: FakeTray, choose: Callable[[str], None]) -> None:
        tray.until(lambda: tray.faces[-1].state == "ready")
        home.__exit__(None, None, None)
        choose("nothing that exists")  # it looks again at once
        tray.until(lambda: tray.faces[-1].state == "stopped")

    tray = play(settings, story)
    assert tray.told == ["The server ended. Start it again from the menu."]


def test_quit_leaves_the_server_and_quit_all_stops_it_first(settings: Settings) -> None:
    said = settings.home.parent / "said"
    note = f"import sys, pathlib; pathlib.Path({str(said)!r}).write_text(sys.argv[1])"
    play(settings, lambda _tray, _choose: None, note)
    assert not said.exists()
    play(
        settings,
        lambda tray, choose: (choose("quit_all"), tray.until(lambda: said.exists() and said.read_text()))[1],
        note,
    )
    assert said.read_text() == "stop"


def test_a_home_has_one_menu_bar(settings: Settings) -> None:
    with only_one(settings.home) as first, only_one(settings.home) as second:
        assert (first, second) == (True, False)
    with only_one(settings.home) as later:
        assert later


@pytest.mark.skipif(sys.platform == "darwin", reason="there it is drawn")
def test_where_no_menu_bar_can_be_drawn_the_next_action_is_told(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CommandError, match="paceline desktop"):
        show_menu_bar(settings, lambda _server, _to: None)
