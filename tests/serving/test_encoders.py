"""An encoder in the real server: its answers, its refusals, and its entries in lists."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import numpy as np
import openai
import pytest

from tests.serving.conftest import Server, running
from tests.tiny import write_tiny_model
from tests.tiny_encoders import CONTEXT_TOKENS, config_of, embedding_of, tokenizer_of, weights_of, write_tiny_encoder

TEXTS = (
    "The cat",
    "the dog ran far away from the red house while rain fell over the green hill and the blue sea",
    "Sea rain, red mat! a cat singing and the hills",
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module", name="folders")
def encoder_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    write_tiny_model(folder / "answers", "qwen3")
    write_tiny_encoder(folder / "first", "bert", pooling="cls_token")
    write_tiny_encoder(folder / "plain", "modernbert")
    shutil.rmtree(write_tiny_encoder(folder / "lost", "xlm-roberta", pooling="cls_token") / "1_Pooling")
    return folder


@pytest.fixture(scope="module", name="served")
def encoder_server(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("home"), PACELINE_MODEL_DIRS=str(folders)) as server:
        yield server


@pytest.fixture(scope="module", name="client")
def openai_client(served: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def truth(kind: str, text: str, pooling: str) -> np.ndarray[Any, Any]:
    """Return the embedding that plain numpy computes for a text and the special tokens around it."""
    tokenizer = tokenizer_of(kind)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return embedding_of(config_of(kind), weights_of(config_of(kind)), tokenizer.encode(text).ids, pooling)


def vectors(client: openai.OpenAI, model: str, texts: Any = TEXTS, **more: Any) -> list[Any]:
    answer = client.embeddings.create(model=model, input=list(texts), encoding_format="float", **more)
    return [np.array(item.embedding) for item in answer.data]


@pytest.mark.parametrize(
    ("model", "kind", "asked", "pooling"),
    [
        ("first", "bert", None, "cls"),
        ("first", "bert", "mean", "mean"),
        ("plain", "modernbert", None, "mean"),
        ("lost", "xlm-roberta", "last", "last"),
    ],
)
def test_texts_get_the_vectors_of_the_model_pooled_as_its_files_or_the_request_say(
    client: openai.OpenAI, model: str, kind: str, asked: str | None, pooling: str
) -> None:
    body = {} if asked is None else {"pooling": asked}
    answer = client.embeddings.create(model=model, input=list(TEXTS), encoding_format="float", extra_body=body)
    for text, item in zip(TEXTS, answer.data, strict=True):
        assert np.abs(np.array(item.embedding) - truth(kind, text, pooling)).max() < 2e-4
    content = answer.model_dump()
    assert (content["pooling"], content["normalized"], content["model"]) == (pooling, True, model)
    tokenizer = tokenizer_of(kind)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text).ids) for text in TEXTS) > 3 * 8


def test_a_copy_that_lost_its_pooling_asks_for_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1_Pooling") as refused:
        vectors(client, "lost")
    assert refused.value.param == "pooling"


def test_the_first_token_of_a_model_that_answers_is_no_embedding(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="mean or last"):
        vectors(client, "answers", extra_body={"pooling": "cls"})


def test_a_text_that_is_too_long_or_empty_is_refused(client: openai.OpenAI) -> None:
    fits = "cat " * (CONTEXT_TOKENS - 2)
    assert len(vectors(client, "first", [fits])) == 1
    for text in (fits + "cat", "cat " * 100_000):
        with pytest.raises(openai.BadRequestError, match=f"{CONTEXT_TOKENS} tokens") as refused:
            vectors(client, "first", [text])
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        vectors(client, "first", [""])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/v1/rerank", {"query": "Hi", "documents": ["a"]}),
        ("/api/chat", CHAT),
        ("/api/generate", {"prompt": "Hi"}),
    ],
)
def test_whatever_asks_it_for_words_is_told_where_to_go(served: Server, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{served.url}{path}", json={"model": "first", **body}, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if path == "/v1/chat/completions":
        assert (error["type"], error["param"]) == ("invalid_request_error", "model")
    assert "/v1/embeddings" in (error if isinstance(error, str) else error["message"])


def test_anthropics_client_gets_its_own_error(served: Server) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match="/v1/embeddings"):
        client.messages.create(model="first", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])


def test_lists_say_that_it_makes_embeddings_and_nothing_else(
    served: Server, client: openai.OpenAI, folders: Path, tmp_path: Path
) -> None:
    listed = {model.id: model.model_dump() for model in client.models.list()}
    first = listed["first"]
    assert (first["kind"], first["capabilities"], first["context_length"]) == (
        "encoder",
        ["embeddings"],
        CONTEXT_TOKENS,
    )
    assert (first["drafts"], first["problem"], listed["answers"]["kind"]) == ([], None, "main")
    shown = httpx.post(f"{served.url}/api/show", json={"model": "first"}, timeout=60).json()
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["bert.context_length"] == CONTEXT_TOKENS
    assert {"first", "plain"} < {
        model["name"].removesuffix(":latest")
        for model in httpx.get(f"{served.url}/api/tags", timeout=60).json()["models"]
    }
    environment = os.environ | {"PACELINE_MODEL_DIRS": str(folders), "PACELINE_HOME": str(tmp_path)}
    listing = subprocess.run(
        [sys.executable, "-m", "app.cli", "ls", "--json"], env=environment, capture_output=True, check=True
    )
    rows = {row["id"]: row for row in json.loads(listing.stdout)}
    assert (rows["first"]["kind"], rows["first"]["context"], rows["first"]["problem"]) == (
        "encoder",
        CONTEXT_TOKENS,
        "",
    )


def test_a_request_that_names_no_model_gets_the_one_that_answers(served: Server, client: openai.OpenAI) -> None:
    vectors(client, "first")
    for named in ({"model": "answers"}, {}):
        body = {**CHAT, "max_tokens": 3, **named}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json().get("model") == "answers", answer.text


def test_ollamas_embed_is_the_same_vector(served: Server, client: openai.OpenAI) -> None:
    [wanted] = vectors(client, "first", [TEXTS[1]])
    embedded = httpx.post(
        f"{served.url}/api/embed", json={"model": "first", "input": [TEXTS[1], TEXTS[0]]}, timeout=60
    ).json()
    assert np.abs(np.array(embedded["embeddings"][0]) - wanted).max() < 1e-4
    single = httpx.post(f"{served.url}/api/embeddings", json={"model": "first", "prompt": TEXTS[1]}, timeout=60).json()
    assert np.abs(np.array(single["embedding"]) - wanted).max() < 1e-4


def test_texts_are_read_while_another_model_answers(client: openai.OpenAI) -> None:
    wanted = [truth("bert", text, "cls") for text in TEXTS]
    begun = threading.Event()

    def chat() -> str:
        stream = client.chat.completions.create(
            model="answers", messages=[{"role": "user", "content": "Hi"}], max_tokens=200, temperature=0, stream=True
        )
        words = []
        for chunk in stream:
            begun.set()
            words += [choice.delta.content or "" for choice in chunk.choices]
        return "".join(words)

    alone = chat()
    begun.clear()
    with ThreadPoolExecutor(9) as threads:
        answer = threads.submit(chat)
        assert begun.wait(60)
        answers = [pending.result() for pending in [threads.submit(vectors, client, "first") for _ in range(8)]]
        assert answer.result() == alone
    for result in answers:
        assert max(np.abs(vector - other).max() for vector, other in zip(result, wanted, strict=True)) < 2e-4


def test_it_leaves_memory_when_it_is_told_to_and_comes_back(served: Server, client: openai.OpenAI) -> None:
    vectors(client, "plain", extra_body={"keep_alive": "5m"})
    state = {model.id: model.model_dump()["state"] for model in client.models.list()}
    assert state["plain"] == "loaded"
    vectors(client, "plain", extra_body={"keep_alive": 0})
    gate = threading.Event()
    for _ in range(1200):
        state = {model.id: model.model_dump()["state"] for model in client.models.list()}
        if state["plain"] == "available":
            break
        gate.wait(0.05)
    assert state["plain"] == "available"
    assert np.abs(vectors(client, "plain")[0] - truth("modernbert", TEXTS[0], "mean")).max() < 2e-4
