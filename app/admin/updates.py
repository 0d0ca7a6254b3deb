"""Daily check for a newer version: asks whatever installed this copy, if the setting `check_updates` is on."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from app import __version__
from app.machine.installation import newer_version, this_installation

Outcome = Literal["", "unreachable", "newer", "latest"]
"""Outcome of the last check; empty: there was none, or none is allowed."""
DAY_SECONDS, RETRY_SECONDS = 86_400.0, 3_600.0

_logger = logging.getLogger(__name__)


async def _ask() -> str:
    return await newer_version(this_installation(), __version__)


class Updates:
    """Checks for updates if `is_wanted`; `ask` returns the newer version or raises `OSError`; `pause` limits a wait."""

    def __init__(
        self,
        is_wanted: Callable[[], bool],
        ask: Callable[[], Awaitable[str]] = _ask,
        pause: Callable[[float | None], asyncio.Timeout] = asyncio.timeout,
    ) -> None:
        self._is_wanted = is_wanted
        self._ask = ask
        self._pause = pause
        self._was_wanted = is_wanted()
        self._switched = asyncio.Event()
        self._outcome: Outcome = ""
        self.newer = ""
        self.command = this_installation().update

    newer: str
    """The newer version; empty: there is none, or no check was made."""
    command: str
    """Command that updates this installation."""

    def view(self) -> dict[str, str]:
        """Return what pages show: a newer version, the command that installs it, and the outcome of the check."""
        return {"newer": self.newer, "command": self.command, "outcome": self._outcome}

    def on_settings_changed(self) -> None:
        """Check at once when the setting is switched on, forget the result when it is switched off."""
        if self._was_wanted != self._is_wanted():
            self._was_wanted = self._is_wanted()
            self.newer, self._outcome = "", ""
            self._switched.set()

    async def run(self) -> None:
        """Check regularly until cancelled."""
        while True:
            seconds = await self._look() if self._is_wanted() else None
            with contextlib.suppress(TimeoutError):
                async with self._pause(seconds):
                    await self._switched.wait()
            self._switched.clear()

    async def _look(self) -> float:
        """Check, and return the seconds until the next check."""
        try:
            newer = await self._ask()
        except OSError as error:  # no network, no installer, no such package
            _logger.info("The update check failed; it is tried again in an hour: %s", error)
            self._outcome = "unreachable" if self._is_wanted() else ""
            return RETRY_SECONDS
        if self._is_wanted():
            self.newer, self._outcome = newer, "newer" if newer else "latest"
        return DAY_SECONDS
