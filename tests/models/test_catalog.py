import json
import os
import resource
import threading
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PosixPath

import pytest

from app.core.errors import DiskUnavailable, ModelNotFound
from app.models.catalog import MAX_FOLDER_ENTRIES, CatalogModel, FolderCatalog, default_catalog
from app.models.folder import MAX_FILES
from app.models.known_places import Source
from tests.models.folders import write_model


class Time:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def ids(catalog: FolderCatalog) -> list[str]:
    return [model.id for model in catalog.models()]


def snapshot(cache: Path, name: str, revision: str, *, main: str = "") -> Path:
    repository = cache / name
    folder = write_model(repository / "snapshots" / revision)
    (repository / "refs").mkdir(exist_ok=True)
    if main:
        (repository / "refs" / "main").write_text(main)
    return folder


def test_missing_folders_hold_no_models(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    catalog = FolderCatalog([nowhere], [("hugging_face", nowhere), ("lm_studio", nowhere), ("embedded", nowhere)])
    assert catalog.models() == ()


def test_models_lie_one_or_two_levels_deep_or_are_the_folder_itself(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "flat")
    write_model(tmp_path / "models" / "org" / "nested")
    write_model(tmp_path / "models" / ".hidden")
    write_model(tmp_path / "models" / "org" / "too" / "deep")
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "note.txt").write_text("not a model")
    alone = write_model(tmp_path / "alone")
    assert ids(FolderCatalog([tmp_path / "models", alone])) == ["alone", "flat", "org/nested"]


def test_stray_weights_beside_models_hide_none(tmp_path: Path) -> None:
    write_model(tmp_path / "flat")
    write_model(tmp_path / "org" / "nested")
    for folder in (tmp_path, tmp_path / "org"):
        (folder / "adapter.safetensors").write_bytes(b"")
    assert ids(FolderCatalog([tmp_path])) == ["flat", "org/nested"]
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "model.safetensors").write_bytes(b"")
    assert ids(FolderCatalog([tmp_path])) == ["alone", "flat", "org/nested"], "listed as broken"


def test_a_model_tells_what_its_headers_and_config_say(tmp_path: Path) -> None:
    write_model(tmp_path / "small")
    write_model(tmp_path / "drafter", dflash_config={"target_layer_ids": [0]})
    small, drafter = FolderCatalog([tmp_path]).find("small"), FolderCatalog([tmp_path]).find("drafter")
    assert small == CatalogModel(
        id="small",
        path=tmp_path / "small",
        source="folder",
        size_bytes=64,
        parameter_count=32,
        context=4096,
        model_type="qwen3",
        bits=16,
    )
    assert (drafter.kind, drafter.method) == ("drafter", "dflash")


def test_a_broken_model_is_listed_with_its_problem_and_harms_no_other(tmp_path: Path) -> None:
    write_model(tmp_path / "good")
    (write_model(tmp_path / "cut") / "model.safetensors").write_bytes(b"cut")
    (write_model(tmp_path / "bare") / "config.json").unlink()
    problems = {model.id: model.problem for model in FolderCatalog([tmp_path]).models()}
    assert problems["good"] == ""
    assert problems["cut"].startswith('model "cut": model.safetensors is truncated or corrupt; ')
    assert "no config.json" in problems["bare"]
    assert str(tmp_path) not in "".join(problems.values())


def test_a_broken_model_of_the_hugging_face_cache_is_told_by_its_id(tmp_path: Path) -> None:
    (snapshot(tmp_path, "models--org--two", "abc", main="abc") / "model.safetensors").write_bytes(b"cut")
    catalog = FolderCatalog([], [("hugging_face", tmp_path)])
    assert catalog.find("org/two").problem.startswith('model "org/two": model.safe')


