"""Model folders for the pages: the embedded models, and one whose weights fit into no memory."""

import json
import os
import shutil
from pathlib import Path

import app
from tests.models.folders import packed

EMBEDDED = Path(app.__file__).parent / "demo_models"
HUGE = "giant-900b"
HUGE_BYTES = 900 * 10**9
"""Size of the weights in bytes; the file is sparse and takes only a few kilobytes on the disk."""


def write_huge_model(folder: Path) -> Path:
    """Write a model with a real configuration and tokenizer but weights larger than any memory; return its folder."""
    made = folder / HUGE
    made.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "demo-assistant" / name, made / name)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 1  # more layers than tensors are refused, and there are two tensors
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows, width = config["vocab_size"], config["hidden_size"]
    embedded = rows * width * 4
    rest = (HUGE_BYTES - embedded) // 2
    header = {
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, embedded]},
        "model.rest.weight": {"dtype": "F16", "shape": [rest], "data_offsets": [embedded, embedded + 2 * rest]},
    }
    content = packed(header)
    weights = made / "model.safetensors"
    weights.write_bytes(content)
    os.truncate(weights, len(content) + embedded + 2 * rest)
    return made
