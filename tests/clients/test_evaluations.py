"""lm-eval over the endpoints: the same scores with drafts, without them, and in mlx-lm's own evaluation."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from mlx_lm.evaluate import MLXLM

import app
from app.engine.memory import on_cpu
from tests.clients.conftest import MODEL, Both

NEARLY = 1e-5 if on_cpu() else 0.05
"""Relative tolerance of perplexities, which mlx-lm computes in batches: they differ by 1e-6, in float16 by 1 %."""
FOLDER = Path(app.__file__).parent / "demo_models" / MODEL
CITIES = ("Paris", "Oslo", "Rome", "Berlin", "Tokyo")
SUMS = [{"question": f"{a} + {b} =", "answers": [str(a + b + n) for n in range(4)]} for a in (1, 3, 5) for b in (2, 4)]
COUNTS = [{"question": f"Count from 1 to {n}:", "answer": ", ".join(map(str, range(1, n + 1)))} for n in (3, 5, 8)]
ASKED = [{"question": f"What is the capital of {name}?", "answer": name} for name in CITIES]
CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{answers}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ENDING: dict[str, Any] = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}
WRITING: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


def task(name: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> ConfigurableTask:
    data = {"task": name, "test_split": "test", "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)}}
    return ConfigurableTask(config=data | settings)


def by_mlx_lm(tasks: list[ConfigurableTask], *, chat: bool, **settings: Any) -> dict[str, Any]:
    """Evaluate with mlx-lm itself, in float32 where Paceline computes in it: float16 shifts a perplexity by 1 %."""
    model = MLXLM(str(FOLDER), use_chat_template=chat)
    if on_cpu():
        model._model.set_dtype(mx.float32)
    return measured(model, tasks, **settings)


def measured(model: Any, tasks: list[ConfigurableTask], **settings: Any) -> dict[str, Any]:
    """Return every score of every task, and the generated texts."""
    none = TaskManager(include_defaults=False)  # skip lm-eval's own tasks, thousands of files
    settings |= {"task_manager": none, "bootstrap_iters": 0, "log_samples": True, "verbosity": "ERROR"}
    evaluation = simple_evaluate(model, tasks=tasks, **settings)
    scores = {
        f"{name} {metric}": value
        for name, results in evaluation["results"].items()
        for metric, value in results.items()
        if isinstance(value, float)
    }
    texts = {
        name: [sample["resps"][0][0] for sample in samples]
        for name, samples in evaluation["samples"].items()
        if isinstance(samples[0]["resps"][0][0], str)
    }
    return scores | texts


def test_scores_of_completions_are_those_of_mlx_lm(both: Both[dict[str, Any]]) -> None:
    def tasks() -> list[ConfigurableTask]:
        return [task("sums", SUMS, CHOICE), task("counts", COUNTS, ENDING), task("writing", ASKED, WRITING)]

    def talk(url: str) -> dict[str, Any]:
        where = f"{url}/v1/completions"
        return measured(LocalCompletionsAPI(where, "huggingface", model=MODEL, tokenizer=str(FOLDER)), tasks())

    ours, theirs = both(talk), by_mlx_lm(tasks(), chat=False)
    assert ours.keys() == theirs.keys()
    assert {name: value for name, value in ours.items() if isinstance(value, list)} == {"writing": theirs["writing"]}
    for name, value in ours.items():
        wanted = pytest.approx(theirs[name], rel=NEARLY) if "perplexity" in name else theirs[name]
        assert value == wanted, name


def test_chats_are_written_as_mlx_lm_writes_them(both: Both[dict[str, Any]]) -> None:
    def talk(url: str) -> dict[str, Any]:
        chats = LocalChatCompletion(f"{url}/v1/chat/completions", model=MODEL)
        return measured(chats, [task("writing", ASKED, WRITING)], apply_chat_template=True)

    assert both(talk) == by_mlx_lm([task("writing", ASKED, WRITING)], chat=True, apply_chat_template=True)
