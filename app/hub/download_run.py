"""Runs a download process from the server: restarts it when it stalls or ends early, and kills it on demand.

Cancelling the task that runs `run_download` ends the process; received bytes stay on disk.
"""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

import app
from app.core.download import TRANSIENT, Download, DownloadJob
from app.models.safe_files import printable

MAX_LINE_BYTES = 1 << 16
PACKAGE_PARENT = Path(app.__file__).resolve().parent.parent

logger = logging.getLogger("paceline.downloads")


Spawn = Callable[[bytes], Awaitable[Process]]
"""Function that starts a process and writes the job to its standard input, which stays open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadTimeouts:
    """Timeouts, and the backoff: `pauses_seconds` between consecutive attempts that received nothing."""

    first_byte_seconds: float = 120.0
    stall_seconds: float = 300.0
    pauses_seconds: tuple[float, ...] = (1, 2, 5, 10, 20, 30, 60, 60, 60)


class Wait:
    """The wait for the next line of a download process; any line ends the wait."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None
        self._began = 0.0

    def begin(self, seconds: float) -> asyncio.Timeout:
        """Begin a wait of at most `seconds`."""
        self._began = asyncio.get_running_loop().time()
        self._timeout = asyncio.timeout(seconds)
        return self._timeout

    def seconds(self) -> tuple[float, float]:
        """Return the seconds waited, and those until a silent process is replaced; zeros while no process runs."""
        if self._timeout is None or (end := self._timeout.when()) is None:
            return 0.0, 0.0
        now = asyncio.get_running_loop().time()
        return now - self._began, max(0.0, end - now)

    def end(self) -> None:
        """Time out now, so that the process is replaced as stalled; the next one resumes at the last received byte."""
        if self._timeout is not None:
            with contextlib.suppress(RuntimeError):  # the wait has already ended
                self._timeout.reschedule(asyncio.get_running_loop().time())

    def stop(self) -> None:
        """Drop the wait, because the process has ended."""
        self._timeout = None


async def spawn_child(job: bytes) -> Process:
    """Start `python -m app.hub.download_child` in Paceline's folder: `-m` imports from the working directory."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app.hub.download_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        cwd=PACKAGE_PARENT,
        start_new_session=True,  # Ctrl-C must reach only the parent, which ends the child
    )
    if process.stdin is not None:
        process.stdin.write(job)
        with contextlib.suppress(ConnectionError):  # the process has already ended: `_listen` reports that
            await process.stdin.drain()
    return process


_decode = msgspec.json.Decoder(Download).decode


async def run_download(
    job: DownloadJob,
    report: Callable[[Download], None],
    *,
    spawn: Spawn = spawn_child,
    timeouts: DownloadTimeouts,
    wait: Wait,
) -> Download:
    """Run processes until the repository is complete or retries cannot help; return the final state of the download."""
    failed_attempts = 0
    while True:
        result, has_received_bytes = await _attempt(job, report, spawn, timeouts, wait)
        if result.state == "done" or result.problem_code not in TRANSIENT:
            return result
        logger.info("the download of %s ended: %s", printable(result.repository), result.problem)
        job = msgspec.structs.replace(job, download=result)
        if result.problem_code == "stalled" and job.use_xet:
            job = msgspec.structs.replace(job, use_xet=False)
            continue
        failed_attempts = 0 if has_received_bytes else failed_attempts + 1
        if failed_attempts > len(timeouts.pauses_seconds):
            return result
        report(replace(result, state="running", phase="waiting"))
        await asyncio.sleep(timeouts.pauses_seconds[max(0, failed_attempts - 1)])


async def _attempt(
    job: DownloadJob, report: Callable[[Download], None], spawn: Spawn, timeouts: DownloadTimeouts, wait: Wait
) -> tuple[Download, bool]:
    """Run one process; return the download as done or failed, and whether bytes were received."""
    current, has_received_bytes = job.download, False

    def on_event(download: Download) -> None:
        nonlocal current, has_received_bytes
        current, has_received_bytes = download, has_received_bytes or download.phase == "downloading"
        if download.state == "running":
            report(download)

    child = await spawn(msgspec.json.encode(job) + b"\n")
    try:
        problem = await _listen(child, on_event, timeouts, wait)
    finally:
        wait.stop()
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await asyncio.shield(child.wait())
    return (replace(current, state="failed", phase="", problem=problem) if problem else current), has_received_bytes


async def _listen(child: Process, on_event: Callable[[Download], None], timeouts: DownloadTimeouts, wait: Wait) -> str:
    """Pass on reports until the download is done or has failed; return "", or why it stalled or ended early."""
    limit = timeouts.first_byte_seconds
    while True:
        try:
            async with wait.begin(limit):
                line = await child.stdout.readline() if child.stdout is not None else b""
        except TimeoutError:
            return "stalled"
        except ValueError:
            return "interrupted: a line without an end"
        if not line:
            return f"interrupted: exit code {await child.wait()}"
        try:
            download = _decode(line)
        except msgspec.MsgspecError:
            continue
        on_event(download)
        if download.state != "running":
            return ""
        if download.phase == "downloading":
            limit = timeouts.stall_seconds
