"""Downloads: their queue (so many at a time, in their order, kept over restarts), and the hub that a person asks.

One event loop calls everything here. What runs when the server ends goes on at the next start; what was paused stays
paused. A repository has one download: asking again goes on with it.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from app.core.clock import Clock
from app.core.download import FINISHED, RESERVE_BYTES, Download, DownloadJob
from app.core.errors import HubProblem, InvalidRequest, StoreUnavailable
from app.hub.download_run import Patience, Spawn, run_download, spawn_child
from app.hub.hub_files import Hub, HubToken, checked_repository, checked_revision
from app.hub.partial_folder import forget_partials
from app.settings import Settings
from app.store.rows import DownloadRows

RANKS = {"running": 0, "queued": 1, "paused": 2}
SMOOTHING_SECONDS, SHORTEST_SECONDS = 5.0, 0.5
ANSWER_SECONDS = 25.0
CONVERSATIONS = 4
"""With the hub at the same time."""

Answer = TypeVar("Answer")

_logger = logging.getLogger("paceline.downloads")


class TransferRate:
    """How fast bytes arrive, smoothed over some seconds so that a number on a page can be read. Fed with totals."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock()
        self._bytes: int | None = None
        self._rate = 0.0

    def note(self, total_bytes: int) -> None:
        """So many bytes are here now. A total below the last one starts anew."""
        now = self._clock()
        if self._bytes is None or total_bytes < self._bytes:
            self._at, self._bytes = now, total_bytes
            return
        passed = now - self._at
        if passed < SHORTEST_SECONDS:
            return
        present = (total_bytes - self._bytes) / passed
        weight = min(1.0, passed / SMOOTHING_SECONDS) if self._rate else 1.0
        self._rate += weight * (present - self._rate)
        self._at, self._bytes = now, total_bytes

    def bytes_per_second(self) -> float:
        """0 when nothing came for a while."""
        return self._rate if self._clock() - self._at < 2 * SMOOTHING_SECONDS else 0.0

    def seconds_left(self, missing_bytes: int) -> float | None:
        """None while nobody can tell."""
        rate = self.bytes_per_second()
        return missing_bytes / rate if rate > 0 else None


@dataclass(slots=True)
class Running:
    """What the server knows of a download only while it runs."""

    task: "asyncio.Task[None]"
    rate: TransferRate


def next_waiting(downloads: Iterable[Download]) -> list[Download]:
    """Those that wait for their turn, the next one first."""
    return sorted((each for each in downloads if each.state == "queued"), key=lambda each: (each.position, each.id))


def in_order(downloads: Iterable[Download]) -> list[Download]:
    """As a page lists them: what runs, waits, is paused; then the rest, the latest first."""

    def rank(download: Download) -> tuple[int, float, int]:
        place = RANKS.get(download.state, len(RANKS))
        return place, download.position if download.state in RANKS else -download.changed_at, download.id

    return sorted(downloads, key=rank)


