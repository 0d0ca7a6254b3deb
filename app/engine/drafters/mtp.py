"""MTP: the prediction layer that Qwen3-Next, Qwen3.5 and the DeepSeek family are trained with, and that mlx-lm strips.

    h = fc([norm_e(embedding of x_{t+1}) ‖ norm_h(H_t)]);  o = norm(layer(h));  logits = head(o);  o is fed back as H

H_t is the target's hidden state after its final norm; DeepSeek zeroes the embedding at position 0 (vLLM's
qwen3_next_mtp.py, qwen3_5_mtp.py, deepseek_mtp.py). The decoder layer is mlx-lm's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models import deepseek_v3, qwen3_5, qwen3_next

from app.engine.drafters.features import FeatureDrafter, FeatureModule, load_tensors
from app.models.config_values import Config, text_part
from app.models.drafters.formats import MtpConfig
from app.models.folder import ModelFolder

NAMES = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "shared_head.norm": "norm"}
"""Name of each module around the layer in `MtpModel`, by its name in checkpoints of Qwen, the last in DeepSeek's."""
TARGET_PREFIXES = ("embed_tokens.", "shared_head.head.")
CENTRED_NORM_MEAN = 0.5
"""Threshold for the mean norm weight: below it, norms are stored minus 1, as in Hugging Face's Qwen checkpoints."""


class MtpModel(FeatureModule):
    """Two norms, a projection, one decoder layer and a final norm."""

    longest = 8

    def __init__(self, config: MtpConfig, layer: nn.Module) -> None:
        super().__init__(config)
        self.fc = nn.Identity()
        self.zero_first_embedding = config.layout == "deepseek"
        self.enorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = layer

    @classmethod
    def load(cls, folder: ModelFolder, target_config: Config) -> Self:
        """Build the head, from a folder of its own or the target's, with lazy weights. Raises ModelUnavailable."""
        config = MtpConfig.read(folder.config, target_config)
        deepseek = config.layout == "deepseek"
        prefix = f"layers.{config.target_layers}." if deepseek else "mtp."
        prefixed = (
            (name.partition(prefix)[2], value) for name, value in load_tensors(folder).items() if prefix in name
        )
        head_tensors = {
            name.removeprefix("layers.0."): value for name, value in prefixed if not name.startswith(TARGET_PREFIXES)
        }
        layer, arguments = _layer(config, text_part(target_config), head_tensors)
        weights = _weights(head_tensors, arguments)
        return cls(config, layer).fill(weights if deepseek else _shifted(weights))

    def extend(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return hidden states [rows, width, hidden] after the final norm, from [embedding ‖ hidden]."""
        embedded, hidden = mx.split(inputs, 2, axis=-1)
        if self.zero_first_embedding:
            first = mx.array(cache[0].offset).reshape(-1, 1) + mx.arange(inputs.shape[1]) == 0
            embedded = mx.where(first[..., None], 0.0, embedded)
        x = self.eh_proj(mx.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))
        mask = cache[0].make_mask(inputs.shape[1], return_array=self.zero_first_embedding)
        return self.norm(self.layer(x, mask=mask, cache=cache[0]))


class Mtp(FeatureDrafter):
    """Drafts with the head that the target was trained with; after the first token, the head is fed its own state."""

    name = "mtp"
    load = MtpModel.load


def _layer(config: MtpConfig, target: Config, tensors: Iterable[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Build a layer like the target's without weights, with full attention and any experts; return its settings too."""
    settings: dict[str, Any] = deepcopy(dict(target))  # mlx-lm renames keys inside it
    if config.layout == "deepseek":
        arguments: Any = deepseek_v3.ModelArgs.from_dict(settings)
        return deepseek_v3.DeepseekV3DecoderLayer(arguments, arguments.num_hidden_layers), vars(arguments)
    if not any(name.startswith(("mlp.experts.", "mlp.switch_mlp.")) for name in tensors):
        settings["num_experts"] = 0
    if config.model_type.startswith("qwen3_next"):
        arguments = qwen3_next.ModelArgs.from_dict({**settings, "mlp_only_layers": [], "decoder_sparse_step": 1})
        kind: Any = qwen3_next.Qwen3NextDecoderLayer
    else:
        arguments, kind = qwen3_5.TextModelArgs.from_dict(settings), qwen3_5.DecoderLayer
    return kind(arguments, arguments.full_attention_interval - 1), {"n_routed_experts": arguments.num_experts}


def _weights(tensors: Mapping[str, mx.array], arguments: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return weights by parameter name. DeepSeek's `sanitize` stacks any family's experts and leaves norms alone."""
    whole = dict(tensors)
    if "mlp.experts.gate_up_proj" in whole:  # Qwen3.5's experts are stacked, with gate and up in one
        gate, up = mx.split(whole.pop("mlp.experts.gate_up_proj"), 2, axis=-2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": whole.pop("mlp.experts.down_proj")}
        whole.update({f"mlp.switch_mlp.{part}.weight": value for part, value in parts.items()})
    alone = SimpleNamespace(args=SimpleNamespace(**{**arguments, "num_hidden_layers": 1}))
    clean = deepseek_v3.Model.sanitize(alone, {f"model.layers.0.{name}": value for name, value in whole.items()})
    weights: dict[str, mx.array] = {}
    for name, value in clean.items():
        stem, _, leaf = name.removeprefix("model.layers.0.").rpartition(".")
        stem = NAMES.get(stem, stem)
        weights[f"{stem}.{leaf}" if stem in NAMES.values() else f"layer.{stem}.{leaf}"] = value
    return weights


def _shifted(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights; if norms are stored minus 1, add 1 to them, in float32."""
    norms = {name: value.astype(mx.float32) for name, value in weights.items() if "norm" in name and value.ndim == 1}
    centred = float(mx.mean(mx.concatenate(list(norms.values())))) < CENTRED_NORM_MEAN
    return {**weights, **({name: value + 1.0 for name, value in norms.items()} if centred else {})}
