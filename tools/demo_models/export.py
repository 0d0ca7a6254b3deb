"""Write a training checkpoint as a model folder that mlx-lm and transformers' tokenizer read."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from models import COMMON, NAMES, build, published_config
from safetensors.torch import save_file
from torch import Tensor

ZERO_CENTRED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)

GENERATION = {"eos_token_id": [COMMON["eos_token_id"], COMMON["pad_token_id"]], "pad_token_id": COMMON["pad_token_id"]}


def mlx_weights(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights in MLX layout.

    mlx-lm converts a Hugging Face qwen3_next checkpoint only where it finds experts, so the dense
    hybrid is converted here: convolutions channel-last, and zero-centred norms shifted by one.
    """
    weights = {}
    for key, value in state.items():
        if key == "lm_head.weight" and COMMON["tie_word_embeddings"]:
            continue
        converted = value
        if name == "demo-hybrid" and key.endswith("conv1d.weight"):
            converted = value.movedim(2, 1)
        elif name == "demo-hybrid" and key.endswith(ZERO_CENTRED):
            converted = value + 1.0
        weights[key] = converted.to(torch.float16).contiguous()
    return weights


def published(name: str, key: str, value: Tensor) -> Tensor:
    """Return a weight as the reference sees it after rounding to the published float16."""
    shift = 1.0 if name == "demo-hybrid" and key.endswith(ZERO_CENTRED) else 0.0
    return (value + shift).to(torch.float16).float() - shift


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.chmod(0o644)
    temporary.replace(path)


def write_json(path: Path, content: object) -> None:
    """Write one JSON file, renamed into place when it is whole."""
    text = json.dumps(content, indent=2) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def export(name: str, state: dict[str, Tensor], tokenizer: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = mlx_weights(name, state)
    replace_file(folder / "model.safetensors", lambda path: save_file(weights, path, metadata={"format": "mlx"}))
    write_json(folder / "config.json", published_config(name))
    write_json(folder / "generation_config.json", GENERATION)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        replace_file(folder / file, lambda path, file=file: shutil.copyfile(tokenizer / file, path))


def main() -> None:
    """Export one checkpoint, or fresh weights where none is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NAMES, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.checkpoint:
        saved = torch.load(arguments.checkpoint, weights_only=True)
        print(f"step {saved['step']}")
        state = saved["model"]
    else:
        state = build(arguments.model, 0).state_dict()
    export(arguments.model, state, arguments.tokenizer, arguments.out / arguments.model)


if __name__ == "__main__":
    main()
