"""Tiny random drafters that read hidden states, in their published formats, for every tiny target."""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3_next

from app.engine.drafters.dflash import DFlash, DFlashModel
from app.engine.drafters.eagle3 import Eagle3, Eagle3Model
from app.engine.drafters.features import FeatureDrafter
from app.engine.drafters.mtp import Mtp, MtpModel
from app.engine.layers import Target
from app.engine.runner import Runner
from app.models.drafters.formats import DFlashConfig, Eagle3Config, MtpConfig
from tests.tiny import fill_at_random, tiny_config

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}
MASK_TOKEN = 96


def dflash_config(family: str, *, vocabulary_size: int = 97, **changes: Any) -> DFlashConfig:
    """Two layers, the second with a window of 12 tokens; block size 6; taps at the target's first and last layer."""
    target = tiny_config(family, vocabulary_size=vocabulary_size)
    config = {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 12,
        "vocab_size": target["vocab_size"],
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, target["num_hidden_layers"] - 1]},
    }
    return DFlashConfig.read({**config, **changes}, target)


def eagle3_config(family: str, *, vocabulary_size: int = 97, **changes: Any) -> Eagle3Config:
    """One layer; only two taps, as some targets have two layers; a draft vocabulary of 40 of the target's tokens."""
    target = tiny_config(family, vocabulary_size=vocabulary_size)
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": [1, target["num_hidden_layers"]],
    }
    return Eagle3Config.read({**config, **changes}, target)


def filled(module: nn.Module, seed: int) -> Any:
    """Fill the module with random weights drawn from the seed, and return it."""
    fill_at_random(module, seed=seed)
    return module


def tiny_dflash_module(family: str, *, seed: int = 3, **changes: Any) -> DFlashModel:
    module: DFlashModel = filled(DFlashModel(dflash_config(family, **changes)), seed)
    return module


def tiny_eagle3_module(family: str, *, seed: int = 4, **changes: Any) -> Eagle3Model:
    module: Eagle3Model = filled(Eagle3Model(eagle3_config(family, **changes), {"d2t"}), seed)
    module.d2t = mx.arange(40, dtype=mx.int32)  # its token i is the target's token 2 i
    return module


def tiny_mtp_module(*, seed: int = 5, vocabulary_size: int = 97) -> MtpModel:
    """Return the MTP head of a tiny qwen3_next, which fits every target with the same hidden size."""
    config = tiny_config("qwen3_next", vocabulary_size=vocabulary_size)
    arguments = qwen3_next.ModelArgs.from_dict({**config, "mlp_only_layers": []})
    layer = qwen3_next.Qwen3NextDecoderLayer(arguments, arguments.full_attention_interval - 1)
    module: MtpModel = filled(MtpModel(MtpConfig.read({}, config), layer), seed)
    return module


def running(
    kind: type[DFlash | Eagle3 | Mtp], module: nn.Module, model: nn.Module, family: str, *, vocabulary_size: int = 97
) -> FeatureDrafter:
    """Return a drafter that runs its module with the target's embedding and head."""
    config = tiny_config(family, vocabulary_size=vocabulary_size)
    runner = Runner(module, margin_tokens=24, chunk_tokens=16)
    return kind(runner, Target(model, config, vocabulary_size))


def tiny_drafter(method: str, family: str, model: nn.Module, *, vocabulary_size: int = 97) -> FeatureDrafter:
    """The drafter of a method for a tiny target."""
    size: dict[str, int] = {"vocabulary_size": vocabulary_size}
    if method == "dflash":
        return running(DFlash, tiny_dflash_module(family, **size), model, family, **size)
    if method == "eagle3":
        return running(Eagle3, tiny_eagle3_module(family, **size), model, family, **size)
    return running(Mtp, tiny_mtp_module(**size), model, family, **size)
