"""Published-format drafters for one tiny main model, sound or broken in one chosen way."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.models.catalog import CatalogModel, FolderCatalog
from tests.models.folders import safetensors, write_model

MAIN = {
    "vocab_size": 16,
    "hidden_size": 4,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 6,
}
LAYER = {
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "vocab_size": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}


def layer_tensors(
    name: str, *, reads: int = 4, queries: int = 4, norms: bool = True
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return a decoder layer of width 4: two heads of size 2, one for keys and values, an MLP of 6."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, reads),
        "self_attn.k_proj.weight": (2, reads),
        "self_attn.v_proj.weight": (2, reads),
        "self_attn.o_proj.weight": (4, 4),
        "mlp.gate_proj.weight": (6, 4),
        "mlp.up_proj.weight": (6, 4),
        "mlp.down_proj.weight": (4, 6),
        "input_layernorm.weight": (4,),
        "post_attention_layernorm.weight": (4,),
        **({"self_attn.q_norm.weight": (2,), "self_attn.k_norm.weight": (2,)} if norms else {}),
    }
    return {f"{name}.{leaf}": ("F16", shape) for leaf, shape in shapes.items()}


DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **LAYER,
    "num_hidden_layers": 2,
    "num_target_layers": 8,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3, 5]},
}
DFLASH_TENSORS = {
    "fc.weight": ("F16", (4, 12)),
    "hidden_norm.weight": ("F16", (4,)),
    "norm.weight": ("F16", (4,)),
    **layer_tensors("layers.0"),
    **layer_tensors("layers.1"),
}
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    **LAYER,
    "num_hidden_layers": 1,
    "draft_vocab_size": 3,
    "target_hidden_size": 4,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
}
EAGLE3_TENSORS = {
    "fc.weight": ("F16", (4, 12)),
    "norm.weight": ("F16", (4,)),
    "midlayer.hidden_norm.weight": ("F16", (4,)),
    **layer_tensors("midlayer", reads=8, norms=False),
    "lm_head.weight": ("F16", (3, 4)),
    "t2d": ("BOOL", (16,)),
    "d2t": ("I64", (3,)),
}
MTP = {"architectures": ["Qwen3NextMTP"], "model_type": "qwen3_next_mtp", **MAIN, "num_nextn_predict_layers": 1}
MTP_TENSORS = {
    "mtp.fc.weight": ("F16", (4, 8)),
    **{f"mtp.{name}.weight": ("F16", (4,)) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")},
    **layer_tensors("mtp.layers.0", queries=8),
}

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def write_drafter(folder: Path, config: Mapping[str, Any], tensors: Tensors, *, d2t: Sequence[int] = ()) -> Path:
    """Write a drafter's folder without tokenizer and embedding; `d2t`: values of the last tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    content = bytearray(safetensors(tensors))
    if d2t:
        content[-8 * len(d2t) :] = struct.pack(f"<{len(d2t)}q", *d2t)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def write_main(folder: Path, *, rows: int = 64, **options: Any) -> Path:
    """Write the main model: ordinary tokens 0 to 7, an unused mask 8, an end token 10, and its template's 11."""
    added = {"<|mask|>": 8, "<|end|>": 10, "<|turn|>": 11}
    write_model(folder, rows=rows, added=added, **{**MAIN, "eos_token_id": 10, **options})
    (folder / "chat_template.jinja").write_text("<|turn|>{{ messages[0].content }}")
    return folder


def catalog(root: Path) -> dict[str, CatalogModel]:
    """Return the models below `root`, by id."""
    return {model.id: model for model in FolderCatalog([root]).models()}
