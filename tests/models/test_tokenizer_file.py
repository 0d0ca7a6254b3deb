"""Tokenizers are read once: not again for another model, another question, another command or another start."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from app.core.errors import DiskUnavailable, ModelUnavailable
from app.models.catalog import FolderCatalog
from app.models.pairing import default_draft, refusal
from app.models.safe_files import read_file
from app.models.tokenizer_file import Tokenizer, TokenizerCache
from tests.models.folders import tokenizer, write_model, write_sixteen_published


class Reader:
    """Reads files, and records which."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, path: Path, max_bytes: int) -> bytes:
        self.read.append(f"{path.parent.name}/{path.name}")
        return read_file(path, max_bytes)


def cache(cache_file: Path | None = None) -> tuple[TokenizerCache, Reader]:
    reader = Reader()
    return TokenizerCache(cache_file, reader), reader


def write(folder: Path, pieces: str = "abcdefgh", **added: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(list(pieces), added)))
    return folder


@pytest.mark.system("npm")
def test_sixteen_models_with_real_tokenizers_are_paired_by_reading_each_file_once_for_ever(tmp_path: Path) -> None:
    write_sixteen_published(tmp_path / "models")
    cache_file = tmp_path / "home" / "tokenizers.json"
    drafts = []
    reads = []
    for _ in range(2):
        tokenizers, reader = cache(cache_file)
        models = FolderCatalog([tmp_path / "models"], tokenizers=tokenizers).models()
        assert not [model.problem for model in models if model.problem]
        drafts.append({model.id: draft.id for model in models if (draft := default_draft(model, models)) is not None})
        reads.append(reader.read)
    assert len(reads[0]) == len(set(reads[0])) >= 15
    assert reads[1] == []
    assert drafts[0] == drafts[1]
    assert drafts[0] == {
        "deepseek_v3-large": "deepseek_v3-small",
        "deepseek_v3-middle": "deepseek_v3-small",
        "gemma3-large": "gemma3-small",
        "gemma3-middle": "gemma3-small",
        "gptoss-large": "gptoss-small",
        "gptoss-middle": "gptoss-small",
        "llama3_1-large": "llama3_1-small",
        "llama3_1-middle": "llama3_1-small",
        "qwen3-large": "qwen3-tiny",
        "qwen3-middle": "qwen3-tiny",
    }
    assert cache_file.stat().st_size < 200_000
    by_id = {model.id: model for model in models}
    foreign = refusal(by_id["gemma3-large"], by_id["qwen3-small"])
    assert "token 0 is '<pad>' in the main model and '!' in the draft" in foreign


def test_a_difference_is_told_again_without_reading(tmp_path: Path) -> None:
    main, draft = write(tmp_path / "main"), write(tmp_path / "draft", "abxdefgh", think=8)
    differences = set()
    for expected in (["main/tokenizer.json", "draft/tokenizer.json"] * 3, [], []):
        tokenizers, reader = cache(tmp_path / "kept.json")
        differences.add(Tokenizer(main, tokenizers).mismatch(Tokenizer(draft, tokenizers), 0))
        differences.add("word: " + Tokenizer(main, tokenizers).text_difference(Tokenizer(draft, tokenizers)))
        assert reader.read == expected
    first = "token 2 is 'c' in the main model and 'x' in the draft"
    assert differences == {
        f"it has a different tokenizer: {first}; choose a draft model of the same family",
        f"word: {first}",
    }


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    main, draft = write(tmp_path / "main"), write(tmp_path / "draft")
    tokenizers, reader = cache(tmp_path / "kept.json")
    assert Tokenizer(main, tokenizers).shares_tokens(Tokenizer(draft, tokenizers))
    before = (draft / "tokenizer.json").stat()
    write(draft, "abcdefgx")
    os.utime(draft / "tokenizer.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not Tokenizer(main, tokenizers).shares_tokens(Tokenizer(draft, tokenizers)), "same size, same time"
    assert reader.read == ["main/tokenizer.json", "draft/tokenizer.json", "draft/tokenizer.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff" * 100, b"[" * 100_000, b'{"form": 0, "files": {}}', b'{"form": 1, "files": {"a": 3}}'],
)
def test_a_damaged_or_older_file_of_what_is_known_is_made_anew(tmp_path: Path, content: bytes) -> None:
    folder, cache_file = write(tmp_path / "main"), tmp_path / "kept.json"
    cache_file.write_bytes(content)
    for expected in (["main/tokenizer.json"], []):
        tokenizers, reader = cache(cache_file)
        assert Tokenizer(folder, tokenizers).facts().ordinary == ((0, 8),)
        assert reader.read == expected
    assert cache_file.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_kept_is_known_while_it_runs(tmp_path: Path) -> None:
    tokenizers, reader = cache(tmp_path / "a file" / "kept.json")
    (tmp_path / "a file").touch()
    folder = write(tmp_path / "main")
    assert [Tokenizer(folder, tokenizers).facts().ordinary for _ in range(2)] == [((0, 8),)] * 2
    assert reader.read == ["main/tokenizer.json"]


