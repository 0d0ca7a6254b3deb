"""What a menu bar can do, whichever system draws it: values to show and the one port to show them through."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

TrayState = Literal["stopped", "starting", "ready", "busy", "trouble"]
"""What its image tells: `icons/STATE.png`, and `@2x` of it."""


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """One line of a menu; without a title, a line between others."""

    title: str = ""
    action: str = ""
    """What is told when it is chosen; empty: it only says something."""
    is_checked: bool = False
    children: tuple["MenuEntry", ...] = ()

    @property
    def shape(self) -> object:
        """What cannot change without another item: whether it is a line, and what is below it."""
        return bool(self.title), tuple(each.shape for each in self.children)


@dataclass(frozen=True, slots=True)
class Face:
    """What the menu bar shows: its image by state, a few characters beside it, and its menu."""

    state: TrayState
    title: str = ""
    """Beside the image, where there is room: tokens per second."""
    tip: str = ""
    """What the pointer tells, and what is read aloud."""
    entries: tuple[MenuEntry, ...] = ()


class Tray(Protocol):
    """A native menu bar. Only `hand_over` and `quit` may be called by another thread than the one in `run`."""

    def show(self, face: Face) -> None:
        """Show this from now on."""

    def run(self, chosen: Callable[[str], None]) -> None:
        """Draw and answer until `quit`; `chosen` hears the actions of entries."""

    def hand_over(self, call: Callable[[], None]) -> None:
        """Have `call` made by the thread in `run`, soon."""

    def notify(self, title: str, text: str) -> None:
        """A notification of the system."""

    def copy(self, text: str) -> None:
        """Put text on the clipboard."""

    def languages(self) -> str:
        """What the user reads, as an `Accept-Language` header."""

    def quit(self) -> None:
        """Let `run` return."""
