"""The download of one repository, the same value in queue, process, store and pages, and why a download stops.

`problem` of a download is a code of `PROBLEMS`, or a code and a detail joined by ": "; `problem_text` explains it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

LARGEST_COUNT = (1 << 53) - 1
"""Largest count that every JSON reader keeps exactly and SQLite can hold."""
Bytes = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
State = Literal["queued", "running", "paused", "done", "failed", "cancelled"]
Phase = Literal["", "connecting", "downloading", "waiting", "verifying"]
FINISHED: tuple[State, ...] = ("done", "failed", "cancelled")

MARKER, PARTIAL = ".paceline.json", ".partial"
"""File that marks a model's folder as downloaded by Paceline; name of the subfolder for incomplete downloads."""
FLAT_NAME = r"[\w.-]+--[\w.-]+"
PARTIAL_NAME, PARTIAL_LOCK = rf"{FLAT_NAME}@(?:[0-9a-f]{{40}}|old-[0-9a-f]{{32}})", rf"{FLAT_NAME}\.lock"
"""Patterns of names in the subfolder `PARTIAL`: a repository at a commit or being removed, and its lock."""
RESERVE_BYTES = 1 << 30
"""Bytes of disk space that downloads leave free."""

PROBLEMS = {
    "offline": "the Hugging Face Hub cannot be reached: check your network, try again; installed models keep working",
    "proxy": "all_proxy names a SOCKS proxy, which cannot be used: set https_proxy to an HTTP proxy, or unset it",
    "busy": "too many requests to the Hub: wait a minute, then try again",
    "hub_error": "the Hub has a problem: try again later",
    "gated": "access to {repository} is gated: accept its license on the Hub and save an access token of that account",
    "not_found": "the Hub has no {repository}, or it is private: check the name, or save a token with access",
    "refused": "the Hub rejected the saved token: save another one, or remove it to download public repositories",
    "empty": "{repository} has no safetensors weights, the only format that runs here: choose another one",
    "unsafe": "{repository} lists files with unsafe names or sizes: choose another one",
    "wrong_hash": "a file failed its checksum twice and was deleted: try again later",
    "disk_full": "not enough disk space: free some, then try again; what has been downloaded is kept",
    "unwritable": "cannot write to the download folder: choose another one, or fix its permissions",
    "folder_missing": "the download folder is missing: connect its drive, or choose another folder, then try again",
    "folder_taken": "there is already a folder {repository} that Paceline did not download: move it, then try again",
    "in_use": "another Paceline is downloading {repository}: try again when it has finished",
    "stalled": "the download stalled: check your network, then try again",
    "interrupted": "the download process ended unexpectedly: try again",
}
"""Messages by code: why a download stopped, and the next action."""

TRANSIENT = frozenset({"offline", "busy", "hub_error", "stalled", "interrupted", "in_use"})
"""Codes of problems that may pass: retried a few times before a person has to act."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """One repository at one commit. Times are Unix seconds."""

    id: int = 0
    repository: str
    revision: str = ""
    """The commit; empty until the hub has named it."""
    state: State = "queued"
    phase: Phase = ""
    """Activity while it runs; not stored."""
    position: int = 0
    total_bytes: Bytes = 0
    done_bytes: Bytes = 0
    folder: str = ""
    problem: str = ""
    drafts_for: str = ""
    """Main model that it will draft for once downloaded."""
    created_at: float = 0.0
    changed_at: float = 0.0

    @property
    def missing_bytes(self) -> int:
        """Bytes still to arrive; 0 also while the total is unknown."""
        return max(0, self.total_bytes - self.done_bytes)

    @property
    def problem_code(self) -> str:
        """Code of its problem, without the detail; "" for none."""
        return self.problem.partition(": ")[0]

    @property
    def problem_text(self) -> str:
        """Message of its problem, with the detail at the end; "" for none."""
        return problem_text(self.repository, self.problem)


class DownloadJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of a download process, passed on its standard input; the token is passed in no other way.

    At each change, the process writes the download to its standard output, as one line of JSON.
    """

    download: Download
    downloads_folder: str
    token: str = ""
    endpoint: str = ""
    use_xet: bool = True
    xet_from_bytes: int = 64 << 20
    """Smallest file, in bytes, that is worth the handshake with the chunk store (Xet)."""
    reserve_bytes: int = RESERVE_BYTES
    """Disk space that must remain free, in bytes."""
    pending_bytes: int = 0
    """Bytes that other running downloads lack at the start of this one."""
    streams: int = 3
    """Number of files fetched at the same time."""
    attempts: int = 5
    """Number of connections that break in a row, with no byte received in between, before the download fails."""
    retry_seconds: float = 1.0
    read_timeout_seconds: float = 30.0
    lock_seconds: float = 5.0


def problem_text(repository: str, problem: str) -> str:
    """Return the message of a problem, with the detail at the end; "" for none."""
    code, _, detail = problem.partition(": ")
    if not code:
        return ""
    text = PROBLEMS[code].format(repository=repository) if code in PROBLEMS else code
    return f"{text} ({detail})" if detail else text
