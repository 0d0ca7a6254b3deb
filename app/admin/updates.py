"""Whether there is a newer Paceline: only where the setting `check_updates` asks for it, and at most once a day.

The package index that pip installs from here is asked for the project's files (PEP 691), by its name alone and with
nothing but our version told. What it said is kept in `PACELINE_HOME/updates.json`, so that a restart asks nobody again.
The index is the one that the environment names for pip or uv, else the one that pip itself tells: no address is ours.
"""

import asyncio
import contextlib
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx2
import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from app import __version__
from app.core.installation import DISTRIBUTION, this_installation
from app.core.safe_files import write_privately
from app.settings import Settings

KEPT = "updates.json"
DAY_SECONDS = 86_400.0
RETRY_SECONDS = 3_600.0
ANSWER_SECONDS = 20.0
MAX_ANSWER_BYTES = 8 << 20
VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
JSON_PAGE = "application/vnd.pypi.simple.v1+json"
HEADERS = {"accept": JSON_PAGE, "user-agent": f"{DISTRIBUTION}/{__version__}"}
TOLD_BY_PIP = re.compile(r"Base URL of the Python Package Index \(default\s+(\S+?)\)")
ADDRESS = re.compile(r"https?://\S+")

Problem = Literal["no_index", "unlisted", "unreachable"]
Outcome = Literal["", Problem, "newer", "latest"]
"""Of the last time that the index was asked; empty: nobody asked yet, or may."""
LOGGED: Mapping[Problem, str] = {
    "no_index": "no package index is known here",
    "unlisted": "the package index has no such project",
    "unreachable": "the package index did not tell",
}

_logger = logging.getLogger("paceline.updates")


class IndexFile(msgspec.Struct, frozen=True):
    """A file of the project, as an index lists it."""

    filename: str
    yanked: bool | str = False
    requires_python: str | None = msgspec.field(name="requires-python", default=None)


class IndexPage(msgspec.Struct, frozen=True):
    """What an index knows of the project."""

    files: tuple[IndexFile, ...]


class KeptCheck(msgspec.Struct, frozen=True):
    """The last answer, and when it came, in Unix seconds."""

    latest: str
    checked_at: float


class Updates:
    """The newest release as far as the index was asked. `index` finds its address, and blocks."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        *,
        index: Callable[[], str] = lambda: package_index(os.environ),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._index = index
        self._clock = clock
        self._path = settings().home / KEPT
        self._latest = ""
        self._problem: Problem | Literal[""] = ""
        self._is_on = settings().check_updates
        self._switched_on = asyncio.Event()
        self.command = this_installation().update

    @property
    def newer(self) -> str:
        """The released version that is newer than this one; empty: there is none, or nobody may ask."""
        is_newer = self._latest and Version(self._latest) > Version(__version__)
        return self._latest if self._settings().check_updates and is_newer else ""

    def view(self) -> dict[str, Any]:
        """What pages show: a newer version, the command that brings it, and what became of asking."""
        known: Outcome = "newer" if self.newer else "latest" if self._latest else ""
        outcome: Outcome = (self._problem or known) if self._settings().check_updates else ""
        return {"newer": self.newer, "command": self.command, "outcome": outcome}

    def on_settings_changed(self) -> None:
        """Ask at once when it was just switched on."""
        was_on, self._is_on = self._is_on, self._settings().check_updates
        if self._is_on and not was_on:
            self._switched_on.set()

    async def run(self) -> None:
        """Ask whenever it is time, as long as the server runs; whoever did not switch it on is never asked for."""
        wait = await asyncio.to_thread(self.recall)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait if self._is_on else None):
                    await self._switched_on.wait()
            self._switched_on.clear()
            wait = await self._ask() if self._settings().check_updates else DAY_SECONDS

    def recall(self) -> float:
        """Take what the index said last; how many seconds that is still good for."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=KeptCheck)
            Version(kept.latest)
        except (OSError, msgspec.MsgspecError, InvalidVersion):
            return 0.0
        self._latest = kept.latest
        return min(max(0.0, kept.checked_at + DAY_SECONDS - self._clock()), DAY_SECONDS)

    async def _ask(self) -> float:
        """Ask the index once; how long to wait before the next time."""
        try:
            index = await asyncio.to_thread(self._index)
            if not index:
                return self._failed("no_index", DAY_SECONDS)
            async with asyncio.timeout(ANSWER_SECONDS):
                content = await _fetch(f"{index.rstrip('/')}/{DISTRIBUTION}/")
            latest = newest(msgspec.json.decode(content, type=IndexPage).files, platform.python_version())
            kept = KeptCheck(latest or __version__, self._clock())
            with contextlib.suppress(OSError):  # a full disk: then a restart asks again
                await asyncio.to_thread(write_privately, self._path, msgspec.json.encode(kept))
            self._latest, self._problem = kept.latest, ""
        except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError, OSError, ValueError) as error:
            if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code == httpx2.codes.NOT_FOUND:
                return self._failed("unlisted", DAY_SECONDS)
            return self._failed("unreachable", RETRY_SECONDS)
        return DAY_SECONDS

    def _failed(self, problem: Problem, seconds: float) -> float:
        self._problem = problem
        _logger.info("No newer version was looked for (%s): again in %d hours.", LOGGED[problem], seconds // 3600)
        return seconds


async def _fetch(address: str) -> bytes:
    """The page at an address, by the proxies of the environment. Raises `httpx2.HTTPError`, `ValueError`."""
    content = bytearray()
    async with (
        httpx2.AsyncClient(headers=HEADERS, follow_redirects=True, timeout=ANSWER_SECONDS) as client,
        client.stream("GET", address) as answer,
    ):
        answer.raise_for_status()
        async for chunk in answer.aiter_bytes():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise ValueError("the answer is too long")
    return bytes(content)


def newest(files: Iterable[IndexFile], python: str) -> str:
    """The newest version with a file for this Python that was not withdrawn; no pre-release. Empty: there is none."""
    found = (_version(file.filename) for file in files if not file.yanked and _runs_on(file, python))
    released = [version for version in found if version is not None and not version.is_prerelease]
    return str(max(released)) if released else ""


def _version(name: str) -> Version | None:
    try:
        return parse_wheel_filename(name)[1] if name.endswith(".whl") else parse_sdist_filename(name)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _runs_on(file: IndexFile, python: str) -> bool:
    try:
        return SpecifierSet(file.requires_python or "").contains(python, prereleases=True)
    except InvalidSpecifier:
        return True


def package_index(environment: Mapping[str, str]) -> str:
    """Where pip would look for packages here: what the environment says, else what pip does; empty: nobody tells."""
    named = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    pythons = dict.fromkeys((sys.executable, str(Path(sys.base_prefix) / "bin" / "python3")))
    address = named or next(filter(None, map(_told_by_pip, pythons)), "")
    return address if ADDRESS.fullmatch(address) else ""


def _told_by_pip(python: str) -> str:
    """The index of its configuration, or its own, as the help of pip names it; empty where there is no pip."""
    command = [python, "-I", "-m", "pip", "--disable-pip-version-check", "install", "--help"]
    try:
        told = subprocess.run(  # noqa: S603 - Python's own pip
            command, env={**os.environ, "COLUMNS": "2000"}, capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = TOLD_BY_PIP.search(told)
    return found[1] if found else ""
