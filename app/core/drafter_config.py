"""What the `config.json` of a feature drafter says, checked against the target it is to draft for.

Pure: the server pairs with it, the worker builds with it. `read` takes the configs of the drafter and of its target
and raises `ModelUnavailable` with one line. Every tap is a decoder layer of the target, counted from 0, whose *output*
is read, whatever convention the file follows; `FINAL` is the state behind the final norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from app.core.config_values import Config, ConfigValues, TargetFacts, text_part
from app.core.errors import ModelUnavailable
from app.core.safe_files import DOWNLOAD_AGAIN

FINAL = -1
FULL, SLIDING = "full_attention", "sliding_attention"
LONGEST_BLOCK = 65
"""An anchor and the 64 drafts that a request may ask for."""
SPECULATORS_BLOCK = 8
CONTEXT_TOKENS = 32_768
"""Context of a drafter whose config and target state none."""
DFLASH2_KEYS = ("conv_kernel_size", "selector_rank", "selector_top_k")
ANCHOR_KEYS = ("sample_from_anchor", "num_anchors")
UNSUPPORTED_KEYS = (
    "attention_sink_bias",
    "attention_value_scale",
    "input_embedding_scale",
    "output_multiplier",
    "projector_type",
)
MTP_LAYOUTS = {"qwen3_next": "qwen", "qwen3_5": "qwen", "deepseek": "deepseek"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """The sizes that all feature drafters have; `num_hidden_layers` counts the drafter's own layers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Config | None
    rope_traditional: bool
    partial_rotary_factor: float
    max_position_embeddings: int
    attention_bias: bool
    vocab_size: int
    """Rows of the target's logits."""
    taps: tuple[int, ...]
    target_layers: int
    target_hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """Block diffusion: `block_size` slots, the anchor's included; `causal` says for each layer whether a slot of the
    block sees only the slots before it."""

    block_size: int
    mask_token_id: int
    draft_vocab_size: int
    layer_types: tuple[str, ...]
    sliding_window: int
    causal: tuple[bool, ...]
    final_logit_softcapping: float

    @classmethod
    def read(cls, config: Config, target_config: Config) -> "DFlashConfig":
        target = TargetFacts.read(target_config)
        values = _values(config, "dflash_config")
        _check_dflash_kind(config, values)
        _check_made_for(values, target)
        shape = _shape(values, target)
        if shape["hidden_size"] != target.hidden_size:
            raise ModelUnavailable("its hidden size is not that of the main model, whose embedding it borrows")
        layer_types = _layer_types(values, shape["num_hidden_layers"])
        block = values.whole("block_size", default=SPECULATORS_BLOCK if _is_speculators(config) else None, least=2)
        mask = values.whole("mask_token_id", least=0)
        if block > LONGEST_BLOCK:
            raise ModelUnavailable(f"it drafts blocks of {block} tokens, more than {LONGEST_BLOCK}; choose another one")
        if mask >= shape["vocab_size"]:
            raise ModelUnavailable(f"its mask token {mask} is beyond the main model's {shape['vocab_size']} tokens")
        return cls(
            **shape,
            taps=_dflash_taps(config, values, shape["num_hidden_layers"], target),
            block_size=block,
            mask_token_id=mask,
            draft_vocab_size=_draft_rows(values, shape["vocab_size"]),
            layer_types=layer_types,
            sliding_window=_window(values, layer_types),
            causal=_causality(values, layer_types),
            final_logit_softcapping=values.real("final_logit_softcapping", 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """One layer over pairs of a token and a state. The two kinds of norms before `fc` exclude one another:
    `norm_before_fc` over all taps joined, `fc_norm` for each tap. `norm_output`: the state fed back is the normed one.
    """

    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def read(cls, config: Config, target_config: Config) -> "Eagle3Config":
        target = TargetFacts.read(target_config)
        values = _values(config, "eagle_config")
        names = " ".join(map(str, (config.get("architectures"), config.get("speculators_model_type")))).lower()
        if "eagle" in names.replace("eagle3", "") and not ("eagle3" in names or values.get("draft_vocab_size")):
            raise ModelUnavailable("it is an EAGLE drafter of an older kind; choose an EAGLE-3 one")
        _check_made_for(values, target)
        shape = _shape(values, target)
        if shape["num_hidden_layers"] != 1:
            raise ModelUnavailable(f"it has {shape['num_hidden_layers']} layers, an EAGLE-3 drafter here has one")
        before_fc, each_tap = values.flag("norm_before_fc"), values.flag("fc_norm")
        if before_fc and each_tap:
            raise ModelUnavailable(f"its config.json sets norm_before_fc and fc_norm, which exclude; {DOWNLOAD_AGAIN}")
        return cls(
            **shape,
            taps=_eagle_taps(values, target),
            draft_vocab_size=_draft_rows(values, shape["vocab_size"]),
            norm_before_residual=values.flag("norm_before_residual"),
            norm_before_fc=before_fc,
            fc_norm=each_tap,
            norm_output=values.flag("norm_output"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(DrafterConfig):
    """The multi-token head of a target; what the drafter's config leaves out, the target's says.

    `layout` `qwen`: tensors `mtp.*`; `deepseek`: further decoder layers, the first with index `target_layers`.
    """

    layout: str
    model_type: str

    @classmethod
    def read(cls, config: Config, target_config: Config) -> "MtpConfig":
        target = TargetFacts.read(target_config)
        own = ConfigValues(text_part(config))
        _check_made_for(own, target)
        layout = next((found for name, found in MTP_LAYOUTS.items() if target.model_type.startswith(name)), "")
        if not layout:
            raise ModelUnavailable(f"the multi-token head of a {target.model_type or 'nameless'} model cannot run here")
        values = ConfigValues(text_part(config), text_part(target_config))
        layers = values.whole("mtp_num_hidden_layers", "num_nextn_predict_layers", default=1)
        return cls(
            **{**_shape(values, target), "num_hidden_layers": layers},
            taps=(FINAL,),
            layout=layout,
            model_type=target.model_type,
        )


def _values(config: Config, section: str) -> ConfigValues:
    """What the method's own section says, then the top of the config, then the layers of the `speculators` format."""
    top = ConfigValues(config)
    return ConfigValues(top.section(section), config, top.section("transformer_layer_config"))


def _is_speculators(config: Config) -> bool:
    return "speculators_model_type" in config or "transformer_layer_config" in config


def _check_made_for(values: ConfigValues, target: TargetFacts) -> None:
    """Width, depth and vocabulary of the target that the drafter was trained on."""
    width = values.whole("target_hidden_size", "hidden_size", default=target.hidden_size)
    if width != target.hidden_size:
        raise ModelUnavailable(f"it was made for a hidden size of {width}, the main model has {target.hidden_size}")
    layers = values.whole("num_target_layers", default=target.layers)
    if layers != target.layers:
        raise ModelUnavailable(f"it was made for {layers} layers, the main model has {target.layers}")
    rows = values.whole("vocab_size", default=target.vocab_size)
    if rows != target.vocab_size:
        raise ModelUnavailable(f"it was made for {rows} tokens, the main model has {target.vocab_size}")


def _check_dflash_kind(config: Config, values: ConfigValues) -> None:
    if "dflash2" in str(config.get("architectures")).lower() or values.get(*DFLASH2_KEYS) is not None:
        raise ModelUnavailable("it is a DFlash2 drafter, which cannot run here; choose a DFlash one")
    if values.get(*ANCHOR_KEYS):
        raise ModelUnavailable("it drafts from the anchor's own slot, which cannot run here; choose another one")
    for key in UNSUPPORTED_KEYS:
        if values.get(key) not in (None, False, 1):  # 1 is the factor that changes nothing
            raise ModelUnavailable(f"its config.json asks for {key}, which cannot run here; choose another one")


def _shape(values: ConfigValues, target: TargetFacts) -> dict[str, Any]:
    """The fields of `DrafterConfig`, less the taps."""
    hidden = values.whole("hidden_size")
    heads = values.whole("num_attention_heads")
    parameters = values.section("rope_parameters", "rope_scaling")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelUnavailable("its rotary positions differ by kind of layer, which cannot run here")
    rope = ConfigValues(values.section("rope_scaling"), parameters)
    kind = rope.get("rope_type", "type")
    theta = rope.real("rope_theta", values.real("rope_theta", 10_000.0))
    return {
        "hidden_size": hidden,
        "intermediate_size": values.whole("intermediate_size", "moe_intermediate_size"),
        "num_hidden_layers": values.whole("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.whole("num_key_value_heads", default=heads),
        "head_dim": values.whole("head_dim", default=max(1, hidden // heads)),
        "rms_norm_eps": values.real("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": None if kind in (None, "default") else {**parameters, **values.section("rope_scaling")},
        "rope_traditional": values.get("is_neox_style", "rope_is_neox_style") is False,
        "partial_rotary_factor": rope.real("partial_rotary_factor", values.real("partial_rotary_factor", 1.0)),
        "max_position_embeddings": values.whole(
            "max_position_embeddings", default=target.context_tokens or CONTEXT_TOKENS
        ),
        "attention_bias": values.flag("attention_bias"),
        "vocab_size": target.vocab_size or values.whole("vocab_size"),
        "target_layers": target.layers,
        "target_hidden_size": target.hidden_size,
    }


def _draft_rows(values: ConfigValues, vocabulary: int) -> int:
    rows = values.whole("draft_vocab_size", default=vocabulary)
    if rows > vocabulary:
        raise ModelUnavailable(f"it drafts from {rows} tokens, the main model has {vocabulary}")
    return rows


def _layer_types(values: ConfigValues, layers: int) -> tuple[str, ...]:
    told = values.get("layer_types")
    if told is None:
        pattern = values.whole("sliding_window_pattern", default=0)
        usual = SLIDING if pattern or values.flag("use_swa") else FULL
        return tuple(FULL if pattern and (layer + 1) % pattern == 0 else usual for layer in range(layers))
    if not isinstance(told, list) or len(told) != layers or any(kind not in (FULL, SLIDING) for kind in told):
        raise ModelUnavailable(f"its config.json gives no usable layer_types; {DOWNLOAD_AGAIN}")
    return tuple(told)


def _window(values: ConfigValues, layer_types: Sequence[str]) -> int:
    return values.whole("sliding_window", "swa_window_size") if SLIDING in layer_types else 0


def _causality(values: ConfigValues, layer_types: Sequence[str]) -> tuple[bool, ...]:
    """A sliding layer is causal inside the block, a full one is not, unless the config says otherwise."""
    told = values.get("causal", "is_causal", "dflash_query_causal")
    if isinstance(told, bool):
        return (told,) * len(layer_types)
    sliding = not values.flag("sliding_window_non_causal")
    return tuple(kind == SLIDING and sliding for kind in layer_types)


def _dflash_taps(config: Config, values: ConfigValues, layers: int, target: TargetFacts) -> tuple[int, ...]:
    """`target_layer_ids` count outputs from 0, the `speculators` format from 1; without either, spread evenly."""
    before = values.layer_ids("aux_hidden_state_layer_ids") if _is_speculators(config) else None
    taps = [tap - 1 for tap in before] if before else values.layer_ids("target_layer_ids")
    if taps is None:
        depth = target.layers
        spread = [round(1 + layer * (depth - 4) / (layers - 1)) for layer in range(layers)] if layers > 1 else []
        taps = spread or [depth // 2]
    return _checked_taps(taps, target)


def _eagle_taps(values: ConfigValues, target: TargetFacts) -> tuple[int, ...]:
    """Published ids say before which layer the state is taken: one less is the layer that put it out."""
    told = values.layer_ids("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    before = [2, target.layers // 2, target.layers - 3] if told is None else told
    return _checked_taps([tap - 1 for tap in before], target)


def _checked_taps(taps: Sequence[int], target: TargetFacts) -> tuple[int, ...]:
    if any(not 0 <= tap < target.layers for tap in taps):
        raise ModelUnavailable(f"it reads layers that the main model does not have ({target.layers} layers)")
    if any(first >= second for first, second in pairwise(taps)):
        raise ModelUnavailable(f"its config.json names a layer twice or out of order; {DOWNLOAD_AGAIN}")
    return tuple(taps)
