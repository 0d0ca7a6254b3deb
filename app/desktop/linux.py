"""The menu bar on Linux, with Qt: the only file that imports PySide6.

Qt uses a StatusNotifier host if there is one, else an X11 tray. Actions are edited in place; a menu that needs other
actions waits until the open one closes. There is no timer: other threads and signals wake the event loop.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from PySide6.QtCore import QObject, QSocketNotifier, Qt, Signal, Slot
from PySide6.QtGui import QAction, QColor, QCursor, QIcon, QPainter, QPixmap
from PySide6.QtWidgets import QApplication, QMenu, QSystemTrayIcon

from app.core.errors import CommandError
from app.desktop.bundle import ICONS
from app.desktop.tray import SEEN_ACTION, MenuEntry, TrayContent, TrayState
from app.i18n.catalogs import system_languages

LIGHT_ICON_COLOUR, DARK_ICON_COLOUR, MIDDLE_LIGHTNESS = QColor("#f5f5f5"), QColor("#1c1c1c"), 128
QT_PROBE = "from PySide6.QtWidgets import QApplication; QApplication([])"


class MainThreadInvoker(QObject):
    """Runs calls from other threads in the thread of the event loop."""

    requested = Signal(object)

    @Slot(object)
    def invoke(self, call: Callable[[], None]) -> None:
        call()


class LinuxTray:
    """A tray icon with its menu; the `Tray` of Linux. Raises `CommandError` if Qt cannot draw."""

    def __init__(self) -> None:
        try_qt()
        self._application = QApplication(["paceline"])
        self._application.setQuitOnLastWindowClosed(False)
        self._invoker = MainThreadInvoker()
        self._invoker.requested.connect(self._invoker.invoke, Qt.ConnectionType.QueuedConnection)
        self._icon, self._menu = QSystemTrayIcon(), QMenu()
        self._menu.setStyleSheet("QMenu::item:disabled { color: palette(text) }")  # disabled entries must be legible
        self._icon.setContextMenu(self._menu)
        self._icon.activated.connect(self._icon_activated)
        self._menu.aboutToHide.connect(self._menu_closed)
        self._application.styleHints().colorSchemeChanged.connect(self._recolour)
        self._shown: TrayContent | None = None
        self._image: tuple[TrayState, bool] | None = None
        self._pending: tuple[MenuEntry, ...] | None = None
        self._on_choose: Callable[[str], None] = lambda _action: None

    def show(self, content: TrayContent) -> None:
        """Show `content` from now on. While the menu is open, entries of another shape wait until it closes."""
        before, self._shown = self._shown, content
        self._recolour()
        self._icon.setToolTip(content.tip)
        if self._menu.isVisible() and not has_shape(self._menu, content.entries):
            self._pending = content.entries
        elif before is None or self._pending is not None or before.entries != content.entries:
            self._pending = None
            self._edit(self._menu, content.entries)
        self._icon.show()

    def run(self, on_choose: Callable[[str], None]) -> None:
        """Run the event loop until `quit`, SIGTERM or Ctrl-C."""
        self._on_choose = on_choose
        receiver, sender = socket.socketpair()
        with receiver, sender:
            receiver.settimeout(0.0)
            sender.settimeout(0.0)
            wake_notifier = QSocketNotifier(receiver.fileno(), QSocketNotifier.Type.Read)
            wake_notifier.activated.connect(lambda *_: receiver.recv(64))  # lets Python run the signal handler
            signal.set_wakeup_fd(sender.fileno())
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: self.quit())
            self._application.exec()
            signal.set_wakeup_fd(-1)
            wake_notifier.setEnabled(False)
        self._icon.hide()

    def schedule(self, call: Callable[[], None]) -> None:
        self._invoker.requested.emit(call)

    def notify(self, title: str, text: str) -> None:
        self._icon.showMessage(title, text, self._icon.icon())

    def copy(self, text: str) -> None:
        QApplication.clipboard().setText(text)

    def languages(self) -> str:
        return system_languages(os.environ)

    def quit(self) -> None:
        self.schedule(QApplication.quit)

    def _icon_activated(self, reason: QSystemTrayIcon.ActivationReason) -> None:
        """Open the menu with the left button too, which Qt leaves to the application."""
        if reason == QSystemTrayIcon.ActivationReason.Trigger:
            self._menu.popup(QCursor.pos())

    def _menu_closed(self) -> None:
        """Show a waiting menu, after the action that closed this one has run."""
        self._on_choose(SEEN_ACTION)
        self.schedule(self._apply_pending)

    def _apply_pending(self) -> None:
        if self._pending is not None and not self._menu.isVisible():
            entries, self._pending = self._pending, None
            self._edit(self._menu, entries)

    def _recolour(self) -> None:
        if self._shown is None:
            return
        previous = self._image if self._menu.isVisible() else None  # an open menu may cover the sampled pixel
        image = self._shown.state, previous[1] if previous else self._is_on_dark()
        if image != self._image:
            self._image = image
            self._icon.setIcon(tinted_icon(image[0], LIGHT_ICON_COLOUR if image[1] else DARK_ICON_COLOUR))

    def _is_on_dark(self) -> bool:
        """Return whether the panel is dark: on X11 by a corner pixel free of the icon, else by the colour scheme."""
        geometry = self._icon.geometry()
        if not geometry.isEmpty() and self._application.platformName() == "xcb":
            corner = self._application.primaryScreen().grabWindow(0, geometry.left(), geometry.top(), 1, 1).toImage()
            if not corner.isNull():
                return corner.pixelColor(0, 0).lightness() < MIDDLE_LIGHTNESS
        return self._application.styleHints().colorScheme() == Qt.ColorScheme.Dark

    def _edit(self, menu: QMenu, entries: Sequence[MenuEntry]) -> None:
        """Make `menu` show `entries`, keeping every action that can be reused."""
        for surplus in menu.actions()[len(entries) :]:
            menu.removeAction(surplus)
        for index, entry in enumerate(entries):
            actions = menu.actions()
            action = actions[index] if index < len(actions) else None
            if action is None or not is_like(action, entry):
                new = self._new_action(menu, entry)
                menu.insertAction(action, new) if action else menu.addAction(new)
                if action:
                    menu.removeAction(action)
                action = new
            self._edit_action(action, entry)

    def _new_action(self, menu: QMenu, entry: MenuEntry) -> QAction:
        if entry.children:
            return QMenu(menu).menuAction()
        action = QAction(menu)
        action.setSeparator(not entry.title)
        action.triggered.connect(lambda *_: action.data() and self._on_choose(action.data()))
        return action

    def _edit_action(self, action: QAction, entry: MenuEntry) -> None:
        action.setText(entry.title.replace("&", "&&"))
        action.setData(entry.action)
        action.setEnabled(bool(entry.action or entry.children))
        action.setCheckable(entry.is_checked)
        action.setChecked(entry.is_checked)
        submenu = action.menu()
        if isinstance(submenu, QMenu):
            self._edit(submenu, entry.children)


def try_qt() -> None:
    """Raise `CommandError` if Qt would end the process: no display, or a missing library."""
    completed = subprocess.run([sys.executable, "-c", QT_PROBE], capture_output=True, text=True, check=False)  # noqa: S603
    if completed.returncode:
        lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
        raise CommandError(f"Qt cannot draw here, see `paceline status` instead: {lines[0] if lines else 'no reason'}")


def is_like(action: QAction, entry: MenuEntry) -> bool:
    """Return whether `action` can become `entry`: both are separators, have submenus, or neither."""
    return (action.isSeparator(), action.menu() is not None) == (not entry.title, bool(entry.children))


def has_shape(menu: QMenu, entries: Sequence[MenuEntry]) -> bool:
    """Return whether the existing actions of `menu` can show `entries`."""
    actions = menu.actions()
    return len(actions) == len(entries) and all(
        is_like(action, entry)
        and (not isinstance(submenu := action.menu(), QMenu) or has_shape(submenu, entry.children))
        for action, entry in zip(actions, entries, strict=True)
    )


def tinted_icon(state: TrayState, colour: QColor) -> QIcon:
    """Return the black template image in another colour, for both screen densities."""
    icon = QIcon()
    for scale, suffix in ((1.0, ""), (2.0, "@2x")):
        image = QPixmap(str(ICONS / f"{state}{suffix}.png"))
        painter = QPainter(image)
        painter.setCompositionMode(QPainter.CompositionMode.CompositionMode_SourceIn)
        painter.fillRect(image.rect(), colour)
        painter.end()
        image.setDevicePixelRatio(scale)
        icon.addPixmap(image)
    return icon
