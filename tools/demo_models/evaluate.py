"""Measure the exported models under mlx-lm on held-out prompts and write the table of results."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models_table import write_table
from samples import Message, Sample
from tasks import TASKS, held_out_samples

with contextlib.suppress(OSError):  # without it, MLX's matrix products on Linux are several times slower
    ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step

ALL_TASKS = (*TASKS, "follow-ups", "tool calls")
LONGEST_ANSWER = 420
DRAFTED = 8


@dataclass
class Outcome:
    """Counts for one model over one task's prompts."""

    right: int = 0
    asked: int = 0
    agreed: int = 0
    tokens: int = 0
    cycles: int = 0
    drafted: int = 0

    def add_pair(self, agreement: list[bool]) -> None:
        """Count the drafting cycles that a greedy pair needs for one answer."""
        self.tokens += len(agreement)
        self.agreed += sum(agreement)
        position = 0
        while position < len(agreement):
            window = agreement[position : position + DRAFTED]
            accepted = next((i for i, same in enumerate(window) if not same), len(window))
            self.cycles += 1
            self.drafted += len(window)
            position += accepted + 1


def load_model(folder: Path) -> tuple[Any, Any]:
    """Load a folder with float32 weights, which the CPU computes fastest."""
    model, tokenizer = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


def asked_messages(sample: Sample) -> tuple[list[Message], Message]:
    """Split a conversation into the messages that the model is given and the message it should write."""
    if sample.task == "tool calls":
        index = next(i for i, message in enumerate(sample.messages) if message["role"] == "assistant")
    else:
        index = len(sample.messages) - 1
    return sample.messages[:index], sample.messages[index]


def answer_ids(model: Any, tokenizer: Any, prompt: list[int]) -> list[int]:
    """Return the greedy answer, its end of turn included."""
    tokens: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=LONGEST_ANSWER):
        tokens.append(int(token))
        if tokens[-1] in tokenizer.eos_token_ids:
            break
    return tokens


def is_right(text: str, wanted: Message) -> bool:
    """Compare an answer, without its think block, with the one right answer."""
    text = text.rpartition("</think>")[2].strip()
    if wanted.get("tool_calls"):
        body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        function = wanted["tool_calls"][0]["function"]
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(body) == {"name": function["name"], "arguments": function["arguments"]}
        return False
    return text == wanted["content"]


def agreement(draft: Any, prompt: list[int], answer: list[int]) -> list[bool]:
    """Return for each answer token whether the draft model would have proposed it."""
    ids = mx.array([*prompt, *answer])[None]
    choices = draft(ids[:, :-1])[0].argmax(-1).tolist()[len(prompt) - 1 :]
    return [choice == token for choice, token in zip(choices, answer, strict=True)]


def measure(folder: Path, draft: Any, prompts: int, *, show: bool) -> dict[str, Outcome]:
    """Ask one model every task's held-out prompts."""
    model, tokenizer = load_model(folder)
    outcomes: dict[str, Outcome] = {}
    for task in ALL_TASKS:
        outcome = outcomes[task] = Outcome()
        for sample in held_out_samples(task, prompts):
            messages, wanted = asked_messages(sample)
            prompt = tokenizer.apply_chat_template(messages, tools=sample.tools, add_generation_prompt=True)
            answer = answer_ids(model, tokenizer, prompt)
            text = tokenizer.decode([token for token in answer if token not in tokenizer.eos_token_ids])
            right = is_right(text, wanted)
            outcome.asked += 1
            outcome.right += right
            if draft is not None:
                outcome.add_pair(agreement(draft, prompt, answer))
            if show and not right:
                print(json.dumps({"task": task, "asked": messages[-1]["content"], "said": text, "wanted": wanted}))
        print(folder.name, task, f"{outcome.right}/{outcome.asked}", flush=True)
    return outcomes


def main() -> None:
    """Measure the models named on the command line and write the table into their parent folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the folder of model folders")
    parser.add_argument("--models", nargs="+", default=["demo-assistant", "demo-draft", "demo-hybrid"])
    parser.add_argument("--prompts", type=int, default=25)
    parser.add_argument("--show", action="store_true", help="print wrong answers")
    parser.add_argument("--results", type=Path, help="keep results here and add those of earlier runs")
    parser.add_argument("--no-table", action="store_true")
    arguments = parser.parse_args()
    results = stored_results(arguments.results)
    draft = load_model(arguments.folder / "demo-draft")[0]
    for name in arguments.models:
        drafter = None if name == "demo-draft" else draft
        results[name] = measure(arguments.folder / name, drafter, arguments.prompts, show=arguments.show)
        if arguments.results:
            content = {model: {task: asdict(o) for task, o in outcomes.items()} for model, outcomes in results.items()}
            arguments.results.write_text(json.dumps(content), encoding="utf-8")
    if not arguments.no_table:
        write_table(arguments.folder, results, DRAFTED)


def stored_results(path: Path | None) -> dict[str, dict[str, Outcome]]:
    """Read the results that earlier runs kept."""
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {model: {task: Outcome(**values) for task, values in tasks.items()} for model, tasks in content.items()}


if __name__ == "__main__":
    main()
