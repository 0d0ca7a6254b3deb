"""Commands and the server's start do not wait for work that they do not need, whatever is on the disk."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.model_settings import ModelSettings
from app.store.rows import StoredSettings
from app.store.store import FILE_NAME, Store
from tests.cli.fake_server import FakeServer
from tests.cli.test_commands import LOADED
from tests.models.folders import write_sixteen_published

STORE = {"sqlalchemy", "sqlmodel", "alembic"}
SERVER = {"fastapi", "uvicorn", "jinja2", "huggingface_hub"}
COMMAND = (
    "import sys; from app.cli import application; application({words}, standalone_mode=False); print(*sys.modules)"
)
LIVE_SECONDS, LOOK_SECONDS = 60.0, 100.0
"""Limits in seconds, generous: the server must only be live before its search for drafters ends."""


def start(environment: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")} | dict(environment)
    return subprocess.Popen([sys.executable, *words], env=own, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("words", [["ps"], ["load", "big"], ["unload", "big"]], ids=" ".join)
def test_a_command_that_asks_the_server_imports_no_store(
    environment: Mapping[str, str], fake: FakeServer, words: list[str]
) -> None:
    answer = {"model": "big", "seconds": 1.0, "was_loaded": True}
    fake.answers |= {"/api/status": (200, LOADED), "/api/load": (200, answer), "/api/unload": (200, answer)}
    modules = modules_after(environment, COMMAND.format(words=words))
    assert "app.command.server" in modules
    assert not (STORE | SERVER | {"httpx2", "asyncio", "app.hub", "app.serving"}) & modules


def test_a_list_of_models_imports_neither_store_nor_server(environment: Mapping[str, str]) -> None:
    store = Store(Path(environment["PACELINE_HOME"]) / FILE_NAME)
    StoredSettings(store).save_model("demo-assistant", ModelSettings(policy="off"), source="test")
    StoredSettings(store).change_settings({"max_requests": 9, "prefix_cache_disk": 0.5}, source="test")
    store.close()
    with start(environment, "-m", "app.cli", "ls", "--json") as process:
        rows = {row["id"]: row for row in json.loads(process.communicate(timeout=LOOK_SECONDS)[0])}
    assert rows["demo-assistant"]["chosen"] == "policy off"
    modules = modules_after(environment, COMMAND.format(words=["ls"]))
    assert "app.models.catalog" in modules
    assert not (STORE | SERVER | {"httpx2"}) & modules


def test_a_server_imports_what_greets_and_what_asks_the_hub_after_its_start(environment: Mapping[str, str]) -> None:
    modules = modules_after(environment, "import sys, app.cli, app.main; print(*sys.modules)")
    assert "app.hub.hub_files" in modules
    assert not {"rich", "app.command.listing", "huggingface_hub.hf_api", "huggingface_hub.utils"} & modules


@pytest.mark.system("npm")
def test_a_server_with_sixteen_real_tokenizers_is_live_before_it_looks_for_drafters(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    write_sixteen_published(tmp_path / "models")
    own = {**environment, "PACELINE_MODEL_DIRS": str(tmp_path / "models"), "PACELINE_PORT": "0"}
    began = time.perf_counter()
    with start(own, "-m", "app.cli", "serve") as process:
        assert process.stdout is not None
        address = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
        root = address.removesuffix("/v1")
        get(f"{root}/health/live")
        assert time.perf_counter() - began < LIVE_SECONDS
        models = get(f"{root}/v1/models")["data"]
        while any(model["looking"] for model in models):
            assert all(model["draft"] is None for model in models)
            assert time.perf_counter() - began < LOOK_SECONDS
            models = get(f"{root}/v1/models")["data"]
        process.terminate()
        process.stdout.read()
    assert process.returncode == 0
    drafts = {model["id"]: model["draft"] for model in models}
    assert (drafts["gemma3-large"], drafts["qwen3-middle"]) == ("gemma3-small", "qwen3-tiny")
    with start(own, "-m", "app.cli", "ls", "--json") as process:
        rows = {row["id"]: row for row in json.loads(process.communicate(timeout=LOOK_SECONDS)[0])}
    assert {name: rows[name]["draft"] or None for name in drafts} == drafts


def modules_after(environment: Mapping[str, str], code: str) -> set[str]:
    """Run `code`, which prints the names of the imported modules; return these names."""
    with start(environment, "-c", code) as process:
        said, _ = process.communicate(timeout=LOOK_SECONDS)
    assert process.returncode == 0
    return set(said.split())


def get(address: str) -> Any:
    return httpx2.get(address, timeout=LOOK_SECONDS).raise_for_status().json()
