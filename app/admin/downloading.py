"""The download queue, kept across restarts, and calls to the hub on behalf of the dashboard.

Call everything here from one event loop. A limited number of downloads runs at a time, in queue order. Downloads that
run when the server ends resume at the next start; paused ones do not. Adding a repository again continues its download.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from app.core.clock import Clock
from app.core.download import FINISHED, RESERVE_BYTES, Download, DownloadJob
from app.core.errors import HubProblem, InvalidRequest, StoreUnavailable
from app.hub.download_run import DownloadTimeouts, Spawn, Wait, run_download, spawn_child
from app.hub.hub_files import Hub, HubToken, checked_repository, checked_revision
from app.hub.partial_folder import delete_partials, is_reachable
from app.machine.host import free_bytes
from app.settings import Settings
from app.store.rows import DownloadRows

STATE_RANKS = {"running": 0, "queued": 1, "paused": 2}
SMOOTHING_SECONDS, MIN_INTERVAL_SECONDS = 5.0, 0.5
ANSWER_SECONDS = 25.0
MAX_HUB_CALLS = 4
"""Maximum number of concurrent calls to the hub."""

Answer = TypeVar("Answer")

logger = logging.getLogger("paceline.downloads")


class TransferRate:
    """Transfer rate, computed from totals and smoothed over some seconds, so that a page shows a steady number."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._measured_at = clock()
        self._bytes: int | None = None
        self._rate = 0.0

    def record(self, total_bytes: int) -> None:
        """Record the total bytes received. A total below the last one restarts the measurement."""
        now = self._clock()
        if self._bytes is None or total_bytes < self._bytes:
            self._measured_at, self._bytes = now, total_bytes
            return
        elapsed = now - self._measured_at
        if elapsed < MIN_INTERVAL_SECONDS:
            return
        current_rate = (total_bytes - self._bytes) / elapsed
        weight = min(1.0, elapsed / SMOOTHING_SECONDS) if self._rate else 1.0
        self._rate += weight * (current_rate - self._rate)
        self._measured_at, self._bytes = now, total_bytes

    def bytes_per_second(self) -> float:
        """Return the smoothed rate; 0 if nothing has arrived for a while."""
        return self._rate if self._clock() - self._measured_at < 2 * SMOOTHING_SECONDS else 0.0

    def seconds_left(self, missing_bytes: int) -> float | None:
        """Return the estimated time left; None while the rate is unknown."""
        rate = self.bytes_per_second()
        return missing_bytes / rate if rate > 0 else None


@dataclass(slots=True)
class RunningDownload:
    """State of a download that exists only while it runs."""

    task: "asyncio.Task[None]"
    rate: TransferRate
    wait: Wait


def queued_in_order(downloads: Iterable[Download]) -> list[Download]:
    """Return the queued downloads, the next one first."""
    return sorted(
        (download for download in downloads if download.state == "queued"),
        key=lambda download: (download.position, download.id),
    )


def in_listing_order(downloads: Iterable[Download]) -> list[Download]:
    """Sort downloads as a page lists them: running, queued, paused; then the rest, the latest first."""

    def rank(download: Download) -> tuple[int, float, int]:
        state_rank = STATE_RANKS.get(download.state, len(STATE_RANKS))
        return state_rank, download.position if download.state in STATE_RANKS else -download.changed_at, download.id

    return sorted(downloads, key=rank)


