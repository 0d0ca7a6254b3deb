"""Hubs and repositories that lie: they are refused with a message, and harm neither the queue nor the token."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest

from app.core.download import LARGEST_COUNT, PARTIAL, Download
from app.core.errors import HubProblem
from app.hub.hub_files import MAX_RESPONSE_BYTES, PRIVATE_FILE_NAME, Hub, HubToken
from app.hub.hub_search import inspect_repository, search
from app.hub.partial_folder import interrupted_commit, read_marker, remove_partials
from tests.hub.queue import DownloadEnvironment, model_files, until, until_state
from tests.hub.stand_in import StandInHub, stand_in_hub
from tests.shares import one_in

pytestmark = pytest.mark.anyio

ID, HONEST = "paceline-test/liar", "paceline-test/honest"
NO_SIZES = (-1, LARGEST_COUNT + 1, 1 << 63, 1 << 64, 10**400, 0.5, 1e300, float("nan"), "12", True, None, [], {})
NO_VALUES = (*NO_SIZES, "", "\ud800", "x" * 10**5, ["a", 5, None, {}], {"a": 5})


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        hub.add(ID, model_files())
        hub.add(HONEST, model_files())
        yield hub


@pytest.fixture
def stranger() -> Iterator[StandInHub]:
    """Run another hub with the same repository, which must not get the token."""
    with stand_in_hub() as hub:
        hub.add(ID, model_files())
        yield hub


@pytest.fixture
def environment(tmp_path: Path, hub: StandInHub) -> DownloadEnvironment:
    return DownloadEnvironment(tmp_path, hub)


def refused(hub: StandInHub, name: str = ID) -> str:
    with pytest.raises(HubProblem) as raised:
        inspect_repository(Hub(hub.address), name)
    return raised.value.reason


def test_a_proxy_that_cannot_be_used_is_named(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: httpx2.Client(proxy="socks5://127.0.0.1:1080"))
    assert refused(hub) == "proxy"


@pytest.mark.parametrize("size", NO_SIZES, ids=repr)
def test_a_size_that_cannot_be_one_condemns_the_repository(hub: StandInHub, size: Any) -> None:
    hub.repositories[ID].other_facts = {"config.json": {"size": size}}
    assert refused(hub) == "unsafe"
    hub.repositories[ID].other_facts = {
        "model.safetensors": {"lfs": {"size": size, "sha256": "0" * 64, "pointerSize": 1}}
    }
    assert refused(hub) == "unsafe"


def test_sizes_that_no_reader_can_add_up_condemn_the_repository(hub: StandInHub) -> None:
    liar = hub.repositories[ID]
    liar.other_facts = {
        name: {"size": LARGEST_COUNT // 2 + 1, "lfs": None} for name in ("config.json", "tokenizer.json")
    }
    assert refused(hub) == "unsafe"
    liar.other_facts = {"config.json": {"size": LARGEST_COUNT - 2 * 10**6}}
    assert inspect_repository(Hub(hub.address), ID).total_bytes <= LARGEST_COUNT


@pytest.mark.parametrize(
    "facts",
    [{"rfilename": "tokenizer.json"}, {"rfilename": "TOKENIZER.json"}, {"blobId": None}, {"blobId": "x"}, {"lfs": {}}],
    ids=repr,
)
def test_names_that_are_there_twice_and_hashes_that_are_none_condemn_the_repository(
    hub: StandInHub, facts: dict[str, Any]
) -> None:
    hub.repositories[ID].other_facts = {"config.json": facts}
    if facts != {"lfs": {}}:
        assert refused(hub) == "unsafe"
    else:
        assert inspect_repository(Hub(hub.address), ID).repository == ID, "no large file"


async def test_a_repository_with_sizes_beyond_all_numbers_costs_the_queue_nothing(
    environment: DownloadEnvironment, hub: StandInHub
) -> None:
    hub.repositories[ID].other_facts = {name: {"size": 1 << 63, "lfs": None} for name in model_files()}
    async with environment.open() as downloads:
        await downloads.add(ID)
        view = await until(downloads, lambda view: view["state"] == "failed")
        assert view["problem"] == "unsafe"
        assert (await downloads.resume(1))["state"] == "running"
        await until(downloads, lambda view: view["state"] == "failed")
        assert (await downloads.cancel(1))["state"] == "cancelled"
        await downloads.add(HONEST)
        await until_state(downloads, "done", 2)
    async with environment.open() as downloads:
        assert {view["repository"]: view["state"] for view in downloads.views()} == {ID: "cancelled", HONEST: "done"}


@pytest.mark.parametrize("values", [{"total_bytes": 1 << 63}, {"done_bytes": LARGEST_COUNT + 1}, {"done_bytes": -1}])
async def test_what_a_process_tells_beyond_all_numbers_is_not_believed(
    environment: DownloadEnvironment, values: dict[str, int]
) -> None:
    line = json.dumps(asdict(Download(id=1, repository=ID, state="running", phase="downloading")) | values)

    async def spawn(_job: bytes) -> asyncio.subprocess.Process:
        words = [sys.executable, "-c", f"print({line!r})"]
        return await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)

    async with environment.open(spawn=spawn) as downloads:
        await downloads.add(ID)
        view = await until(downloads, lambda view: view["state"] == "failed")
        assert (view["problem"], view["total_bytes"], view["done_bytes"]) == ("interrupted", 0, 0)
        assert (await downloads.cancel(1))["state"] == "cancelled"


@pytest.mark.parametrize("value", one_in(3, NO_VALUES), ids=lambda value: repr(value)[:20])
def test_whatever_a_hub_says_of_a_repository_is_a_refusal_or_can_be_shown(hub: StandInHub, value: Any) -> None:
    ours = Hub(hub.address)
    for name in hub.repositories[ID].information():
        hub.repositories[ID].other_information = {name: value}
        with suppress(HubProblem):
            json.dumps(asdict(inspect_repository(ours, ID)), allow_nan=False).encode()
        hub.faults.answers.append(json.dumps([hub.repositories[ID].information()]).encode())
        with suppress(HubProblem):
            results = search(ours, "")
            json.dumps([asdict(result) for result in results], allow_nan=False, ensure_ascii=False).encode()
            assert all(
                abs(number) <= LARGEST_COUNT for result in results for number in (result.downloads, result.likes)
            )


@pytest.mark.parametrize("name", ["../../etc", "/etc/x", "..", "a/..", "a/../../b", "a/b/c", "a\n/b", "", "a"])
def test_what_has_no_name_of_a_repository_is_not_offered(hub: StandInHub, name: str) -> None:
    hub.repositories[ID].other_information = {"id": name}
    assert [result.repository for result in search(Hub(hub.address), "")] == [HONEST]


@pytest.mark.parametrize(
    "answer",
    [b"", b"5", b"null", b"[1]", b"{}", b'"x"', b'{"siblings": 5}', b"\xff", b"[" * 10**6, b"9" * 10**5],
    ids=lambda answer: repr(answer[:16]),
)
def test_an_answer_that_is_none_is_a_refusal(hub: StandInHub, answer: bytes) -> None:
    hub.faults.answers.extend([answer, answer])
    assert refused(hub) in {"offline", "hub_error"}
    with suppress(HubProblem):
        assert search(Hub(hub.address), "") == []


def test_an_answer_without_an_end_is_not_waited_for(hub: StandInHub) -> None:
    hub.faults.answers.append(b"[]" + b" " * MAX_RESPONSE_BYTES)
    with pytest.raises(HubProblem, match="not from the hub"):
        search(Hub(hub.address), "")


def test_an_answer_that_never_ends_is_given_up(hub: StandInHub) -> None:
    hub.faults.searches_drip = True
    with pytest.raises(HubProblem, match="takes too long"):
        search(Hub(hub.address, response_seconds=0.1), "")
    hub.faults.searches_drip = False
    assert search(Hub(hub.address, response_seconds=60), "")


@pytest.mark.parametrize(
    "body", [b"[1]", b"5", b'{"error": 5, "errors": 5}', b"{" * 10**6], ids=lambda body: repr(body[:20])
)
async def test_a_refusal_in_any_words_is_a_refusal(
    environment: DownloadEnvironment, hub: StandInHub, body: bytes
) -> None:
    hub.faults.refusal = body
    assert refused(hub, "no/such") == "not_found"
    hub.faults.statuses.extend([404] * 9)
    async with environment.open() as downloads:
        await downloads.add(ID)
        assert (await until(downloads, lambda view: view["state"] == "failed"))["problem"] == "not_found"


async def test_the_token_goes_to_no_route_that_the_hub_names(
    environment: DownloadEnvironment, hub: StandInHub, stranger: StandInHub
) -> None:
    hub.tokens.add("hf_secret")
    hub.repositories[ID].xet = frozenset({"model.safetensors"})
    commit = hub.repositories[ID].commit
    for route in (f"{stranger.address}/api/models/x", f"{hub.address}/api/models/{HONEST}/xet-read-token/x", "/", "x:"):
        hub.faults.token_route = route
        hub.requests.clear()
        async with environment.open(xet_from_bytes=1000, token="hf_secret") as downloads:
            await downloads.add(ID)
            await until_state(downloads, "done")
            await downloads.remove(1)
        for file in (environment.folder / ID).iterdir():
            file.unlink()
        (environment.folder / ID).rmdir()
        requested_paths = {
            request.path
            for request in hub.requests
            if "/resolve/" not in request.path and request.path != f"/api/models/{ID}"
        }
        assert requested_paths == {f"/api/models/{ID}/xet-read-token/{commit}"}
    assert stranger.requests == []


async def test_the_token_goes_to_no_host_that_the_hub_redirects_to(
    environment: DownloadEnvironment, hub: StandInHub, stranger: StandInHub
) -> None:
    hub.tokens.add("hf_secret")
    stranger.repositories[ID].xet = frozenset({"model.safetensors"})
    hub.faults.redirect = stranger.address
    async with environment.open(xet_from_bytes=1000, token="hf_secret") as downloads:
        await downloads.add(ID)
        await until_state(downloads, "done")
    assert {request.authorization for request in hub.requests} == {"Bearer hf_secret"}
    assert {request.authorization for request in stranger.requests} == {""}
    assert not [request for request in stranger.requests if request.method == "HEAD"], (
        "where the chunk store is, only the hub says"
    )


def test_a_hash_of_the_chunk_store_that_is_none_is_not_asked_for(hub: StandInHub) -> None:
    ours, liar = Hub(hub.address), hub.repositories[ID]
    weights = next(file for file in ours.contents(ID).files if file.name == "model.safetensors")
    assert ours.find_in_xet(ID, liar.commit, weights) is None
    liar.xet = frozenset({"model.safetensors"})
    stored = ours.find_in_xet(ID, liar.commit, weights)
    assert stored is not None
    assert stored.token_address == f"{hub.address}/api/models/{ID}/xet-read-token/{liar.commit}"


# --- only files with our names are ours, and no links -------------------------------------------------------------


async def test_a_linked_folder_of_what_arrives_is_refused_and_stays(
    environment: DownloadEnvironment, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (environment.folder / PARTIAL).symlink_to(elsewhere)
    async with environment.open() as downloads:
        await downloads.add(ID)
        view = await until(downloads, lambda view: view["state"] == "failed")
        assert (view["problem"], "is a link" in view["problem_text"]) == ("unwritable", True)
        view = await downloads.cancel(1)
        assert (view["state"], view["problem"]) == ("failed", "unwritable"), "told, and it can be cancelled again"
        (environment.folder / PARTIAL).unlink()
        assert (await downloads.cancel(1))["state"] == "cancelled"
    assert list(elsewhere.iterdir()) == []


async def test_a_linked_folder_inside_what_arrives_is_refused(
    environment: DownloadEnvironment, hub: StandInHub, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    hub.repositories[ID].files["1_Pooling/config.json"] = b"{}"
    growing = environment.folder / PARTIAL / f"{ID.replace('/', '--')}@{hub.repositories[ID].commit}"
    growing.mkdir(parents=True)
    (growing / "1_Pooling").symlink_to(elsewhere)
    async with environment.open() as downloads:
        await downloads.add(ID)
        assert (await until(downloads, lambda view: view["state"] == "failed"))["problem"] == "unwritable"
    assert list(elsewhere.iterdir()) == []


def test_only_folders_of_commits_are_removed_with_what_has_arrived(tmp_path: Path) -> None:
    flat, commit = ID.replace("/", "--"), "0" * 40
    folder = tmp_path / PARTIAL
    ours = {f"{flat}@{commit}", f"{flat}@old-{'a' * 32}"}
    others = {f"{flat}@mine", f"{flat}@{commit}.bak", f"{flat}@{'0' * 39}", f"{flat}-2@{commit}", flat}
    for name in (*ours, *others):
        (folder / name).mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (folder / f"{flat}@{'1' * 40}").symlink_to(tmp_path / "model")
    (folder / f"{flat}@{'2' * 40}").write_bytes(b"a file")
    assert interrupted_commit(tmp_path, ID) == commit
    remove_partials(tmp_path, ID)
    assert {path.name for path in folder.iterdir()} == others | {f"{flat}@{'1' * 40}", f"{flat}@{'2' * 40}"}


def test_a_token_that_is_a_pipe_a_link_or_endless_is_none(tmp_path: Path) -> None:
    token, address = HubToken(tmp_path), "http://hub.test"
    token.write("hf_secret", address)
    assert token.read(address) == "hf_secret"
    path, sound = tmp_path / PRIVATE_FILE_NAME, tmp_path / "sound"
    path.rename(sound)
    for make in (partial(os.mkfifo, path), partial(path.symlink_to, sound), partial(path.write_bytes, b"h" * 10**7)):
        make()
        assert token.read(address) == ""
        path.unlink()


def test_a_marker_that_is_a_pipe_a_link_a_folder_or_endless_is_none(tmp_path: Path) -> None:
    marker = tmp_path / ".paceline.json"
    sound = {"repository": ID, "commit": "0" * 40, "files": {}}
    endless = json.dumps(sound | {"files": {str(number): number for number in range(100_000)}})
    (tmp_path / "sound").write_text(json.dumps(sound))
    for make in (
        partial(os.mkfifo, marker),
        partial(marker.symlink_to, tmp_path / "sound"),
        partial(marker.write_text, endless),
    ):
        make()
        assert read_marker(tmp_path) is None
        marker.unlink()
    marker.mkdir()
    assert read_marker(tmp_path) is None
