"""`paceline pull`: one download with a progress bar, in the queue of the running server, else by this command itself.

Ctrl-C pauses the download; the same command resumes it. A running server also finds models that this command downloads.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from app.command.server import NoKey, NoServer, target_server
from app.core.download import Download, DownloadJob
from app.core.errors import CommandError
from app.hub.download_run import DownloadTimeouts, Wait, run_download
from app.hub.hub_files import HubToken, checked_repository, checked_revision
from app.settings import Settings

DOWNLOADS = "/admin/api/downloads"
POLL_SECONDS = 0.5
TIMEOUTS = DownloadTimeouts(pauses_seconds=(1, 2, 5, 10, 20))
"""Pauses before retries, in seconds; shorter than the server's, because a person is watching."""
PHASES = {"waiting": "connection lost, retrying", "verifying": "checking", "queued": "queued"}

Show = Callable[[Download], None]


def pull_model(settings: Settings, repository: str, revision: str, screen: Console) -> None:
    """Download a repository and print its folder. Raises `CommandError`, or `KeyboardInterrupt` once it is paused."""
    repository, revision = checked_repository(repository), checked_revision(revision)
    try:
        with _bar(repository, screen) as show:
            try:
                folder = _pull_on_server(settings, repository, revision, show)
            except (NoServer, NoKey):
                folder = _pull_in_process(settings, repository, revision, show)
    except KeyboardInterrupt:
        screen.print("Paused. Run the command again to resume.", highlight=False)
        raise
    screen.print(f"{repository} is in {folder}.", highlight=False, markup=False)


@contextmanager
def _bar(repository: str, screen: Console) -> Iterator[Show]:
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    name = TextColumn("{task.description}", markup=False)
    with Progress(name, BarColumn(), *columns, console=screen) as progress:
        task = progress.add_task(repository, total=None, note="")

        def show(download: Download) -> None:
            note = PHASES.get(download.phase or download.state, "")
            progress.update(task, completed=download.done_bytes, total=download.total_bytes or None, note=note)

        yield show


def _pull_on_server(settings: Settings, repository: str, revision: str, show: Show) -> str:
    """Download in the server's queue, and return the server's downloads folder."""
    server = target_server(settings)
    view = server.call("POST", DOWNLOADS, {"repository": repository, "revision": revision})
    number = int(view["id"])
    try:
        while view.get("state") in {"queued", "running"}:
            show(msgspec.convert(view, Download))
            time.sleep(POLL_SECONDS)
            rows = server.call("GET", DOWNLOADS)["downloads"]
            view = next((row for row in rows if row["id"] == number), {})
    except KeyboardInterrupt:
        server.call("POST", f"{DOWNLOADS}/{number}/pause", {})
        raise
    state = view.get("state", "removed")
    if state == "failed":
        raise CommandError(_sentence(view["problem_text"]))
    if state != "done":
        raise CommandError(f"The download is {state}: changed on the dashboard. Run the command again to resume.")
    show(msgspec.convert(view, Download))
    return str(server.call("GET", DOWNLOADS)["folder"])


def _pull_in_process(settings: Settings, repository: str, revision: str, show: Show) -> str:
    """Download in a child process of this command, and return the downloads folder."""

    def report(download: Download) -> None:
        if download.problem_code == "offline" and not download.total_bytes:
            raise CommandError(_sentence(download.problem_text))
        show(download)

    job = DownloadJob(
        download=Download(repository=repository, revision=revision),
        downloads_folder=str(settings.downloads_path),
        token=HubToken(settings.home).read(settings.hub_endpoint),
        endpoint=settings.hub_endpoint,
    )
    try:
        if settings.downloads_folder is None:
            settings.downloads_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"The downloads folder {settings.downloads_path} cannot be created ({error.strerror})"
        raise CommandError(f"{problem}: `paceline config set downloads_folder FOLDER` chooses another.") from None
    end = asyncio.run(run_download(job, report, timeouts=TIMEOUTS, wait=Wait()))
    if end.state == "failed":
        raise CommandError(_sentence(end.problem_text))
    show(end)
    return str(settings.downloads_path)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
