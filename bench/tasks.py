"""Measures the tokens per cycle of every drafting method, task by task: `python bench/tasks.py` prints a table.

The embedded models answer the recipe's held-out prompts greedily, one request at a time, with a fixed number of drafts
per cycle and no governor. Drafts past an answer's end count, but few are accepted: short answers lower the figures.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from app.core.request import Request, SamplingParameters
from app.engine.engine import Engine
from app.engine.loading.opening import open_engine
from bench.acceptance import DEMO_MODELS, Counts, answer, load

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "demo_models"))
from samples import Sample
from tasks import TASKS, held_out_samples


@dataclass(frozen=True)
class DraftingSetup:
    """A method and the models that it runs on."""

    method: str
    drafts: int
    target: str = "demo-assistant"
    draft: str = "demo-draft"


SETUPS = (
    DraftingSetup("dflash", 7, draft="demo-assistant-dflash"),
    DraftingSetup("eagle3", 7, draft="demo-assistant-eagle3"),
    DraftingSetup("draft_model", 7),
    DraftingSetup("ngram", 7),
    DraftingSetup("mtp", 3, target="demo-hybrid", draft="demo-hybrid-mtp"),
)


def prompt_messages(sample: Sample) -> Sequence[dict[str, Any]]:
    """Return the messages before the first answer if the sample has tools, or else before the last one."""
    turns: Sequence[dict[str, Any]] = sample.messages
    last = len(turns) - 1
    if sample.tools:
        last = next(index for index, turn in enumerate(turns) if turn["role"] == "assistant")
    return turns[:last]


def count_task(engine: Engine, tokenizer: Any, setup: DraftingSetup, task: str, prompts: int) -> Counts:
    """Count cycles and drafts over the prompts of one task."""
    counts = Counts()
    for index, sample in enumerate(held_out_samples(task, prompts)):
        prompt = tokenizer.apply_chat_template(
            list(prompt_messages(sample)), tools=sample.tools or None, add_generation_prompt=True, return_dict=False
        )
        request = Request(
            id=f"{task}-{index}",
            prompt_tokens=tuple(prompt),
            max_tokens=300,
            stop_token_ids=frozenset({tokenizer.eos_token_id}),
            sampling=SamplingParameters(temperature=0.0),
        )
        answer(engine, request, setup.method, setup.drafts, counts)
    return counts


def measure(setup: DraftingSetup, tasks: Sequence[str], prompts: int) -> dict[str, Counts]:
    """Return the counts of each task."""
    unit = load(
        DEMO_MODELS / setup.target,
        DEMO_MODELS / setup.draft,
        "draft_model" if setup.method == "ngram" else setup.method,
    )
    engine, tokenizer = open_engine(unit), AutoTokenizer.from_pretrained(DEMO_MODELS / setup.target)
    by_task = {}
    for task in tasks:
        by_task[task] = count_task(engine, tokenizer, setup, task, prompts)
        print(f"{setup.method}: {task}", file=sys.stderr, flush=True)
    engine.close()
    return by_task


def cell(counts: Counts) -> str:
    """Format tokens per cycle and the share of accepted first drafts; a dash if nothing was drafted."""
    if not counts.cycles:
        return "–"
    return f"{1 + counts.accepted / counts.cycles:.2f} ({counts.first_accepted / counts.cycles:.0%})"


def mean(by_task: dict[str, Counts]) -> str:
    """Format the mean over the tasks in which something was drafted."""
    drafted = [counts for counts in by_task.values() if counts.cycles]
    tokens = sum(1 + counts.accepted / counts.cycles for counts in drafted) / len(drafted)
    first = sum(counts.first_accepted / counts.cycles for counts in drafted) / len(drafted)
    return f"**{tokens:.2f}** ({first:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=6, help="of each task")
    parser.add_argument("--method", action="append", choices=[setup.method for setup in SETUPS])
    arguments = parser.parse_args()
    tasks = (*TASKS, "follow-ups", "tool calls")
    setups = [setup for setup in SETUPS if not arguments.method or setup.method in arguments.method]
    results = [measure(setup, tasks, arguments.prompts) for setup in setups]
    print("| task | " + " | ".join(f"`{setup.method}`, {setup.drafts} drafts" for setup in setups) + " |")
    print("|---|" + "---:|" * len(setups))
    for task in tasks:
        print(f"| {task} | " + " | ".join(cell(result[task]) for result in results) + " |")
    print("| **mean** | " + " | ".join(mean(result) for result in results) + " |")


if __name__ == "__main__":
    main()
