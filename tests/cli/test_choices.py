"""Settings stored for a model are shown, and a damaged store is reported in one line."""

import json
from collections.abc import Mapping
from pathlib import Path

from app.model_settings import ModelSettings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from tests.cli.fake_server import FakeServer
from tests.cli.test_commands import LOADED, run
from tests.tiny import write_tiny_model

CHOICE = ModelSettings(methods=("draft_model",), num_draft_tokens=4, policy="single")
WORDS = "methods draft_model; 4 drafts; policy single"


def keep(environment: Mapping[str, str], model: str) -> Path:
    store = Store(Path(environment["PACELINE_HOME"]) / FILE_NAME)
    StoredSettings(store).save_model(model, CHOICE, source="test")
    store.close()
    return store.path


def test_ls_shows_a_stored_choice(environment: Mapping[str, str]) -> None:
    assert "Chosen" not in run(environment, "ls").stdout
    keep(environment, "demo-assistant")
    table = run(environment, "ls").stdout
    assert "Chosen" in table
    assert WORDS in table
    rows = {row["id"]: row for row in json.loads(run(environment, "ls", "--json").stdout)}
    assert (rows["demo-assistant"]["chosen"], rows["demo-draft"]["chosen"]) == (WORDS, "")
    assert rows["demo-assistant"]["draft"] == "demo-draft", "the best one of the chosen methods"


def test_ls_says_why_keys_and_values_stay_whole(environment: Mapping[str, str], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "folders" / "small-heads", "qwen3", head_size=16)
    there = {**environment, "PACELINE_MODEL_DIRS": str(tmp_path / "folders")}
    for model in ("small-heads", "demo-assistant"):
        assert run(there, "config", "set", "kv_bits", "8", "--model", model).exit_code == 0
    rows = {row["id"]: row["chosen"] for row in json.loads(run(there, "ls", "--json").stdout)}
    assert rows["demo-assistant"] == "kv_bits 8"
    assert rows["small-heads"] == "kv_bits 8; not quantized: the size of its heads is no multiple of 32"


def test_ps_shows_a_stored_choice_of_a_loaded_model(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/api/status"] = (200, LOADED)
    assert "Chosen" not in run(environment, "ps").stdout
    keep(environment, "big")
    keep(environment, "not-loaded")
    shown = run(environment, "ps").stdout
    assert f"Settings of big: {WORDS}" in shown
    assert "not-loaded" not in shown


def test_a_damaged_store_is_one_line_and_a_finding(environment: Mapping[str, str]) -> None:
    path = keep(environment, "demo-assistant")
    path.write_bytes(b"damaged" * 1000)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    for words in (("ls",), ("config", "set", "theme", "dark"), ("ps",)):
        result = run(environment, *words)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"{path} is damaged (it is not a database)")
        assert "sets it aside" in result.stderr
        assert result.stderr.count("\n") == 1
    result = run(environment, "doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["store"]["level"] == "fail"
    assert "sets it aside" in findings["store"]["action"]