def test_the_hugging_face_cache_is_read_through_refs_main(tmp_path: Path) -> None:
    snapshot(tmp_path, "models--org--two", "aaa")
    chosen = snapshot(tmp_path, "models--org--two", "bbb", main="aaa\n")
    os.utime(chosen, ns=(1, 1))
    newest = snapshot(tmp_path, "models--org--newest", "new")
    os.utime(snapshot(tmp_path, "models--org--newest", "old", main="../../elsewhere"), ns=(1, 1))
    snapshot(tmp_path, "models--gpt2", "c0ffee", main="c0ffee")
    (tmp_path / "models--org--partial" / "snapshots").mkdir(parents=True)
    whole = snapshot(tmp_path, "models--org--moved", "whole")
    tokenizer = snapshot(tmp_path, "models--org--moved", "tokenizer", main="tokenizer")
    for weights in tokenizer.glob("*.safetensors"):
        weights.unlink()
    (tmp_path / "datasets--org--data").mkdir()
    paths = {model.id: model.path for model in FolderCatalog([], [("hugging_face", tmp_path)]).models()}
    assert paths == {
        "org/two": tmp_path / "models--org--two" / "snapshots" / "aaa",
        "org/newest": newest,
        "org/moved": whole,
        "gpt2": tmp_path / "models--gpt2" / "snapshots" / "c0ffee",
    }


def test_the_first_folder_wins(tmp_path: Path) -> None:
    first = write_model(tmp_path / "one" / "same")
    write_model(tmp_path / "two" / "same")
    write_model(tmp_path / "embedded" / "same")
    catalog = FolderCatalog([tmp_path / "one", tmp_path / "two"], [("embedded", tmp_path / "embedded")])
    assert [(model.path, model.source) for model in catalog.models()] == [(first, "folder")]


def test_a_broken_copy_hides_no_whole_one(tmp_path: Path) -> None:
    (snapshot(tmp_path / "hub", "models--org--same", "abc", main="abc") / "model.safetensors").write_bytes(b"cut")
    whole = write_model(tmp_path / "studio" / "org" / "same")
    roots: list[tuple[Source, Path]] = [("hugging_face", tmp_path / "hub"), ("lm_studio", tmp_path / "studio")]
    assert FolderCatalog([], roots).find("org/same").path == whole
    broken = FolderCatalog([], roots[:1]).find("org/same")
    assert broken.problem


def test_an_interrupted_update_hides_no_whole_snapshot(tmp_path: Path) -> None:
    whole = snapshot(tmp_path, "models--org--two", "old")
    newer = snapshot(tmp_path, "models--org--two", "new", main="new")
    (newer / "model.safetensors").rename(newer / "model-00001-of-00002.safetensors")
    assert FolderCatalog([], [("hugging_face", tmp_path)]).find("org/two").path == whole


def test_a_folder_named_in_finder_is_found_as_people_type_its_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / unicodedata.normalize("NFD", "모델-é"))
    model = FolderCatalog([tmp_path]).find("모델-é")
    assert (model.id, model.path) == ("모델-é", path)
    assert FolderCatalog([tmp_path]).find(unicodedata.normalize("NFD", "모델-é")).id == "모델-é"


def test_an_unknown_id_gets_the_nearest_ones(tmp_path: Path) -> None:
    write_model(tmp_path / "demo-assistant")
    catalog = FolderCatalog([tmp_path])
    with pytest.raises(ModelNotFound, match="did you mean demo-assistant"):
        catalog.find("demo-asistant")
    with pytest.raises(ModelNotFound, match="`paceline ls` shows the models") as caught:
        catalog.find("../../etc/passwd\n\0" + "x" * 100_000)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400
    assert caught.value.parameter == "model"


def test_the_listing_is_refreshed_by_time_and_on_demand(tmp_path: Path) -> None:
    now = Time()
    write_model(tmp_path / "first")
    catalog = FolderCatalog([tmp_path], clock=now, refresh_seconds=2.0)
    assert ids(catalog) == ["first"]
    write_model(tmp_path / "second")
    now.seconds = 1.9
    assert ids(catalog) == ["first"]
    now.seconds = 2.0
    assert ids(catalog) == ["first", "second"]
    write_model(tmp_path / "third")
    catalog.refresh()
    assert ids(catalog) == ["first", "second", "third"]


