"""Measure a drafter in PyTorch: tokens a cycle and acceptance on held-out prompts, greedy, task by task."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafters import BLOCK, NAMES, TARGETS, build_drafter
from drafters_table import replace_drafter
from drafting import Target, frozen_target, propose
from load import load_published
from samples import Message, Sample
from tasks import TASKS, held_out_samples
from tokenizer import template_text
from tokenizers import Tokenizer
from torch import Tensor
from transformers.utils.chat_template_utils import _compile_jinja_template

ALL_TASKS = (*TASKS, "follow-ups", "tool calls")
LONGEST_ANSWER = 300
AT_ONCE = 64
END_TOKENS = (0, 2)


@dataclass
class Tally:
    """Counts of the drafting for one task's answers."""

    tokens: int = 0
    cycles: int = 0
    drafted: int = 0
    first_right: int = 0

    def add(self, drafted: Tensor, answer: list[int]) -> None:
        """Count the cycles one answer needs; its first token comes from the prompt's pass."""
        position, width = 0, drafted.shape[1]
        while position < len(answer) - 1:
            following = answer[position + 1 :]
            same = [int(a) == b for a, b in zip(drafted[position], following, strict=False)]
            accepted = next((i for i, right in enumerate(same) if not right), len(same))
            self.cycles += 1
            self.drafted += min(width, len(following))
            self.first_right += same[0]
            self.tokens += min(accepted + 1, len(following))
            position += accepted + 1


def asked_messages(sample: Sample) -> list[Message]:
    """Return the messages of a conversation that the model is given."""
    if sample.task == "tool calls":
        return sample.messages[: next(i for i, m in enumerate(sample.messages) if m["role"] == "assistant")]
    return sample.messages[:-1]


@torch.no_grad()
def greedy_answer(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Return the greedy answer, its end of turn included."""
    answer: list[int] = []
    tokens, cache = torch.tensor([prompt]), None
    while len(answer) < LONGEST_ANSWER:
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        answer.append(int(output.logits[0, -1].argmax()))
        if answer[-1] in END_TOKENS:
            break
        tokens = torch.tensor([[answer[-1]]])
    return answer


def answers_of(folder: Path, model: torch.nn.Module, prompts: int, kept: Path) -> dict[str, list[list[list[int]]]]:
    """Return [prompt, answer] pairs by task, kept on disk for the next drafter of the same target."""
    if kept.exists():
        stored: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        if stored["prompts"] == prompts:
            return stored["answers"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = _compile_jinja_template(template_text())
    answers: dict[str, list[list[list[int]]]] = {}
    for task in ALL_TASKS:
        answers[task] = []
        for sample in held_out_samples(task, prompts):
            text = template.render(messages=asked_messages(sample), tools=sample.tools, add_generation_prompt=True)
            prompt = tokenizer.encode(text).ids
            answers[task].append([prompt, greedy_answer(model, prompt)])
    kept.write_text(json.dumps({"prompts": prompts, "answers": answers}), encoding="utf-8")
    return answers


def drafts_for(drafter: torch.nn.Module, target: Target, pair: list[list[int]], count: int) -> Tensor:
    """Return the drafts after every token of one answer except the last."""
    prompt, answer = pair
    tokens = torch.tensor([[*prompt, *answer]])
    _, features = target.read(tokens)
    places = torch.arange(len(prompt), len(prompt) + len(answer) - 1)
    parts = [propose(drafter, target, features, tokens, part[None], count)[0] for part in places.split(AT_ONCE)]
    return torch.cat(parts)


def measure(
    name: str, drafter: torch.nn.Module, models: Path, prompts: int, count: int, kept: Path
) -> dict[str, Tally]:
    """Return the tally of every task."""
    folder = models / TARGETS[name]
    target = frozen_target(load_published(folder), "final" if name == NAMES[2] else "taps")
    drafter.eval()
    tallies = {}
    for task, pairs in answers_of(folder, target.model, prompts, kept).items():
        tallies[task] = Tally()
        for pair in pairs:
            if len(pair[1]) > 1:
                tallies[task].add(drafts_for(drafter, target, pair, count), pair[1])
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    """Return the results as a markdown table; the mean counts every task the same."""
    lines = [
        "| task | tokens | tokens a cycle | accepted of drafted | first right |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = []
    for task, tally in tallies.items():
        row = (
            tally.tokens / tally.cycles,
            (tally.tokens - tally.cycles) / tally.drafted,
            tally.first_right / tally.cycles,
        )
        rows.append(row)
        lines.append(f"| {task} | {tally.tokens} | {row[0]:.2f} | {100 * row[1]:.0f} % | {100 * row[2]:.0f} % |")
    mean = np.mean(rows, axis=0)
    total = sum(tally.tokens for tally in tallies.values())
    lines.append(f"| **mean** | {total} | {mean[0]:.2f} | {100 * mean[1]:.0f} % | {100 * mean[2]:.0f} % |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", choices=NAMES, required=True)
    parser.add_argument("--models", type=Path, required=True, help="the folder of model folders")
    parser.add_argument("--out", type=Path, required=True, help="the folder of training runs")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--count", type=int, default=BLOCK - 1, help="tokens drafted in a cycle")
    parser.add_argument("--write", action="store_true", help="put the table into the models' README.md")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    saved = torch.load(arguments.out / arguments.drafter / "checkpoint.pt", weights_only=True)
    drafter = build_drafter(arguments.drafter, 0)
    drafter.load_state_dict(saved["model"])
    kept = arguments.out / f"answers-{TARGETS[arguments.drafter]}.json"
    print(f"{arguments.drafter} step {saved['step']}, {arguments.count} drafted")
    rows = table(measure(arguments.drafter, drafter, arguments.models, arguments.prompts, arguments.count, kept))
    print(rows)
    if arguments.write:
        heading = (
            f"{saved['step']} steps; {arguments.count} tokens drafted each cycle; {arguments.prompts} prompts a task."
        )
        replace_drafter(arguments.models / "README.md", arguments.drafter, [heading, "", *rows.splitlines()])


if __name__ == "__main__":
    main()
