"""Whether a drafter's checkpoint holds exactly the tensors that its config asks for, in shapes and types that can run.

Read from headers alone, so that a drafter with a missing, foreign or cut layer is refused before the main model makes
way for it. The worker builds with the same names (`app/engine/drafters/`); what its layers add, `_layer` adds here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from app.core.config_values import Config, ConfigValues, text_part
from app.core.drafter_config import DFlashConfig, DrafterConfig, Eagle3Config, MtpConfig
from app.core.errors import ModelUnavailable
from app.core.safe_files import DOWNLOAD_AGAIN, TensorInfo, printable

CHOOSE_ANOTHER = "choose another one"
NUMBERS = frozenset({"F16", "BF16", "F32"})
INTEGERS = frozenset({"I32", "I64"})
BORROWED = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "t2d", "d2t")
"""What a DFlash checkpoint may hold besides; the main model's are used."""
ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "deepseek_yarn": ("factor",),
    "telechat3-yarn": ("factor",),
    "longrope": ("original_max_position_embeddings",),
    "proportional": (),
    "mrope": (),
}
"""Kinds of rotary positions that can run, and the numbers that each one needs."""

Shape = tuple[int, ...]
Tensors = Mapping[str, TensorInfo]


def check_tensors(config: DrafterConfig, tensors: Tensors, target_config: Config) -> None:
    """Raises ModelUnavailable with one line: what is missing, foreign or misshapen, and the next action."""
    names = {name.removeprefix("model."): info for name, info in tensors.items()}
    if config.num_hidden_layers > len(names):  # before as many names are made up
        raise ModelUnavailable(
            f"its config.json asks for {config.num_hidden_layers} layers, its weights hold {len(names)} tensors; "
            f"{DOWNLOAD_AGAIN}"
        )
    match config:
        case DFlashConfig():
            _check_attention(config)
            _compare({name: info for name, info in names.items() if not name.startswith(BORROWED)}, _dflash(config))
        case Eagle3Config():
            _check_attention(config)
            own = {name.replace("layers.0.", "midlayer."): info for name, info in names.items() if name != "t2d"}
            _compare(own, _eagle3(config, own))
        case MtpConfig(layout="qwen"):
            _compare(*_qwen_head(names, ConfigValues(text_part(target_config))))


def _dflash(config: DFlashConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    attention = _attention(config, hidden, 1, bias=config.attention_bias, norms=True)
    layer = _layer(attention, hidden, config.intermediate_size)
    layers = (
        (f"layers.{index}.{name}", shape) for index in range(config.num_hidden_layers) for name, shape in layer.items()
    )
    fused = len(config.taps) * config.target_hidden_size
    own = {"fc.weight": (hidden, fused), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    return dict(chain(own.items(), layers))


def _eagle3(config: Eagle3Config, tensors: Tensors) -> dict[str, Shape]:
    hidden, rows = config.hidden_size, config.draft_vocab_size
    attention = _attention(config, 2 * hidden, 1, bias=config.attention_bias, norms=False)
    layer = {**_layer(attention, hidden, config.intermediate_size), "hidden_norm.weight": (hidden,)}
    wanted: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (rows, hidden),
        **{f"midlayer.{name}": shape for name, shape in layer.items()},
    }
    optional: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, hidden), "d2t": (rows,)}
    return wanted | {name: shape for name, shape in optional.items() if name in tensors}


