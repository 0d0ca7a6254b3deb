"""Reads a feature drafter's `config.json`, checks it against the target, and checks that the checkpoint has exactly the
tensors that the config asks for, in shapes and dtypes that can run.

No weights are read: the server uses this to pair models, the worker to build drafters. Problems raise
`ModelUnavailable` with one line. A tap is a decoder layer of the target, counted from 0, whose *output* the drafter
reads; ids of other conventions are converted. `FINAL` is the state after the final norm.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from app.core.errors import ModelUnavailable
from app.models.config_values import DEFAULT_CONTEXT_TOKENS, Config, ConfigValues, TargetFacts
from app.models.safe_files import DOWNLOAD_AGAIN, TensorInfo, printable
from app.models.tokenizer_file import Tokenizer

FINAL = -1
FULL, SLIDING = "full_attention", "sliding_attention"
CHOOSE_ANOTHER = "choose another one"
FLOAT_DTYPES = frozenset({"F16", "BF16", "F32"})
INTEGER_DTYPES = frozenset({"I32", "I64"})
ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
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
"""Supported kinds of rotary positions (RoPE), each with its required parameters."""

Shape = tuple[int, ...]
Tensors = Mapping[str, TensorInfo]


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
    """Number of logits of the target."""
    draft_vocab_size: int
    """Number of logits of the drafter."""
    taps: tuple[int, ...]
    target_layers: int
    target_hidden_size: int
    layer_types: tuple[str, ...] = (FULL,)

    @classmethod
    def read(cls, config: Config, target_config: Config) -> Self:
        """Read a drafter's config and check it against its target's. Raises ModelUnavailable.

        Default for methods that define no format: one or more layers of the target's width, fed by `target_layer_ids`.
        """
        target, values = TargetFacts.read(target_config), ConfigValues(config)
        check_target(values, target)
        taps = values.layer_ids("target_layer_ids")
        return cls(**read_fields(values, target), taps=(FINAL,) if taps is None else checked_taps(taps, target))

    def check(self, folder: Path, tensors: Tensors, target: Tokenizer) -> None:
        """Run the further checks of a format, on a drafter whose tensors match its config; by default there are none.

        `target` is the tokenizer of the main model. Raises ModelUnavailable.
        """

    def expected_tensors(self, tensors: Tensors, target_config: Config) -> tuple[Tensors, Mapping[str, Shape]]:  # noqa: ARG002
        """Return the tensors to load, under Paceline's names, and the names and shapes that they must have."""
        return {}, {}


def layered_values(config: Config, section: str) -> ConfigValues:
    """Return values looked up in the method's section, then at the top level, then in `speculators`' layer config."""
    top = ConfigValues(config)
    return ConfigValues(top.section(section), config, top.section("transformer_layer_config"))


def is_speculators(config: Config) -> bool:
    return "speculators_model_type" in config or "transformer_layer_config" in config


def check_target(values: ConfigValues, target: TargetFacts) -> None:
    """Check that the drafter was trained for the target's width, depth and vocabulary size. Raises ModelUnavailable."""
    width = values.whole("target_hidden_size", "hidden_size", default=target.hidden_size)
    if width != target.hidden_size:
        raise ModelUnavailable(f"it was made for a hidden size of {width}, the main model has {target.hidden_size}")
    layers = values.whole("num_target_layers", default=target.layers)
    if layers != target.layers:
        raise ModelUnavailable(f"it was made for {layers} layers, the main model has {target.layers}")
    rows = values.whole("vocab_size", default=target.vocab_size)
    if rows != target.vocab_size:
        raise ModelUnavailable(f"it was made for {rows} tokens, the main model has {target.vocab_size}")


def read_fields(values: ConfigValues, target: TargetFacts) -> dict[str, Any]:
    """Return the fields of `DrafterConfig` except `taps` and `layer_types`."""
    hidden = values.whole("hidden_size")
    heads = values.whole("num_attention_heads")
    rows = target.vocab_size or values.whole("vocab_size")
    parameters = values.section("rope_parameters", "rope_scaling")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelUnavailable("its rotary positions differ by kind of layer, which is not supported")
    rope = ConfigValues(values.section("rope_scaling"), parameters)
    rope_type = rope.get("rope_type", "type")
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
        "rope_scaling": None if rope_type in (None, "default") else {**parameters, **values.section("rope_scaling")},
        "rope_traditional": values.get("is_neox_style", "rope_is_neox_style") is False,
        "partial_rotary_factor": rope.real("partial_rotary_factor", values.real("partial_rotary_factor", 1.0)),
        "max_position_embeddings": values.whole(
            "max_position_embeddings", default=target.context_tokens or DEFAULT_CONTEXT_TOKENS
        ),
        "attention_bias": values.flag("attention_bias"),
        "vocab_size": rows,
        "draft_vocab_size": _draft_rows(values, rows),
        "target_layers": target.layers,
        "target_hidden_size": target.hidden_size,
    }


def _draft_rows(values: ConfigValues, vocabulary: int) -> int:
    rows = values.whole("draft_vocab_size", default=vocabulary)
    if rows > vocabulary:
        raise ModelUnavailable(f"it drafts from {rows} tokens, the main model has {vocabulary}")
    return rows


