"""Train a drafter on its target's greedy choices and hidden states; resumable, seeded, CPU only."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from corpus import ANSWER_WEIGHT, load_rows
from drafters import BLOCK, NAMES, TARGETS, DFlash, Eagle3, build_drafter
from drafting import Chain, Target, dflash_states, documents_of, frozen_target
from load import load_published
from pause import wait_while_paused
from torch import Tensor, nn
from torch.nn import functional
from train import optimizers, restore, scale_at, set_rate, store

SAVE_EVERY = 100
SHORT_ROWS, SHORT, LONG_ROWS, LONG = 12, 224, 6, 448
DECAY = {NAMES[0]: math.exp(-1 / 4), NAMES[1]: 0.85, NAMES[2]: 0.8}
CHAIN_STEPS = {NAMES[1]: 6, NAMES[2]: 4}
ANCHORS = {NAMES[0]: 14, NAMES[1]: 32, NAMES[2]: 32}


class Rows:
    """Batches of packed conversations: every third one has longer rows."""

    def __init__(self, tokenizer: Path, cache: Path, seed: int, batches: int) -> None:
        """Build or read the rows; after the last one they start over."""
        self.kinds = [
            (*load_rows(tokenizer, cache, seed, batches * SHORT_ROWS, SHORT, late=True), SHORT_ROWS),
            (*load_rows(tokenizer, cache, seed + 1, batches // 2 * LONG_ROWS, LONG, late=True), LONG_ROWS),
        ]

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a batch, and a mask of the answers."""
        tokens, weights, rows = self.kinds[step % 3 == 2]
        number = step // 3 if step % 3 == 2 else step - step // 3
        first = number % (len(tokens) // rows) * rows
        picked = torch.from_numpy(tokens[first : first + rows].astype(np.int64))
        return picked, torch.from_numpy(weights[first : first + rows] == ANSWER_WEIGHT)


def sample_anchors(answers: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw positions inside answers that another answer token follows."""
    chance = torch.full(answers.shape, 1e-9)
    chance[:, 1:-1] += (answers[:, 1:-1] & answers[:, 2:]).float()
    chance[:, 0] = chance[:, -1] = 0.0
    return torch.multinomial(chance, count, generator=generator).sort(dim=1).values


def labels_of(tokens: Tensor, answers: Tensor, picks: Tensor, anchors: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return the target's picks for the slots after each anchor, and which of them count.

    A slot counts inside its anchor's answer while the target would have chosen the text before it.
    """
    places = anchors[:, :, None] + torch.arange(slots + 1)
    room = places < tokens.shape[1]
    flat = places.clamp(max=tokens.shape[1] - 1).flatten(1)
    text, said, inside, owner = (
        values.gather(1, flat).view(places.shape) for values in (tokens, picks, answers, documents_of(tokens))
    )
    wanted = said[:, :, :-1]
    usable = room[:, :, 1:] & inside[:, :, 1:] & inside[:, :, :1] & (owner[:, :, 1:] == owner[:, :, :1])
    agrees = (text[:, :, 1:] == wanted).long()
    earlier = torch.cat([torch.ones_like(agrees[:, :, :1]), agrees[:, :, :-1]], dim=-1).cumprod(-1).bool()
    return wanted, usable.long().cumprod(-1).bool() & earlier


def all_logits(drafter: nn.Module, target: Target, batch: tuple[Tensor, ...], slots: int) -> Tensor:
    """Return the drafter's logits for every slot, later steps fed with the text: [batch, anchors, slots, ids]."""
    tokens, features, anchors = batch
    if isinstance(drafter, DFlash):
        return functional.linear(dflash_states(drafter, target, features, tokens, anchors), target.embedding.weight)
    chain = Chain(drafter, target, features, tokens, anchors)
    parts = [chain.logits(chain.first())]
    for step in range(1, slots):
        fed = tokens.gather(1, (anchors + step).clamp(max=tokens.shape[1] - 1))
        parts.append(chain.logits(chain.following(fed)))
    return torch.stack(parts, dim=2)


class Lesson:
    """Losses of one drafter under its target."""

    def __init__(self, name: str, drafter: nn.Module, target: Target, seed: int) -> None:
        """Set the number of slots to train and the weight of each."""
        self.name, self.drafter, self.target, self.seed = name, drafter, target, seed
        self.slots = CHAIN_STEPS.get(name, BLOCK - 1)
        self.weights = DECAY[name] ** torch.arange(self.slots)

    def loss(self, step: int, tokens: Tensor, answers: Tensor) -> tuple[Tensor, list[float]]:
        """Return the loss and the share of right choices slot by slot."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        anchors = sample_anchors(answers, ANCHORS[self.name], generator)
        picks, features = self.target.read(tokens)
        labels, counts = labels_of(tokens, answers, picks, anchors, self.slots)
        if isinstance(self.drafter, Eagle3):
            counts = counts & self.drafter.t2d[labels]
            labels = (self.drafter.t2d.cumsum(0) - 1)[labels].clamp(min=0)
        logits = all_logits(self.drafter, self.target, (tokens, features, anchors), self.slots).float()
        losses = functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
        weight = counts * self.weights
        right = ((logits.argmax(-1) == labels) & counts).sum((0, 1)) / counts.sum((0, 1)).clamp(min=1)
        return (losses * weight).sum() / weight.sum().clamp(min=1.0), right.tolist()


def begin(drafter: nn.Module, target: Target, rows: Rows) -> None:
    """Start from the target where shapes match: norms, MTP's layer, EAGLE-3's draft vocabulary and head rows."""
    model = target.model.model
    if isinstance(drafter, DFlash):
        drafter.norm.load_state_dict(model.norm.state_dict())
        return
    if not isinstance(drafter, Eagle3):
        drafter.mtp.layers[0].load_state_dict(model.layers[3].state_dict())
        with torch.no_grad():  # minus its mean, by which loaders recognise centred norms; choices stay much the same
            drafter.mtp.norm.weight.copy_(model.norm.weight - model.norm.weight.mean())
        return
    counts = torch.zeros(drafter.t2d.shape[0])
    for step in range(60):
        tokens, answers = rows[step]
        counts += torch.bincount(target.read(tokens)[0][answers], minlength=len(counts))
    drafter.choose_vocabulary(counts)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.embedding.weight[drafter.t2d])
    print(f"draft vocabulary covers {counts[drafter.t2d].sum() / counts.sum():.5f}", flush=True)


def train(arguments: argparse.Namespace) -> None:
    """Run the schedule from the last checkpoint to its end."""
    name = arguments.drafter
    folder: Path = arguments.out / name
    folder.mkdir(parents=True, exist_ok=True)
    source = arguments.models / TARGETS[name]
    wait_while_paused(arguments.pause)
    target = frozen_target(load_published(source), "final" if name == NAMES[2] else "taps")
    rows = Rows(source, arguments.out, 101, arguments.batches)
    drafter = build_drafter(name, arguments.seed)
    steppers = optimizers(drafter, arguments.rate, arguments.optimizer)
    first = restore(folder / "checkpoint.pt", drafter, steppers)
    if first == 0:
        begin(drafter, target, rows)
    lesson = Lesson(name, drafter, target, arguments.seed)
    print(f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters, from step {first}", flush=True)
    started, paused, shares = time.monotonic(), 0.0, torch.zeros(lesson.slots)
    for step in range(first, arguments.steps):
        paused += wait_while_paused(arguments.pause)
        set_rate(steppers, arguments.rate * scale_at(step, arguments.steps))
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = lesson.loss(step, *rows[step])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        with torch.autocast("cpu", torch.bfloat16):
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad(set_to_none=True)
        shares = torch.tensor(right) if step == first else 0.95 * shares + 0.05 * torch.tensor(right)
        if step % 20 == 19:
            pace = (time.monotonic() - started - paused) / (step - first + 1)
            rates = " ".join(f"{share:.2f}" for share in shares.tolist())
            print(f"{step + 1} loss {loss.item():.4f} right {rates} {pace:.2f} s/step", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == arguments.steps:
            store(folder / "checkpoint.pt", drafter, steppers, step + 1)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", choices=NAMES, required=True)
    parser.add_argument("--models", type=Path, required=True, help="the folder of model folders")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batches", type=int, default=600, help="different batches of rows")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause", type=Path, help="wait while this file exists")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments)


if __name__ == "__main__":
    main()
