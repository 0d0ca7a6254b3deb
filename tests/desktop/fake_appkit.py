"""Fakes of AppKit and Foundation under PyObjC's names, with the behaviour that a menu bar needs.

Tests can read items and menus; `opened`, `closed` and `clicked` do what a user does. An open menu refuses to lose or
gain items, because AppKit breaks on that.
"""

import queue
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Self

CALLS: list[tuple[Any, ...]] = []


class NSObject:
    @classmethod
    def alloc(cls) -> Self:
        return cls()

    def init(self) -> Self:
        return self

    def performSelectorOnMainThread_withObject_waitUntilDone_(self, selector: str, argument: Any, wait: bool) -> None:
        NSRunLoop.main.performed.put(lambda: getattr(self, selector.replace(":", "_"))(argument))


class NSImageRep(NSObject):
    path = ""
    size: tuple[float, float] = (0, 0)

    @classmethod
    def imageRepWithContentsOfFile_(cls, path: str) -> "NSImageRep":
        made = cls()
        made.path = path
        return made

    def setSize_(self, size: tuple[float, float]) -> None:
        self.size = size


class NSImage(NSObject):
    is_template = False

    def initWithSize_(self, size: tuple[float, float]) -> Self:
        self.size = size
        self.representations: list[NSImageRep] = []
        return self

    def addRepresentation_(self, representation: NSImageRep) -> None:
        self.representations.append(representation)

    def setTemplate_(self, is_template: bool) -> None:
        self.is_template = is_template


class NSFont(NSObject):
    @classmethod
    def monospacedDigitSystemFontOfSize_weight_(cls, points: float, weight: float) -> "NSFont":
        return cls()


class NSStatusBarButton(NSObject):
    image: NSImage
    title = ""
    tip = ""

    def setImage_(self, image: NSImage) -> None:
        self.image = image

    def setTitle_(self, title: str) -> None:
        self.title = title

    def setToolTip_(self, text: str) -> None:
        self.tip = text

    def setImagePosition_(self, position: int) -> None:
        self.position = position

    def setFont_(self, font: NSFont) -> None:
        self.font = font