def checked_taps(taps: Sequence[int], target: TargetFacts) -> tuple[int, ...]:
    if any(not 0 <= tap < target.layers for tap in taps):
        raise ModelUnavailable(f"it reads layers that the main model does not have ({target.layers} layers)")
    if any(first >= second for first, second in pairwise(taps)):
        raise ModelUnavailable(f"its config.json names a layer twice or out of order; {DOWNLOAD_AGAIN}")
    return tuple(taps)


def check_tensors(config: DrafterConfig, tensors: Tensors, target_config: Config) -> None:
    """Raise ModelUnavailable if a tensor is missing or unexpected, or has the wrong shape or dtype."""
    if config.num_hidden_layers > len(tensors):  # the count is untrusted: names are built for each layer
        raise ModelUnavailable(
            f"its config.json asks for {config.num_hidden_layers} layers, its weights hold {len(tensors)} tensors; "
            f"{DOWNLOAD_AGAIN}"
        )
    _compare(*config.expected_tensors(tensors, target_config))


def without_model_prefix(tensors: Tensors) -> Tensors:
    """Strip the prefix `model.` that some checkpoints use."""
    return {name.removeprefix("model."): info for name, info in tensors.items()}


def attention_tensors(
    sizes: DrafterConfig, input_size: int, query_factor: int, *, bias: bool, norms: bool
) -> dict[str, Shape]:
    """Return the tensor shapes of an attention over inputs of `input_size`; `query_factor` 2 adds a gate to queries."""
    size, heads, shared = sizes.head_dim, sizes.num_attention_heads, sizes.num_key_value_heads
    outputs = {"q_proj": heads * size * query_factor, "k_proj": shared * size, "v_proj": shared * size}
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, input_size) for name, rows in outputs.items()}
    shapes["o_proj.weight"] = (sizes.hidden_size, heads * size)
    if bias:
        shapes |= {f"{name}.bias": (rows,) for name, rows in {**outputs, "o_proj": sizes.hidden_size}.items()}
    if norms:
        shapes |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    return shapes


def layer_tensors(attention: Mapping[str, Shape], hidden: int, intermediate: int) -> dict[str, Shape]:
    """Return the tensor shapes of a decoder layer; `intermediate` 0 leaves out the MLP."""
    shapes: dict[str, Shape] = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if intermediate:
        shapes |= {f"mlp.{name}_proj.weight": (intermediate, hidden) for name in ("gate", "up")}
        shapes["mlp.down_proj.weight"] = (hidden, intermediate)
    return shapes


def check_attention(config: DrafterConfig) -> None:
    """Raise ModelUnavailable for attention settings that would fail only when the first token is drafted."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelUnavailable(
            f"its {config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} for keys and "
            f"values; {DOWNLOAD_AGAIN}"
        )
    rotated = int(config.head_dim * config.partial_rotary_factor)
    if not 0 < rotated <= config.head_dim or rotated % 2:
        raise ModelUnavailable(
            f"its rotary embedding covers {rotated} of {config.head_dim} dimensions of a head, which is not supported; "
            f"{CHOOSE_ANOTHER}"
        )
    if config.rope_scaling is not None:
        _check_rope(config.rope_scaling)


def _check_rope(scaling: Config) -> None:
    rope_type = str(scaling.get("type") or scaling.get("rope_type"))
    if rope_type not in ROPE_PARAMETERS:
        raise ModelUnavailable(
            f"its rotary positions are of the kind {printable(rope_type)}, which is not supported; {CHOOSE_ANOTHER}"
        )
    values = ConfigValues(scaling)
    for key in ROPE_PARAMETERS[rope_type]:
        if values.get(key) is None or values.real(key, 0.0) == 0.0:
            raise ModelUnavailable(f"its config.json gives no usable {key} for its rotary positions; {DOWNLOAD_AGAIN}")
    if rope_type == "longrope" and not all(
        isinstance(values.get(key), list) for key in ("short_factor", "long_factor")
    ):
        raise ModelUnavailable(f"its config.json gives no factors for its rotary positions; {DOWNLOAD_AGAIN}")


def _compare(tensors: Tensors, expected_shapes: Mapping[str, Shape]) -> None:
    if missing := expected_shapes.keys() - tensors.keys():
        raise ModelUnavailable(
            f"its weights lack {_name_some(missing)}, which its config.json asks for; {DOWNLOAD_AGAIN}"
        )
    if unexpected := tensors.keys() - expected_shapes.keys():
        raise ModelUnavailable(
            f"its weights hold {_name_some(unexpected)}, which its config.json does not ask for; {DOWNLOAD_AGAIN}"
        )
    for name, shape in expected_shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            actual, expected = (" x ".join(map(str, dimensions)) for dimensions in (tensor.shape, shape))
            raise ModelUnavailable(
                f"its {name} is {actual}, its config.json and the main model ask for {expected}; {DOWNLOAD_AGAIN}"
            )
        if tensor.dtype not in (INTEGER_DTYPES if name == "d2t" else FLOAT_DTYPES):
            raise ModelUnavailable(f"its {name} is stored as {tensor.dtype}, which is not supported; {CHOOSE_ANOTHER}")


def _name_some(names: Iterable[str]) -> str:
    """Name the first tensor, and count the others."""
    first, *more = sorted(names)
    return f"{printable(first)} and {len(more)} more tensors" if more else f"the tensor {printable(first)}"
