"""The menu bar on macOS, with PyObjC: the only file that imports AppKit.

Items are edited in place, because AppKit breaks if an open menu is rebuilt; a menu that needs other items waits until
the open one closes. The timer lets Python handle signals; in the common run loop modes it fires with a menu open, too.
"""

import logging
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

import AppKit
import Foundation

from app.desktop.bundle import ICONS
from app.desktop.tray import SEEN_ACTION, MenuEntry, TrayContent, TrayState

TICK_SECONDS, TICK_TOLERANCE_SECONDS = 1.0, 0.2
"""Interval between two checks for signals, and the delay that macOS may add to save energy, both in seconds."""
REPEATS = AT_START = True
WAITS = False
ICON_POINTS = (18.0, 18.0)
NOTIFY = ("on run argv", "display notification (item 2 of argv) with title (item 1 of argv)", "end run")
"""Program for osascript, because UserNotifications ends a process without a signed bundle; texts are arguments."""
REOPEN_ACTION = "dashboard"  # for a double click on the app while it runs

logger = logging.getLogger("paceline.menubar")


class MenuBarEvents(Foundation.NSObject):
    """Callbacks that AppKit calls by name."""

    tray: "MacTray"

    def chosen_(self, item: AppKit.NSMenuItem) -> None:
        self.tray.choose(str(item.representedObject()))

    def tick_(self, _timer: Foundation.NSTimer) -> None:
        self.tray.run_scheduled_calls()

    def menuWillOpen_(self, _menu: AppKit.NSMenu) -> None:  # noqa: N802 - AppKit's name
        self.tray.open_menu()

    def menuDidClose_(self, _menu: AppKit.NSMenu) -> None:  # noqa: N802 - AppKit's name
        self.tray.close_menu()

    def applicationShouldHandleReopen_hasVisibleWindows_(  # noqa: N802 - AppKit's name
        self, _application: AppKit.NSApplication, _has_windows: int
    ) -> bool:
        self.tray.choose(REOPEN_ACTION)
        return False


