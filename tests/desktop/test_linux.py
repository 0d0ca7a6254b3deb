"""The menu bar on Linux as a user operates it: the real process, in an X11 tray, by mouse and keyboard."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.desktop.menu import tray_content
from app.settings import Settings
from tests.cli.fake_server import FakeServer
from tests.desktop.screen import SECONDS, Screen, ended, screen_with_tray
from tests.desktop.test_menu import BUSY, QUARANTINED, READY, STOPPED, WORDS

pytestmark = [
    pytest.mark.system("a screen of X11"),
    pytest.mark.skipif(sys.platform != "linux", reason="the menu bar of Linux"),
]
MENUBAR = [sys.executable, "-m", "app.cli", "menubar"]


@pytest.fixture(scope="module")
def screen() -> Iterator[Screen]:
    with screen_with_tray() as made:
        yield made


def posts(fake: FakeServer) -> list[tuple[str, object]]:
    return [(path, body) for method, path, body, _ in fake.requests if method == "POST"]


def test_a_model_is_unloaded_by_keyboard_and_sigterm_ends_the_menu_bar(
    screen: Screen, settings: Settings, served: FakeServer
) -> None:
    environment = {**screen.environment, "HOME": str(settings.home.parent), "PACELINE_HOME": str(settings.home)}
    with ended(MENUBAR, env=environment) as process:
        screen.open_menu()
        screen.press("Down", windows=2)
        screen.press("Right", windows=3)  # the models in memory
        screen.press("Right", windows=4)  # this model: its drafter cannot be chosen, so Pin is first
        screen.press("Down", windows=4)
        screen.press("Return", windows=1)
        screen.until(lambda: bool(posts(served)))
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert posts(served) == [("/api/unload", {"model": "demo-assistant"})]


def test_quit_leaves_the_server(screen: Screen, settings: Settings, served: FakeServer) -> None:
    environment = {**screen.environment, "HOME": str(settings.home.parent), "PACELINE_HOME": str(settings.home)}
    with ended(MENUBAR, env=environment) as process:
        screen.open_menu()
        screen.press("Up", windows=2)  # the last entry: stop the server and quit
        screen.press("Up", windows=2)
        screen.do("key", "Return")
        assert process.wait(SECONDS) == 0
    assert posts(served) == []


@pytest.mark.parametrize("display", ["", ":4711"])
def test_without_a_screen_that_answers_one_line_says_so(screen: Screen, tmp_path: Path, display: str) -> None:
    environment = {**screen.environment, "PACELINE_HOME": str(tmp_path), "DISPLAY": display}
    ran = subprocess.run(MENUBAR, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 1
    assert len(ran.stderr.strip().splitlines()) == 1
    assert "screen" in ran.stderr or "Qt cannot draw" in ran.stderr


EDITED = """
import sys
from PySide6.QtWidgets import QApplication
from app.desktop.linux import LinuxTray
from tests.desktop.test_linux import FACES
tray = LinuxTray()
titles = lambda: [each.text() for each in tray._menu.actions() if each.text()]
tray.show(FACES["ready"])
first = tray._menu.actions()
tray.show(FACES["busy"])
assert tray._menu.actions() == first and "41" in titles()[0], titles()
def story():
    tray._menu.popup(tray._menu.pos())
    tray.show(FACES["ready"])
    assert "Ready" in titles()  # what has a place changes while the menu is open
    tray.show(FACES["stopped"])
    assert "Stopped" not in titles()
    tray._menu.hide()
    tray.schedule(closed)
def closed():
    assert "Stopped" in titles() and len(tray._menu.actions()) == len(FACES["stopped"].entries)
    tray.show(FACES["quarantined"])
    tray.copy("http://127.0.0.1:8710/v1")
    assert QApplication.clipboard().text() == "http://127.0.0.1:8710/v1"
    tray.notify("Paceline", "told")
    print(tray.languages(), "ended well")
    tray.quit()
tray.schedule(story)
tray.run(print)
"""
FACES = {
    name: tray_content(seen, WORDS)
    for name, seen in {
        "ready": READY,
        "busy": BUSY,
        "stopped": STOPPED,
        "quarantined": QUARANTINED,
    }.items()
}


def test_an_open_menu_is_edited_in_place_and_never_rebuilt(screen: Screen) -> None:
    environment = {**screen.environment, "LC_ALL": "", "LC_CTYPE": "C.UTF-8", "LC_MESSAGES": "ko_KR.UTF-8"}
    ran = subprocess.run(
        [sys.executable, "-c", EDITED], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (ran.stdout.strip(), ran.stderr) == ("seen\nko-KR ended well", "")


READ = """
from app.desktop.linux import LinuxTray
from tests.desktop.test_linux import FACES
tray = LinuxTray()
tray.show(FACES["busy"])
told, *_, offered = [each for each in tray._menu.actions() if each.text()]
def contrast(action):
    image = tray._menu.grab(tray._menu.actionGeometry(action)).toImage()
    seen = [image.pixelColor(x, y).lightness() for x in range(image.width()) for y in range(image.height())]
    return max(seen) - min(seen)
assert offered.isEnabled() and not told.isEnabled()
print(contrast(told) > 0.9 * contrast(offered) > 100)
"""


def test_a_line_that_only_tells_is_as_legible_as_one_that_can_be_chosen(screen: Screen) -> None:
    command = [sys.executable, "-c", READ]
    ran = subprocess.run(command, env=screen.environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("True", 0), ran.stderr


SHOWN_FOR_HOURS = """
import sys
from app.desktop.linux import LinuxTray
from tests.desktop.test_linux import FACES
tray, held = LinuxTray(), sys.getrefcount(None)
for number in range(400):
    tray.show(list(FACES.values())[number % len(FACES)])
assert sys.getrefcount(None) >= held - 100, (held, sys.getrefcount(None))
print("still there")
"""


def test_the_menu_bar_outlives_its_changes(screen: Screen) -> None:
    """PySide6 6.12 drops a reference to None with every call that returns nothing; after minutes Python 3.11 aborts."""
    ran = subprocess.run(
        [sys.executable, "-c", SHOWN_FOR_HOURS],
        env=screen.environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (ran.stdout.strip(), ran.returncode) == ("still there", 0), ran.stderr


INKED = """
import sys, time
from PySide6.QtWidgets import QApplication
from app.desktop.linux import LinuxTray
from tests.desktop.test_linux import FACES
tray, until = LinuxTray(), time.monotonic() + 20
lightnesses = []
while time.monotonic() < until:
    tray.show(FACES["ready"])
    QApplication.processEvents()
    place = tray._icon.geometry()
    there = QApplication.primaryScreen().grabWindow(0, *place.getRect()).toImage()
    lightnesses = sorted({there.pixelColor(x, y).lightness() for x in range(20) for y in range(20)})
    if place.left() > 300 and lightnesses[-1] - lightnesses[0] > 180:
        break
print(lightnesses[0] < 60 and lightnesses[-1] > 200)
"""


@pytest.mark.parametrize("tint", ["0xe8e8e8", "0x202020"])
def test_the_image_is_legible_in_a_light_and_in_a_dark_tray(tint: str) -> None:
    with screen_with_tray("--transparent", "true", "--alpha", "0", "--tint", tint) as screen:
        command = [sys.executable, "-c", INKED]
        ran = subprocess.run(
            command, env=screen.environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    assert (ran.stdout.strip(), ran.returncode) == ("True", 0), ran.stderr
