"""`python -m tests.desktop.screenshots`: save pictures of the Linux tray in five states, light and dark, as
`docs/tray-*.png`."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from PySide6.QtCore import QPoint, QRect
from PySide6.QtGui import QPainter, QPixmap
from PySide6.QtWidgets import QApplication

from app.desktop.linux import LinuxTray
from app.desktop.menu import tray_content
from tests.desktop.screen import SECONDS, screen_with_tray
from tests.desktop.test_menu import BUSY, PORT_TAKEN, QUARANTINED, READY, STARTING, STOPPED, WORDS

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "tray.png"
STATES = (STOPPED, STARTING, READY, BUSY, dataclasses.replace(QUARANTINED, problem=PORT_TAKEN.problem))
SCHEMES = {"light": "0xe8e8e8", "dark": "0x202020"}
"""Colour of the panel, by scheme."""
WIDTH, DRAWN_SECONDS = 560, 0.4


def draw() -> None:
    """Let Qt and the tray draw."""
    drawn = time.monotonic() + DRAWN_SECONDS
    while time.monotonic() < drawn:
        QApplication.processEvents()


def take(picture: Path) -> None:
    """Save one picture of all states, one below the other, each with its tray and its open menu."""
    tray = LinuxTray()
    pictures = []
    for seen in STATES:
        tray.show(tray_content(seen, WORDS))
        draw()
        tray.show(tray_content(seen, WORDS))  # only now does the tray know its position
        tray._menu.popup(QPoint(640 - tray._menu.sizeHint().width(), 26))
        draw()
        height = 30 + tray._menu.sizeHint().height()
        pictures.append(QApplication.primaryScreen().grabWindow(0).copy(QRect(640 - WIDTH, 0, WIDTH, height)))
        tray._menu.hide()
    whole = QPixmap(WIDTH, sum(part.height() for part in pictures))
    painter, top = QPainter(whole), 0
    for state_picture in pictures:
        painter.drawPixmap(0, top, state_picture)
        top += state_picture.height()
    painter.end()
    assert whole.save(str(picture))


def main() -> None:
    """Take one picture for each scheme, each in its own process and on its own screen."""
    parts = [PICTURE.with_name(f"tray-{scheme}.png") for scheme in SCHEMES]
    for tint, part in zip(SCHEMES.values(), parts, strict=True):
        with screen_with_tray("--transparent", "true", "--alpha", "0", "--tint", tint) as screen:
            command = [sys.executable, "-m", "tests.desktop.screenshots", str(part)]
            subprocess.run(command, env=screen.environment, timeout=SECONDS, check=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        take(Path(sys.argv[1]))
    else:
        main()