def test_two_processes_keep_what_both_found(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, f"{name}bcdefgh") for name in "xyz"]
    cache_file = tmp_path / "kept.json"
    for folder, (tokenizers, _) in zip(folders, [cache(cache_file), cache(cache_file), cache(cache_file)], strict=True):
        Tokenizer(folder, tokenizers).facts()
    tokenizers, reader = cache(cache_file)
    assert all(Tokenizer(folder, tokenizers).is_cached for folder in folders)
    assert reader.read == []


BROKEN: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "deep": lambda path: path.write_bytes(b'{"model":' + b"[" * 1_000_000),
    "of too many pieces": lambda path: path.write_bytes(b'{"model":{"vocab":{' + b'"":1,' * 2_000_001 + b'"a":2}}}'),
    "with an id below zero": lambda path: path.write_text('{"model": {"vocab": {"a": -1}}}'),
    "with an id beyond all": lambda path: path.write_text('{"model": {"vocab": {"a": 1' + "0" * 400 + "}}}"),
    "of another shape": lambda path: path.write_text('{"model": {"vocab": 3}}'),
    "too large": lambda path: os.truncate(path, 1 << 40),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tokenizer_is_told_in_one_line_and_read_once(tmp_path: Path, case: str) -> None:
    folder = write(tmp_path / "main")
    BROKEN[case](folder / "tokenizer.json")
    tokenizers, reader = cache(tmp_path / "kept.json")
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="download the model again") as caught:
            Tokenizer(folder, tokenizers).facts()
        assert "\n" not in caught.value.message
    assert len(reader.read) == 1


def test_too_many_open_files_are_no_fault_of_the_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path / "main")

    def fails(path: Path, max_bytes: int) -> bytes:
        raise DiskUnavailable("too many open files")

    exhausted = TokenizerCache(tmp_path / "kept.json", fails)
    with pytest.raises(DiskUnavailable):
        Tokenizer(folder, exhausted).facts()
    assert not Tokenizer(folder, exhausted).is_cached
    assert Tokenizer(folder, cache(tmp_path / "kept.json")[0]).facts().ordinary == ((0, 8),)


class HungPath(type(Path())):  # type: ignore[misc]
    """A path on a drive that answers once `answers` is set."""

    answers = threading.Event()

    def is_file(self) -> bool:
        self.answers.wait()
        return super().is_file()


def test_a_drive_that_stops_answering_holds_nobody_up(tmp_path: Path) -> None:
    tokenizers, reader = cache()
    known, new = (Tokenizer(HungPath(write(tmp_path / name)), tokenizers) for name in ("known", "new"))
    HungPath.answers.set()
    assert known.shares_tokens(known)
    HungPath.answers.clear()
    try:
        assert (known.is_cached, known.longest_bytes(), known.shares_tokens(known)) == (True, 1, True)
        assert (new.is_cached, new.longest_bytes()) == (True, 0)
        with pytest.raises(DiskUnavailable, match="does not answer"):
            new.facts()
    finally:
        HungPath.answers.set()
    while new.longest_bytes() == 0:
        pass
    assert reader.read == ["known/tokenizer.json", "new/tokenizer.json"]


def test_who_only_lists_models_is_told_that_drafters_are_looked_for(tmp_path: Path) -> None:
    for name, rows in (("main", 64), ("draft", 8)):
        write_model(tmp_path / name, rows=rows)
    may_read = threading.Event()

    def waits(path: Path, max_bytes: int) -> bytes:
        assert may_read.wait(60)
        return read_file(path, max_bytes)

    catalog = FolderCatalog([tmp_path], tokenizers=TokenizerCache(read=waits), wait_seconds=0.01)
    assert [catalog.is_reading_tokenizers(), catalog.is_reading_tokenizers()] == [True, True]
    may_read.set()
    while catalog.is_reading_tokenizers():
        pass
    models = catalog.models()
    draft = default_draft(catalog.find("main"), models)
    assert draft is not None
    assert draft.id == "draft"
