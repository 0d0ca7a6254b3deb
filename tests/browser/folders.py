"""Model folders for the pages: one that does not fit into any memory, and ones whose names try to be markup."""

import json
import os
import shutil
from pathlib import Path

import app
from tests.models.folders import packed

EMBEDDED = Path(app.__file__).parent / "demo_models"
HUGE = "giant-900b"
HUGE_BYTES = 900 * 10**9
"""Of a sparse file: it takes a few kilobytes of the disk."""


def write_huge_model(folder: Path) -> Path:
    """A model with real configuration and tokenizer whose weights are larger than any memory here."""
    made = folder / HUGE
    made.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "demo-assistant" / name, made / name)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 1  # two tensors make no more
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
