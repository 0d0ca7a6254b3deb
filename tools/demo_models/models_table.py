"""Write the README of the committed models: what each can do and how well the pair drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafters_table import drafters_part

INTRODUCTION = """# Embedded models

Small models of our own, so that the first run needs no network. `tools/demo_models/` holds the recipe
that made them; this file is written by its `evaluate.py`.

- `demo-assistant`: Qwen3 architecture, the model a person talks to.
- `demo-draft`: same tokenizer, distilled from the assistant, proposes tokens for it.
- `demo-hybrid`: Qwen3-Next architecture (every fourth layer full attention, the others gated-delta, dense MLPs), MLX
  layout, distilled from the assistant in 800 short steps: right less often than its teacher.
- `demo-assistant-dflash`, `demo-assistant-eagle3`, `demo-hybrid-mtp`: drafters that read their model's hidden states,
  in the layout of each method's published checkpoints. They bring no tokenizer and borrow the model's embedding.

They know a few tasks and nothing else: ask for counting, sums, spelling, sorting, repeating, tables,
JSON, small Python functions or tool calls. `<|mask|>` is in the vocabulary and in no training text.
"""


def _sizes(folder: Path, names: list[str]) -> list[str]:
    lines = ["| model | architecture | layers | hidden | size (MB) |", "| --- | --- | --- | --- | --- |"]
    for name in names:
        config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
        size = sum(path.stat().st_size for path in (folder / name).iterdir()) / 1e6
        lines.append(
            f"| {name} | {config['model_type']} | {config['num_hidden_layers']} | {config['hidden_size']} "
            f"| {size:.1f} |"
        )
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _scores(results: dict[str, dict[str, Any]]) -> list[str]:
    names = list(results)
    lines = [f"| task | prompts | {' | '.join(names)} |", "| --- | --- |" + " --- |" * len(names)]
    for task in results[names[0]]:
        row = [results[name][task] for name in names]
        cells = " | ".join(_percent(outcome.right, outcome.asked) for outcome in row)
        lines.append(f"| {task} | {row[0].asked} | {cells} |")
    sums = [_percent(sum(o.right for o in r.values()), sum(o.asked for o in r.values())) for r in results.values()]
    lines.append(f"| **all** | {sum(o.asked for o in results[names[0]].values())} | {' | '.join(sums)} |")
    return lines


def _pairs(outcomes: dict[str, Any]) -> list[str]:
    lines = [
        "| task | tokens | draft's choice is the model's | accepted of drafted | tokens a cycle |",
        "| --- | --- | --- | --- | --- |",
    ]
    for task, outcome in outcomes.items():
        if outcome.cycles:
            accepted = outcome.tokens - outcome.cycles
            lines.append(
                f"| {task} | {outcome.tokens} | {_percent(outcome.agreed, outcome.tokens)} "
                f"| {_percent(accepted, outcome.drafted)} | {outcome.tokens / outcome.cycles:.2f} |"
            )
    return lines


def write_table(folder: Path, results: dict[str, dict[str, Any]], drafted: int) -> None:
    """Write README.md beside the model folders."""
    lines = [
        INTRODUCTION,
        *_sizes(folder, list(results)),
        "",
        "## What they can do",
        "",
        "Share of held-out prompts answered exactly right (split by a hash of a conversation's requests; the same",
        "request may have been one turn of a longer conversation in training),",
        'greedily under mlx-lm, float32 on CPU. "(think)": the model reasons in a think block first.',
        "",
        *_scores(results),
    ]
    for name, outcomes in results.items():
        if any(outcome.cycles for outcome in outcomes.values()):
            lines += [
                "",
                f"## `demo-draft` drafting {drafted} tokens for `{name}`",
                "",
                "On the same prompts, greedy. A cycle is one pass of the larger model.",
                "",
                *_pairs(outcomes),
            ]
    kept = drafters_part(folder / "README.md")
    text = "\n".join([*lines, "", *kept] if kept else lines)
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")
