"""From the picker to a faster reply, over HTTP, with the embedded models and a real worker: choose, measure, apply,
chat, see acceptance, and find the choice again after a restart."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from tests.serving.conftest import Server, free_port

MODEL = "demo-assistant"
KEY = "sk-of-this-test"


@contextlib.contextmanager
def serving(home: Path) -> Iterator[httpx.Client]:
    """Run `paceline serve` with its state in `home`; yield a client with all rights."""
    port = free_port()
    environment = os.environ | {
        "PACELINE_PORT": str(port),
        "PACELINE_HOME": str(home),
        "PACELINE_API_KEY": KEY,
        "HF_HOME": str(home),
        "HOME": str(home),
    }
    process = psutil.Popen([sys.executable, "-m", "app.cli", "serve"], env=environment, stdout=subprocess.DEVNULL)
    server = Server(process, f"http://127.0.0.1:{port}")
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    try:
        server.wait_ready()
        with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def call(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    response = client.request(method, path, json=body)
    assert response.is_success, response.text
    return response.json()


def measured(client: httpx.Client) -> dict[str, Any]:
    """Run a short measurement, follow it as a page does, and return its result."""
    wish = {"model": MODEL, "drafts": ["demo-draft"], "minutes": 0.02, "rounds": 1, "several": False}
    assert call(client, "POST", "/admin/api/measurements", wish)["active"]["model_id"] == MODEL
    with client.stream("GET", "/admin/api/live?topics=measuring") as events:
        for line in events.iter_lines():
            state: Any = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"active": True}
            if not state["active"]:
                assert state["last"]["outcome"] == "done", state["last"]
                break
    row: dict[str, Any] = call(client, "GET", f"/admin/api/measurements?model={MODEL}")["measurements"][0]
    return row


def reply(client: httpx.Client) -> Any:
    question = [{"role": "user", "content": "Count from 1 to 20."}]
    body = {"model": MODEL, "messages": question, "max_tokens": 60, "temperature": 0}
    return call(client, "POST", "/v1/chat/completions", body)


def without_changes(setting: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in setting.items() if name != "changes"}


@pytest.mark.soak
@pytest.mark.landing
def test_a_draft_is_picked_measured_applied_and_seen_in_the_reply(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        view = call(client, "GET", f"/admin/api/drafts/{MODEL}")
        assert {candidate["id"] for candidate in view["candidates"] if not candidate["refusal"]} >= {"demo-draft", ""}
        row = measured(client)
        (cell,) = row["report"]["cells"]
        assert {setting["method"] for setting in cell["settings"]} == {"off", "auto", "draft_model", "ngram"}
        assert all(setting["tokens_per_second"] > 0 for setting in cell["settings"])
        picked = {"method": "draft_model", "num_draft_tokens": 4}
        assert call(client, "POST", f"/admin/api/measurements/{row['id']}/apply", picked)["model"] == MODEL
        first = reply(client)
        assert first["speculation"]["method"] == "draft_model"
        assert first["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        view = call(client, "GET", f"/admin/api/drafts/{MODEL}")
        used = next(candidate for candidate in view["candidates"] if candidate["in_use"])
        assert used["id"] == "demo-draft"
        newest = {"measured_at": row["created_at"], "is_latest": True}
        assert used["measured"] in [{**setting, **newest} for setting in map(without_changes, cell["settings"])]
        assert view["counts"]["draft_model"]["accepted"] > 0
    with serving(tmp_path) as client:
        again = reply(client)
        assert again["speculation"]["method"] == "draft_model"
        assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
        assert [entry["id"] for entry in call(client, "GET", "/admin/api/measurements")["measurements"]] == [row["id"]]
