"""The folder of a download in progress: `.partial/organisation--name@commit`, renamed to its final place at the end.

A file there is called `name.incomplete` until its hash is verified. The folder moves to its final place only once all
files are verified. So visible models are complete and downloads can resume, whichever process is killed.
"""

import contextlib
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from app.core.download import MARKER, PARTIAL, PARTIAL_NAME
from app.core.errors import HubProblem
from app.core.patience import patient
from app.hub.hub_files import COMMIT, RepositoryFile
from app.machine.own_files import (
    flush_to_disk,
    lock_file,
    make_cache_folder,
    make_folder,
    open_regular_file,
    own_folders,
    read_json_as,
    sync,
)

INCOMPLETE = ".incomplete"
BLOCK_BYTES = 1 << 20


class Marker(msgspec.Struct, frozen=True):
    """Record in a downloaded folder, which distinguishes the folder from foreign ones and names its commit."""

    repository: str
    commit: str
    files: dict[str, int]


class PartialFolder:
    """Partial folder of one repository at one commit, and its final place. Raises `HubProblem` where stated."""

    def __init__(self, downloads: Path, repository: str, commit: str) -> None:
        self._downloads = downloads
        self._repository = repository
        self._commit = commit
        self.target = downloads / repository
        self.path = downloads / PARTIAL / f"{_flat_name(repository)}@{commit}"

    def is_published(self, files: tuple[RepositoryFile, ...]) -> bool:
        """Return whether the final folder holds this commit. Raises `folder_taken` for a folder that is not ours."""
        if not os.path.lexists(self.target):
            return False
        marker = read_marker(self.target)
        if marker is None or self.target.is_symlink() or self.target.parent.is_symlink():
            raise HubProblem("folder_taken", self._repository)
        return marker.commit == self._commit and all(
            _file_size(self.target / file.name) == file.size_bytes for file in files
        )

    def create(self) -> None:
        """Create the partial folder; refuse links in its way, remove the partial folders of other commits."""
        make_cache_folder(self.path.parent, 0o755)
        make_folder(self.path, 0o755)
        remove_partials(self._downloads, self._repository, except_commit=self._commit)

    def is_verified(self, file: RepositoryFile) -> bool:
        """Return whether a file has its final name, which it gets once its hash is verified."""
        return _file_size(self.path / file.name) == file.size_bytes

    def received_bytes(self, file: RepositoryFile) -> int:
        """Return the number of bytes of a file received so far."""
        size = _file_size(self.path / file.name)
        return size if size >= 0 else max(0, _file_size(self.path / (file.name + INCOMPLETE)))

    @contextlib.contextmanager
    def open_incomplete(self, file: RepositoryFile) -> Iterator[BinaryIO]:
        """Open the incomplete file, unbuffered, never through a link."""
        path = self.path / (file.name + INCOMPLETE)
        make_folder(path.parent, 0o755)
        with os.fdopen(open_regular_file(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as handle:
            yield handle

    def verify(self, file: RepositoryFile, on_block: Callable[[], None]) -> bool:
        """Hash a complete file; rename it to its final name if the hash is right, else remove it and return False."""
        incomplete = self.path / (file.name + INCOMPLETE)
        digest = hashlib.sha256() if file.sha256 else hashlib.sha1(usedforsecurity=False)
        if not file.sha256:
            digest.update(b"blob %d\0" % file.size_bytes)
        with os.fdopen(open_regular_file(incomplete), "rb") as handle:
            while block := handle.read(BLOCK_BYTES):
                digest.update(block)
                on_block()
            flush_to_disk(handle.fileno())
        if digest.hexdigest() != (file.sha256 or file.blob_id) or _file_size(incomplete) != file.size_bytes:
            incomplete.unlink()
            return False
        incomplete.rename(self.path / file.name)
        return True

    def publish(self, files: tuple[RepositoryFile, ...]) -> None:
        """Move the complete folder to its final place, replacing an earlier commit."""
        expected_names = {file.name.partition("/")[0] for file in files}
        for path in self.path.iterdir():
            if path.name not in expected_names:
                path.unlink()
        marker = Marker(self._repository, self._commit, {file.name: file.size_bytes for file in files})
        (self.path / MARKER).write_bytes(msgspec.json.encode(marker))
        sync(self.path)
        self.target.parent.mkdir(exist_ok=True)
        if self.target.parent.is_symlink():
            raise HubProblem("folder_taken", self._repository)
        if os.path.lexists(self.target):
            self.target.rename(self.path.parent / f"{_flat_name(self._repository)}@old-{uuid.uuid4().hex}")
        self.path.rename(self.target)
        sync(self.target.parent)
        remove_partials(self._downloads, self._repository)


@contextlib.contextmanager
def repository_lock(downloads: Path, repository: str, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of a repository; the system frees it if its holder is killed. Raises `in_use`."""
    folder = downloads / PARTIAL
    make_cache_folder(folder, 0o755)
    descriptor = open_regular_file(folder / f"{_flat_name(repository)}.lock", os.O_RDWR | os.O_CREAT)
    try:
        if not lock_file(descriptor, wait_seconds):
            raise HubProblem("in_use", repository)
        yield
    finally:
        os.close(descriptor)


@patient(otherwise=False)
def is_reachable(downloads: Path) -> bool:
    """Return whether a downloads folder or its parent exists; below an unmounted drive, neither does."""
    return downloads.is_dir() or downloads.parent.is_dir()


def interrupted_commit(downloads: Path, repository: str) -> str:
    """Return the commit of an interrupted download of `repository`; "" when there is none."""
    names = [path.name.rpartition("@")[2] for path in _partials(downloads, repository)]
    return next((name for name in sorted(names) if COMMIT.fullmatch(name)), "")


def remove_partials(downloads: Path, repository: str, *, except_commit: str = "") -> None:
    """Remove the partial folders of a repository, except that of `except_commit`."""
    for path in _partials(downloads, repository):
        if not (except_commit and path.name.endswith(f"@{except_commit}")):
            shutil.rmtree(path, ignore_errors=True)


def delete_partials(roots: Iterable[Path], repository: str, wait_seconds: float = 5.0) -> None:
    """Remove all partial folders of a repository in `roots`, under its locks. Raises `in_use` or `unwritable`."""
    try:
        for downloads in roots:
            if (downloads / PARTIAL).is_dir():  # else nothing may be made there: its drive may be unmounted
                with repository_lock(downloads, repository, wait_seconds):
                    remove_partials(downloads, repository)
    except OSError as error:
        raise HubProblem("unwritable", repository, error.strerror or type(error).__name__) from None


def remove_model(roots: Iterable[Path], folder: Path) -> bool:
    """Remove a model downloaded into one of `roots`, atomically for readers; return False for any other folder."""
    marker = read_marker(folder)
    downloads = next((root for root in roots if marker is not None and folder == root / marker.repository), None)
    if marker is None or downloads is None or folder.is_symlink() or folder.parent.is_symlink():
        return False
    make_cache_folder(downloads / PARTIAL, 0o755)
    trash = downloads / PARTIAL / f"{_flat_name(marker.repository)}@old-{uuid.uuid4().hex}"
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: the organisation has other models
        folder.parent.rmdir()
    return True


def read_marker(folder: Path) -> Marker | None:
    """Read the marker of a folder; None if Paceline did not download the folder."""
    return read_json_as(folder / MARKER, Marker)


def _partials(downloads: Path, repository: str) -> list[Path]:
    partials = own_folders(downloads, re.escape(PARTIAL), PARTIAL_NAME)
    return [path for path in partials if path.name.startswith(f"{_flat_name(repository)}@")]


def _flat_name(repository: str) -> str:
    """Return a repository as one folder name; it is unambiguous because the hub allows no "--" in names."""
    return repository.replace("/", "--")


def _file_size(path: Path) -> int:
    """Return the size of a regular file, -1 for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
