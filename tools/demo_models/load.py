"""Read a published model folder back into its PyTorch reference."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from export import ZERO_CENTRED
from models import build
from safetensors.torch import load_file
from torch import Tensor

NAME_OF_ARCHITECTURE = {"Qwen3ForCausalLM": ("demo-assistant", "demo-draft"), "Qwen3NextForCausalLM": ("demo-hybrid",)}


def torch_weights(name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `export.mlx_weights`: convolutions channel-first, hybrid norms centred on zero, float32."""
    state = {}
    for key, value in weights.items():
        converted = value.float()
        if name == "demo-hybrid" and key.endswith("conv1d.weight"):
            converted = converted.movedim(1, 2)
        elif name == "demo-hybrid" and key.endswith(ZERO_CENTRED):
            converted = converted - 1.0
        state[key] = converted.contiguous()
    return state


def load_published(folder: Path) -> torch.nn.Module:
    """Return the model of a folder, whose name says which of the recipe's models it is."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if folder.name not in NAME_OF_ARCHITECTURE[config["architectures"][0]]:
        raise ValueError(f"{folder.name} is none of the recipe's models")
    model = build(folder.name, 0)
    state = torch_weights(folder.name, load_file(folder / "model.safetensors"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model
