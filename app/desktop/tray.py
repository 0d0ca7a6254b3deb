"""The system-independent menu bar: the values it shows, and the `Tray` protocol that draws them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

TrayState = Literal["stopped", "starting", "ready", "busy", "trouble"]
"""State that the image shows: `icons/STATE.png`, and its `@2x` version."""
SEEN_ACTION = "seen"
"""Action reported when the menu closes: the user has seen its messages."""


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """One entry of a menu; without a title, a separator."""

    title: str = ""
    action: str = ""
    """Action that is reported when the entry is chosen; empty: the entry is only text."""
    is_checked: bool = False
    children: tuple["MenuEntry", ...] = ()

    @property
    def shape(self) -> object:
        """Structure of the entry: separator or not, and its children's. If it changes, a new native item is needed."""
        return bool(self.title), tuple(child.shape for child in self.children)


@dataclass(frozen=True, slots=True)
class TrayContent:
    """Content of the menu bar: its image by state, a few characters beside it, and its menu."""

    state: TrayState
    title: str = ""
    """Text beside the image, where there is room: tokens per second."""
    tip: str = ""
    """Tooltip, also for screen readers."""
    entries: tuple[MenuEntry, ...] = ()


class Tray(Protocol):
    """A native menu bar. Threads other than the one in `run` may call only `schedule` and `quit`."""

    def show(self, content: TrayContent) -> None:
        """Show `content` from now on."""

    def run(self, on_choose: Callable[[str], None]) -> None:
        """Run the event loop until `quit`; `on_choose` is called with the actions of chosen entries."""

    def schedule(self, call: Callable[[], None]) -> None:
        """Schedule `call` in the thread of `run`."""

    def notify(self, title: str, text: str) -> None:
        """Show a system notification."""

    def copy(self, text: str) -> None:
        """Put text on the clipboard."""

    def languages(self) -> str:
        """Return the user's languages as an `Accept-Language` header."""

    def quit(self) -> None:
        """Make `run` return."""
