"""Train one demo model on the generated corpus; resumable, seeded, CPU only."""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from convert import borrow
from corpus import ANSWER_WEIGHT, load_rows
from load import load_published
from models import NAMES, build
from muon import Muon
from pause import wait_while_paused
from torch import Tensor
from torch.nn import functional

SAVE_EVERY = 100


@dataclass(frozen=True)
class Phase:
    """Some steps on rows of one length."""

    steps: int
    rows: int
    length: int
    late: bool = True


def phases(steps: int, batch_tokens: int) -> list[Phase]:
    """Plan most steps on short rows, later with more of the short tasks, then longer rows to train far positions."""
    early, long, longest = round(steps * 0.70), round(steps * 0.10), round(steps * 0.03)
    return [
        Phase(early, batch_tokens // 256, 256, late=False),
        Phase(steps - early - long - longest, batch_tokens // 256, 256),
        Phase(long, batch_tokens // 512, 512),
        Phase(longest, batch_tokens // 1024, 1024),
    ]


class Batches:
    """Batches of the whole schedule by step number, the same in every run with one seed."""

    def __init__(self, tokenizer: Path, cache: Path, plan: list[Phase], seed: int) -> None:
        """Build or read every phase's rows."""
        self.plan = plan
        self.data = [
            load_rows(tokenizer, cache, seed + index, phase.steps * phase.rows, phase.length, late=phase.late)
            for index, phase in enumerate(plan)
        ]

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the step's tokens and weights."""
        for phase, (tokens, weights) in zip(self.plan, self.data, strict=True):
            if step < phase.steps:
                rows = slice(step * phase.rows, (step + 1) * phase.rows)
                picked = torch.from_numpy(tokens[rows].astype(np.int64))
                return picked, torch.from_numpy(weights[rows].astype(np.float32)) / ANSWER_WEIGHT
            step -= phase.steps
        raise IndexError(step)


def optimizers(model: torch.nn.Module, rate: float, kind: str) -> list[torch.optim.Optimizer]:
    """Return AdamW for everything, or Muon for the layers' matrices and AdamW for the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        chosen = kind == "muon" and parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if chosen else others).append(parameter)
    groups: list[torch.optim.Optimizer] = []
    if matrices:
        groups.append(Muon(matrices, lr=rate))
    decayed = [p for p in others if p.ndim == 2]
    plain = [p for p in others if p.ndim != 2]
    adam_groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    groups.append(torch.optim.AdamW(adam_groups, lr=rate, betas=(0.9, 0.95)))
    return groups


def scale_at(step: int, steps: int) -> float:
    """Return the share of the full learning rate at a step: short warm-up, then cosine to a twentieth."""
    warm_up = min(100, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def set_rate(steppers: list[torch.optim.Optimizer], rate: float) -> None:
    """Use one learning rate for everything."""
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = rate


def loss_of(
    model: torch.nn.Module, teacher: torch.nn.Module | None, tokens: Tensor, weights: Tensor, match: float = 0.0
) -> tuple[Tensor, float]:
    """Return the loss to minimise, and the weighted cross entropy alone.

    With `match`, every layer's states follow the teacher's too: the hybrid shares its residual stream.
    """
    output = model(input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=match > 0)
    logits = output.logits.float()
    flat, targets, weight = logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
    losses = functional.cross_entropy(flat, targets, reduction="none")
    entropy = (losses * weight).sum() / weight.sum()
    if teacher is None:
        return entropy, entropy.item()
    with torch.no_grad():
        wanted = teacher(input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=match > 0)
        goal = wanted.logits.float().reshape(-1, logits.shape[-1]).log_softmax(-1)
    divergence = (goal.exp() * (goal - flat.log_softmax(-1))).sum(-1)
    distance = (divergence * weight).sum() / weight.sum()
    loss = 0.9 * distance + 0.1 * entropy
    if match > 0:
        pairs = zip(output.hidden_states[1:], wanted.hidden_states[1:], strict=True)
        errors = [((own - other).pow(2).sum(-1) / other.pow(2).sum(-1)).mean() for own, other in pairs]
        loss = loss + match * torch.stack(errors).mean()
    return loss, entropy.item()


def train(arguments: argparse.Namespace) -> None:
    """Run the schedule from the last checkpoint to its end."""
    folder: Path = arguments.out / arguments.model
    folder.mkdir(parents=True, exist_ok=True)
    (arguments.out / "pid").write_text(f"{os.getpid()}\n")
    wait_while_paused(arguments.pause)
    plan = phases(arguments.steps, arguments.batch_tokens)
    batches = Batches(arguments.tokenizer, arguments.out, plan, arguments.seed)
    model = build(arguments.model, arguments.seed)
    steppers = optimizers(model, arguments.rate, arguments.optimizer)
    first = restore(folder / "checkpoint.pt", model, steppers)
    teacher = None
    if arguments.start and first == 0:
        model.load_state_dict(load_published(arguments.start).state_dict())
    if arguments.teacher:
        teacher = read_teacher(arguments.teacher)
        if first == 0 and not arguments.start:
            print(f"{borrow(model, teacher)} parameters borrowed", flush=True)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, from step {first}", flush=True)
    precision = torch.autocast("cpu", torch.bfloat16, enabled=arguments.bfloat16)
    started, smooth = time.monotonic(), 0.0
    for step in range(first, arguments.steps):
        started += wait_while_paused(arguments.pause)
        set_rate(steppers, arguments.rate * scale_at(step, arguments.steps))
        followed = teacher if step >= arguments.teacher_after else None
        with precision:
            loss, entropy = loss_of(model, followed, *batches[step], arguments.match)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with precision:
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad(set_to_none=True)
        smooth = entropy if step == first else 0.95 * smooth + 0.05 * entropy
        if step % 20 == 19:
            pace = (time.monotonic() - started) / (step - first + 1)
            print(f"{step + 1} loss {loss.item():.4f} entropy {smooth:.4f} {pace:.2f} s/step", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == arguments.steps:
            store(folder / "checkpoint.pt", model, steppers, step + 1)


def read_teacher(source: Path) -> torch.nn.Module:
    """Return the assistant of a checkpoint or of a published folder."""
    if source.is_dir():
        return load_published(source).eval()
    teacher = build("demo-assistant", 0)
    teacher.load_state_dict(torch.load(source, weights_only=True)["model"])
    return teacher.eval()


def store(path: Path, model: torch.nn.Module, steppers: list[torch.optim.Optimizer], step: int) -> None:
    """Write a checkpoint, renamed into place when it is whole."""
    temporary = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "steppers": [s.state_dict() for s in steppers], "step": step}, temporary)
    temporary.replace(path)


def restore(path: Path, model: torch.nn.Module, steppers: list[torch.optim.Optimizer]) -> int:
    """Load the last checkpoint, if there is one, and return the step to continue from."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for stepper, state in zip(steppers, saved["steppers"], strict=True):
        stepper.load_state_dict(state)
    return int(saved["step"])


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NAMES, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--teacher", type=Path, help="a checkpoint or folder of demo-assistant to follow")
    parser.add_argument("--teacher-after", type=int, default=0, help="learn from the data alone before this step")
    parser.add_argument("--match", type=float, default=0.0, help="weight of the distance to the teacher's states")
    parser.add_argument("--start", type=Path, help="go on from this published folder's weights, with a new optimiser")
    parser.add_argument("--bfloat16", action="store_true", help="several times faster where the CPU has it")
    parser.add_argument("--pause", type=Path, help="wait while this file exists")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments)


if __name__ == "__main__":
    main()
