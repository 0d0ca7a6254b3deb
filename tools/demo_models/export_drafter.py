"""Write a trained drafter as a published checkpoint, and reference outputs that check another implementation."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from drafters import BLOCK, MASK_TOKEN, NAMES, TARGETS, DFlash, Eagle3, build_drafter, published_config
from drafting import Chain, Target, dflash_states, frozen_target
from export import replace_file, write_json
from load import load_published
from parity import PROMPTS
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

CHAIN = 4


def published_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Round weights to float16; index tables stay as they are."""
    return {
        key: (value.to(torch.float16) if value.is_floating_point() else value).contiguous()
        for key, value in state.items()
    }


def export(name: str, state: dict[str, Tensor], folder: Path) -> None:
    """Write weights and configuration; the tokenizer, the embedding and most heads are the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = published_weights(state)
    replace_file(folder / "model.safetensors", lambda path: save_file(weights, path, metadata={"format": "pt"}))
    write_json(folder / "config.json", published_config(name))


@torch.no_grad()
def outputs(drafter: torch.nn.Module, target: Target, tokens: Tensor, anchor: int) -> dict[str, Tensor]:
    """Return one anchor's inputs and logits; a chain is fed its own choices."""
    picks, features = target.read(tokens)
    anchors = torch.tensor([[anchor]])
    arrays = {"tokens": tokens[0], "anchor": torch.tensor(anchor), "features": features[0], "target_picks": picks[0]}
    if isinstance(drafter, DFlash):
        states = dflash_states(drafter, target, features, tokens, anchors)
        slots = torch.tensor([int(tokens[0, anchor]), *[MASK_TOKEN] * (BLOCK - 1)])
        return arrays | {"block": slots, "logits": functional.linear(states[0, 0], target.embedding.weight)}
    chain, logits, recycled, fed = Chain(drafter, target, features, tokens, anchors), [], [], []
    headed = chain.first()
    for step in range(CHAIN):
        logits.append(chain.logits(headed)[0, 0])
        recycled.append(chain.state[0, 0])
        chosen = logits[-1].argmax()
        fed.append(chosen + drafter.d2t[chosen] if isinstance(drafter, Eagle3) else chosen)
        if step + 1 < CHAIN:
            headed = chain.following(fed[-1][None, None])
    return arrays | {"logits": torch.stack(logits), "states": torch.stack(recycled), "drafted": torch.stack(fed)}


def write_parity(name: str, models: Path, path: Path) -> None:
    """Save the published weights' outputs for two sequences; features before the anchor are the drafter's context."""
    source = models / TARGETS[name]
    target = frozen_target(load_published(source), "final" if name == NAMES[2] else "taps")
    drafter = build_drafter(name, 0)
    state = load_file(models / name / "model.safetensors")
    drafter.load_state_dict({key: v.float() if v.is_floating_point() else v for key, v in state.items()})
    drafter.eval()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    arrays = {}
    for index, prompt in enumerate(PROMPTS[:2]):
        tokens = torch.tensor([tokenizer.encode(prompt).ids])
        for key, value in outputs(drafter, target, tokens, tokens.shape[1] - 1).items():
            arrays[f"{key}{index}"] = value.numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def main() -> None:
    """Export one drafter's checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", choices=NAMES, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder of model folders")
    parser.add_argument("--parity", type=Path, help="write the reference outputs there")
    arguments = parser.parse_args()
    saved = torch.load(arguments.checkpoint, weights_only=True)
    print(f"step {saved['step']}")
    export(arguments.drafter, saved["model"], arguments.out / arguments.drafter)
    if arguments.parity:
        write_parity(arguments.drafter, arguments.out, arguments.parity)


if __name__ == "__main__":
    main()