class SlowDisk(PosixPath):
    """A folder on a disk that does not answer until `goes_on` is set."""

    reached, goes_on = threading.Event(), threading.Event()

    def __fspath__(self) -> str:
        self.reached.set()
        assert self.goes_on.wait(60)
        return super().__fspath__()


def test_what_changes_while_the_disk_is_read_waits_for_nothing_and_is_not_lost(tmp_path: Path) -> None:
    SlowDisk.reached.clear()
    SlowDisk.goes_on.clear()
    write_model(tmp_path / "slow" / "one")
    write_model(tmp_path / "other" / "two")
    catalog = FolderCatalog([SlowDisk(tmp_path / "slow")], clock=Time())
    with ThreadPoolExecutor() as threads:
        scan = threads.submit(catalog.models)
        try:
            assert SlowDisk.reached.wait(60)
            threads.submit(catalog.set_folders, [tmp_path / "other"]).result(60)
            threads.submit(catalog.refresh).result(60)
            assert scan.running()
        finally:
            SlowDisk.goes_on.set()
        assert [model.id for model in scan.result()] == ["one"]
    assert ids(catalog) == ["two"]


def test_many_threads_list_models_at_once(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    for refresh_seconds in (0.0, *[60.0] * 50):
        catalog = FolderCatalog([tmp_path], refresh_seconds=refresh_seconds)
        with ThreadPoolExecutor(8) as threads:
            listings = [threads.submit(ids, catalog) for _ in range(1 if refresh_seconds else 100) for _ in range(8)]
            assert all(listing.result(60) == ["one"] for listing in listings)


def test_models_that_are_known_are_listed_while_a_disk_does_not_answer(tmp_path: Path) -> None:
    write_model(tmp_path / "network" / "one")
    SlowDisk.goes_on.set()
    catalog = FolderCatalog([SlowDisk(tmp_path / "network")], patience_seconds=0.01, clock=Time())
    assert ids(catalog) == ["one"]
    SlowDisk.reached.clear()
    SlowDisk.goes_on.clear()
    catalog.refresh()
    write_model(tmp_path / "network" / "two")
    try:
        assert ids(catalog) == ["one"]
        assert SlowDisk.reached.wait(60)
        assert catalog.find("one").problem == ""
    finally:
        SlowDisk.goes_on.set()
    while ids(catalog) != ["one", "two"]:
        catalog.refresh()


def test_a_link_that_cannot_be_followed_hides_no_other_model(tmp_path: Path) -> None:
    too_long = "x" * 300  # looking at it raises, as in a folder without permission, but for root too
    write_model(tmp_path / "good")
    (tmp_path / "link").symlink_to(too_long)
    (tmp_path / "link-to-good").symlink_to(tmp_path / "good")
    newest = snapshot(tmp_path, "models--org--two", "aaa", main=too_long)
    (newest.parent / "link").symlink_to(too_long)
    assert {model.id: model.path for model in FolderCatalog([tmp_path]).models()} == {
        "good": tmp_path / "good",
        "org/two": newest,
    }


def test_a_folder_is_inspected_again_only_when_it_changed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    catalog = FolderCatalog([tmp_path], refresh_seconds=0.0)
    before = catalog.find("model")
    assert catalog.find("model") is before
    (folder / "model.safetensors").write_bytes(b"broken")
    assert "corrupt" in catalog.find("model").problem
    write_model(folder, max_position_embeddings=128_000)
    assert catalog.find("model").context == 128_000
    before = catalog.find("model")
    (folder / "config.json").chmod(0o600)  # it may have been unreadable until now
    assert catalog.find("model") is not before


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"HF_HUB_CACHE": "{}/direct", "HF_HOME": "{}/other"}, "direct"),
        ({"HUGGINGFACE_HUB_CACHE": "{}/older", "HF_HOME": "{}/other"}, "older"),
        ({"HF_HOME": "{}/face"}, "face/hub"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/huggingface/hub"),
        ({}, "home/.cache/huggingface/hub"),
    ],
)
def test_the_default_catalog_honours_the_hub_variables(tmp_path: Path, environment: dict[str, str], place: str) -> None:
    snapshot(tmp_path / place, "models--org--name", "abc", main="abc")
    variables = {name: value.format(tmp_path) for name, value in environment.items()}
    catalog = default_catalog([], environment=variables, home=tmp_path / "home")
    assert catalog.find("org/name").source == "hugging_face"


