"""Writes small model folders: a config, a tokenizer and safetensors files, sound or broken in one chosen way."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.published import tokenizer_folder

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}
PUBLISHED_ROWS = {"qwen3": 151_936, "llama3_1": 128_256, "gemma3": 262_208, "gptoss": 201_088, "deepseek_v3": 129_280}
"""Number of embedding rows, by tokenizer, in models that are published with it; some are padded."""
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1, "BOOL": 1, "I64": 8}


def safetensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = WIDTHS[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return packed(header) + bytes(end)


def packed(header: Any) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content


def tokenizer(pieces: list[str], added: Mapping[str, int] | None = None) -> dict[str, Any]:
    return {
        "model": {"type": "BPE", "vocab": {piece: index for index, piece in enumerate(pieces)}, "merges": []},
        "added_tokens": [{"id": index, "content": piece, "special": True} for piece, index in (added or {}).items()],
    }


def write_model(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    rows: int = 8,
    pieces: str = "abcdefgh",
    added: Mapping[str, int] | None = None,
    **extra: Any,
) -> Path:
    """Write a folder that passes inspection; `extra` has further config keys."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**(CONFIG if config is None else config), **extra}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(list(pieces), added)))
    (folder / "model.safetensors").write_bytes(safetensors(tensors_of(rows, {**CONFIG, **(config or {}), **extra})))
    return folder


def tensors_of(rows: int, config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return an embedding of width 4, and an empty tensor for every layer of the config."""
    layers = {f"model.layers.{index}.norm.weight": ("F16", (0,)) for index in range(config["num_hidden_layers"])}
    return {"model.embed_tokens.weight": ("F16", (rows, 4)), **layers}


def write_published(folder: Path, name: str, *, width: int, rows: int | None = None) -> Path:
    """Write a model with the published tokenizer `name`; its weights have full size but take no disk space."""
    source = tokenizer_folder(name)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        shutil.copyfile(file, folder / file.name)
    rows = rows or PUBLISHED_ROWS[name]
    config = {**CONFIG, "vocab_size": rows, "hidden_size": width, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    size = 2 * rows * width
    tensor = {"dtype": "F16", "shape": [rows, width], "data_offsets": [0, size]}
    with (folder / "model.safetensors").open("wb") as weights:
        header = weights.write(packed({"model.embed_tokens.weight": tensor}))
        weights.truncate(header + size)
    return folder


def write_sixteen_published(root: Path) -> None:
    """Write sixteen models with five published tokenizers: three sizes of each, and one more of the first."""
    for name in PUBLISHED_ROWS:
        for size, width in (("large", 4096), ("middle", 1024), ("small", 64)):
            write_published(root / f"{name}-{size}", name, width=width)
    write_published(root / "qwen3-tiny", "qwen3", width=32)