class NSMenuItem(NSObject):
    title, action, state, is_enabled, represented = "", "", 0, True, None
    is_separator = False
    below: "NSMenu | None" = None
    target: Any = None

    @classmethod
    def separatorItem(cls) -> "NSMenuItem":
        made = cls()
        made.is_separator = True
        return made

    def initWithTitle_action_keyEquivalent_(self, title: str, action: str, key: str) -> Self:
        self.title, self.action = title, action
        return self

    def isSeparatorItem(self) -> bool:
        return self.is_separator

    def submenu(self) -> "NSMenu | None":
        return self.below

    def setSubmenu_(self, menu: "NSMenu | None") -> None:
        self.below = menu

    def setTitle_(self, title: str) -> None:
        self.title = title

    def setEnabled_(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled

    def setState_(self, state: int) -> None:
        self.state = state

    def setTarget_(self, target: Any) -> None:
        self.target = target

    def setRepresentedObject_(self, value: object) -> None:
        self.represented = value

    def representedObject(self) -> object:
        return self.represented

    def clicked(self) -> None:
        """Choose the item, as a user does."""
        assert self.is_enabled
        getattr(self.target, self.action.replace(":", "_"))(self)


class NSMenu(NSObject):
    delegate: Any = None
    is_open = False

    def init(self) -> Self:
        self.items: list[NSMenuItem] = []
        return self

    def setAutoenablesItems_(self, is_automatic: bool) -> None:
        self.is_automatic = is_automatic

    def setDelegate_(self, delegate: Any) -> None:
        self.delegate = delegate

    def numberOfItems(self) -> int:
        return len(self.items)

    def itemAtIndex_(self, place: int) -> NSMenuItem:
        return self.items[place]

    def insertItem_atIndex_(self, item: NSMenuItem, place: int) -> None:
        assert not self.is_open, "AppKit breaks on this"
        self.items.insert(place, item)

    def removeItemAtIndex_(self, place: int) -> None:
        assert not self.is_open, "AppKit breaks on this"
        del self.items[place]

    def opened(self) -> None:
        """Open the menu, as a user does."""
        self.is_open = True
        self.delegate.menuWillOpen_(self)

    def closed(self) -> None:
        """Close the menu, as a user does by a click elsewhere."""
        self.is_open = False
        self.delegate.menuDidClose_(self)


class NSStatusItem(NSObject):
    menu: NSMenu

    def __init__(self) -> None:
        self._button = NSStatusBarButton()

    def button(self) -> NSStatusBarButton:
        return self._button

    def setMenu_(self, menu: NSMenu) -> None:
        CALLS.append(("setMenu:",))
        self.menu = menu


class NSStatusBar(NSObject):
    items: list[NSStatusItem] = []  # noqa: RUF012 - there is one status bar

    @classmethod
    def systemStatusBar(cls) -> "NSStatusBar":
        return cls()

    def statusItemWithLength_(self, length: float) -> NSStatusItem:
        item = NSStatusItem()
        self.items.append(item)
        return item

    def removeStatusItem_(self, item: NSStatusItem) -> None:
        self.items.remove(item)


class NSEvent(NSObject):
    @classmethod
    def otherEventWithType_location_modifierFlags_timestamp_windowNumber_context_subtype_data1_data2_(
        cls, *values: Any
    ) -> "NSEvent":
        assert len(values) == 9
        return cls()


class NSApplication(NSObject):
    """The event loop: each turn runs one of `steps`, queued calls and timers, until it is stopped and gets an event."""

    shared: "NSApplication"
    delegate: Any = None
    policy = -1
    is_stopped = has_event = False
    has_timers = True

    def __init__(self) -> None:
        self.steps: list[Any] = []

    @classmethod
    def sharedApplication(cls) -> "NSApplication":
        return cls.shared

    def setActivationPolicy_(self, policy: int) -> bool:
        self.policy = policy
        return True

    def setDelegate_(self, delegate: Any) -> None:
        self.delegate = delegate

    def stop_(self, sender: object) -> None:
        self.is_stopped = True

    def postEvent_atStart_(self, event: NSEvent, first: bool) -> None:
        self.has_event = True

    def run(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self.is_stopped and self.has_event:
                return
            if self.steps:
                self.steps.pop(0)()
            while not NSRunLoop.main.performed.empty():
                NSRunLoop.main.performed.get()()
            for timer in NSRunLoop.main.timers if self.has_timers else ():
                timer.fire()
        raise AssertionError("it never ended")


class NSTimer(NSObject):
    is_valid = True

    @classmethod
    def timerWithTimeInterval_target_selector_userInfo_repeats_(
        cls, seconds: float, target: Any, selector: str, information: None, repeats: bool
    ) -> "NSTimer":
        made = cls()
        made.seconds, made.repeats = seconds, repeats
        made.fire = lambda: getattr(target, selector.replace(":", "_"))(made)
        return made

    seconds: float
    repeats: bool
    fire: Any

    def setTolerance_(self, seconds: float) -> None:
        self.tolerance = seconds

    def invalidate(self) -> None:
        self.is_valid = False


class NSRunLoop(NSObject):
    main: "NSRunLoop"

    def __init__(self) -> None:
        self.timers: list[NSTimer] = []
        self.modes: list[str] = []
        self.performed: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @classmethod
    def mainRunLoop(cls) -> "NSRunLoop":
        return cls.main

    def addTimer_forMode_(self, timer: NSTimer, mode: str) -> None:
        self.timers.append(timer)
        self.modes.append(mode)


class NSPasteboard(NSObject):
    general: "NSPasteboard"
    text = ""

    @classmethod
    def generalPasteboard(cls) -> "NSPasteboard":
        return cls.general

    def clearContents(self) -> int:
        self.text = ""
        return 1

    def setString_forType_(self, text: str, kind: str) -> bool:
        assert kind == "public.utf8-plain-text"
        assert self.text == ""
        self.text = text
        return True


class NSLocale(NSObject):
    @classmethod
    def preferredLanguages(cls) -> Sequence[str]:
        return ["ko-KR", "en-US"]


FOUNDATION = {kind.__name__: kind for kind in (NSObject, NSTimer, NSRunLoop, NSLocale)} | {
    "NSRunLoopCommonModes": "kCFRunLoopCommonModes"
}
APPKIT = {
    kind.__name__: kind
    for kind in (
        NSApplication,
        NSEvent,
        NSFont,
        NSImage,
        NSImageRep,
        NSMenu,
        NSMenuItem,
        NSPasteboard,
        NSStatusBar,
        NSStatusBarButton,
        NSStatusItem,
    )
} | {
    "NSApplicationActivationPolicyAccessory": 1,
    "NSControlStateValueOff": 0,
    "NSControlStateValueOn": 1,
    "NSEventTypeApplicationDefined": 15,
    "NSImageLeading": 7,
    "NSPasteboardTypeString": "public.utf8-plain-text",
    "NSVariableStatusItemLength": -1.0,
}


def fresh_modules() -> dict[str, ModuleType]:
    """Return both modules in their initial state, for `sys.modules`."""
    NSApplication.shared, NSRunLoop.main, NSPasteboard.general = NSApplication(), NSRunLoop(), NSPasteboard()
    NSStatusBar.items.clear()
    CALLS.clear()
    made = {"AppKit": ModuleType("AppKit"), "Foundation": ModuleType("Foundation")}
    vars(made["AppKit"]).update(APPKIT)
    vars(made["Foundation"]).update(FOUNDATION)
    return made
