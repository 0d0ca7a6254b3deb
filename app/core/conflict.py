"""Settings that cannot stand together: declared once where the settings are, told alike by page, API and terminal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Values = TypeVar("Values")


@dataclass(frozen=True, slots=True)
class Conflict(Generic[Values]):
    """`names` are the settings that clash, `advice` says why and what to do."""

    names: tuple[str, ...]
    advice: str
    clashes: Callable[[Values], bool]
    wording: str = ""
    """The key of the dashboard's words for it; empty: that of the first name."""


def find_conflict(values: Values, conflicts: Iterable[Conflict[Values]]) -> Conflict[Values] | None:
    """The first conflict that these values have."""
    return next((conflict for conflict in conflicts if conflict.clashes(values)), None)
