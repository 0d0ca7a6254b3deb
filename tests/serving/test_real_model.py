"""A real published language model: it loads and answers beside a busy model, and drafting does not change its text."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI

from tests.published import real_model
from tests.serving.conftest import Server, running
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.system("a published model")
PATIENCE_SECONDS = 240.0


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "busy", "qwen3")
    folders = os.pathsep.join(map(str, (folder, real_model().parent)))
    with running(tmp_path_factory.mktemp("home"), PACELINE_MODEL_DIRS=folders) as server:
        yield server


def complete(server: Server, prompt: str, **fields: Any) -> str:
    body = {"model": real_model().name, "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_it_loads_beside_a_busy_model_and_nobody_is_blamed(real_server: Server) -> None:
    over = threading.Event()

    def keep_busy() -> None:
        body = {"model": "busy", "prompt": "x", "max_tokens": 50, "temperature": 0}
        while not over.is_set():
            httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS).raise_for_status()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        assert "Paris" in complete(real_server, "The capital of France is", max_tokens=6)
    finally:
        over.set()
        busy.join()
    status = httpx.get(f"{real_server.url}/api/status", timeout=PATIENCE_SECONDS).json()
    assert (status["quarantined"], status["worker"]["restarts"]) == ({}, 0)


def test_what_repeats_is_drafted_and_the_text_is_that_of_plain_decoding(real_server: Server) -> None:
    prompt = "one two three four five, one two three four five, one two three four five, one two"
    plain = complete(real_server, prompt, speculation={"method": "off"})
    assert complete(real_server, prompt, speculation={"method": "ngram", "num_draft_tokens": 4}) == plain
    assert "three four five" in plain


def test_a_chat_in_its_own_template_is_the_same_streamed_and_whole(real_server: Server) -> None:
    client = OpenAI(base_url=f"{real_server.url}/v1", api_key="none", timeout=PATIENCE_SECONDS)
    asked: Any = {
        "model": real_model().name,
        "messages": [{"role": "user", "content": "Say hello in French."}],
        "max_tokens": 10,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = client.chat.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    assert whole