class MacTray:
    """A status item with its menu; the `Tray` of macOS."""

    def __init__(self) -> None:
        self._application = AppKit.NSApplication.sharedApplication()
        self._application.setActivationPolicy_(AppKit.NSApplicationActivationPolicyAccessory)
        self._events = MenuBarEvents.alloc().init()
        self._events.tray = self
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._images: dict[TrayState, AppKit.NSImage] = {}
        self._menu = AppKit.NSMenu.alloc().init()
        self._menu.setAutoenablesItems_(False)
        self._menu.setDelegate_(self._events)
        self._item = AppKit.NSStatusBar.systemStatusBar().statusItemWithLength_(AppKit.NSVariableStatusItemLength)
        self._item.setMenu_(self._menu)
        button = self._item.button()
        button.setImagePosition_(AppKit.NSImageLeading)
        button.setFont_(AppKit.NSFont.monospacedDigitSystemFontOfSize_weight_(0.0, 0.0))  # else its width changes
        self._shown: tuple[MenuEntry, ...] = ()
        self._pending: tuple[MenuEntry, ...] | None = None
        self._is_open = False
        self._on_choose: Callable[[str], None] = lambda _action: None

    def show(self, content: TrayContent) -> None:
        """Show `content` from now on. While the menu is open, entries of another shape wait until it closes."""
        if content.state not in self._images:
            self._images[content.state] = template_image(content.state)
        button = self._item.button()
        button.setImage_(self._images[content.state])
        button.setTitle_(content.title)
        button.setToolTip_(content.tip)
        if self._is_open and [entry.shape for entry in content.entries] != [entry.shape for entry in self._shown]:
            self._pending = content.entries
        else:
            self._pending = None
            self._edit(self._menu, content.entries)
            self._shown = content.entries

    def run(self, on_choose: Callable[[str], None]) -> None:
        """Run the event loop until `quit`, SIGTERM or Ctrl-C."""
        self._on_choose = on_choose
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.quit())
        self._application.setDelegate_(self._events)
        timer = Foundation.NSTimer.timerWithTimeInterval_target_selector_userInfo_repeats_(
            TICK_SECONDS, self._events, "tick:", None, REPEATS
        )
        timer.setTolerance_(TICK_TOLERANCE_SECONDS)
        Foundation.NSRunLoop.mainRunLoop().addTimer_forMode_(timer, Foundation.NSRunLoopCommonModes)
        self._application.run()
        timer.invalidate()
        AppKit.NSStatusBar.systemStatusBar().removeStatusItem_(self._item)

    def schedule(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        self._events.performSelectorOnMainThread_withObject_waitUntilDone_("tick:", None, WAITS)

    def notify(self, title: str, text: str) -> None:
        command = ["osascript", *(argument for line in NOTIFY for argument in ("-e", line)), title, text]
        threading.Thread(target=subprocess.run, args=(command,), kwargs={"check": False}, daemon=True).start()

    def copy(self, text: str) -> None:
        board = AppKit.NSPasteboard.generalPasteboard()
        board.clearContents()
        board.setString_forType_(text, AppKit.NSPasteboardTypeString)

    def languages(self) -> str:
        return ",".join(Foundation.NSLocale.preferredLanguages())

    def quit(self) -> None:
        self.schedule(self._stop)

    def choose(self, action: str) -> None:
        if action:
            self._on_choose(action)

    def run_scheduled_calls(self) -> None:
        """Run all scheduled calls; a failing call is logged and does not stop the others."""
        while not self._calls.empty():
            try:
                self._calls.get_nowait()()
            except Exception:  # AppKit would end the process
                logger.exception("The menu bar could not do this.")

    def open_menu(self) -> None:
        self._is_open = True

    def close_menu(self) -> None:
        """Show the entries that waited for the menu to close."""
        self._is_open = False
        self._on_choose(SEEN_ACTION)
        if self._pending is not None:
            self._edit(self._menu, self._pending)
            self._shown, self._pending = self._pending, None

    def _stop(self) -> None:
        """Stop the event loop. `stop_` takes effect after the next event, so one is posted."""
        self._application.stop_(None)
        other_event = (
            AppKit.NSEvent.otherEventWithType_location_modifierFlags_timestamp_windowNumber_context_subtype_data1_data2_
        )
        event = other_event(AppKit.NSEventTypeApplicationDefined, (0.0, 0.0), 0, 0.0, 0, None, 0, 0, 0)
        self._application.postEvent_atStart_(event, AT_START)

    def _edit(self, menu: AppKit.NSMenu, entries: Sequence[MenuEntry]) -> None:
        """Make `menu` show `entries`, keeping every item that can be reused."""
        while menu.numberOfItems() > len(entries):
            menu.removeItemAtIndex_(menu.numberOfItems() - 1)
        for index, entry in enumerate(entries):
            existing = menu.itemAtIndex_(index) if index < menu.numberOfItems() else None
            if existing is None or existing.isSeparatorItem() == bool(entry.title):
                if existing is not None:
                    menu.removeItemAtIndex_(index)
                menu.insertItem_atIndex_(self._new_item(entry), index)
            if entry.title:
                self._edit_item(menu.itemAtIndex_(index), entry)

    def _new_item(self, entry: MenuEntry) -> AppKit.NSMenuItem:
        if not entry.title:
            return AppKit.NSMenuItem.separatorItem()
        item = AppKit.NSMenuItem.alloc().initWithTitle_action_keyEquivalent_(entry.title, "chosen:", "")
        item.setTarget_(self._events)
        return item

    def _edit_item(self, item: AppKit.NSMenuItem, entry: MenuEntry) -> None:
        item.setTitle_(entry.title)
        item.setEnabled_(bool(entry.action or entry.children))
        item.setState_(AppKit.NSControlStateValueOn if entry.is_checked else AppKit.NSControlStateValueOff)
        item.setRepresentedObject_(entry.action)
        submenu = item.submenu()
        if entry.children and submenu is None:
            submenu = AppKit.NSMenu.alloc().init()
            submenu.setAutoenablesItems_(False)
            item.setSubmenu_(submenu)
        if submenu is not None:
            self._edit(submenu, entry.children)
            if not entry.children:
                item.setSubmenu_(None)


def template_image(state: TrayState) -> AppKit.NSImage:
    """Return a black image that macOS draws in the colour of the menu bar, for both screen densities."""
    image = AppKit.NSImage.alloc().initWithSize_(ICON_POINTS)
    for name in (f"{state}.png", f"{state}@2x.png"):
        representation = AppKit.NSImageRep.imageRepWithContentsOfFile_(str(ICONS / name))
        representation.setSize_(ICON_POINTS)
        image.addRepresentation_(representation)
    image.setTemplate_(True)
    return image
