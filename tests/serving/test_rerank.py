"""Documents ordered by the probability of `yes` against `no`, equal to the output of the model's own layers."""

import shutil
from pathlib import Path
from typing import Any

import httpx2 as httpx
import mlx.core as mx
import pytest
from mlx_lm import load

from app.api.rerank import INSTRUCTION, relevance
from tests.published import tokenizer_folder
from tests.serving.conftest import Server
from tests.tiny import write_tiny_model

NAME = "tiny-Reranker-0.1M"
ONLY_NAMED = "random-reranker"
DOCUMENTS = ["Paris is the capital of France.", "Cats sleep all day.", "It rains.", "La capitale est Paris. " * 40]
QUERY = "What is the capital of France?"
SAID = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "  # noqa: E501 - as published
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n'
    "<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@pytest.fixture(scope="module")
def judge(model_folder: Path) -> Any:
    """A tiny model with a real tokenizer. Its logits are zero except for `yes`, `no` and the end of turn, which is the
    likeliest token."""
    shutil.copytree(model_folder / "attention", model_folder / ONLY_NAMED)
    folder = write_tiny_model(model_folder / NAME, "qwen3", vocabulary_size=151_936)
    for file in tokenizer_folder("qwen3").iterdir():
        shutil.copy(file, folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    tokenizer: Any = load(str(folder))[1]
    words = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    assert [len(word) for word in words] == [1, 1]
    weights["model.embed_tokens.weight"][:, 0] = 4.0  # the residual stream is above 0 there for any input
    weights["model.norm.weight"] = mx.ones_like(weights["model.norm.weight"])
    weights["lm_head.weight"] = mx.zeros_like(weights["lm_head.weight"])
    for [word], weight in zip((*words, [tokenizer.eos_token_id]), (1.5, 1.0, 3.0), strict=True):
        weights["lm_head.weight"][word, 0] = weight
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return load(str(folder))


def scores(judge: Any, query: str, instruction: str = INSTRUCTION) -> list[float]:
    network, tokenizer = judge[0], judge[1]
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    probabilities = []
    for document in DOCUMENTS:
        tokens = tokenizer.encode(SAID.format(instruction, query, document), add_special_tokens=False)
        logits = network(mx.array([tokens]))[0, -1]
        probabilities.append(mx.softmax(mx.stack([logits[no], logits[yes]]))[1].item())
    return probabilities


def ask(server: Server, **body: Any) -> Any:
    return httpx.post(f"{server.url}/v1/rerank", json={"model": NAME, "query": QUERY} | body, timeout=60)


@pytest.mark.system("npm")
def test_documents_come_in_the_order_of_what_the_model_thinks_of_them(server: Server, judge: Any) -> None:
    wanted = scores(judge, QUERY)
    assert len({round(score, 4) for score in wanted}) == len(DOCUMENTS)
    answer = ask(server, documents=DOCUMENTS).json()
    by_index = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [by_index[place] for place in range(len(DOCUMENTS))] == pytest.approx(wanted, abs=1e-4)
    assert list(by_index) == sorted(by_index, key=lambda place: -wanted[place])
    assert answer["usage"]["total_tokens"] > 4 * 60
    other = ask(server, documents=[{"text": text} for text in DOCUMENTS], instruction="Find cats.", top_n=2).json()
    best = sorted(scores(judge, QUERY, "Find cats."), reverse=True)[:2]
    assert [result["relevance_score"] for result in other["results"]] == pytest.approx(best, abs=1e-4)
    [kept] = ask(server, documents=DOCUMENTS, top_n=1, return_documents=True).json()["results"]
    assert kept["document"]["text"] == DOCUMENTS[kept["index"]]


@pytest.mark.system("npm")
def test_models_say_whether_they_can(server: Server, judge: Any) -> None:
    listed = {
        model["id"]: model["capabilities"] for model in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    }
    assert [name for name, can in listed.items() if "rerank" in can] == [ONLY_NAMED, NAME]
    refused = ask(server, model="attention", documents=DOCUMENTS)
    assert refused.status_code == 400
    assert "no reranker" in refused.json()["error"]["message"]
    for wrong in ([], "one", [""], [1], [{"title": "x"}], ["x"] * 2049):
        assert ask(server, documents=wrong).status_code == 400, wrong


@pytest.mark.system("npm")
def test_a_model_that_only_bears_the_name_is_told(server: Server, judge: Any) -> None:
    refused = ask(server, model=ONLY_NAMED, documents=DOCUMENTS)
    assert refused.status_code == 400
    assert "neither yes nor no" in refused.json()["error"]["message"]


def test_the_relevance_is_the_share_of_yes() -> None:
    assert relevance([("yes", -1.0), ("no", -1.0), ("maybe", -0.5)]) == 0.5
    assert relevance([("yes", -1.0)]) == 1.0
    assert relevance([("no", -1.0)]) == 0.0
    assert relevance([("Yes", -1.0)]) is None