class Downloads:
    """All downloads of this computer, into the folder and from the hub that the settings name.

    `on_done` is called for each completed download; `job` holds further fields of each `DownloadJob`.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        rows: DownloadRows,
        token: HubToken,
        *,
        on_done: Callable[[Download], None] = lambda _download: None,
        spawn: Spawn = spawn_child,
        timeouts: DownloadTimeouts | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        **job: Any,
    ) -> None:
        self._settings = settings
        self._rows = rows
        self.token = token
        self._on_done = on_done
        self._spawn = spawn
        self._timeouts = timeouts or DownloadTimeouts()
        self._reserve_bytes = reserve_bytes
        self._job_fields = job
        self._downloads: dict[int, Download] = {}
        self._running: dict[int, RunningDownload] = {}
        self._is_open = False
        self._saving: asyncio.Task[None] | None = None
        self._change_lock = asyncio.Lock()
        self._write_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(MAX_HUB_CALLS, "hub")
        """Threads for the hub alone: a hub that hangs must not use up the threads that all requests share."""

    async def start(self) -> None:
        """Load the stored downloads and resume those that were running; without the store, begin with none."""
        self._is_open = True
        try:
            self._downloads = {stored.id: stored for stored in await asyncio.to_thread(self._rows.all)}
        except StoreUnavailable as error:
            logger.warning("Earlier downloads are not known: %s", error.message)
        for download in self._downloads.values():
            if download.state == "running":
                self._update(download, state="queued")
        self.start_queued()

    async def stop(self) -> None:
        """Stop the processes; running downloads are stored as running, so that the next start resumes them."""
        self._is_open = False
        self._threads.shutdown(wait=False, cancel_futures=True)
        running, self._running = list(self._running.values()), {}
        for active in running:
            active.task.cancel()
        await asyncio.gather(*(active.task for active in running), return_exceptions=True)
        await self._save()  # waits for a save that is under way

    @property
    def folder(self) -> Path:
        """Folder that downloads are written to."""
        return self._settings().downloads_path

    @property
    def endpoint(self) -> str:
        """Address of the hub; empty: HF_ENDPOINT, else the public hub."""
        return self._settings().hub_endpoint

    async def call_hub(self, call: Callable[[Hub], Answer]) -> Answer:
        """Call the hub in a thread, for at most ANSWER_SECONDS. Raises `HubProblem`."""
        endpoint = self.endpoint
        token = await asyncio.to_thread(self.token.read, endpoint)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                hub = Hub(endpoint or None, token, ANSWER_SECONDS, ANSWER_SECONDS)
                return await loop.run_in_executor(self._threads, call, hub)
        except TimeoutError:
            raise HubProblem("offline") from None

    def free_bytes(self) -> int:
        """Return the free bytes on the disk of the downloads folder; 0 while its drive is unmounted."""
        return (free_bytes(self.folder) or 0) if is_reachable(self.folder) else 0

    def views(self) -> list[dict[str, Any]]:
        """Return every download as plain values: running, queued, paused, then all others."""
        return [self._view(download) for download in in_listing_order(self._downloads.values())]

    def view(self, download_id: int) -> dict[str, Any]:
        """Return one download as plain values. Raises `InvalidRequest` for an unknown id."""
        return self._view(self._find(download_id))

    def __contains__(self, download_id: object) -> bool:
        return download_id in self._downloads

    @property
    def claimed_bytes(self) -> int:
        """Disk space that another download cannot use: what queued and running ones still lack, and the reserve."""
        unfinished = (other for other in self._downloads.values() if other.state in {"queued", "running"})
        return self._reserve_bytes + sum(other.missing_bytes for other in unfinished)

    async def changed(self) -> None:
        """Wait for the next change of any download."""
        await self._changed.wait()

    async def add(self, repository: str, revision: str = "", drafts_for: str = "") -> dict[str, Any]:
        """Queue a repository or continue its download. Raises `InvalidRequest` for a malformed name or revision."""
        repository, revision = checked_repository(repository), checked_revision(revision)
        async with self._change_lock:
            download = next(
                (download for download in self._downloads.values() if download.repository == repository), None
            )
            if download is not None and download.state in {"queued", "running"}:
                return self._view(download)
            if download is None:
                new_download = Download(
                    id=0, repository=repository, created_at=time.time(), position=self._last_position() + 1
                )
                download = await asyncio.to_thread(self._rows.add, new_download)
                self._downloads[download.id] = download
            if download.state in FINISHED:
                download = self._update(
                    download, revision="", done_bytes=0, total_bytes=0, position=self._last_position() + 1
                )
            commit = revision or download.revision
            self._update(
                download, state="queued", problem="", revision=commit, drafts_for=drafts_for or download.drafts_for
            )
            return await self._finish_change(download.id)

    async def pause(self, download_id: int) -> dict[str, Any]:
        """Pause a download; its partial files are kept."""
        async with self._change_lock:
            download = self._find(download_id, "queued", "running")
            await self._cancel_task(download_id)
            download = self._downloads[download_id]
            if download.state in {"queued", "running"}:
                self._update(download, state="paused")
            return await self._finish_change(download_id)

    async def resume(self, download_id: int) -> dict[str, Any]:
        """Queue a paused, failed or cancelled download again; it continues from its partial files."""
        async with self._change_lock:
            self._update(self._find(download_id, "paused", "failed", "cancelled"), state="queued", problem="")
            return await self._finish_change(download_id)

    async def reconnect(self, download_id: int) -> dict[str, Any]:
        """Replace the process of a running download; the new process resumes after the last byte received."""
        self._find(download_id, "running")
        self._running[download_id].wait.end()
        return self.view(download_id)

    async def cancel(self, download_id: int) -> dict[str, Any]:
        """Cancel a download and delete its partial files."""
        async with self._change_lock:
            self._find(download_id, "queued", "running", "paused", "failed")
            await self._cancel_task(download_id)
            download = self._downloads[download_id]
            if download.state != "done":
                await self._forget_partials(download)
            return await self._finish_change(download_id)

    async def move(self, download_id: int, *, up: bool) -> dict[str, Any]:
        """Swap a queued download with the one before or after it; at either end of the queue nothing happens."""
        async with self._change_lock:
            download = self._find(download_id, "queued")
            waiting = queued_in_order(self._downloads.values())
            other = waiting.index(download) + (-1 if up else 1)
            if 0 <= other < len(waiting):
                self._update(download, position=waiting[other].position)
                self._update(waiting[other], position=download.position)
            return await self._finish_change(download_id)

    async def remove(self, download_id: int) -> None:
        """Remove a finished download from the list and delete any partial files; a whole model is kept."""
        async with self._change_lock:
            download = self._find(download_id, *FINISHED)
            if download.state == "failed":
                await asyncio.to_thread(delete_partials, self._settings().model_folders, download.repository)
            async with self._write_lock:
                await asyncio.to_thread(self._rows.delete, download_id)
                del self._downloads[download_id]
            self._notify_change()

    def start_queued(self) -> None:
        """Start queued downloads, up to the limit on parallel ones."""
        if not self._is_open:
            return
        room = max(0, self._settings().parallel_downloads - len(self._running))
        for download in queued_in_order(self._downloads.values())[:room]:
            self._update(download, state="running", phase="connecting", problem="")
            task = asyncio.create_task(self._run(download.id), name=f"download {download.id}")
            self._running[download.id] = RunningDownload(task, TransferRate(time.monotonic), Wait())

    async def _run(self, download_id: int) -> None:
        try:
            job = await self._job(download_id)
            wait = self._running[download_id].wait
            result = await run_download(job, self._on_event, spawn=self._spawn, timeouts=self._timeouts, wait=wait)
        except Exception as error:  # any error: the queue must go on
            current = self._downloads[download_id]
            logger.exception("the download of %s was interrupted", current.repository)
            problem = f"interrupted: {getattr(error, 'strerror', None) or type(error).__name__}"
            result = replace(current, state="failed", phase="", problem=problem)
        self._finish(result)
        await self._save()

    async def _job(self, download_id: int) -> DownloadJob:
        download = self._downloads[download_id]
        others = (self._downloads[other_id] for other_id in self._running if other_id != download_id)
        other_pending_bytes = sum(other.missing_bytes for other in others)
        return DownloadJob(
            download=download,
            downloads_folder=str(self.folder),
            token=await asyncio.to_thread(self.token.read, self.endpoint),
            endpoint=self.endpoint,
            reserve_bytes=self._reserve_bytes,
            pending_bytes=other_pending_bytes,
            **self._job_fields,
        )

    def _on_event(self, download: Download) -> None:
        running, before = self._running.get(download.id), self._downloads[download.id]
        if running is not None:
            running.rate.record(download.done_bytes)
            self._update(download)
            if (download.revision, download.total_bytes) != (before.revision, before.total_bytes):
                # saved now: after a crash the next server continues with this commit
                self._saving = asyncio.create_task(self._save(), name="downloads: save")

    def _finish(self, download: Download) -> None:
        self._running.pop(download.id, None)
        self._update(download)
        logger.info("the download of %s: %s %s", download.repository, download.state, download.problem)
        try:
            if download.state == "done":
                self._report(download)
        except Exception:  # here too the queue must go on
            logger.exception("%s was downloaded, but it could not be listed or attached", download.repository)
        self.start_queued()

    def _report(self, download: Download) -> None:
        """Report a completed download. If it is a main model, also report its drafters that finished earlier. A drafter
        whose main model is not complete yet is reported without `drafts_for`."""
        downloads = list(self._downloads.values())
        missing = {other.repository for other in downloads if other.state not in {"done", "cancelled"}}
        drafters = [other for other in downloads if other.state == "done" and other.drafts_for == download.repository]
        for completed in (download, *drafters):
            is_early = completed.drafts_for in missing
            self._on_done(replace(completed, drafts_for="") if is_early else completed)
            if completed.drafts_for and not is_early:
                self._update(completed, drafts_for="")

    async def _cancel_task(self, download_id: int) -> None:
        running = self._running.pop(download_id, None)
        if running is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            self._update(self._downloads[download_id], phase="")

    async def _forget_partials(self, download: Download) -> None:
        """Delete the partial files of a stopped download and mark it cancelled; if they cannot be deleted, mark it
        failed, so that it can be cancelled again."""
        try:
            await asyncio.to_thread(delete_partials, self._settings().model_folders, download.repository)
        except HubProblem as problem:
            self._update(download, state="failed", problem=problem.problem)
        else:
            self._update(download, state="cancelled", done_bytes=0, problem="")

    async def _finish_change(self, download_id: int) -> dict[str, Any]:
        """Complete a change: start queued downloads, store the queue, return the download as plain values."""
        self.start_queued()
        await self._save()
        return self._view(self._downloads[download_id])

    def _update(self, download: Download, **changes: Any) -> Download:
        changed = replace(download, **changes, changed_at=time.time())
        self._downloads[download.id] = changed
        self._notify_change()
        return changed

    def _notify_change(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def _save(self) -> None:
        """Store all downloads. A failed write is retried at the next change: the files on disk are authoritative."""
        try:
            async with self._write_lock:
                if self._downloads:
                    await asyncio.to_thread(self._rows.save, list(self._downloads.values()))
        except StoreUnavailable as error:
            logger.warning("the list of downloads cannot be written: %s", error.message)

    def _find(self, download_id: int, *states: str) -> Download:
        download = self._downloads.get(download_id)
        if download is None:
            raise InvalidRequest(f"There is no download {download_id}: GET /admin/api/downloads lists them.")
        if states and download.state not in states:
            allowed = " or ".join(states)
            raise InvalidRequest(f"The download is {download.state}: that is possible only while it is {allowed}.")
        return download

    def _last_position(self) -> int:
        return max((download.position for download in self._downloads.values()), default=0)

    def _view(self, download: Download) -> dict[str, Any]:
        """Return the download's values with its rate, its time left and its problem in words."""
        running = self._running.get(download.id)
        seconds = running.rate.seconds_left(download.missing_bytes) if running is not None else None
        silent, left = running.wait.seconds() if running is not None else (0.0, 0.0)
        return asdict(download) | {
            "bytes_per_second": round(running.rate.bytes_per_second()) if running is not None else 0.0,
            "seconds_left": None if seconds is None else round(seconds),
            "silent_seconds": round(silent),
            "reconnect_seconds": round(left),
            "problem": download.problem_code,
            "problem_text": download.problem_text,
        }
