"""Builds the module of a feature drafter from its folder, with lazy weights."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from app.core.drafter_config import DFlashConfig, Eagle3Config, MtpConfig
from app.core.errors import ModelUnavailable
from app.core.model_folder import ModelFolder
from app.engine.drafters.dflash import DFlashModel
from app.engine.drafters.eagle3 import Eagle3Model
from app.engine.drafters.mtp import build_mtp

BORROWED = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "t2d", "d2t")
"""What a DFlash checkpoint may carry beside its own layers: the target's copies are used."""


def build_dflash(folder: ModelFolder, target_config: Mapping[str, Any]) -> nn.Module:
    """A DFlash drafter. Raises ModelUnavailable."""
    weights = {name: value for name, value in _own_names(_tensors(folder)).items() if not name.startswith(BORROWED)}
    return _filled(DFlashModel(DFlashConfig.read(folder.config, target_config)), weights)


def build_eagle3(folder: ModelFolder, target_config: Mapping[str, Any]) -> nn.Module:
    """An EAGLE-3 drafter. Raises ModelUnavailable."""
    tensors = _own_names(_tensors(folder))
    weights = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items() if name != "t2d"}
    config = Eagle3Config.read(folder.config, target_config)
    if config.norm_before_fc or config.fc_norm:
        raise ModelUnavailable("it norms the states before it joins them, which cannot run here; choose another one")
    model = Eagle3Model(
        config,
        own_embedding="embed_tokens.weight" in weights,
        own_map="d2t" in weights,
    )
    return _filled(model, weights)


def build_mtp_head(folder: ModelFolder, target_config: Mapping[str, Any]) -> nn.Module:
    """The MTP head, from a folder of its own or from the main model's. Raises ModelUnavailable."""
    return build_mtp(MtpConfig.read(folder.config, target_config), target_config, _tensors(folder))


MODULES: Mapping[str, Callable[[ModelFolder, Mapping[str, Any]], nn.Module]] = {
    "dflash": build_dflash,
    "eagle3": build_eagle3,
    "mtp": build_mtp_head,
}


def _tensors(folder: ModelFolder) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for name in folder.weight_files:
        loaded: Any = mx.load(str(folder.path / name))
        tensors.update(loaded)
    return tensors


def _own_names(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def _filled(model: nn.Module, weights: Mapping[str, mx.array]) -> nn.Module:
    """The model with these weights, every one of them and nothing else."""
    try:
        return model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        detail = " ".join(str(error).split())[:200]
        raise ModelUnavailable(f"its tensors are not those of its config ({detail}); download it again") from error
