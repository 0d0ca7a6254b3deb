"""One download seen from the server: a process that is watched, restarted when it stalls or ends, and ended on demand.

Cancelling the task that runs `DownloadRun.run` ends the process; what has arrived stays on the disk.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

import app
from app.core.download import TRANSIENT
from app.core.safe_files import printable
from app.hub.download_frames import (
    Done,
    DownloadFailed,
    DownloadJob,
    DownloadProgress,
    DownloadWaiting,
    Event,
    read_event,
)

MAX_LINE_BYTES = 1 << 16
PACKAGE_PARENT = Path(app.__file__).resolve().parent.parent

_logger = logging.getLogger("paceline.downloads")


class Reader(Protocol):
    """The events of a child, a line each; empty at the end."""

    async def readline(self) -> bytes: ...


class DownloadProcess(Protocol):
    """A downloading process; `asyncio.subprocess.Process` is one."""

    @property
    def stdout(self) -> Reader | None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


Spawn = Callable[[bytes], Awaitable[DownloadProcess]]
"""Starts a process and hands it the job, keeping its standard input open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what. `pauses_seconds` lie between the attempts that brought nothing, one after another."""

    first_byte_seconds: float = 120.0
    stall_seconds: float = 300.0
    pauses_seconds: tuple[float, ...] = (1, 2, 5, 10, 20, 30, 60, 60, 60)


async def spawn_child(job: bytes) -> DownloadProcess:
    """`python -m app.hub.download_child`, in a folder of ours: `-m` imports from the one that it is started in."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app.hub.download_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        cwd=PACKAGE_PARENT,
        start_new_session=True,  # Ctrl-C at the terminal is for the parent, which ends it
    )
    if process.stdin is not None:
        process.stdin.write(job)
        with contextlib.suppress(ConnectionError):  # it is gone already: its end tells
            await process.stdin.drain()
    return process


class DownloadRun:
    """Process after process until the repository is here or another attempt would not help."""

    def __init__(self, job: DownloadJob, tell: Callable[[Event], None], *, spawn: Spawn, patience: Patience) -> None:
        self._job = job
        self._tell = tell
        self._spawn = spawn
        self._patience = patience
        self._arrived = False

    async def run(self) -> Done | DownloadFailed:
        """The end of the download."""
        fruitless = 0
        while True:
            self._arrived = False
            end = await self._attempt()
            code = end.problem.partition(":")[0] if isinstance(end, DownloadFailed) else ""
            if isinstance(end, Done) or code not in TRANSIENT:
                return end
            _logger.info("the download of %s ended: %s", printable(self._job.repository), end.problem)
            if code == "stalled" and self._job.use_xet:
                self._job = msgspec.structs.replace(self._job, use_xet=False)
                continue
            fruitless = 0 if self._arrived else fruitless + 1
            if fruitless > len(self._patience.pauses_seconds):
                return end
            self._tell(DownloadWaiting(end.problem))
            await asyncio.sleep(self._patience.pauses_seconds[max(0, fruitless - 1)])

    async def _attempt(self) -> Done | DownloadFailed:
        child = await self._spawn(msgspec.json.encode(self._job) + b"\n")
        try:
            return await self._listen(child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await asyncio.shield(child.wait())

    async def _listen(self, child: DownloadProcess) -> Done | DownloadFailed:
        """Its events until the last one; a silent process is taken for stalled."""
        limit = self._patience.first_byte_seconds
        while True:
            try:
                async with asyncio.timeout(limit):
                    line = await child.stdout.readline() if child.stdout is not None else b""
            except TimeoutError:
                return DownloadFailed("stalled")
            except ValueError:
                return DownloadFailed("interrupted: a line without an end")
            if not line:
                return DownloadFailed(f"interrupted: exit code {await child.wait()}")
            try:
                event = read_event(line)
            except msgspec.MsgspecError:
                continue
            if isinstance(event, Done | DownloadFailed):
                return event
            if isinstance(event, DownloadProgress):
                self._arrived = True
                limit = self._patience.stall_seconds
            self._tell(event)
