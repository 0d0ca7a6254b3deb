"""An X11 screen with a tray, and the keyboard and mouse to use it."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

PROGRAMS = ("Xvfb", "trayer", "xdotool")
MISSING = "The tests of the tray need Debian's xvfb, trayer, xdotool and libxcb-cursor0: apt-get install -y"
SECONDS, POLL_SECONDS = 30.0, 0.03
TRAY = ("trayer", "--edge", "top", "--align", "right", "--height", "24", "--width", "40")


@contextmanager
def ended(command: list[str], **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that is terminated at the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        process.wait(SECONDS)


class Screen:
    """The screen at `display`: what a user sees and does there."""

    def __init__(self, display: str) -> None:
        self.environment = {**os.environ, "DISPLAY": display, "LC_ALL": "C.UTF-8"}
        self.environment.pop("WAYLAND_DISPLAY", None)
        self.environment.pop("QT_QPA_PLATFORM", None)

    def do(self, *words: str) -> list[str]:
        ran = subprocess.run(["xdotool", *words], env=self.environment, capture_output=True, text=True, check=False)
        return ran.stdout.split()

    def windows(self) -> list[str]:
        """Return the visible windows of the menu bar: its icon, and each open menu."""
        return self.do("search", "--onlyvisible", "--class", "paceline")

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < deadline, self.windows()
            threading.Event().wait(POLL_SECONDS)

    def open_menu(self) -> None:
        self.until(lambda: len(self.windows()) == 1)
        self.do("mousemove", "--window", self.windows()[0], "8", "8", "click", "1")
        self.until(lambda: len(self.windows()) == 2)

    def press(self, key: str, *, windows: int) -> None:
        """Press a key, and wait until this number of windows is visible."""
        self.do("key", key)
        self.until(lambda: len(self.windows()) == windows)


@contextmanager
def screen_with_tray(*tint: str) -> Iterator[Screen]:
    """Start a screen with a tray, on a new display."""
    if not all(map(shutil.which, PROGRAMS)):
        pytest.fail(f"{MISSING} xvfb trayer xdotool libxcb-cursor0")
    reader, writer = os.pipe()
    with ExitStack() as stack:
        # Without -noreset, Xvfb resets when its last client disconnects, which may end the tray as it starts.
        server = ["Xvfb", "-displayfd", str(writer), "-screen", "0", "640x400x24", "-nolisten", "tcp", "-noreset"]
        stack.enter_context(ended(server, pass_fds=(writer,)))
        os.close(writer)
        with os.fdopen(reader) as number:
            screen = Screen(f":{number.readline().strip()}")
        stack.enter_context(ended([*TRAY, *tint], env=screen.environment))
        screen.until(lambda: bool(screen.do("search", "--class", "trayer")))
        yield screen
