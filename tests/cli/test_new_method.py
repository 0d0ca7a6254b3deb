"""A new drafting method needs one new file and one more line; every command, API and page then knows it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.models.drafters.methods import METHODS
from tests.models.folders import safetensors

APP = Path(__file__).parents[2] / "app"
DEMO, DRAFT = "demo-assistant", "demo-assistant-echo"
LINE = """    Method(name="echo", drafts_with="features", words={"en": "Echo", "ja": "エコー"}),\n"""
FILE = '''"""Drafts the last token again."""

import mlx.core as mx
from mlx import nn

from app.core.reason import NO_REASON
from app.engine.drafters.drafter import Drafter, Proposal


class Echo(Drafter):
    """As often as it may."""

    name = "echo"

    @classmethod
    def load(cls, folder, target_config):
        return nn.Identity()

    @classmethod
    def open(cls, unit):
        unit.drafter(cls.name)
        return cls()

    def propose(self, rows, sampled):
        counts = tuple(row.num_draft_tokens for row in rows)
        tokens = [[row.tokens[-1]] * max(counts) for row in rows]
        return Proposal(mx.array(tokens, dtype=mx.int32), counts, (NO_REASON,) * len(rows))
'''
DRAFTER = {
    "echo_config": {},
    "hidden_size": 256,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 2048,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the app with the new file and line, and a drafter of the new method next to its main model."""
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "app/engine/drafters/echo.py").write_text(FILE)
    described = tmp_path / "app/models/drafters/methods.py"
    text = described.read_text()
    described.write_text(text.replace("METHODS = (\n", f"METHODS = (\n{LINE}", 1))
    shutil.copytree(APP / "demo_models" / DEMO, tmp_path / "models" / DEMO)
    (tmp_path / "models" / DRAFT).mkdir()
    (tmp_path / "models" / DRAFT / "config.json").write_text(json.dumps(DRAFTER))
    (tmp_path / "models" / DRAFT / "model.safetensors").write_bytes(safetensors({"norm.weight": ("F16", (256,))}))
    return tmp_path


def start(tree: Path, *words: str, **settings: str) -> subprocess.Popen[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    own |= {
        "PYTHONPATH": str(tree),
        "PACELINE_HOME": str(tree / "home"),
        "HF_HOME": str(tree / "hub"),
        "HOME": str(tree),
    }
    own |= {"PACELINE_MODEL_DIRS": str(tree / "models"), "PACELINE_PORT": "0", "PACELINE_API_KEY": "secret", **settings}
    command = [sys.executable, "-m", "app.cli", *words]
    return subprocess.Popen(command, cwd=tree, env=own, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def client(tree: Path) -> Iterator[httpx2.Client]:
    with start(tree, "serve") as server:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        headers = {"authorization": "Bearer secret"}
        with httpx2.Client(base_url=address.removesuffix("/v1"), headers=headers, timeout=120) as made:
            yield made
        server.terminate()
        server.stdout.read()


def answer(response: httpx2.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def listed(tree: Path) -> Mapping[str, Any]:
    with start(tree, "ls", "--json") as process:
        return {row["id"]: row for row in json.loads(process.communicate(timeout=60)[0])}


@pytest.mark.soak
@pytest.mark.landing
def test_a_method_is_one_file_and_one_line_elsewhere(tree: Path, client: httpx2.Client) -> None:
    rows = listed(tree)
    assert (rows[DRAFT]["kind"], rows[DRAFT]["problem"]) == ("echo", "")
    assert rows[DEMO]["drafts"] == [{"id": DRAFT, "method": "echo"}], "listed and paired"
    config = json.dumps({"method": "echo", "model": DRAFT})
    with start(tree, "config", PACELINE_SPECULATIVE_CONFIG=config) as process:
        assert "echo" in process.communicate(timeout=60)[0], "the command line takes it"
    body = {"model": DEMO, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 20, "temperature": 0}
    asked = {**body, "speculation": {"method": "echo", "num_draft_tokens": 2}}
    said = answer(client.post("/v1/chat/completions", json=asked))
    assert said["speculation"]["method"] == "echo", "a request names it"
    plain = answer(client.post("/v1/chat/completions", json={**body, "speculation": {"method": "off"}}))
    assert said["choices"][0]["message"] == plain["choices"][0]["message"]
    picker = answer(client.get(f"/admin/api/drafts/{DEMO}"))
    candidate = next(entry for entry in picker["candidates"] if entry["id"] == DRAFT)
    assert (candidate["method"], candidate["refusal"], candidate["in_use"]) == ("echo", "", True)
    answer(client.put(f"/admin/api/drafts/{DEMO}", json={"drafts": [DRAFT], "methods": ["echo"]}))
    assert "methods echo" in listed(tree)[DEMO]["chosen"], "a setting names it"
    options = answer(client.get(f"/admin/api/models/{DEMO}/settings"))["settings"]
    methods = next(row for row in options if row["name"] == "methods")["options"]
    assert methods == ["echo", *(method.name for method in METHODS)]
    for language, word in {"en": "Echo", "ja": "エコー", "ko": "Echo"}.items():
        page = client.get(f"/admin/drafts/{DEMO}", headers={"accept-language": language})
        assert json.dumps(word)[1:-1] in page.text or word in page.text, f"the page says it in {language}"
