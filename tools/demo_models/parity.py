"""Save the PyTorch reference's logits, or compare mlx-lm's with them (two environments, two runs)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

PROMPTS = (
    "<|im_start|>user\ncount from 3 to 20<|im_end|>\n<|im_start|>assistant\n3, 4, 5, 6",
    "<|im_start|>user\nmake JSON from name Ada, age 36<|im_end|>\n<|im_start|>assistant\n",
    "def add(a, b):\n    return a + b\n",
)


def reference(folder: Path, checkpoint: Path, out: Path) -> None:
    """Run the checkpoint, rounded to float16 as it is published, under transformers."""
    import torch  # noqa: PLC0415
    from export import published  # noqa: PLC0415
    from models import build  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415

    model = build(folder.name, 0)
    state = torch.load(checkpoint, weights_only=True)["model"]
    model.load_state_dict({key: published(folder.name, key, value) for key, value in state.items()})
    model.eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    arrays = {}
    with torch.no_grad():
        for index, prompt in enumerate(PROMPTS):
            ids = tokenizer.encode(prompt).ids
            arrays[f"ids{index}"] = np.array(ids)
            arrays[f"logits{index}"] = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    np.savez(out, **arrays)


def compare(folder: Path, out: Path) -> None:
    """Print the largest difference between mlx-lm's float32 logits and the reference's."""
    import mlx.core as mx  # noqa: PLC0415
    from mlx_lm import load  # noqa: PLC0415

    model, _ = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    with np.load(out) as stored:
        for index in range(len(PROMPTS)):
            mine = np.array(model(mx.array(stored[f"ids{index}"])[None])[0])
            wanted = stored[f"logits{index}"]
            same = bool((mine.argmax(-1) == wanted.argmax(-1)).all())
            print(json.dumps({"largest": float(abs(mine - wanted).max()), "same_choices": same}))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="write the reference from this; without it, compare")
    parser.add_argument("--logits", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.checkpoint:
        reference(arguments.folder, arguments.checkpoint, arguments.logits)
    else:
        compare(arguments.folder, arguments.logits)


if __name__ == "__main__":
    main()
