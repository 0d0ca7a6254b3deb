"""One server as its user sees it: exact text, speculation that stops and resumes, and recovery from a crash."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.serving.conftest import Server

PROMPT = "count with me: one two three one two three one"


def complete(server: Server, **changes: Any) -> dict[str, Any]:
    body = {"model": "attention", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "seed": 7} | changes
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def test_the_official_client_streams_a_chat(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="attention",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 20
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_server_process_never_loaded_mlx(server: Server) -> None:
    complete(server)
    mapped = {mapping.path for mapping in server.process.memory_maps()}
    assert not [path for path in mapped if "/mlx" in path]
    assert [mapping.path for mapping in server.worker.memory_maps() if "libmlx" in mapping.path]


@pytest.mark.parametrize("model", ["attention", "hybrid"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5}])
def test_the_same_seed_gives_the_same_text_with_any_method(server: Server, model: str, sampling: Any) -> None:
    texts = {}
    for method in ("off", "draft_model", "ngram"):
        asked = {"method": method, "num_draft_tokens": 4} if method != "off" else {"method": method}
        answer = complete(server, model=model, speculation=asked, **sampling)
        texts[method] = text_of(answer)
        drafted = answer["timings"]["draft_n"]
        assert (drafted > 0) == (method == "draft_model") or method == "ngram"
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] <= drafted
    assert texts["off"] == texts["draft_model"] == texts["ngram"]


def stream(server: Server, speaking: threading.Event, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Stream an answer; return its text and its `speculation`. Set `speaking` as soon as some text has come."""
    body = {"model": "attention", "prompt": PROMPT, "stream": True} | changes
    text, speculation = "", {}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            text += "".join(choice.get("text") or "" for choice in chunk["choices"])
            speculation = chunk.get("speculation") or speculation
            if text:
                speaking.set()
    return text, speculation


def test_speculation_stops_for_a_second_request_and_resumes(server: Server) -> None:
    speculation = {"method": "draft_model", "num_draft_tokens": 4}
    asked = {"long": {"seed": 1, "max_tokens": 3000}, "short": {"seed": 2, "max_tokens": 40}}
    alone = {
        name: text_of(complete(server, temperature=1.0, speculation={"method": "off"}, **changes))
        for name, changes in asked.items()
    }
    before = server.metric("paceline_spec_decode_num_drafts_total")
    speaking = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, speaking, temperature=1.0, speculation=speculation, **asked["long"])
        assert speaking.wait(60)
        short = complete(server, temperature=1.0, speculation=speculation, **asked["short"])
        long_text, long_speculation = running.result()
    assert long_text == alone["long"]
    assert text_of(short) == alone["short"]
    assert short["speculation"]["reason_code"] == "batched"
    assert long_speculation["method"] == "draft_model", "the long one drafted again when it was alone"
    assert server.metric("paceline_spec_decode_num_drafts_total") > before
    again = complete(server, temperature=1.0, speculation=speculation, **asked["short"])
    assert (again["speculation"]["method"], again["speculation"]["reason"]) == ("draft_model", "")


def test_a_model_that_cannot_load_says_why_and_harms_nobody(server: Server) -> None:
    body = {"model": "broken", "prompt": "x", "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code in {400, 503}
    assert "broken" in answer.json()["error"]["message"]
    assert complete(server)["choices"]


def test_a_draft_of_another_family_can_be_asked_for_by_name(server: Server) -> None:
    answer = complete(server, model="hybrid", draft_model="attention-draft", num_draft_tokens=3)
    assert answer["speculation"]["method"] in {"draft_model", "off"}
    assert text_of(answer) == text_of(complete(server, model="hybrid", speculation={"method": "off"}))


def test_an_unknown_draft_is_refused_by_name(server: Server) -> None:
    body = {"model": "attention", "prompt": "x", "max_tokens": 2, "draft_model": "nobody"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code in {400, 404}
    assert "nobody" in answer.json()["error"]["message"]


class Calm:
    """A clock that leaves out the time that the server and this process wait for a CPU in use by others."""

    def __init__(self, process_id: int) -> None:
        self._processes = (process_id, os.getpid())

    def __call__(self, *more: int) -> float:
        """Return the time in seconds; `more` are ids of processes that started after the clock."""
        return time.monotonic() - sum(waited(process_id) for process_id in (*self._processes, *more))


def waited(process_id: int) -> float:
    """Return the seconds that a process's threads were ready but not running; 0 where the system does not report it."""
    files = Path(f"/proc/{process_id}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def test_a_killed_worker_is_told_within_two_seconds_and_healed_within_ten(server: Server) -> None:
    complete(server)
    errors: list[float] = []
    streaming = threading.Event()
    calm = Calm(server.process.pid)

    def follow() -> None:
        body = {"model": "attention", "prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                streaming.set()
                if '"error"' in line:
                    errors.append(calm())

    reader = threading.Thread(target=follow)
    reader.start()
    assert streaming.wait(60)
    killed = calm()
    server.worker.kill()
    reader.join(60)
    assert not reader.is_alive()
    assert len(errors) == 1, "exactly one error frame"
    assert errors[0] - killed <= 2.0
    server.wait_ready()
    assert calm(server.worker.pid) - killed <= 10.0
    assert complete(server)["choices"]
    assert server.metric("paceline_worker_restarts_total") >= 1
