"""Searching the stand-in hub with the real library: order, a message for every refusal, sizes before a download."""

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
from huggingface_hub import HfFileMetadata

from app.core.errors import HubProblem, InvalidRequest
from app.hub.hub_files import ALLOWED_SUFFIXES, Hub, checked_repository, checked_revision
from app.hub.hub_search import inspect_repository, search
from tests.hub.queue import model_files
from tests.hub.stand_in import StandInHub, stand_in_hub


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub() as hub:
        yield hub


def names(hub: StandInHub, text: str, **more: str) -> list[str]:
    return [result.repository for result in search(Hub(hub.address), text, **more)]  # type: ignore[arg-type]


def test_mlx_repositories_come_first_then_what_can_be_loaded(hub: StandInHub) -> None:
    hub.add("a/qwen-mlx", model_files(), downloads=5)
    hub.add("b/qwen-mlx", model_files(), downloads=9, tags=["mlx", "safetensors"])
    plain = {"tags": ["safetensors"], "library": "transformers"}
    hub.add("c/qwen", model_files(), downloads=100, config={"model_type": "qwen3"}, **plain)
    hub.add("d/qwen", model_files(), config={"model_type": "no_such_architecture"}, **plain)
    hub.add("e/qwen-gguf", model_files(), tags=["gguf"], library="gguf")
    hub.add("f/qwen-dflash", model_files(), downloads=1, config={"architectures": ["DFlashDraftModel"]}, **plain)
    hub.add("g/bert", model_files(), config={"model_type": "bert"}, **plain)
    assert names(hub, "bert") == ["g/bert"], "an encoder is no model of mlx-lm, but one that runs here"
    assert names(hub, "qwen") == ["b/qwen-mlx", "a/qwen-mlx", "c/qwen", "f/qwen-dflash"]
    assert names(hub, "") == ["b/qwen-mlx", "a/qwen-mlx"], "without words only MLX ones are shown"
    assert names(hub, "nothing like it") == []
    assert names(hub, "https://hub.example/b/qwen-mlx/") == ["b/qwen-mlx"], "a pasted address is a name"


def test_results_can_be_sorted(hub: StandInHub) -> None:
    hub.add("a/first", model_files(), downloads=1, likes=3, modified="2026-01-02T00:00:00.000Z")
    hub.add("a/second", model_files(), downloads=2, likes=2, modified="2026-01-03T00:00:00.000Z")
    hub.add("a/third", model_files(), downloads=3, likes=1, modified="2026-01-01T00:00:00.000Z")
    assert names(hub, "a", sort="downloads") == ["a/third", "a/second", "a/first"]
    assert names(hub, "a", sort="likes") == ["a/first", "a/second", "a/third"]
    assert names(hub, "a", sort="updated") == ["a/second", "a/first", "a/third"]


def test_a_result_tells_what_a_person_chooses_by(hub: StandInHub) -> None:
    hub.add("a/gated", model_files(), gated="manual", config={"architectures": ["DFlashDraftModel"]})
    result = search(Hub(hub.address), "gated")[0]
    assert (result.author, result.gated, result.is_mlx, result.method) == ("a", True, True, "dflash")
    assert (result.licence, result.downloads, result.likes) == ("apache-2.0", 100, 10)
    assert result.modified_at == 1790812800.0


def test_details_tell_exact_bytes_of_only_what_would_be_fetched(hub: StandInHub) -> None:
    files = model_files()
    hub.add("a/model", {**files, "model.py": b"x", "pytorch_model.bin": b"x" * 5000, "sub/model.safetensors": b"x"})
    details = inspect_repository(Hub(hub.address), "a/model")
    assert dict(details.files) == {name: len(content) for name, content in files.items()}
    assert details.total_bytes == sum(map(len, files.values()))
    assert details.weights_bytes == len(files["model.safetensors"])
    assert (details.licence, details.model_type, details.context) == ("apache-2.0", "qwen3", 4096)
    assert details.commit == hub.repositories["a/model"].commit
    assert all(name.endswith(ALLOWED_SUFFIXES) for name, _ in details.files)


def test_details_tell_a_drafter_and_its_method(hub: StandInHub) -> None:
    config = json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 4}).encode()
    hub.add("a/drafter", {**model_files(), "config.json": config})
    assert inspect_repository(Hub(hub.address), "a/drafter").method == "eagle3"


def problem_of(hub: StandInHub, name: str = "a/model", token: str = "") -> HubProblem:
    with pytest.raises(HubProblem) as raised:
        inspect_repository(Hub(hub.address, token), name)
    assert token not in raised.value.message or not token
    return raised.value


def test_every_refusal_has_words_and_a_next_action(hub: StandInHub) -> None:
    hub.add("a/model", model_files())
    hub.add("a/private", model_files(), private=True)
    hub.add("a/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    assert problem_of(hub, "a/missing").code == "hub_not_found"
    assert "check the name" in problem_of(hub, "a/private").message
    assert problem_of(hub, "a/pickled").code == "hub_empty"
    assert problem_of(hub, "a/missing", token="hf_stale").code == "hub_refused"
    for status, code in ((429, "hub_busy"), (500, "hub_hub_error"), (503, "hub_hub_error"), (403, "hub_refused")):
        hub.faults.api.append(status)
        assert problem_of(hub).code == code
    hub.close()
    assert problem_of(hub).code == "hub_offline"
    with pytest.raises(HubProblem, match="check your network") as raised:
        search(Hub(hub.address), "anything")
    assert raised.value.status == 503


def test_a_gated_repository_can_be_looked_at(hub: StandInHub) -> None:
    hub.add("a/gated", model_files(), gated="auto", config={"model_type": "llama"})
    details = inspect_repository(Hub(hub.address), "a/gated")
    assert (details.gated, details.model_type) == (True, "llama")


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "a/../b",
        "a/b/c",
        "name",
        "",
        "a/",
        "/b",
        "./b",
        ".hidden/b",
        "a/.b",
        "models--a--b/c",
        "a--b/c",
        "a\\b/c",
        "a/b\x00",
        "a b/c",
        "a/" + "b" * 200,
        "~/b",
        "a/b.git",
        "<script>/b",
        "https://other.example/",
    ],
)
def test_hostile_names_of_repositories_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        checked_repository(name)


def test_a_pasted_address_is_a_name() -> None:
    assert checked_repository(" https://hub.example/mlx-community/Qwen3-8B-4bit/ ") == "mlx-community/Qwen3-8B-4bit"
    assert checked_revision("refs/pr/3") == "refs/pr/3"
    for text in ("../main", "a..b", "-x", "main\n", "a b"):
        with pytest.raises(InvalidRequest):
            checked_revision(text)


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "/etc/evil.json",
        "sub/../../evil.json",
        "..\\evil.json",
        "C:evil.json",
        "a//b.json",
        "./b.json",
        "evil\u202ejson.json",
        "evil\n.json",
        "CONFIG.json",
    ],
)
def test_hostile_names_of_files_condemn_the_repository(hub: StandInHub, name: str) -> None:
    repository = hub.add("a/model", {**model_files(), "evil.json": b"{}"})
    repository.other_names = {"evil.json": name}
    assert problem_of(hub).code == "hub_unsafe"


def test_the_hub_still_tells_where_its_chunk_store_has_a_file() -> None:
    about = get_args(get_type_hints(HfFileMetadata)["xet_file_data"])[0]
    assert {"file_hash", "refresh_route"} <= {field.name for field in fields(about)}
