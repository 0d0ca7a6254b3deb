"""The download queue: models arrive whole, interrupted downloads resume, incomplete ones are never listed."""

import asyncio
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.core.download import Download, DownloadJob
from app.core.errors import InvalidRequest
from app.hub import download_child, partial_folder
from app.hub.download_run import DownloadTimeouts, Wait, spawn_child
from app.hub.hub_files import Hub
from app.hub.partial_folder import PARTIAL, PartialFolder, delete_partials
from tests.hub.queue import WAIT_SECONDS, DownloadEnvironment, model_files, until, until_state
from tests.hub.stand_in import StandInHub, stand_in_hub

pytestmark = pytest.mark.anyio

ID = "paceline-test/tiny-4bit"


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        hub.add(ID, model_files())
        yield hub


@pytest.fixture
def environment(tmp_path: Path, hub: StandInHub) -> DownloadEnvironment:
    return DownloadEnvironment(tmp_path, hub)


async def test_a_repository_arrives_whole_and_is_listed(environment: DownloadEnvironment, hub: StandInHub) -> None:
    hub.repositories[ID].files |= {"evil.py": b"import os", "weights.bin": b"pickle", "README.md": b"hello"}
    hub.repositories[ID].files |= {"consolidated.safetensors": b"the same again", "onnx/config.json": b"{}"}
    async with environment.open() as downloads:
        await downloads.add(ID)
        view = await until_state(downloads, "done")
    arrived = {path.name: path.read_bytes() for path in (environment.folder / ID).iterdir() if path.name[0] != "."}
    assert arrived == model_files()
    assert view["total_bytes"] == view["done_bytes"] == sum(map(len, arrived.values()))
    assert view["revision"] == hub.repositories[ID].commit
    assert environment.listed() == [ID]
    assert environment.catalog.find(ID).problem == ""


async def test_how_an_encoder_pools_arrives_with_it(environment: DownloadEnvironment, hub: StandInHub) -> None:
    said = b'{"pooling_mode_cls_token": true}'
    hub.repositories[ID].files |= {
        "1_Pooling/config.json": said,
        "2_Dense/config.json": b"{}",
        "1_Pooling/x.json": b"{}",
    }
    async with environment.open() as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
    arrived = {path.name: path for path in (environment.folder / ID).iterdir() if path.name[0] != "."}
    assert set(arrived) == {*model_files(), "1_Pooling"}
    assert {path.name: path.read_bytes() for path in arrived["1_Pooling"].iterdir()} == {"config.json": said}
    assert environment.catalog.find(ID).pooling == "cls"
    async with environment.open() as downloads:
        await downloads.add(ID)
        view = await until_state(downloads, "done")
    assert view["done_bytes"] == view["total_bytes"]


async def test_a_cut_connection_is_gone_on_with_where_it_was(environment: DownloadEnvironment, hub: StandInHub) -> None:
    hub.faults.cuts.extend([10_000_000, 10_000_000, 70_000, 30_000])
    async with environment.open(streams=1) as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
    assert [request.range for request in hub.gets("model.safetensors")] == ["", "bytes=70000-", "bytes=100000-"]
    assert environment.listed() == [ID]


async def test_after_a_failure_no_further_file_is_asked_for(environment: DownloadEnvironment, hub: StandInHub) -> None:
    hub.faults.statuses.append(404)
    async with environment.open(streams=1) as downloads:
        await downloads.add(ID)
        assert (await until(downloads, lambda view: view["state"] == "failed"))["problem"].startswith("not_found")
    assert len([request for request in hub.requests if "/resolve/" in request.path]) == 1


