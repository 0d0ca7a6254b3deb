"""Embeddings from any loaded model through the official client, equal to the output of the model's own layers."""

import base64
import struct
from pathlib import Path
from typing import Any

import httpx2 as httpx
import mlx.core as mx
import numpy as np
import openai
import pytest
from mlx_lm import load

from tests.serving.conftest import Server

TEXT = "count with me: one two three one two three " * 20
"""Text of 860 tokens: longer than a first prefill chunk (512), so that pooling can span several forwards."""


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("model", ["attention", "hybrid"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_is_the_pooled_state_of_the_model(
    client: openai.OpenAI, model_folder: Path, model: str, pooling: str
) -> None:
    loaded: Any = load(str(model_folder / model))
    network, tokenizer = loaded[0], loaded[1]
    tokens = tokenizer.encode(TEXT)
    states = network.model(mx.array([tokens]))[0].astype(mx.float32)
    wanted = mx.mean(states, axis=0) if pooling == "mean" else states[-1]
    wanted = np.array(wanted / mx.linalg.norm(wanted))
    answer = client.embeddings.create(
        model=model, input=[TEXT, "other"], encoding_format="float", extra_body={"pooling": pooling}
    )
    assert np.abs(np.array(answer.data[0].embedding) - wanted).max() < 1e-4
    assert answer.usage.prompt_tokens > len(tokens)
    assert answer.model_dump()["pooling"] == pooling
    by_tokens = client.embeddings.create(model=model, input=tokens, extra_body={"pooling": pooling})
    assert np.abs(np.array(by_tokens.data[0].embedding) - wanted).max() < 1e-4


def test_formats_and_dimensions(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="attention", input="Hello", encoding_format="float").data[0].embedding
    packed: Any = client.embeddings.create(model="attention", input="Hello", encoding_format="base64").data[0].embedding
    assert np.allclose(struct.unpack(f"{len(plain)}f", base64.b64decode(packed)), plain, atol=1e-6)
    short = client.embeddings.create(model="attention", input="Hello", dimensions=8).data[0].embedding
    assert len(short) == 8
    assert np.linalg.norm(short) == pytest.approx(1)
    for bad in ("", [], [""], [1, -1], ["x"] * 2049):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="attention", input=bad)


@pytest.mark.parametrize("count", [300, pytest.param(2048, marks=pytest.mark.soak)])
def test_more_inputs_than_may_wait_for_a_model_come_back_in_order(client: openai.OpenAI, count: int) -> None:
    texts = [f"text number {number}" for number in range(count)]
    answer = client.embeddings.create(model="attention", input=texts, encoding_format="float")
    assert [embedding.index for embedding in answer.data] == list(range(count))
    alone = client.embeddings.create(model="attention", input=texts[-1], encoding_format="float")
    assert np.abs(np.array(alone.data[0].embedding) - answer.data[-1].embedding).max() < 1e-5


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_more_dimensions_than_there_are_is_refused(server: Server, path: str) -> None:
    body = {"model": "attention", "input": "Hello", "dimensions": 100_000}
    answer = httpx.post(f"{server.url}{path}", json=body)
    assert (answer.status_code, "dimensions is 100000" in answer.text) == (400, True)
    assert httpx.post(f"{server.url}{path}", json=body | {"dimensions": 8}).status_code == 200
