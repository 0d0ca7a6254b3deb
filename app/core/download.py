"""A download of one repository, one value for queue, process, store and pages, and the reasons why one stands still.

`problem` of a download is a code of `PROBLEMS`, or a code and a detail joined by ": "; `problem_text` makes it words.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

LARGEST_COUNT = (1 << 53) - 1
"""Count of bytes, or of anything else, that every reader of JSON keeps exactly and SQLite holds: the largest."""
Bytes = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
State = Literal["queued", "running", "paused", "done", "failed", "cancelled"]
Phase = Literal["", "connecting", "downloading", "waiting", "verifying"]
FINISHED: tuple[State, ...] = ("done", "failed", "cancelled")

MARKER, PARTIAL = ".paceline.json", ".partial"
"""In the folder of a model: that Paceline downloaded it; beside them: the folder of what is not whole yet."""
FLAT_NAME = r"[\w.-]+--[\w.-]+"
PARTIAL_NAME, PARTIAL_LOCK = rf"{FLAT_NAME}@(?:[0-9a-f]{{40}}|old-[0-9a-f]{{32}})", rf"{FLAT_NAME}\.lock"
"""Names in that folder, as patterns: a repository at a commit or on its way out, and its lock."""
RESERVE_BYTES = 1 << 30
"""Room on the disk that downloads leave to everything else."""

PROBLEMS = {
    "offline": "the Hugging Face Hub cannot be reached: check your network, try again; installed models keep working",
    "busy": "too many requests to the Hub: wait a minute, then try again",
    "hub_error": "the Hub has a problem: try again later",
    "gated": "{repository} is gated: accept its licence on the Hub and save an access token of that account",
    "not_found": "{repository} does not exist on the Hub or is private: check the name, or save a token with access",
    "refused": "the Hub rejected the saved token: save another one, or remove it to download public repositories",
    "empty": "{repository} has no safetensors weights, the only format that runs here: choose another one",
    "unsafe": "{repository} lists files with unsafe names or sizes: choose another one",
    "wrong_hash": "a file failed its checksum twice and was deleted: try again later",
    "disk_full": "not enough disk space: free some, then try again; what has been downloaded is kept",
    "unwritable": "cannot write to the download folder: choose another one, or fix its permissions",
    "folder_taken": "there is already a folder {repository} that Paceline did not download: move it, then try again",
    "in_use": "another Paceline is downloading {repository}: try again when it has finished",
    "stalled": "the download stalled: check your network, then try again",
    "interrupted": "the download process ended unexpectedly: try again",
}
"""Why a download stands still, with the next action."""

TRANSIENT = frozenset({"offline", "busy", "hub_error", "stalled", "interrupted", "in_use"})
"""Problems that go away by themselves: tried again some times before a person is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """One repository at one commit. Times are Unix seconds."""

    id: int = 0
    repository: str
    revision: str = ""
    """The commit; empty until the hub told it."""
    state: State = "queued"
    phase: Phase = ""
    """What it does while it runs; not kept."""
    position: int = 0
    total_bytes: Bytes = 0
    done_bytes: Bytes = 0
    folder: str = ""
    problem: str = ""
    drafts_for: str = ""
    """The main model that it is to draft for once it is here."""
    created_at: float = 0.0
    changed_at: float = 0.0

    @property
    def missing_bytes(self) -> int:
        """What is still to arrive; 0 also while nobody knows."""
        return max(0, self.total_bytes - self.done_bytes)

    @property
    def problem_code(self) -> str:
        """Its code alone; "" for none."""
        return self.problem.partition(": ")[0]

    @property
    def problem_text(self) -> str:
        """Its words, with the detail behind them; "" for none."""
        return problem_text(self.repository, self.problem)


class DownloadJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a downloading process is told, on its standard input; the token travels nowhere else.

    It answers with the download as it becomes, a line of JSON each time.
    """

    download: Download
    downloads_folder: str
    token: str = ""
    endpoint: str = ""
    use_xet: bool = True
    xet_from_bytes: int = 64 << 20
    """Smaller files are not worth the handshake of the chunk store."""
    reserve_bytes: int = RESERVE_BYTES
    """Room on the disk that must stay free."""
    streams: int = 3
    """Files fetched at the same time."""
    attempts: int = 5
    """Broken connections in a row, without a byte between them, that end the process."""
    retry_seconds: float = 1.0
    read_timeout_seconds: float = 30.0
    lock_seconds: float = 5.0


def problem_text(repository: str, problem: str) -> str:
    """The words of a problem, with its detail behind them; "" for none."""
    code, _, detail = problem.partition(": ")
    if not code:
        return ""
    text = PROBLEMS[code].format(repository=repository) if code in PROBLEMS else code
    return f"{text} ({detail})" if detail else text
