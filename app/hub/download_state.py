"""What the queue of downloads asks from outside, and what a download looks like to a page."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from app.core.download import Download, problem_text
from app.hub.transfer_rate import TransferRate

RESERVE_BYTES = 1 << 30
"""Room on the disk that downloads leave to everything else."""
RANKS = {"running": 0, "queued": 1, "paused": 2}


class DownloadStore(Protocol):
    """Where downloads are kept. Calls take milliseconds and are made in a thread."""

    def all(self) -> list[Download]:
        """Every download."""
        ...

    def add(self, download: Download) -> Download:
        """Keep a new one; it gets its id here."""
        ...

    def save(self, downloads: Iterable[Download]) -> None:
        """Keep their changes in one transaction."""
        ...

    def delete(self, download_id: int) -> None:
        """Forget one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is asked each time a download starts; `job` holds further fields of each `Job`."""

    folder: Callable[[], Path]
    parallel: Callable[[], int] = lambda: 1
    token: Callable[[], str] = lambda: ""
    endpoint: Callable[[], str] = lambda: ""
    reserve_bytes: int = RESERVE_BYTES
    job: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Running:
    """What is known of a download only while it runs. `phase`: connecting, downloading, waiting or verifying."""

    task: "asyncio.Task[None]"
    rate: TransferRate
    phase: str = "connecting"


def next_waiting(downloads: Iterable[Download]) -> list[Download]:
    """Those that wait for their turn, the next one first."""
    return sorted((each for each in downloads if each.state == "queued"), key=lambda each: (each.position, each.id))


def in_order(downloads: Iterable[Download]) -> list[Download]:
    """As a page lists them: what runs, waits, is paused; then the rest, the latest first."""

    def rank(download: Download) -> tuple[int, float, int]:
        place = RANKS.get(download.state, len(RANKS))
        return place, download.position if download.state in RANKS else -download.changed_at, download.id

    return sorted(downloads, key=rank)


def view_of(download: Download, running: Running | None) -> dict[str, Any]:
    """A download as plain values: the kept ones, how fast it is, and its problem in words."""
    view = asdict(download) | {"phase": "", "bytes_per_second": 0.0, "seconds_left": None}
    if running is not None:
        seconds = running.rate.seconds_left(download.missing_bytes)
        view |= {
            "phase": running.phase,
            "bytes_per_second": round(running.rate.bytes_per_second()),
            "seconds_left": None if seconds is None else round(seconds),
        }
    view["problem"] = download.problem.partition(": ")[0]
    view["problem_text"] = problem_text(download.repository, download.problem)
    return view
