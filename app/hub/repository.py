"""What may be asked of the hub and what of it may be stored: names of repositories and files, checked purely.

Only data that a model folder needs is fetched, and only from the top level: weights in subfolders are other formats of
the same model. A path that tries to leave its folder condemns the whole repository.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from app.core.errors import HubProblem, InvalidRequest
from app.core.safe_files import printable

ALLOWED_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")
REPOSITORY = re.compile(r"\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@ -]{0,199}")
MAX_FILES = 2_000


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """One file to fetch. `sha256` is known for large files, `blob_id` (git's SHA-1) for the others."""

    name: str
    size_bytes: int
    sha256: str = ""
    blob_id: str = ""


def checked_repository(text: str) -> str:
    """`organisation/name` out of what a person typed or pasted. Raises `InvalidRequest`."""
    name = re.sub(r"^https?://[^/]+/", "", text.strip()).removesuffix("/")
    if REPOSITORY.fullmatch(name) is None or ".." in name or "--" in name or name.endswith(".git"):
        raise InvalidRequest(
            f'"{printable(text)}" is no name of a repository: give organisation/name', parameter="repository"
        )
    return name


def checked_revision(text: str) -> str:
    """A branch, tag or commit; empty stands for the main branch. Raises `InvalidRequest`."""
    if text and (REVISION.fullmatch(text) is None or ".." in text):
        raise InvalidRequest(f'"{printable(text)}" is no revision: give a branch, tag or commit', parameter="revision")
    return text


def wanted_files(repository: str, files: Iterable[RepositoryFile]) -> tuple[RepositoryFile, ...]:
    """The files to fetch, small ones first. Raises `HubProblem` for a repository that is unsafe or has no weights."""
    every = list(files)
    for file in every:
        check_path(repository, file)
    kept = [file for file in every if "/" not in file.name and _is_wanted(file.name)]
    weights = [file for file in kept if file.name.endswith(".safetensors")]
    loaded = [file for file in weights if file.name.startswith("model")] or weights
    if not weights:
        raise HubProblem("empty", repository)
    if len(kept) > MAX_FILES:
        raise HubProblem("unsafe", repository, f"{len(kept)} files")
    chosen = [file for file in kept if file not in weights or file in loaded]
    _check_unique(repository, chosen)
    return tuple(sorted(chosen, key=lambda file: (file.size_bytes, file.name)))


def check_path(repository: str, file: RepositoryFile) -> None:
    """Raises `HubProblem` when the path could lead out of its folder or hides something from a person."""
    parts = file.name.split("/")
    escapes = "\\" in file.name or not file.name.isprintable() or any(part in {"", ".", ".."} for part in parts)
    if escapes or re.match(r"[A-Za-z]:", file.name) or file.size_bytes < 0:
        raise HubProblem("unsafe", repository, printable(file.name))


def _is_wanted(name: str) -> bool:
    return name.endswith(ALLOWED_SUFFIXES) and FILE_NAME.fullmatch(name) is not None


def _check_unique(repository: str, files: Iterable[RepositoryFile]) -> None:
    """Two names that differ by case only are one file on a Mac's disk."""
    seen: set[str] = set()
    for file in files:
        if file.name.casefold() in seen:
            raise HubProblem("unsafe", repository, printable(file.name))
        seen.add(file.name.casefold())
        if not (SHA256.fullmatch(file.sha256) or COMMIT.fullmatch(file.blob_id)):
            raise HubProblem("unsafe", repository, f"{printable(file.name)} has no hash")
