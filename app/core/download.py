"""A download of one repository as it is kept between starts, and the reasons why one stands still.

`problem` of a download is a code of `PROBLEMS`, or a code and a detail joined by ": "; `problem_text` makes it words.
"""

from dataclasses import dataclass
from typing import Literal

State = Literal["queued", "running", "paused", "done", "failed", "cancelled"]
FINISHED: tuple[State, ...] = ("done", "failed", "cancelled")

PROBLEMS = {
    "offline": "the Hugging Face hub cannot be reached: check the network, then try again; models here keep working",
    "busy": "the hub asks for patience (too many requests): wait a minute, then try again",
    "hub_error": "the hub has a fault of its own: try again later",
    "gated": "{repository} wants its licence accepted: open it on the hub, accept, and store that account's token here",
    "not_found": "the hub has no {repository}, or it is private: check the name, or store a token that may see it",
    "refused": "the hub refused the stored token: store another one, or remove it for public repositories",
    "empty": "{repository} has no safetensors weights, the only ones that run here: choose another one",
    "unsafe": "{repository} names a file that cannot be stored safely: choose another one",
    "wrong_hash": "a file arrived twice with other content than the hub promised and was thrown away: try again later",
    "disk_full": "the disk has too little room: free some, then try again; what has arrived is kept",
    "unwritable": "the downloads folder cannot be written: choose another, or allow yourself to write there",
    "folder_taken": "a folder {repository} that was not downloaded by Paceline is in the way: move it, then try again",
    "in_use": "another Paceline is downloading {repository}: wait for it, then try again",
    "stalled": "nothing arrived for a long time: check the network, then try again",
    "interrupted": "the downloading process ended unexpectedly: try again",
}
"""Why a download stands still, with the next action."""

TRANSIENT = frozenset({"offline", "busy", "hub_error", "stalled", "interrupted", "in_use"})
"""Problems that go away by themselves: tried again some times before a person is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """One repository at one commit. Times are Unix seconds."""

    id: int
    repository: str
    revision: str = ""
    """The commit; empty until the hub told it."""
    state: State = "queued"
    position: int = 0
    total_bytes: int = 0
    done_bytes: int = 0
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


def problem_text(repository: str, problem: str) -> str:
    """The words of a problem, with its detail behind them; "" for none."""
    code, _, detail = problem.partition(": ")
    if not code:
        return ""
    text = PROBLEMS.get(code, code).format(repository=repository)
    return f"{text} ({detail})" if detail else text
