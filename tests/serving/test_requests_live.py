"""Requests to a real server with the demo model: running, in the history and in the log, but never their text."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.serving.conftest import Server, free_port

KEY = {"authorization": "Bearer pl-test-0123456789"}
SAID = "Count from 1 to 400, zanzibar."


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def demo(home: Path) -> Iterator[Server]:
    """Server with only the embedded models and a required key."""
    environment = os.environ | {
        "PACELINE_PORT": str(free_port()),
        "PACELINE_HOME": str(home),
        "PACELINE_API_KEY": "pl-test-0123456789",
        "PACELINE_OPEN": "0",
    }
    command = [sys.executable, "-m", "app.cli", "serve"]
    process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    running = Server(process, f"http://127.0.0.1:{environment['PACELINE_PORT']}")
    try:
        running.wait_ready()
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def chat(demo: Server, **changes: Any) -> httpx2.Response:
    body = {"model": "demo-assistant", "messages": [{"role": "user", "content": SAID}], "max_tokens": 40} | changes
    return httpx2.post(f"{demo.url}/v1/chat/completions", json=body, headers=KEY, timeout=60)


def ask(demo: Server, path: str) -> Any:
    response = httpx2.get(f"{demo.url}/admin/api/{path}", headers=KEY, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_request_is_in_the_history_with_the_numbers_that_its_client_got(demo: Server) -> None:
    reply = chat(demo).json()
    entry = ask(demo, f"requests/{reply['id']}")["request"]
    assert entry["figures"]["timings"] == reply["timings"]
    assert entry["figures"]["speculation"] == reply["speculation"]
    assert entry["completion_tokens"] == reply["usage"]["completion_tokens"]
    seconds = entry["figures"]["seconds"]
    parts = sum(value for name, value in seconds.items() if name != "total")
    assert 0 < seconds["decode"] <= parts <= seconds["total"] * 1.05 + 0.05
    assert (entry["outcome"], entry["prompt"], entry["reply"]) == (reply["choices"][0]["finish_reason"], None, None)


def test_one_that_runs_is_seen_and_cancelled(demo: Server) -> None:
    answers: list[httpx2.Response] = []
    client = threading.Thread(
        target=lambda: answers.append(chat(demo, max_tokens=3_000, n=8, speculation={"method": "off"}))
    )
    client.start()
    seen: dict[str, Any] = {}
    while not seen.get("completion_tokens"):
        assert client.is_alive()
        running = ask(demo, "requests")["running"]
        seen = running[0] if running else {}
    assert (seen["phase"], seen["method"], seen["reason"]) == ("decode", "off", "the request switched drafting off")
    path = f"{demo.url}/admin/api/requests/{seen['id']}/cancel"
    assert httpx2.post(path, json={}, headers=KEY, timeout=60).status_code == 200
    client.join(60)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (499, "cancelled")
    assert ask(demo, f"requests/{seen['id']}")["request"]["outcome"] == "cancelled"


def test_a_cancelled_request_has_the_same_figures_on_its_page_in_the_list_and_in_the_log(demo: Server) -> None:
    body = {
        "model": "demo-assistant",
        "messages": [{"role": "user", "content": SAID}],
        "stream": True,
        "temperature": 0,
    }
    with httpx2.stream("POST", f"{demo.url}/v1/chat/completions", json=body, headers=KEY, timeout=60) as reply:
        chunks = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))
        (name,) = {next(chunks)["id"] for _ in range(60)}
    lines: list[Any] = []
    while not lines:
        lines = ask(demo, f"logs?text={name}")["lines"]
    logged = dict(part.split("=", 1) for part in lines[0]["text"].split() if "=" in part)
    figures: dict[str, Any] = {}
    while not figures or figures["speculation"]["decision"] is None:  # the worker reports it a moment later
        entry = ask(demo, f"requests/{name}")["request"]
        figures = entry["figures"]
    assert (logged["finish"], entry["outcome"]) == ("cancelled", "cancelled")
    assert int(logged["cached"]) == figures["usage"]["cached_tokens"]
    assert int(logged["completion"]) == figures["usage"]["completion_tokens"] == entry["completion_tokens"]
    assert int(logged["drafted"]) == figures["speculation"]["drafted"]
    assert float(logged["tokens_per_cycle"]) == figures["speculation"]["tokens_per_cycle"]
    assert float(logged["tokens_per_second"]) == figures["timings"]["predicted_per_second"]
    assert entry["tokens_per_second"] == round(figures["timings"]["predicted_per_second"], 1)
    assert next(row for row in ask(demo, "requests")["requests"] if row["id"] == name).items() <= entry.items()


def test_the_log_has_the_line_of_the_worker_with_the_request_and_no_text_of_it_is_on_disk(
    demo: Server, home: Path
) -> None:
    reply = chat(demo).json()
    lines: list[Any] = []
    while not lines:
        lines = ask(demo, f"logs?text={reply['id']}")["lines"]
    assert [(line["logger"], line["request"]) for line in lines] == [("paceline.request", reply["id"])]
    written = (home / "logs" / "paceline.log").read_text().splitlines()
    assert all({"time", "level", "logger", "text"} <= set(json.loads(line)) for line in written)
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert {path.name for path in kept} >= {"paceline.log", "paceline.sqlite3"}
    for path in kept:
        assert b"zanzibar" not in path.read_bytes(), path.name
        assert b"pl-test-0123456789" not in path.read_bytes(), path.name


def test_the_log_level_is_felt_at_once(demo: Server) -> None:
    changed = httpx2.patch(f"{demo.url}/admin/api/settings", json={"log_level": "error"}, headers=KEY, timeout=60)
    assert changed.status_code == 200
    while (reply := chat(demo).json()) and ask(demo, f"logs?text={reply['id']}")["lines"]:
        pass
    httpx2.patch(f"{demo.url}/admin/api/settings", json={"log_level": "info"}, headers=KEY, timeout=60)
    while (reply := chat(demo).json()) and not ask(demo, f"logs?text={reply['id']}")["lines"]:
        pass