async def test_a_server_that_ignores_ranges_costs_bytes_and_nothing_else(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.faults.cuts.extend([10_000_000, 10_000_000, 70_000])
    hub.faults.ignores_ranges = True
    async with environment.open(streams=1) as downloads:
        await downloads.add(ID)
        view = await until_state(downloads, "done")
    assert view["done_bytes"] == view["total_bytes"]


async def test_pause_keeps_what_arrived_and_resume_goes_on_there(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.faults.stalls.extend([10_000_000, 10_000_000, 65_536])
    async with environment.open(streams=1) as downloads:
        await downloads.add(ID)
        await until(downloads, lambda view: view["done_bytes"] >= 65_536)
        assert (await downloads.pause(1))["state"] == "paused"
        assert environment.listed() == []
        with pytest.raises(InvalidRequest, match="paused"):
            await downloads.pause(1)
        await downloads.resume(1)
        await until_state(downloads, "done")
    assert hub.gets("model.safetensors")[-1].range == "bytes=65536-"
    environment.catalog.refresh()
    assert environment.listed() == [ID]


async def test_what_ran_goes_on_after_a_restart_and_what_was_paused_stays_paused(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.add("paceline-test/second", model_files(30_000))
    hub.faults.stalls.extend([10_000_000, 10_000_000, 65_536])
    async with environment.open(streams=1) as downloads:
        await downloads.add(ID)
        await downloads.add("paceline-test/second")
        await downloads.pause(2)
        await until(downloads, lambda view: view["done_bytes"] >= 65_536)
    async with environment.open() as downloads:
        await until_state(downloads, "done")
        assert downloads.view(2)["state"] == "paused"
        assert hub.gets("model.safetensors")[-1].range == "bytes=65536-"
    async with environment.open() as downloads:
        assert [view["state"] for view in downloads.views()] == ["paused", "done"]


async def test_a_resumed_download_stays_at_its_commit(environment: DownloadEnvironment, hub: StandInHub) -> None:
    old = hub.repositories[ID].commit
    hub.faults.stalls.extend([10_000_000, 10_000_000, 65_536])
    async with environment.open(streams=1) as downloads:
        await downloads.add(ID)
        await until(downloads, lambda view: view["done_bytes"] >= 65_536)
        await downloads.pause(1)
        hub.add(ID, model_files(25_000))
        await downloads.resume(1)
        assert (await until(downloads, lambda view: view["state"] == "failed"))["problem"] == "not_found"
        assert downloads.view(1)["revision"] == old
        await downloads.cancel(1)
        assert environment.partial_bytes() == 0
        await downloads.add(ID)
        assert (await until_state(downloads, "done"))["revision"] == hub.repositories[ID].commit != old


@pytest.mark.parametrize("revision", ["", "main"])
async def test_what_is_downloaded_is_kept_as_soon_as_it_is_known(
    environment: DownloadEnvironment, hub: StandInHub, revision: str
) -> None:
    hub.faults.stalls.extend([10_000_000, 10_000_000, 65_536])
    async with environment.open(streams=1) as downloads:
        await downloads.add(ID, revision)
        await until(downloads, lambda view: view["done_bytes"] >= 65_536)
        known = hub.repositories[ID].commit, downloads.view(1)["total_bytes"]
        with closing(sqlite3.connect(environment.store_file)) as file:  # what a kill of the server now would leave
            async with asyncio.timeout(WAIT_SECONDS):
                while file.execute("SELECT revision, total_bytes FROM download").fetchall() != [known]:  # noqa: ASYNC110
                    await asyncio.sleep(0)


async def test_a_newer_commit_takes_the_place_of_an_older_one(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    async with environment.open() as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
        hub.add(ID, model_files(25_000))
        await downloads.add(ID)
        await until(downloads, lambda view: view["state"] == "running")
        await until_state(downloads, "done")
        request_count = len(hub.gets("model.safetensors"))
        await downloads.add(ID)
        await until(downloads, lambda view: view["state"] == "running")
        await until_state(downloads, "done")
    assert len(hub.gets("model.safetensors")) == request_count, "what is there already is not fetched again"
    assert (environment.folder / ID / "model.safetensors").read_bytes() == model_files(25_000)["model.safetensors"]
    assert [path.name for path in (environment.folder / ".partial").iterdir()] == ["paceline-test--tiny-4bit.lock"]


async def test_content_with_another_hash_never_becomes_visible(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    weights = hub.repositories[ID].files["model.safetensors"]
    for lie in (weights[:-1] + b"!", weights[:-1], weights + b"!"):
        hub.repositories[ID].lies = {"model.safetensors": lie}
        async with environment.open(attempts=1, timeouts=DownloadTimeouts(pauses_seconds=())) as downloads:
            await downloads.add(ID)
            view = await until(downloads, lambda view: view["state"] == "failed")
            assert view["problem"] in {"wrong_hash", "offline"}
            assert "again" in view["problem_text"]
        environment.catalog.refresh()
        assert environment.listed() == []


async def test_a_small_file_is_checked_too(environment: DownloadEnvironment, hub: StandInHub) -> None:
    config = hub.repositories[ID].files["config.json"]
    hub.repositories[ID].lies = {"config.json": config.replace(b"qwen3", b"qwen9")}
    async with environment.open() as downloads:
        await downloads.add(ID)
        assert (await until(downloads, lambda view: view["state"] == "failed"))["problem"] == "wrong_hash"
        assert environment.partial_bytes() > 0
        await downloads.remove(1)
        assert environment.partial_bytes() == 0, "what nobody can go on with leaves no bytes behind"


async def test_a_full_disk_is_told_before_the_first_byte(environment: DownloadEnvironment, hub: StandInHub) -> None:
    free = shutil.disk_usage(environment.folder).free
    async with environment.open(reserve_bytes=2 * free) as downloads:
        await downloads.add(ID)
        view = await until(downloads, lambda view: view["state"] == "failed")
    assert view["problem"] == "disk_full"
    assert "MB more are needed" in view["problem_text"]
    assert hub.gets("model.safetensors") == []


async def download_while_disk_is(
    usage_at: Callable[[int], object], hub: StandInHub, monkeypatch: pytest.MonkeyPatch, job: DownloadJob
) -> Download:
    """Download with `usage_at(check)` as the disk's usage; no byte arrives before the third check. Return the last
    report."""
    checks, several, chunks = count(), threading.Event(), Hub.chunks

    def usage(_folder: Path) -> object:
        check = next(checks)
        if check > 2:
            several.set()
        return usage_at(check)

    def held_back(*arguments: Any) -> Iterator[tuple[int, bytes]]:
        assert several.wait(WAIT_SECONDS)
        return chunks(*arguments)

    monkeypatch.setattr(download_child, "REPORT_SECONDS", 0.001)
    monkeypatch.setattr(download_child.shutil, "disk_usage", usage)
    monkeypatch.setattr(Hub, "chunks", held_back)
    reports: list[Download] = []
    await asyncio.to_thread(download_child.download, msgspec.structs.replace(job, endpoint=hub.address), reports.append)
    return reports[-1]


async def test_a_disk_that_cannot_be_read_for_a_moment_ends_no_download(
    environment: DownloadEnvironment, hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(environment.folder)

    def unreadable(check: int) -> object:
        if check == 0:  # before the first byte
            return usage
        raise OSError(5, "Input/output error")

    job = DownloadJob(download=Download(repository=ID), downloads_folder=str(environment.folder), reserve_bytes=0)
    last = await download_while_disk_is(unreadable, hub, monkeypatch, job)
    assert (last.state, last.problem) == ("done", "")


async def test_space_that_other_downloads_fill_meanwhile_ends_no_download(
    environment: DownloadEnvironment, hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(environment.folder)

    def filling(check: int) -> object:
        return usage._replace(free=10**13 if check == 0 else 10**9)

    job = DownloadJob(
        download=Download(repository=ID),
        downloads_folder=str(environment.folder),
        reserve_bytes=10**6,
        pending_bytes=10**12,
    )
    last = await download_while_disk_is(filling, hub, monkeypatch, job)
    assert (last.state, last.problem) == ("done", "")


async def test_a_process_that_hangs_is_restarted_without_the_chunk_store(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.repositories[ID].xet = frozenset({"model.safetensors"})
    hub.faults.xet_hangs = True
    timeouts = DownloadTimeouts(first_byte_seconds=6, stall_seconds=6, pauses_seconds=(0.01,) * 5)
    async with environment.open(timeouts=timeouts, xet_from_bytes=1000) as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
    assert [request.range for request in hub.gets("model.safetensors")] == [""]


async def test_a_process_that_hangs_halfway_is_restarted_where_it_was(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    timeouts = DownloadTimeouts(first_byte_seconds=6, stall_seconds=2, pauses_seconds=(0.01,) * 5)
    hub.faults.stalls.extend([10_000_000, 10_000_000, 65_536])
    async with environment.open(timeouts=timeouts, streams=1, read_timeout_seconds=60) as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
    assert [request.range for request in hub.gets("model.safetensors")] == ["", "bytes=65536-"]


async def test_a_silent_download_reconnects_at_once_where_a_person_asks_for_it_and_goes_on_at_its_last_byte(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.faults.stalls.extend([10_000_000, 10_000_000, 65_536])
    async with environment.open(streams=1, read_timeout_seconds=600) as downloads:
        await downloads.add(ID)
        await until(downloads, lambda view: view["done_bytes"] >= 65_536)
        await downloads.reconnect(1)
        await until_state(downloads, "done")
        with pytest.raises(InvalidRequest, match="done"):
            await downloads.reconnect(1)
    assert [request.range for request in hub.gets("model.safetensors")] == ["", "bytes=65536-"]


async def test_a_wait_says_how_long_it_lasted_and_how_long_it_will_and_ends_when_asked() -> None:
    wait = Wait()
    assert wait.seconds() == (0.0, 0.0)
    wait.end()

    async def listen() -> None:
        async with wait.begin(300):
            waited, left = wait.seconds()
            assert 0 <= waited < 60
            assert 240 < left <= 300
            wait.end()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await listen()
    wait.end()
    wait.stop()
    assert wait.seconds() == (0.0, 0.0)


async def test_a_chunk_store_that_fails_gives_way_to_plain_http(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.repositories[ID].xet = frozenset({"model.safetensors"})
    async with environment.open(xet_from_bytes=1000) as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
    assert any("xet-read-token" in request.path for request in hub.requests)


async def test_so_many_run_at_a_time_and_the_rest_in_their_order(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    names = [f"paceline-test/model-{number}" for number in range(4)]
    for name in names:
        hub.add(name, model_files())
    hub.faults.held = {names[0], names[1]}
    async with environment.open(parallel=2, streams=1) as downloads:
        for name in names:
            await downloads.add(name)
        assert [view["state"] for view in downloads.views()] == ["running", "running", "queued", "queued"]
        await downloads.move(4, up=True)
        await downloads.move(4, up=True)
        assert [view["id"] for view in downloads.views()] == [1, 2, 4, 3]
        await downloads.move(4, up=False)
        assert [view["id"] for view in downloads.views()] == [1, 2, 3, 4]
        await downloads.move(4, up=True)
        await downloads.pause(2)
        await until_state(downloads, "done", 4)
        await until_state(downloads, "done", 3)
        hub.release.set()
        await downloads.resume(2)
        await until_state(downloads, "done", 1)
        await until_state(downloads, "done", 2)


async def test_cancel_removes_what_arrived_and_the_row_can_go(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.faults.stalls.extend([10_000_000, 10_000_000, 65_536])
    async with environment.open(streams=1) as downloads:
        await downloads.add(ID)
        await until(downloads, lambda view: view["done_bytes"] >= 65_536)
        assert environment.partial_bytes() >= 65_536
        assert (await downloads.cancel(1))["state"] == "cancelled"
        assert environment.partial_bytes() == 0
        await downloads.remove(1)
        assert downloads.views() == []
    async with environment.open() as downloads:
        assert downloads.views() == []


async def test_whatever_becomes_of_a_process_the_queue_goes_on(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.add("a/noisy", model_files())

    async def spawn(job: bytes) -> asyncio.subprocess.Process:
        if b"a/noisy" not in job:
            return await spawn_child(job)
        if not is_noisy:
            raise RuntimeError("nobody expected this")
        endless = [sys.executable, "-c", "print('x' * 200_000)"]
        return await asyncio.create_subprocess_exec(*endless, stdout=asyncio.subprocess.PIPE)

    async with environment.open(spawn=spawn, on_done=_broken) as downloads:
        is_noisy = True
        await downloads.add("a/noisy")
        await downloads.add(ID)
        await until_state(downloads, "done", 2)
        assert downloads.view(1)["problem"] == "interrupted"
        is_noisy = False
        await downloads.resume(1)
        await until(downloads, lambda view: view["state"] == "failed" and "RuntimeError" in view["problem_text"])


def _broken(_download: Download) -> None:
    raise ValueError("nobody expected this either")


async def test_a_store_that_cannot_be_written_at_the_end_is_no_crash(environment: DownloadEnvironment) -> None:
    async with environment.open() as downloads:
        await downloads.add("no/such")
        environment.store_file.write_bytes(b"no database")


async def test_partial_files_are_deleted_in_earlier_folders_too_and_no_folder_is_made(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("earlier", "now", "unmounted/models")]
    partials = [root / PARTIAL / f"{ID.replace('/', '--')}@{'0' * 40}" for root in roots[:2]]
    for partial in partials:
        partial.mkdir(parents=True)
    delete_partials(roots, ID)
    assert not any(partial.exists() for partial in partials)
    assert not (tmp_path / "unmounted").exists()


async def test_a_download_can_be_paused_and_cancelled_while_nothing_can_be_written(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.faults.held = {ID}
    async with environment.open() as downloads:
        await downloads.add(ID)
        environment.store_file.write_bytes(b"no database")
        assert (await downloads.pause(1))["state"] == "paused"
        assert (await downloads.cancel(1))["state"] == "cancelled"


async def test_nothing_is_imported_from_the_folder_that_the_server_was_started_in(
    environment: DownloadEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app" / "hub").mkdir(parents=True)
    for name in ("app/__init__.py", "app/hub/__init__.py", "app/hub/download_child.py", "msgspec.py"):
        (tmp_path / name).write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    async with environment.open() as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
    assert not (tmp_path / "ran").exists()


async def test_adding_twice_is_one_download(environment: DownloadEnvironment, hub: StandInHub) -> None:
    hub.faults.held = {ID}
    async with environment.open() as downloads:
        views = await asyncio.gather(*(downloads.add(ID) for _ in range(5)))
        assert {view["id"] for view in views} == {1}


async def test_the_token_stays_out_of_rows_views_and_arguments(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.tokens.add("hf_secret")
    hub.repositories[ID].gated = "manual"
    async with environment.open(token="hf_secret") as downloads:
        await downloads.add(ID)
        assert "hf_secret" not in str(await until_state(downloads, "done"))
    assert b"hf_secret" not in environment.store_file.read_bytes()
    assert {request.authorization for request in hub.requests} == {"Bearer hf_secret"}


async def test_a_token_that_the_hub_does_not_know_is_left_out_for_public_repositories(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    async with environment.open(token="hf_stale") as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
    assert {request.authorization for request in hub.requests} == {"Bearer hf_stale", ""}


async def test_a_drafter_that_arrives_before_its_main_model_is_reported_again_with_that(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    main = "paceline-test/main"
    hub.add(main, model_files())
    hub.faults.held = {main}
    reported: list[tuple[str, str]] = []

    def report(download: Download) -> None:
        reported.append((download.repository, download.drafts_for))

    async with environment.open(parallel=2, on_done=report) as downloads:
        await downloads.add(main)
        await downloads.add(ID, drafts_for=main)
        await until_state(downloads, "done", 2)
        assert reported == [(ID, "")]
        hub.release.set()
        await until_state(downloads, "done", 1)
        assert reported[1:] == [(main, ""), (ID, main)]
        await downloads.add(main)
        await until_state(downloads, "done", 1)
        assert reported[3:] == [(main, "")], "what the drafter does for it is settled"


async def test_backups_leave_out_what_has_half_arrived_and_hold_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[Path] = []

    def make(folder: Path, mode: int) -> None:
        folder.mkdir(mode)
        left_out.append(folder)

    monkeypatch.setattr(partial_folder, "make_cache_folder", make)
    folder = PartialFolder(tmp_path, ID, "0" * 40)
    folder.create()
    folder.publish(())
    assert folder.target.is_dir()
    assert left_out == [tmp_path / PARTIAL], "a model keeps the attributes of the folder that becomes it"
