"""Daily check for a newer version, by the installer of this copy, if the setting `check_updates` is on."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from app import __version__
from app.machine.installation import newer_version, this_installation

Outcome = Literal["", "unreachable", "newer", "latest"]
"""Outcome of the last check; empty: there was no check, or checks are off."""
DAY_SECONDS, RETRY_SECONDS = 86_400.0, 3_600.0

logger = logging.getLogger("paceline.updates")


async def _query_installer() -> str:
    return await newer_version(this_installation(), __version__)


class Updates:
    """Checks for updates while `is_enabled()`.

    `query_newer` returns the newer version, empty if there is none, or raises `OSError`; `timeout` limits a wait.
    """

    def __init__(
        self,
        is_enabled: Callable[[], bool],
        query_newer: Callable[[], Awaitable[str]] = _query_installer,
        timeout: Callable[[float | None], asyncio.Timeout] = asyncio.timeout,
    ) -> None:
        self._is_enabled = is_enabled
        self._query_newer = query_newer
        self._timeout = timeout
        self._was_enabled = is_enabled()
        self._setting_changed = asyncio.Event()
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
        """Check immediately when the setting is switched on, forget the result when it is switched off."""
        if self._was_enabled != self._is_enabled():
            self._was_enabled = self._is_enabled()
            self.newer, self._outcome = "", ""
            self._setting_changed.set()

    async def run(self) -> None:
        """Check regularly until cancelled."""
        while True:
            seconds = await self._check() if self._is_enabled() else None
            with contextlib.suppress(TimeoutError):
                async with self._timeout(seconds):
                    await self._setting_changed.wait()
            self._setting_changed.clear()

    async def _check(self) -> float:
        """Query the installer once; return the seconds until the next check."""
        try:
            newer = await self._query_newer()
        except OSError as error:  # no network, no installer, no such package
            logger.info("The update check failed; it is tried again in an hour: %s", error)
            self._outcome = "unreachable" if self._is_enabled() else ""
            return RETRY_SECONDS
        if self._is_enabled():
            self.newer, self._outcome = newer, "newer" if newer else "latest"
        return DAY_SECONDS
