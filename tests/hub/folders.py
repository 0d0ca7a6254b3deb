"""Writes small model folders: a config, a tokenizer and safetensors files, sound or broken in one chosen way."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}
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
    """A folder that passes the gate; `extra` names further config keys."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**(CONFIG if config is None else config), **extra}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(list(pieces), added)))
    (folder / "model.safetensors").write_bytes(safetensors({"model.embed_tokens.weight": ("F16", (rows, 4))}))
    return folder
