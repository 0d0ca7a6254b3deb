"""DFlash as its checkpoints describe it: z-lab's, and those in the `speculators` format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from app.core.config_values import Config, ConfigValues, TargetFacts, text_part
from app.core.drafters.config import (
    FULL,
    SLIDING,
    DrafterConfig,
    Shape,
    Tensors,
    attention_tensors,
    check_attention,
    check_made_for,
    check_width,
    checked_taps,
    is_speculators,
    layer_tensors,
    shape_of,
    values_of,
)
from app.core.errors import ModelUnavailable
from app.core.safe_files import DOWNLOAD_AGAIN, read_object
from app.core.tokenizer_file import ORDINARY, Tokenizer

LONGEST_BLOCK = 65
"""An anchor and the 64 drafts that a request may ask for."""
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
BORROWED = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "t2d", "d2t")
"""What a checkpoint may carry beside its own layers: the target's copies are used."""
MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """Block diffusion: `block_size` slots, the anchor's included; `causal` says for each layer whether a slot of the
    block sees only the slots before it."""

    block_size: int
    mask_token_id: int
    sliding_window: int
    causal: tuple[bool, ...]
    final_logit_softcapping: float

    @classmethod
    def read(cls, config: Config, target_config: Config) -> Self:
        target = TargetFacts.read(target_config)
        values = values_of(config, "dflash_config")
        _check_dflash_kind(config, values)
        check_made_for(values, target)
        shape = shape_of(values, target)
        if shape["hidden_size"] != target.hidden_size:
            raise ModelUnavailable("its hidden size is not that of the main model, whose embedding it borrows")
        layer_types = _layer_types(values, shape["num_hidden_layers"])
        block = values.whole("block_size", default=SPECULATORS_BLOCK if is_speculators(config) else None, least=2)
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
            layer_types=layer_types,
            sliding_window=values.whole("sliding_window", "swa_window_size") if SLIDING in layer_types else 0,
            causal=_causality(values, layer_types),
            final_logit_softcapping=values.real("final_logit_softcapping", 0.0),
        )

    def check(self, folder: Path, tensors: Tensors, target: Tokenizer) -> None:  # noqa: ARG002
        """Its features have the right width, and its mask is no token that the target may write."""
        check_width(tensors, "fc.weight", (self.hidden_size, len(self.taps) * self.target_hidden_size))
        if use := _token_use(target, self.mask_token_id):
            raise ModelUnavailable(f"its mask token {self.mask_token_id} is {use} of the main model")

    def wanted(self, tensors: Tensors, target_config: Config) -> tuple[Tensors, Mapping[str, Shape]]:  # noqa: ARG002
        """The layers, and what surrounds them; what the target has too is not looked at."""
        check_attention(self)
        hidden = self.hidden_size
        attention = attention_tensors(self, hidden, 1, bias=self.attention_bias, norms=True)
        layer = layer_tensors(attention, hidden, self.intermediate_size)
        numbers = range(self.num_hidden_layers)
        layers = {f"layers.{index}.{name}": shape for index in numbers for name, shape in layer.items()}
        fused = len(self.taps) * self.target_hidden_size
        own = {"fc.weight": (hidden, fused), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
        return {name: info for name, info in tensors.items() if not name.startswith(BORROWED)}, {**own, **layers}


def _check_dflash_kind(config: Config, values: ConfigValues) -> None:
    if "dflash2" in str(config.get("architectures")).lower() or values.get(*DFLASH2_KEYS) is not None:
        raise ModelUnavailable("it is a DFlash2 drafter, which cannot run here; choose a DFlash one")
    if values.get(*ANCHOR_KEYS):
        raise ModelUnavailable("it drafts from the anchor's own slot, which cannot run here; choose another one")
    for key in UNSUPPORTED_KEYS:
        if values.get(key) not in (None, False, 1):  # 1 is the factor that changes nothing
            raise ModelUnavailable(f"its config.json asks for {key}, which cannot run here; choose another one")


def _layer_types(values: ConfigValues, layers: int) -> tuple[str, ...]:
    told = values.get("layer_types")
    if told is None:
        pattern = values.whole("sliding_window_pattern", default=0)
        usual = SLIDING if pattern or values.flag("use_swa") else FULL
        return tuple(FULL if pattern and (layer + 1) % pattern == 0 else usual for layer in range(layers))
    if not isinstance(told, list) or len(told) != layers or any(kind not in (FULL, SLIDING) for kind in told):
        raise ModelUnavailable(f"its config.json gives no usable layer_types; {DOWNLOAD_AGAIN}")
    return tuple(told)


def _causality(values: ConfigValues, layer_types: Sequence[str]) -> tuple[bool, ...]:
    """A sliding layer is causal inside the block, a full one is not, unless the config says otherwise."""
    told = values.get("causal", "is_causal", "dflash_query_causal")
    if isinstance(told, bool):
        return (told,) * len(layer_types)
    sliding = not values.flag("sliding_window_non_causal")
    return tuple(kind == SLIDING and sliding for kind in layer_types)


def _dflash_taps(config: Config, values: ConfigValues, layers: int, target: TargetFacts) -> tuple[int, ...]:
    """`target_layer_ids` count outputs from 0, the `speculators` format from 1; without either, spread evenly."""
    before = values.layer_ids("aux_hidden_state_layer_ids") if is_speculators(config) else None
    taps = [tap - 1 for tap in before] if before else values.layer_ids("target_layer_ids")
    if taps is None:
        depth = target.layers
        spread = [round(1 + layer * (depth - 4) / (layers - 1)) for layer in range(layers)] if layers > 1 else []
        taps = spread or [depth // 2]
    return checked_taps(taps, target)


def _token_use(tokenizer: Tokenizer, token: int) -> str:
    """What a model with this tokenizer can write with this id, in words; "" for an id that no answer holds.

    A special token that ends no text and that no chat template mentions is free. Raises ModelUnavailable.
    """
    folder = tokenizer.folder
    if not (folder / "tokenizer.json").is_file():
        return ""
    use = tokenizer.use_of(token)
    if use == ORDINARY:
        return "an ordinary token"
    return "a special token in the answers" if use and (token in _ends(folder) or use in _template(folder)) else ""


def _ends(folder: Path) -> set[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = read_object(folder / name) if (folder / name).is_file() else {}
        for part in (config, text_part(config)):
            for key in ("eos_token_id", "bos_token_id"):
                value = part.get(key)
                found.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return found


def _template(folder: Path) -> str:
    """Every chat template of the folder, as text to search."""
    files = [folder / name for name in ("tokenizer_config.json", "chat_template.json")]
    texts = [str(read_object(file).get("chat_template")) for file in files if file.is_file()]
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size <= MAX_TEMPLATE_BYTES:
        texts.append(path.read_text("utf-8", errors="replace"))
    return "\n".join(texts)
