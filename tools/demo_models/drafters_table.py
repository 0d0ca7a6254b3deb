"""Keep the section on feature drafters at the end of the committed models' README."""

from __future__ import annotations

from pathlib import Path

HEADING = "## Drafters that read the model's hidden states"
INTRODUCTION = (
    "Measured in PyTorch (`evaluate_drafter.py`), greedy, on held-out prompts. A cycle is one pass of",
    "the main model; the answer's first token comes from the prompt's pass. The mean counts every task the same.",
)


def drafters_part(readme: Path) -> list[str]:
    """Return the section's lines; none if there is no such section."""
    if not readme.exists():
        return []
    lines = readme.read_text(encoding="utf-8").splitlines()
    return lines[lines.index(HEADING) :] if HEADING in lines else []


def replace_drafter(readme: Path, name: str, lines: list[str]) -> None:
    """Remove one drafter's older results, and put the new ones at the end."""
    part = drafters_part(readme)
    before = readme.read_text(encoding="utf-8").splitlines()
    before = before[: len(before) - len(part)]
    part = part or [HEADING, "", *INTRODUCTION]
    title = f"### `{name}`"
    if title in part:
        start = part.index(title)
        later = [i for i in range(start + 1, len(part)) if part[i].startswith("### ")]
        rest = part[later[0] :] if later else []
        part = [*part[:start], *rest]
    while before and not before[-1]:
        before.pop()
    while part and not part[-1]:
        part.pop()
    readme.write_text("\n".join([*before, "", *part, "", title, "", *lines]) + "\n", encoding="utf-8")