def _qwen_head(tensors: Tensors, target: ConfigValues) -> tuple[dict[str, TensorInfo], dict[str, Shape]]:
    """A head's tensors and those wanted; its layer has the sizes of the main model's, its experts are left alone."""
    mine = {f"mtp.{name.partition('mtp.')[2]}": info for name, info in tensors.items() if "mtp." in name}
    hidden, heads = target.whole("hidden_size"), target.whole("num_attention_heads")
    sizes = _Heads(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=target.whole("num_key_value_heads", default=heads),
        head_dim=target.whole("head_dim", default=max(1, hidden // heads)),
    )
    attention = _attention(sizes, hidden, 2, bias=target.flag("attention_bias"), norms=True)
    sparse = any(".experts" in name or ".switch_mlp" in name for name in mine)
    layer = _layer(attention, hidden, 0 if sparse else target.whole("intermediate_size"))
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    wanted: dict[str, Shape] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in norms},
        **{f"mtp.layers.0.{name}": shape for name, shape in layer.items()},
    }
    return {name: info for name, info in mine.items() if not (sparse and ".mlp." in name)}, wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """The sizes that the tensors of an attention follow from."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def _attention(sizes: DrafterConfig | _Heads, reads: int, gated: int, *, bias: bool, norms: bool) -> dict[str, Shape]:
    """Tensors of an attention over inputs of size `reads`; `gated` 2: queries carry a gate of the same size."""
    size, heads, shared = sizes.head_dim, sizes.num_attention_heads, sizes.num_key_value_heads
    outputs = {"q_proj": heads * size * gated, "k_proj": shared * size, "v_proj": shared * size}
    found: dict[str, Shape] = {f"{name}.weight": (rows, reads) for name, rows in outputs.items()}
    found["o_proj.weight"] = (sizes.hidden_size, heads * size)
    if bias:
        found |= {f"{name}.bias": (rows,) for name, rows in {**outputs, "o_proj": sizes.hidden_size}.items()}
    if norms:
        found |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    return found


def _layer(attention: Mapping[str, Shape], hidden: int, intermediate: int) -> dict[str, Shape]:
    """Tensors of a decoder layer; `intermediate` 0 leaves out what follows the attention."""
    found: dict[str, Shape] = {f"self_attn.{name}": shape for name, shape in attention.items()}
    found |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if intermediate:
        found |= {f"mlp.{name}_proj.weight": (intermediate, hidden) for name in ("gate", "up")}
        found["mlp.down_proj.weight"] = (hidden, intermediate)
    return found


def _check_attention(config: DrafterConfig) -> None:
    """What would only fail when the first token is drafted."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelUnavailable(
            f"its {config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} for keys and "
            f"values; {DOWNLOAD_AGAIN}"
        )
    turned = int(config.head_dim * config.partial_rotary_factor)
    if not 0 < turned <= config.head_dim or turned % 2:
        raise ModelUnavailable(
            f"its rotary positions turn {turned} of {config.head_dim} numbers of a head, which cannot run here; "
            f"{CHOOSE_ANOTHER}"
        )
    if config.rope_scaling is not None:
        _check_rope(config.rope_scaling)


def _check_rope(scaling: Config) -> None:
    kind = str(scaling.get("type") or scaling.get("rope_type"))
    if kind not in ROPE_NUMBERS:
        raise ModelUnavailable(
            f"its rotary positions are of the kind {printable(kind)}, which cannot run here; {CHOOSE_ANOTHER}"
        )
    values = ConfigValues(scaling)
    for key in ROPE_NUMBERS[kind]:
        if values.get(key) is None or values.real(key, 0.0) == 0.0:
            raise ModelUnavailable(f"its config.json gives no usable {key} for its rotary positions; {DOWNLOAD_AGAIN}")
    if kind == "longrope" and not all(isinstance(values.get(key), list) for key in ("short_factor", "long_factor")):
        raise ModelUnavailable(f"its config.json gives no factors for its rotary positions; {DOWNLOAD_AGAIN}")


def _compare(tensors: Tensors, wanted: Mapping[str, Shape]) -> None:
    if missing := wanted.keys() - tensors.keys():
        raise ModelUnavailable(f"its weights lack {_some(missing)}, which its config.json asks for; {DOWNLOAD_AGAIN}")
    if foreign := tensors.keys() - wanted.keys():
        raise ModelUnavailable(
            f"its weights hold {_some(foreign)}, which its config.json does not ask for; {DOWNLOAD_AGAIN}"
        )
    for name, shape in wanted.items():
        found = tensors[name]
        if found.shape != shape:
            here, there = (" x ".join(map(str, each)) for each in (found.shape, shape))
            raise ModelUnavailable(
                f"its {name} is {here}, its config.json and the main model ask for {there}; {DOWNLOAD_AGAIN}"
            )
        if found.dtype not in (INTEGERS if name == "d2t" else NUMBERS):
            raise ModelUnavailable(f"its {name} is stored as {found.dtype}, which cannot run here; {CHOOSE_ANOTHER}")


def _some(names: Iterable[str]) -> str:
    """The first name, and how many more there are."""
    first, *more = sorted(names)
    return f"{printable(first)} and {len(more)} more tensors" if more else f"the tensor {printable(first)}"
