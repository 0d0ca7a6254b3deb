"""Checkpoint formats of feature drafters: DFlash, EAGLE-3 and MTP.

DFlash is read as z-lab publishes it, EAGLE-3 as SafeAI Lab does, and both in the `speculators` format too. Qwen3-Next,
Qwen3.5 and the DeepSeek family are trained with a multi-token (MTP) head, which lies in its own folder or inside the
main model's checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

from app.core.errors import ModelUnavailable
from app.core.request import MAX_DRAFT_TOKENS
from app.models.config_values import Config, ConfigValues, TargetFacts, text_part
from app.models.drafters.config import (
    FINAL,
    FULL,
    SLIDING,
    DrafterConfig,
    Shape,
    Tensors,
    attention_tensors,
    check_attention,
    check_target,
    checked_taps,
    is_speculators,
    layer_tensors,
    layered_values,
    read_fields,
)
from app.models.safe_files import DOWNLOAD_AGAIN, read_integers, read_object
from app.models.tokenizer_file import ORDINARY, Tokenizer

LONGEST_BLOCK = 1 + MAX_DRAFT_TOKENS
"""Maximum number of slots in a block: the anchor, and as many drafts as a request may ask for."""
SPECULATORS_BLOCK = 8
DFLASH2_KEYS = ("conv_kernel_size", "selector_rank", "selector_top_k")
ANCHOR_KEYS = ("sample_from_anchor", "num_anchors")
UNSUPPORTED_KEYS = (
    "attention_sink_bias",
    "attention_value_scale",
    "input_embedding_scale",
    "output_multiplier",
    "projector_type",
)
TARGET_PREFIXES = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "t2d", "d2t")
"""Prefixes of tensors that a DFlash checkpoint may contain but that are ignored: the target's are used instead."""
MAX_TEMPLATE_BYTES = 1 << 20
MTP_LAYOUTS = {"qwen3_next": "qwen", "qwen3_5": "qwen", "deepseek": "deepseek"}
"""Layouts of MTP heads in a checkpoint, by the prefix of the target's `model_type`."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """Block diffusion over `block_size` slots, including the anchor's. `causal` is a flag for each layer: whether its
    attention is causal inside the block."""

    block_size: int
    mask_token_id: int
    sliding_window: int
    causal: tuple[bool, ...]

    @classmethod
    def read(cls, config: Config, target_config: Config) -> Self:
        target = TargetFacts.read(target_config)
        values = layered_values(config, "dflash_config")
        _check_dflash_kind(config, values)
        check_target(values, target)
        fields = read_fields(values, target)
        if fields["hidden_size"] != target.hidden_size:
            raise ModelUnavailable("its hidden size is not that of the main model, whose embedding it borrows")
        layer_types = _layer_types(values, fields["num_hidden_layers"])
        block = values.whole("block_size", default=SPECULATORS_BLOCK if is_speculators(config) else None, least=2)
        mask = values.whole("mask_token_id", least=0)
        if block > LONGEST_BLOCK:
            raise ModelUnavailable(f"it drafts blocks of {block} tokens, more than {LONGEST_BLOCK}; choose another one")
        if mask >= fields["vocab_size"]:
            raise ModelUnavailable(f"its mask token {mask} is beyond the main model's {fields['vocab_size']} tokens")
        return cls(
            **fields,
            taps=_dflash_taps(config, values, fields["num_hidden_layers"], target),
            block_size=block,
            mask_token_id=mask,
            layer_types=layer_types,
            sliding_window=values.whole("sliding_window", "swa_window_size") if SLIDING in layer_types else 0,
            causal=_causal_layers(values, layer_types),
        )

    def check(self, folder: Path, tensors: Tensors, target: Tokenizer) -> None:  # noqa: ARG002
        """Check that the mask token is not one that the target may generate."""
        if token_use := _describe_token_use(target, self.mask_token_id):
            raise ModelUnavailable(f"its mask token {self.mask_token_id} is {token_use} of the main model")

    def expected_tensors(self, tensors: Tensors, target_config: Config) -> tuple[Tensors, Mapping[str, Shape]]:  # noqa: ARG002
        """Return the tensors of the layers, `fc` and the norms; copies of the target's tensors are ignored."""
        check_attention(self)
        hidden = self.hidden_size
        attention = attention_tensors(self, hidden, 1, bias=self.attention_bias, norms=True)
        layer = layer_tensors(attention, hidden, self.intermediate_size)
        layer_numbers = range(self.num_hidden_layers)
        layers = {f"layers.{index}.{name}": shape for index in layer_numbers for name, shape in layer.items()}
        fc_input_size = len(self.taps) * self.target_hidden_size
        own_tensors = {"fc.weight": (hidden, fc_input_size), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
        return {name: info for name, info in tensors.items() if not name.startswith(TARGET_PREFIXES)}, {
            **own_tensors,
            **layers,
        }


def _check_dflash_kind(config: Config, values: ConfigValues) -> None:
    if "dflash2" in str(config.get("architectures")).lower() or values.get(*DFLASH2_KEYS) is not None:
        raise ModelUnavailable("it is a DFlash2 drafter, which is not supported; choose a DFlash one")
    if values.get(*ANCHOR_KEYS):
        raise ModelUnavailable("it drafts from the anchor's own slot, which is not supported; choose another one")
    for key in UNSUPPORTED_KEYS:
        if values.get(key) not in (None, False, 1):  # 1 is the factor that changes nothing
            raise ModelUnavailable(f"its config.json asks for {key}, which is not supported; choose another one")


def _layer_types(values: ConfigValues, layers: int) -> tuple[str, ...]:
    declared = values.get("layer_types")
    if declared is None:
        pattern = values.whole("sliding_window_pattern", default=0)
        default = SLIDING if pattern or values.flag("use_swa") else FULL
        return tuple(FULL if pattern and (layer + 1) % pattern == 0 else default for layer in range(layers))
    if (
        not isinstance(declared, list)
        or len(declared) != layers
        or any(kind not in (FULL, SLIDING) for kind in declared)
    ):
        raise ModelUnavailable(f"its config.json gives no usable layer_types; {DOWNLOAD_AGAIN}")
    return tuple(declared)


def _causal_layers(values: ConfigValues, layer_types: Sequence[str]) -> tuple[bool, ...]:
    """Return for each layer whether it is causal inside the block: by default only sliding layers are."""
    declared = values.get("causal", "is_causal", "dflash_query_causal")
    if isinstance(declared, bool):
        return (declared,) * len(layer_types)
    sliding_is_causal = not values.flag("sliding_window_non_causal")
    return tuple(kind == SLIDING and sliding_is_causal for kind in layer_types)


def _dflash_taps(config: Config, values: ConfigValues, layers: int, target: TargetFacts) -> tuple[int, ...]:
    """Return taps. `target_layer_ids` count from 0, `speculators` ids from 1; without ids, taps are evenly spread."""
    layer_inputs = values.layer_ids("aux_hidden_state_layer_ids") if is_speculators(config) else None
    taps = [tap - 1 for tap in layer_inputs] if layer_inputs else values.layer_ids("target_layer_ids")
    if taps is None:
        depth = target.layers
        evenly_spaced = [round(1 + layer * (depth - 4) / (layers - 1)) for layer in range(layers)] if layers > 1 else []
        taps = evenly_spaced or [depth // 2]
    return checked_taps(taps, target)


def _describe_token_use(tokenizer: Tokenizer, token: int) -> str:
    """Describe the use of a token id in the answers of the tokenizer's model; "" for an id that no answer contains.

    A special token that neither begins nor ends text is unused if no template mentions it. Raises ModelUnavailable.
    """
    folder = tokenizer.folder
    if not (folder / "tokenizer.json").is_file():
        return ""
    token_use = tokenizer.token_role(token)
    if token_use == ORDINARY:
        return "an ordinary token"
    return (
        "a special token in the answers"
        if token_use and (token in _end_tokens(folder) or token_use in template_text(folder))
        else ""
    )


def _end_tokens(folder: Path) -> set[int]:
    token_ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = read_object(folder / name) if (folder / name).is_file() else {}
        for part in (config, text_part(config)):
            for key in ("eos_token_id", "bos_token_id"):
                value = part.get(key)
                token_ids.update(
                    token_id
                    for token_id in (value if isinstance(value, list) else [value])
                    if isinstance(token_id, int)
                )
    return token_ids


def template_text(folder: Path) -> str:
    """Return all chat templates of the folder as one text to search; empty where there is none."""
    files = [folder / name for name in ("tokenizer_config.json", "chat_template.json")]
    texts = [str(read_object(file).get("chat_template") or "") for file in files if file.is_file()]
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size <= MAX_TEMPLATE_BYTES:
        texts.append(path.read_text("utf-8", errors="replace"))
    return "\n".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """A single layer that reads pairs of a token and a hidden state. A norm before `fc` is refused: `norm_before_fc`
    over the concatenated taps, or `fc_norm` over each tap. `norm_output`: the state fed back is normalised.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def read(cls, config: Config, target_config: Config) -> Self:
        target = TargetFacts.read(target_config)
        values = layered_values(config, "eagle_config")
        names = " ".join(map(str, (config.get("architectures"), config.get("speculators_model_type")))).lower()
        if "eagle" in names.replace("eagle3", "") and not ("eagle3" in names or values.get("draft_vocab_size")):
            raise ModelUnavailable("it is an EAGLE drafter of an older kind; choose an EAGLE-3 one")
        check_target(values, target)
        fields = read_fields(values, target)
        if fields["num_hidden_layers"] != 1:
            raise ModelUnavailable(f"it has {fields['num_hidden_layers']} layers, an EAGLE-3 drafter here has one")
        before_fc, each_tap = values.flag("norm_before_fc"), values.flag("fc_norm")
        if before_fc and each_tap:
            raise ModelUnavailable(f"its config.json sets both norm_before_fc and fc_norm; {DOWNLOAD_AGAIN}")
        return cls(
            **fields,
            taps=_eagle_taps(config, values, target),
            norm_before_residual=values.flag("norm_before_residual"),
            norm_before_fc=before_fc,
            fc_norm=each_tap,
            norm_output=values.flag("norm_output"),
        )

    def check(self, folder: Path, tensors: Tensors, target: Tokenizer) -> None:  # noqa: ARG002
        """Check that an embedding can be used, and that `d2t` maps each draft token to a token of the target."""
        rows, vocabulary = self.draft_vocab_size, self.vocab_size
        if "embed_tokens.weight" not in tensors and self.hidden_size != self.target_hidden_size:
            raise ModelUnavailable("it has no embedding, and the main model's has a different width")
        if "t2d" in tensors and tensors["t2d"].shape != (vocabulary,):
            raise ModelUnavailable(f"its t2d is not a table of the main model's {vocabulary} tokens")
        if "d2t" not in tensors and rows != vocabulary:
            raise ModelUnavailable(f"it has no table d2t from its {rows} tokens to the main model's; {DOWNLOAD_AGAIN}")
        offsets = read_integers(folder, tensors["d2t"]) if "d2t" in tensors else ()
        if any(not 0 <= token + offset < vocabulary for token, offset in enumerate(offsets)):
            raise ModelUnavailable(f"its d2t maps to ids beyond the main model's {vocabulary} tokens")

    def expected_tensors(self, tensors: Tensors, target_config: Config) -> tuple[Tensors, Mapping[str, Shape]]:  # noqa: ARG002
        """Return the tensors of the layer and the head, and of the embedding and the token table if present."""
        if self.norm_before_fc or self.fc_norm:
            raise ModelUnavailable("it norms the states before it joins them, which is not supported")
        check_attention(self)
        own_tensors = {name.replace("layers.0.", "midlayer."): info for name, info in tensors.items() if name != "t2d"}
        hidden, rows = self.hidden_size, self.draft_vocab_size
        attention = attention_tensors(self, 2 * hidden, 1, bias=self.attention_bias, norms=False)
        layer = {**layer_tensors(attention, hidden, self.intermediate_size), "hidden_norm.weight": (hidden,)}
        expected: dict[str, Shape] = {
            "fc.weight": (hidden, len(self.taps) * self.target_hidden_size),
            "norm.weight": (hidden,),
            "lm_head.weight": (rows, hidden),
            **{f"midlayer.{name}": shape for name, shape in layer.items()},
        }
        optional: dict[str, Shape] = {"embed_tokens.weight": (self.vocab_size, hidden), "d2t": (rows,)}
        return own_tensors, expected | {name: shape for name, shape in optional.items() if name in own_tensors}


def _eagle_taps(config: Config, values: ConfigValues, target: TargetFacts) -> tuple[int, ...]:
    """Return the taps. An id at the top level (`speculators`) names the layer that reads the state, so the tap is the
    layer before it; an id in `eagle_config` (SpecForge, SGLang) names the layer whose output it is."""
    keys = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
    inputs = ConfigValues(config).layer_ids(*keys)
    outputs = values.layer_ids(*keys) if inputs is None else [layer - 1 for layer in inputs]
    return checked_taps(outputs or (1, target.layers // 2 - 1, target.layers - 4), target)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(DrafterConfig):
    """The multi-token (MTP) head of a target; values missing from its config are read from the target's.

    `layout` is `qwen` (tensors `mtp.*`) or `deepseek` (further decoder layers, the first with index `target_layers`).
    """

    layout: str
    model_type: str

    @classmethod
    def read(cls, config: Config, target_config: Config) -> Self:
        target = TargetFacts.read(target_config)
        own_values = ConfigValues(text_part(config))
        check_target(own_values, target)
        layout = next((candidate for name, candidate in MTP_LAYOUTS.items() if target.model_type.startswith(name)), "")
        if not layout:
            raise ModelUnavailable(f"the multi-token head of a {target.model_type or 'nameless'} model cannot run here")
        values = ConfigValues(text_part(config), text_part(target_config))
        layers = values.whole("mtp_num_hidden_layers", "num_nextn_predict_layers", default=1)
        return cls(
            **{**read_fields(values, target), "num_hidden_layers": layers},
            taps=(FINAL,),
            layout=layout,
            model_type=target.model_type,
        )

    def expected_tensors(self, tensors: Tensors, target_config: Config) -> tuple[Tensors, Mapping[str, Shape]]:
        """Return the tensors of a Qwen head except experts; its only layer has the main model's sizes. For a DeepSeek
        head, return only the projection that joins an embedding and a state."""
        if self.layout != "qwen":
            joins = {name: info for name, info in tensors.items() if name.endswith("eh_proj.weight")}
            return joins, dict.fromkeys(joins or ("eh_proj.weight",), (self.hidden_size, 2 * self.hidden_size))
        mtp_tensors = {f"mtp.{name.partition('mtp.')[2]}": info for name, info in tensors.items() if "mtp." in name}
        target = ConfigValues(text_part(target_config))
        hidden, heads = target.whole("hidden_size"), target.whole("num_attention_heads")
        sizes = replace(
            self,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=target.whole("num_key_value_heads", default=heads),
            head_dim=target.whole("head_dim", default=max(1, hidden // heads)),
        )
        attention = attention_tensors(sizes, hidden, 2, bias=target.flag("attention_bias"), norms=True)
        is_sparse = any(".experts" in name or ".switch_mlp" in name for name in mtp_tensors)
        layer = layer_tensors(attention, hidden, 0 if is_sparse else target.whole("intermediate_size"))
        expected: dict[str, Shape] = {
            "mtp.fc.weight": (hidden, 2 * hidden),
            **{f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")},
            **{f"mtp.layers.0.{name}": shape for name, shape in layer.items()},
        }
        return {name: info for name, info in mtp_tensors.items() if not (is_sparse and ".mlp." in name)}, expected


def head_tensors(config: Config, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Return the tensors of the multi-token head inside a main model's checkpoint, by name; empty when there is none.

    Qwen names them `mtp.*`; DeepSeek appends decoder layers after the `num_hidden_layers` layers of the config.
    """
    text = text_part(config)
    prefix = f"model.layers.{text.get('num_hidden_layers')}."
    starts = (prefix, "mtp.") if text.get("num_nextn_predict_layers") else ("mtp.",)
    return {name: info for name, info in tensors.items() if name.startswith(starts) or ".mtp." in name}
