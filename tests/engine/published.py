"""Writers of tiny drafters in their published formats, for the models of `write_tiny_model`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_next

from app.engine.drafters.dflash import DFlashModel
from app.engine.drafters.eagle3 import Eagle3Model
from app.engine.drafters.mtp import MtpModel
from app.models.drafters.formats import DFlashConfig, Eagle3Config, MtpConfig
from tests.tiny import BYTE_VOCABULARY_SIZE, PAD, fill_at_random, tiny_config
from tests.tiny_drafters import SIZES

DRAFT_TOKENS = 40
MTP_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}


def target_config(family: str) -> dict[str, Any]:
    return tiny_config(family, vocabulary_size=BYTE_VOCABULARY_SIZE)


def write_dflash(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """Write a two-layer drafter that taps the target's first and last layer; its mask token is the padding token."""
    target = target_config(family)
    config = {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 6,
        "vocab_size": BYTE_VOCABULARY_SIZE,
        "dflash_config": {"mask_token_id": PAD, "target_layer_ids": [0, target["num_hidden_layers"] - 1]},
    }
    module = DFlashModel(DFlashConfig.read(config, target))
    return _write(folder, {**config, **changes}, _weights(module, seed=3))


def write_eagle3(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """Write a drafter that knows every sixth token of the target, `DRAFT_TOKENS` in all."""
    target = target_config(family)
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": BYTE_VOCABULARY_SIZE,
        "draft_vocab_size": DRAFT_TOKENS,
        "eagle_aux_hidden_state_layer_ids": [1, target["num_hidden_layers"]],
    }
    weights = _weights(Eagle3Model(Eagle3Config.read(config, target), {"d2t"}), seed=4)
    weights["d2t"] = mx.arange(DRAFT_TOKENS, dtype=mx.int64) * 5
    weights["t2d"] = mx.arange(BYTE_VOCABULARY_SIZE) % 6 == 0
    return _write(folder, {**config, **changes}, weights)


def write_mtp(folder: Path, weights: Mapping[str, mx.array] | None = None) -> Path:
    """Write the MTP head of a tiny qwen3_next to a folder of its own."""
    config = {**target_config("qwen3_next"), "architectures": ["Qwen3NextMTP"], "model_type": "qwen3_next_mtp"}
    return _write(folder, config, weights or mtp_weights())


def mtp_weights(**changes: Any) -> dict[str, mx.array]:
    """Return the tensors of an MTP head under Qwen's names, with experts stacked as in mlx-lm."""
    config = {**target_config("qwen3_next"), **changes}
    arguments = qwen3_next.ModelArgs.from_dict({**config, "mlp_only_layers": []})
    layer = qwen3_next.Qwen3NextDecoderLayer(arguments, arguments.full_attention_interval - 1)
    module = MtpModel(MtpConfig.read({}, config), layer)
    return {_mtp_name(name): value for name, value in _weights(module, seed=5).items()}


def published_experts(weights: Mapping[str, mx.array], *, fused: bool) -> dict[str, mx.array]:
    """Return the head with experts as published: gate and up of all in one array if `fused`, else one array each."""
    stem = "mtp.layers.0.mlp"
    kept = dict(weights)
    gate, up, down = (kept.pop(f"{stem}.switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
    if fused:
        joined = mx.concatenate([gate, up], axis=-2)
        return {**kept, f"{stem}.experts.gate_up_proj": joined, f"{stem}.experts.down_proj": down}
    for index in range(len(gate)):
        for part, stacked in {"gate": gate, "up": up, "down": down}.items():
            kept[f"{stem}.experts.{index}.{part}_proj.weight"] = stacked[index]
    return kept


def _mtp_name(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"mtp.layers.0.{rest}" if first == "layer" else f"mtp.{MTP_NAMES[first]}.{rest}"


def _weights(module: nn.Module, *, seed: int) -> dict[str, mx.array]:
    fill_at_random(module, seed=seed)
    return dict(tree_flatten(module.parameters()))


def _write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    return folder
