"""Runs one download in its own process: `python -m app.hub.download_child`, started only by Paceline.

The job is the first line of standard input; each change of the download is written to standard output. The process may
be killed at any moment: received bytes stay on disk, where the next one resumes. A process ends with its parent.
"""

import sys

from app.machine.lifeline import end_with_parent

if __name__ == "__main__":
    JOB = sys.stdin.buffer.readline()
    end_with_parent()

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from app.core.download import Download, DownloadJob
from app.core.errors import HubProblem, PacelineError
from app.hub.hub_files import (
    Hub,
    HubErrors,
    IncompleteStream,
    RepositoryFile,
    XetFile,
    checked_repository,
    checked_revision,
    files_to_download,
    problem_of,
)
from app.hub.partial_folder import PartialFolder, interrupted_commit, is_reachable, repository_lock
from app.models.safe_files import printable

try:
    import hf_xet  # type: ignore[import-untyped]
except ImportError:  # there are no wheels for some platforms
    hf_xet = None


class XetError(Exception):
    """Error of the chunk store (Xet)."""


def _xet_chunks(xet_file: XetFile, size: int, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield a file of the chunk store as (position, bytes). hf_xet's stream can start at `offset`, `xet_get` cannot."""
    position = offset
    try:
        group = hf_xet.XetSession().new_download_stream_group(
            token_refresh_url=xet_file.token_address, token_refresh_headers=xet_file.headers
        )
        for chunk in group.download_stream(hf_xet.XetFileInfo(xet_file.hash, size), start=offset, end=size):
            yield position, bytes(chunk)
            position += len(chunk)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise XetError(type(error).__name__) from None


REPORT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 20.0
DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
RETRIED_REASONS = frozenset({"offline", "busy", "hub_error"})

Report = Callable[[Download], None]


class Cancelled(Exception):
    """Ends the download of a file because another file failed."""


class Fetch:
    """One job, from listing its files to publishing its folder."""

    def __init__(self, job: DownloadJob, report: Report) -> None:
        self._job = job
        self._listener = report
        self._hub = Hub(job.endpoint or None, job.token, job.read_timeout_seconds)
        self._downloads = Path(job.downloads_folder)
        self._download = replace(job.download, state="running", phase="connecting", problem="")
        self._repository = checked_repository(job.download.repository)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._verifying = threading.Event()
        self._disk_full: HubProblem | None = None

    def run(self) -> None:
        """Run the job; report every change, and success at the end. Raises `HubProblem`, or `OSError` for the disk."""
        if not is_reachable(self._downloads):
            raise HubProblem("folder_missing", self._repository)
        with repository_lock(self._downloads, self._repository, self._job.lock_seconds):
            revision = checked_revision(self._download.revision) or interrupted_commit(
                self._downloads, self._repository
            )
            contents = self._hub.contents(self._repository, revision)
            files = files_to_download(self._repository, contents.files)
            self._folder = PartialFolder(self._downloads, self._repository, contents.commit)
            total, self._commit = sum(file.size_bytes for file in files), contents.commit
            if not self._folder.is_published(files):
                self._folder.create()
                self._done_bytes = sum(self._folder.received_bytes(file) for file in files)
                self._report(revision=contents.commit, total_bytes=total)
                self._check_disk_space(total - self._done_bytes + self._job.pending_bytes)
                self._fetch_all([file for file in files if not self._folder.is_verified(file)])
                self._folder.publish(files)
            self._done_bytes = total
            folder = str(self._folder.target)
            self._report(revision=contents.commit, total_bytes=total, state="done", phase="", problem="", folder=folder)

    def fail(self, problem: str) -> None:
        """Report that the job failed with `problem`."""
        self._report(state="failed", phase="", problem=problem)

    def _fetch_all(self, files: list[RepositoryFile]) -> None:
        watch = threading.Thread(target=self._watch, daemon=True, name="watch")
        watch.start()
        with ThreadPoolExecutor(max(1, self._job.streams)) as pool:
            running = [pool.submit(self._fetch_or_stop, file) for file in files]
        self._stop.set()
        watch.join()
        errors = [error for future in running if (error := future.exception()) and not isinstance(error, Cancelled)]
        if self._disk_full is not None:
            raise self._disk_full
        if errors:
            raise errors[0]

    def _fetch_or_stop(self, file: RepositoryFile) -> None:
        """Fetch a file unless another one failed; if this one fails, stop the others."""
        if self._stop.is_set():
            raise Cancelled
        try:
            self._fetch(file)
        except Exception:
            self._stop.set()
            raise

    def _fetch(self, file: RepositoryFile) -> None:
        """Fetch a file; after a wrong hash, try again without the chunk store: that or a crash may be the cause."""
        for use_xet in (self._job.use_xet, False):
            self._receive(file, use_xet=use_xet)
            received = self._folder.received_bytes(file)
            if self._folder.verify(file, self._verifying.set):
                return
            self._add_bytes(-received)
        raise HubProblem("wrong_hash", self._repository, printable(file.name))

    def _receive(self, file: RepositoryFile, *, use_xet: bool) -> None:
        """Receive a file, reconnecting until it is complete."""
        failures = 0
        while True:
            before = self._folder.received_bytes(file)
            try:
                with self._folder.open_incomplete(file) as handle:
                    self._append_chunks(file, handle, use_xet=use_xet)
            except XetError:
                use_xet = False
            except (*HubErrors, IncompleteStream) as error:
                use_xet = False
                failures = 1 if self._folder.received_bytes(file) > before else failures + 1
                self._back_off(problem_of(error, self._repository), failures)
            else:
                return

    def _back_off(self, problem: HubProblem, failures: int) -> None:
        """Back off before the next connection; raise `problem` if a retry cannot help or no attempts are left."""
        if problem.reason not in RETRIED_REASONS or failures >= self._job.attempts:
            raise problem
        self._report(phase="waiting", problem=problem.problem)
        if self._stop.wait(min(LONGEST_WAIT_SECONDS, self._job.retry_seconds * 2 ** (failures - 1))):
            raise Cancelled

    def _append_chunks(self, file: RepositoryFile, handle: BinaryIO, *, use_xet: bool) -> None:
        """Append received chunks until the file is complete, or longer than expected."""
        offset = handle.seek(0, os.SEEK_END)
        if offset > file.size_bytes:
            offset = self._restart(handle, offset)
        if offset == file.size_bytes:
            return
        for position, chunk in self._chunks(file, offset, use_xet=use_xet):
            if position != offset:
                offset = self._restart(handle, offset)
            handle.write(chunk)
            offset += len(chunk)
            self._add_bytes(len(chunk))
            if self._stop.is_set():
                raise Cancelled
            if offset > file.size_bytes:
                return
        if offset < file.size_bytes:
            raise IncompleteStream

    def _restart(self, handle: BinaryIO, offset: int) -> int:
        handle.seek(0)
        handle.truncate()
        self._add_bytes(-offset)
        return 0

    def _chunks(self, file: RepositoryFile, offset: int, *, use_xet: bool) -> Iterator[tuple[int, bytes]]:
        if use_xet and hf_xet is not None and file.size_bytes >= self._job.xet_from_bytes:
            xet_file = self._hub.find_in_xet(self._repository, self._commit, file)
            if xet_file is not None:
                return _xet_chunks(xet_file, file.size_bytes, offset)
        return self._hub.chunks(self._repository, self._commit, file, offset)

    def _report(self, **changes: Any) -> None:
        with self._lock:
            self._download = replace(self._download, done_bytes=self._done_bytes, **changes)
            self._listener(self._download)

    def _add_bytes(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count

    def _watch(self) -> None:
        """Report progress and check disk space a few times a second: the server treats a silent process as stalled."""
        reported = self._done_bytes
        while not self._stop.wait(REPORT_SECONDS):
            done = self._done_bytes
            if done != reported:
                self._report(phase="downloading", problem="")
                reported = done
            elif self._verifying.is_set():
                self._report(phase="verifying")
            self._verifying.clear()
            try:
                self._check_disk_space(0)
            except HubProblem as problem:
                self._disk_full = problem
                self._stop.set()
            except OSError:  # the next write fails too, and reports why
                continue

    def _check_disk_space(self, needed_bytes: int) -> None:
        free = shutil.disk_usage(self._downloads).free
        if needed_bytes + self._job.reserve_bytes > free:
            missing_bytes = needed_bytes + self._job.reserve_bytes - free
            raise HubProblem("disk_full", self._repository, f"{missing_bytes / 1e6:,.0f} MB more are needed")


def download(job: DownloadJob, report: Report) -> None:
    """Run a job; report its success or its failure."""
    fetch = Fetch(job, report)
    try:
        fetch.run()
    except HubProblem as problem:
        fetch.fail(problem.problem)
    except PacelineError as error:
        fetch.fail(f"unsafe: {error.message}")
    except OSError as error:
        full = error.errno in DISK_FULL_ERRORS
        fetch.fail("disk_full" if full else f"unwritable: {error.strerror or type(error).__name__}")


def serve(job: bytes, output: BinaryIO) -> None:
    """Decode and run a job, and write each change of the download to `output` as a line of JSON."""

    def report(current: Download) -> None:
        try:
            output.write(msgspec.json.encode(current) + b"\n")
            output.flush()
        except OSError:  # the parent is gone
            os._exit(1)

    download(msgspec.json.decode(job, type=DownloadJob), report)


if __name__ == "__main__":
    serve(JOB, sys.stdout.buffer)