class Downloads:
    """All downloads of this computer, into the folder and from the hub that the settings name.

    `arrived` is called for each one that is done; `job` holds further fields of each `DownloadJob`.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        rows: DownloadRows,
        token: HubToken,
        *,
        arrived: Callable[[Download], None] = lambda _download: None,
        spawn: Spawn = spawn_child,
        patience: Patience | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        **job: Any,
    ) -> None:
        self._settings = settings
        self._rows = rows
        self.token = token
        self._arrived = arrived
        self._spawn = spawn
        self._patience = patience or Patience()
        self._reserve_bytes = reserve_bytes
        self._job_fields = job
        self._downloads: dict[int, Download] = {}
        self._running: dict[int, Running] = {}
        self._is_open = False
        self._saving: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(CONVERSATIONS, "hub")
        """For the hub alone: one that does not answer must not take the threads that every request needs."""

    async def start(self) -> None:
        """Read what is kept and go on with what ran; where it cannot be read the queue works, too."""
        self._is_open = True
        try:
            self._downloads = {each.id: each for each in await asyncio.to_thread(self._rows.all)}
        except StoreUnavailable as error:
            _logger.warning("Earlier downloads are not known: %s", error.message)
        for download in self._downloads.values():
            if download.state == "running":
                self._put(download, state="queued")
        self.fill()

    async def stop(self) -> None:
        """End the processes; what ran is kept as running."""
        self._is_open = False
        self._threads.shutdown(wait=False, cancel_futures=True)
        running, self._running = list(self._running.values()), {}
        for each in running:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in running), return_exceptions=True)
        await self._save()  # after the one that may be under way

    @property
    def folder(self) -> Path:
        """Where downloads go."""
        return self._settings().downloads_path

    @property
    def endpoint(self) -> str:
        """The address of the hub; empty: the public one, or what HF_ENDPOINT says."""
        return self._settings().hub_endpoint

    async def ask(self, call: Callable[[Hub], Answer]) -> Answer:
        """One conversation with the hub, in a thread, for as long as a person waits. Raises `HubProblem`."""
        endpoint = self.endpoint
        token = await asyncio.to_thread(self.token.read, endpoint)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await loop.run_in_executor(self._threads, call, Hub(endpoint or None, token))
        except TimeoutError:
            raise HubProblem("offline") from None

    def free_bytes(self) -> int:
        """Room on the disk of the downloads folder, which need not be there yet; a disk may take long to answer."""
        there = next((each for each in (self.folder, *self.folder.parents) if each.is_dir()), Path("/"))
        try:
            return shutil.disk_usage(there).free
        except OSError:
            return 0

    def views(self) -> list[dict[str, Any]]:
        """Every download as plain values, in the order of the queue: running, queued, paused, then finished ones."""
        return [self._view(each) for each in in_order(self._downloads.values())]

    def view(self, download_id: int) -> dict[str, Any]:
        """One download as plain values. Raises `InvalidRequest`."""
        return self._view(self._find(download_id))

    def __contains__(self, download_id: object) -> bool:
        return download_id in self._downloads

    @property
    def promised_bytes(self) -> int:
        """What is still to arrive of everything that runs or waits."""
        return sum(each.missing_bytes for each in self._downloads.values() if each.state in {"queued", "running"})

    async def changed(self) -> None:
        """Return at the next change of any download."""
        await self._changed.wait()

    async def add(self, repository: str, revision: str = "", drafts_for: str = "") -> dict[str, Any]:
        """Queue a repository, or go on with the download of it that there is. Raises `InvalidRequest`."""
        repository, revision = checked_repository(repository), checked_revision(revision)
        async with self._changing:
            known = next((each for each in self._downloads.values() if each.repository == repository), None)
            if known is not None and known.state in {"queued", "running"}:
                return self._view(known)
            if known is None:
                fresh = Download(id=0, repository=repository, created_at=time.time(), position=self._last() + 1)
                known = await asyncio.to_thread(self._rows.add, fresh)
                self._downloads[known.id] = known
            if known.state in FINISHED:
                known = self._put(known, revision="", done_bytes=0, total_bytes=0, position=self._last() + 1)
            commit = revision or known.revision
            self._put(known, state="queued", problem="", revision=commit, drafts_for=drafts_for or known.drafts_for)
            return await self._settle(known.id)

    async def pause(self, download_id: int) -> dict[str, Any]:
        """Stop for now; what has arrived stays."""
        async with self._changing:
            download = self._find(download_id, "queued", "running")
            await self._end(download_id)
            download = self._downloads[download_id]
            if download.state in {"queued", "running"}:
                self._put(download, state="paused")
            return await self._settle(download_id)

    async def resume(self, download_id: int) -> dict[str, Any]:
        """Go on with a paused or failed download where it was."""
        async with self._changing:
            self._put(self._find(download_id, "paused", "failed", "cancelled"), state="queued", problem="")
            return await self._settle(download_id)

    async def cancel(self, download_id: int) -> dict[str, Any]:
        """Stop for good and remove what has arrived."""
        async with self._changing:
            self._find(download_id, "queued", "running", "paused", "failed")
            await self._end(download_id)
            download = self._downloads[download_id]
            if download.state != "done":
                await self._forget_partials(download)
            return await self._settle(download_id)

    async def move(self, download_id: int, *, up: bool) -> dict[str, Any]:
        """Change places with the one before or behind in the queue; at its end nothing happens."""
        async with self._changing:
            download = self._find(download_id, "queued")
            waiting = next_waiting(self._downloads.values())
            other = waiting.index(download) + (-1 if up else 1)
            if 0 <= other < len(waiting):
                self._put(download, position=waiting[other].position)
                self._put(waiting[other], position=download.position)
            return await self._settle(download_id)

    async def remove(self, download_id: int) -> None:
        """Forget a finished download: a model that is whole stays, what had arrived of one that failed goes."""
        async with self._changing:
            download = self._find(download_id, *FINISHED)
            if download.state == "failed":
                await asyncio.to_thread(forget_partials, self.folder, download.repository)
            async with self._writing:
                await asyncio.to_thread(self._rows.delete, download_id)
                del self._downloads[download_id]
            self._tell_change()

    def fill(self) -> None:
        """Start the next ones while there is room for them."""
        if not self._is_open:
            return
        room = max(0, self._settings().parallel_downloads - len(self._running))
        for download in next_waiting(self._downloads.values())[:room]:
            self._put(download, state="running", phase="connecting", problem="")
            task = asyncio.create_task(self._run(download.id), name=f"download {download.id}")
            self._running[download.id] = Running(task, TransferRate(time.monotonic))

    async def _run(self, download_id: int) -> None:
        try:
            job = await self._job(download_id)
            end = await run_download(job, self._on_event, spawn=self._spawn, patience=self._patience)
        except Exception as error:  # whatever it is, the queue goes on
            present = self._downloads[download_id]
            _logger.exception("the download of %s was interrupted", present.repository)
            problem = f"interrupted: {getattr(error, 'strerror', None) or type(error).__name__}"
            end = replace(present, state="failed", phase="", problem=problem)
        self._finish(end)
        await self._save()

    async def _job(self, download_id: int) -> DownloadJob:
        download = self._downloads[download_id]
        others = (self._downloads[each] for each in self._running if each != download_id)
        promised = sum(other.missing_bytes for other in others)
        return DownloadJob(
            download=download,
            downloads_folder=str(self.folder),
            token=await asyncio.to_thread(self.token.read, self.endpoint),
            endpoint=self.endpoint,
            reserve_bytes=self._reserve_bytes + promised,
            **self._job_fields,
        )

    def _on_event(self, download: Download) -> None:
        running, before = self._running.get(download.id), self._downloads[download.id]
        if running is not None:
            running.rate.note(download.done_bytes)
            self._put(download)
            if (download.revision, download.total_bytes) != (before.revision, before.total_bytes):
                # whatever ends the server, the next one goes on with this commit
                self._saving = asyncio.create_task(self._save(), name="downloads: save")

    def _finish(self, download: Download) -> None:
        self._running.pop(download.id, None)
        self._put(download)
        _logger.info("the download of %s is %s %s", download.repository, download.state, download.problem)
        try:
            if download.state == "done":
                self._arrived(download)
        except Exception:  # whatever comes of it, the queue goes on
            _logger.exception("the arrival of %s was not felt everywhere", download.repository)
        self.fill()

    async def _end(self, download_id: int) -> None:
        running = self._running.pop(download_id, None)
        if running is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            self._put(self._downloads[download_id], phase="")

    async def _forget_partials(self, download: Download) -> None:
        """Cancel what was ended; where what has arrived cannot be removed it has failed, and can be cancelled again."""
        try:
            await asyncio.to_thread(forget_partials, self.folder, download.repository)
        except HubProblem as problem:
            self._put(download, state="failed", problem=problem.problem)
        else:
            self._put(download, state="cancelled", done_bytes=0, problem="")

    async def _settle(self, download_id: int) -> dict[str, Any]:
        """After a command: fill the free places, keep the change, tell the result."""
        self.fill()
        await self._save()
        return self._view(self._downloads[download_id])

    def _put(self, download: Download, **changes: Any) -> Download:
        changed = replace(download, **changes, changed_at=time.time())
        self._downloads[download.id] = changed
        self._tell_change()
        return changed

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _save(self) -> None:
        """Keep all of them. What cannot be written waits for the next change: the files on the disk are what counts."""
        try:
            async with self._writing:
                if self._downloads:
                    await asyncio.to_thread(self._rows.save, list(self._downloads.values()))
        except StoreUnavailable as error:
            _logger.warning("the list of downloads cannot be written: %s", error.message)

    def _find(self, download_id: int, *states: str) -> Download:
        download = self._downloads.get(download_id)
        if download is None:
            raise InvalidRequest(f"There is no download {download_id}: GET /admin/api/downloads lists them.")
        if states and download.state not in states:
            allowed = " or ".join(states)
            raise InvalidRequest(f"The download is {download.state}: that is possible only while it is {allowed}.")
        return download

    def _last(self) -> int:
        return max((each.position for each in self._downloads.values()), default=0)

    def _view(self, download: Download) -> dict[str, Any]:
        """The value itself, how fast it is, and its problem in words."""
        running = self._running.get(download.id)
        seconds = running.rate.seconds_left(download.missing_bytes) if running is not None else None
        return asdict(download) | {
            "bytes_per_second": round(running.rate.bytes_per_second()) if running is not None else 0.0,
            "seconds_left": None if seconds is None else round(seconds),
            "problem": download.problem_code,
            "problem_text": download.problem_text,
        }