def test_all_folders_of_lm_studio_are_searched(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_model(home / ".cache" / "lm-studio" / "models" / "org" / "legacy")
    write_model(home / ".lmstudio" / "models" / "org" / "usual")
    write_model(tmp_path / "drive" / "org" / "named")
    write_model(tmp_path / "elsewhere" / "models" / "org" / "pointed")
    settings = home / ".lmstudio" / "settings.json"

    def names() -> set[str]:
        models = default_catalog([], environment={}, home=home).models()
        return {model.id for model in models if model.source == "lm_studio"}

    assert names() == {"org/legacy", "org/usual"}
    settings.write_text(json.dumps({"downloadsFolder": str(tmp_path / "drive")}))
    assert names() == {"org/legacy", "org/usual", "org/named"}
    (home / ".lmstudio-home-pointer").write_text(f"{tmp_path / 'elsewhere'}\n")
    assert names() == {"org/legacy", "org/usual", "org/named", "org/pointed"}
    settings.write_text("{broken")
    assert names() == {"org/legacy", "org/usual", "org/pointed"}


def test_a_folder_is_listed_once_however_many_ways_lead_to_it(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_model(root / "org" / "name")
    (root / "again").symlink_to(root / "org")
    (root / "org" / "above").symlink_to(root)
    (root / "org" / "another").symlink_to("name")
    (root / "zzz").symlink_to(root / "org" / "name")
    (tmp_path / "linked").symlink_to(root)
    others = [("lm_studio", root), ("lm_studio", root / "org"), ("embedded", root)]
    nested = FolderCatalog([root, tmp_path / "linked", root / "org"], others)
    assert [(model.id, model.source) for model in nested.models()] == [("org/name", "folder")]
    write_model(tmp_path / "apart" / "name")
    (root / "linked").symlink_to(tmp_path / "apart" / "name")
    assert ids(FolderCatalog([root])) == ["linked", "org/name"]


def test_a_folder_of_very_many_entries_keeps_nobody_waiting(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "good")
    crowd = tmp_path / "models" / "crowd"
    crowd.mkdir()
    for index in range(MAX_FOLDER_ENTRIES + 1):
        os.mkfifo(crowd / f"{index}.gguf")
    for index in range(MAX_FILES + 1):
        (tmp_path / "models" / "good" / str(index)).touch()
    catalog = FolderCatalog([tmp_path / "models"])
    assert ids(catalog) == ["good"]
    assert "more than 10000 files" in catalog.find("good").problem


@contextmanager
def exhausted() -> Iterator[None]:
    """Let no file be opened until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_while_too_many_files_are_open_models_stay_listed_and_none_is_said_to_be_missing(tmp_path: Path) -> None:
    for name in ("one", "org/two"):
        write_model(tmp_path / name)
    now = Time()
    catalog = FolderCatalog([tmp_path], clock=now)
    before = catalog.models()
    now.seconds = 10
    with exhausted():
        assert catalog.models() == before
        assert catalog.find("one") is before[0]
        with pytest.raises(DiskUnavailable) as caught:
            catalog.find("three")
        assert (caught.value.status, caught.value.retry_after_seconds) == (503, 2)
    write_model(tmp_path / "three")
    now.seconds = 20
    assert catalog.find("three").problem == ""
    with pytest.raises(ModelNotFound):
        catalog.find("four")


def test_a_server_that_starts_with_too_many_open_files_finds_its_models_later(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    now = Time()
    catalog = FolderCatalog([tmp_path], clock=now)
    with exhausted(), pytest.raises(DiskUnavailable):
        catalog.find("one")
    now.seconds = 10
    assert catalog.find("one").problem == ""


def test_embedded_models_if_any_are_sound(tmp_path: Path) -> None:
    embedded = list(default_catalog([], environment={}, home=tmp_path).models())
    assert all(model.source == "embedded" and not model.problem for model in embedded)
