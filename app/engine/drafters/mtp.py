"""MTP: the prediction layer that Qwen3-Next, Qwen3.5 and the DeepSeek family are trained with, and that mlx-lm strips.

    h = fc([norm_e(embedding of x_{t+1}) ‖ norm_h(H_t)]);  o = norm(layer(h));  logits = head(o);  o is fed back as H

H_t is the target's hidden state behind its final norm; DeepSeek zeroes the embedding at position 0 (vLLM's
qwen3_next_mtp.py, qwen3_5_mtp.py, deepseek_mtp.py). The decoder layer is mlx-lm's own.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import deepseek_v3, qwen3_5, qwen3_next
from mlx_lm.models.cache import KVCache

from app.core.drafter_config import MtpConfig
from app.core.errors import ModelUnavailable
from app.engine.drafters.recurrent import RecurrentDrafter
from app.engine.drafters.target import Target
from app.engine.runner import Runner

LONGEST_DRAFT = 8
QWEN_NAMES = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
DEEPSEEK_NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
CENTRED_NORM_MEAN = 0.5
"""Below it, over all norms, they are stored as their distance from 1, as Hugging Face's Qwen checkpoints do."""


class MtpModel(nn.Module):
    """Two norms, a projection, one decoder layer and a final norm; embedding and head are the target's."""

    def __init__(self, config: MtpConfig, layer: nn.Module, *, zero_first_embedding: bool) -> None:
        super().__init__()
        self.config = config
        self.zero_first_embedding = zero_first_embedding
        self.enorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def make_cache(self) -> list[Any]:
        """One attention layer."""
        return [KVCache()]

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        """Embeddings [rows, width, hidden]."""
        return target.embed(tokens)

    def fuse(self, features: mx.array) -> mx.array:
        """The hidden state as it is."""
        return features

    def extend(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Hidden states behind the final norm [rows, width, hidden], from [embedding ‖ hidden]."""
        embedded, hidden = mx.split(inputs, 2, axis=-1)
        if self.zero_first_embedding:
            first = mx.array(cache[0].offset).reshape(-1, 1) + mx.arange(inputs.shape[1]) == 0
            embedded = mx.where(first[..., None], 0.0, embedded)
        x = self.eh_proj(mx.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))
        mask = cache[0].make_mask(inputs.shape[1], return_array=self.zero_first_embedding)
        return self.norm(self.layer(x, mask=mask, cache=cache[0]))

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """float32 logits [rows, width, vocabulary]."""
        return target.logits(hidden)


class Mtp(RecurrentDrafter):
    """Drafts with the head that the target was trained with; beyond the first token it is fed its own state."""

    name = "mtp"

    def __init__(self, runner: Runner, target: Target) -> None:
        super().__init__(runner, target, longest=LONGEST_DRAFT)


def build_mtp(config: MtpConfig, target_config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> MtpModel:
    """The module with its (lazy) weights. Raises ModelUnavailable for a family or a set of tensors that is unknown."""
    text = target_config.get("text_config")
    settings = {**target_config, **(text if isinstance(text, dict) else {})}
    family = str(target_config.get("model_type", ""))
    if family.startswith("deepseek"):
        weights, layer = _deepseek(settings, tensors)
    elif family.startswith(("qwen3_next", "qwen3_5")):
        weights, layer = _qwen(settings, tensors, next_family=family.startswith("qwen3_next"))
    else:
        raise ModelUnavailable(f"MTP heads of {family or 'this family'} are not known; choose another drafter")
    model = MtpModel(config, layer, zero_first_embedding=family.startswith("deepseek"))
    model.load_weights(list(weights.items()), strict=True)
    return model


def _qwen(
    settings: Mapping[str, Any], tensors: Mapping[str, mx.array], *, next_family: bool
) -> tuple[dict[str, mx.array], nn.Module]:
    mine = {name.partition("mtp.")[2]: value for name, value in tensors.items() if "mtp." in name}
    sparse = any(".experts" in name or ".switch_mlp" in name for name in mine)
    if next_family:
        arguments = qwen3_next.ModelArgs.from_dict({**settings, "mlp_only_layers": [], "decoder_sparse_step": 1})
        arguments.num_experts = arguments.num_experts if sparse else 0
        layer: nn.Module = qwen3_next.Qwen3NextDecoderLayer(arguments, arguments.full_attention_interval - 1)
    else:
        arguments = qwen3_5.TextModelArgs.from_dict(settings)
        arguments.num_experts = arguments.num_experts if sparse else 0
        layer = qwen3_5.DecoderLayer(arguments, arguments.full_attention_interval - 1)
    weights = _stacked(_renamed(mine, "layers.0.", QWEN_NAMES))
    norms = {name: value.astype(mx.float32) for name, value in weights.items() if "norm" in name and value.ndim == 1}
    centred = float(mx.mean(mx.concatenate(list(norms.values())))) < CENTRED_NORM_MEAN
    return {**weights, **({name: value + 1.0 for name, value in norms.items()} if centred else {})}, layer


def _deepseek(settings: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> tuple[dict[str, mx.array], nn.Module]:
    arguments = deepseek_v3.ModelArgs.from_dict(dict(settings))
    prefix = f"model.layers.{arguments.num_hidden_layers}."
    mine = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    unused = ("embed_tokens.", "shared_head.head.")
    own = {f"model.layers.0.{name}": value for name, value in mine.items() if not name.startswith(unused)}
    alone = SimpleNamespace(args=SimpleNamespace(**{**vars(arguments), "num_hidden_layers": 1}))
    clean = deepseek_v3.Model.sanitize(alone, own)
    plain = {name.removeprefix("model.layers.0."): value for name, value in clean.items()}
    return _renamed(plain, "", DEEPSEEK_NAMES), deepseek_v3.DeepseekV3DecoderLayer(
        arguments, arguments.num_hidden_layers
    )


def _renamed(tensors: Mapping[str, mx.array], layer: str, names: Mapping[str, str]) -> dict[str, mx.array]:
    """Tensors under our names: norms and projection by `names`, everything below `layer` as the decoder layer."""
    renamed: dict[str, mx.array] = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if stem in names:
            renamed[f"{names[stem]}.{leaf}"] = value
        elif name.startswith(layer):
            renamed[f"layer.{name.removeprefix(layer)}"] = value
        else:
            raise ModelUnavailable(f"its MTP head has a tensor that is unknown here ({name}); choose another drafter")
    return renamed


def _stacked(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Experts as mlx-lm keeps them: one array of all; fused gate and up projections are split."""
    joined = {name: value for name, value in weights.items() if ".mlp.experts." not in name}
    for part in ("gate_proj", "up_proj", "down_proj"):
        stem = "layer.mlp.experts"
        experts = sorted(
            (int(name.split(".")[3]), name) for name in weights if name.startswith(f"{stem}.") and f".{part}." in name
        )
        if experts:
            joined[f"layer.mlp.switch_mlp.{part}.weight"] = mx.stack([weights[name] for _, name in experts])
    fused = weights.get("layer.mlp.experts.gate_up_proj")
    if fused is not None:
        gate, up = mx.split(fused, 2, axis=-2)
        joined["layer.mlp.switch_mlp.gate_proj.weight"], joined["layer.mlp.switch_mlp.up_proj.weight"] = gate, up
        joined["layer.mlp.switch_mlp.down_proj.weight"] = weights["layer.mlp.experts.down_proj"]
    return joined
