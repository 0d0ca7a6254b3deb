import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.models import pairing
from app.models.catalog import CatalogModel, FolderCatalog
from app.models.pairing import default_draft, refusal
from tests.models.folders import write_model, write_published


def model(root: Path, name: str, *, size: int = 0, **options: Any) -> CatalogModel:
    write_model(root / name, **options)
    entry = FolderCatalog([root]).find(name)
    return replace(entry, size_bytes=size) if size else entry


def test_identical_tokenizer_files_fit(tmp_path: Path) -> None:
    main, draft = model(tmp_path, "main", rows=16), model(tmp_path, "draft")
    assert (refusal(main, draft), draft.method) == ("", "draft_model")


def test_equal_tokens_in_different_files_fit_whatever_the_embedding_is_padded_to(tmp_path: Path) -> None:
    main = model(tmp_path, "main", rows=16, vocab_size=16)
    draft = model(tmp_path, "draft", vocab_size=8)
    file = draft.path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    content["normalizer"] = None
    file.write_text(json.dumps(content, indent=2))
    assert not refusal(main, draft)


def test_tokens_listed_by_position_are_compared_by_id(tmp_path: Path) -> None:
    main, draft = model(tmp_path, "main", rows=16), model(tmp_path, "draft")
    unigram = {"model": {"type": "Unigram", "vocab": [[piece, -1.0] for piece in "abcdefgh"]}}
    (draft.path / "tokenizer.json").write_text(json.dumps(unigram))
    assert not refusal(main, draft)


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    main = model(tmp_path, "main", rows=16)
    assert "token 2 is 'c' in the main model and 'x' in the draft" in refusal(
        main, model(tmp_path, "other", pieces="abxdyfgh")
    )
    longer = refusal(main, model(tmp_path, "longer", added={"<think>": 8}))
    assert longer
    assert "token 8 is unused in the main model and '<think>' in the draft" in longer


def test_special_tokens_count(tmp_path: Path) -> None:
    main = model(tmp_path, "main", rows=16, added={"<eos>": 8})
    assert not refusal(main, model(tmp_path, "same", rows=9, vocab_size=9, added={"<eos>": 8}))
    assert "8 rows lacks token 8" in refusal(main, model(tmp_path, "short", added={"<eos>": 8}))
    assert "'<eos>'" in refusal(main, model(tmp_path, "other", added={"<end>": 8}))


@pytest.mark.system("npm")
def test_a_small_gemma_without_rows_for_pictures_drafts_for_a_larger_one(tmp_path: Path) -> None:
    write_published(tmp_path / "gemma-3-4b", "gemma3", width=64)
    write_published(tmp_path / "gemma-3-1b", "gemma3", width=8, rows=262_144)
    catalog = FolderCatalog([tmp_path])
    main, draft = catalog.find("gemma-3-4b"), catalog.find("gemma-3-1b")
    assert refusal(main, draft) == ""
    assert default_draft(main, catalog.models()) == draft
    write_published(tmp_path / "cut", "gemma3", width=32, rows=262_000)
    assert "262000 rows lacks token 262143" in refusal(main, FolderCatalog([tmp_path]).find("cut"))


def test_a_draft_larger_than_its_main_model_is_refused(tmp_path: Path) -> None:
    main, draft = model(tmp_path, "main", rows=8), model(tmp_path, "draft", rows=9)
    assert "larger than the main model" in refusal(main, draft)
    assert not refusal(main, main)


def test_broken_folders_and_files_are_reasons_not_errors(tmp_path: Path) -> None:
    main, draft = model(tmp_path, "main", rows=16), model(tmp_path, "draft")
    (draft.path / "tokenizer.json").write_text('{"model": 3}')
    assert "tokenizer.json is not valid" in refusal(main, draft)
    (draft.path / "tokenizer.json").unlink()
    assert "cannot be compared" in refusal(main, replace(draft))
    (draft.path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert "cannot be compared" in refusal(main, replace(draft))
    assert refusal(main, replace(draft, reason="it is broken")).endswith("it is broken")
    (main.path / "tokenizer.json").rename(main.path / "elsewhere")
    (main.path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert not refusal(replace(main), replace(draft))


def test_the_default_draft_is_a_small_sibling_of_the_same_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing, "IS_MAC", True)
    main = model(tmp_path, "demo-assistant", size=900)
    relative = model(tmp_path, "demo-draft", size=300)
    stranger = model(tmp_path, "other-draft", size=100)
    large = model(tmp_path, "demo-large", size=301)
    foreign = model(tmp_path, "demo-foreign", size=10, pieces="hgfedcba")
    elsewhere = replace(stranger, id="demo-elsewhere", source="hugging_face")
    everything = [large, stranger, foreign, elsewhere, relative, main]
    assert default_draft(main, everything) == relative
    assert default_draft(main, [large, stranger, foreign, elsewhere]) == stranger
    assert default_draft(main, [main, large, foreign, elsewhere]) is None
    assert default_draft(replace(main, reason="broken"), everything) is None
    measured = {("draft_model", name): times for name, times in (("demo-large", 1.9), ("demo-foreign", 9.0))}
    assert default_draft(main, everything, measured=measured) == large, "of those that fit, the fastest here"
    slow = {("draft_model", "demo-draft"): 0.9}
    assert default_draft(main, everything, measured=slow) == stranger, "rather one that nobody measured"
    assert default_draft(main, [relative, main], measured=slow) == relative


def test_a_packed_copy_drafts_by_default_where_reading_weights_is_what_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = replace(model(tmp_path, "main", size=2_000), parameter_count=1_000)
    copy = replace(model(tmp_path, "main-4bit", size=560), parameter_count=1_000)
    small = replace(model(tmp_path, "small", size=640), parameter_count=320)
    chosen = {}
    for is_gpu in (True, False):
        monkeypatch.setattr(pairing, "IS_MAC", is_gpu)
        chosen[is_gpu] = default_draft(main, [main, copy, small])
    assert chosen == {True: copy, False: small}, "a CPU multiplies as many weights, and packed ones take it longer"
    assert default_draft(main, [main, copy]) is None


def test_the_server_side_never_loads_a_model_library() -> None:
    code = "import app.models.catalog, app.models.pairing, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"mlx", "mlx_lm", "transformers", "tokenizers", "numpy", "jinja2", "pydantic"} & set(loaded)
