"""Estimates the bytes that a unit takes while it serves, from safetensors headers and configs; weights are not read.

The sum covers all weights in the dtype of computation, keys and values for a context budget, recurrent states of all
rows, and activations of one prefill chunk. The worker computes it before a load, the server to show the memory of a
choice. `widen`: the device computes in float32, so half-precision weights take twice their size.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from app.core.request import UNQUANTISED, Quantisation
from app.core.unit import DrafterSpecification, ModelSpecification
from app.models.config_values import (
    HEADS_KEYS,
    HIDDEN_KEYS,
    KEY_VALUE_HEADS_KEYS,
    LAYER_KEYS,
    VOCABULARY_KEYS,
    context_tokens,
    text_number,
    text_part,
)
from app.models.draft_lengths import longest_draft
from app.models.drafters.methods import FEATURE_METHODS, MTP
from app.models.encoders import BATCH_TOKENS
from app.models.folder import ModelFolder, Packing, inspect_folder

FULL_ATTENTION = ("full_attention", "attention")
WINDOW_ATTENTION = ("sliding_attention", "chunked_attention")
"""Names in `layer_types` of layers that cache every token, and of layers that cache a window of tokens."""
FUSED_SIZES = frozenset({64, 72, 80, 96, 128})
"""Head sizes whose prefill attention never stores scores on Metal. For 192 and 256 the path that stores them is faster
(mlx/backend/metal/scaled_dot_product_attention.cpp, `use_fallback`); other sizes have no fused kernel."""
CONTEXT_BUDGET_TOKENS = 16_384
"""Tokens, over all rows together, whose keys and values are reserved when no context length was chosen."""
RECORDED_CHANNELS = 4
"""Numbers per draft and channel that a recurrent layer keeps until verification: the convolution's input and output,
and the scan's inputs."""
SMALLEST_CHUNK_TOKENS = 32
"""Shortest prefill chunk, in tokens, however long the context."""
SHARED_CHUNK_TOKENS = 512
"""Longest prefill chunk, in tokens, while other requests have rows."""
GROWTH_STEP_TOKENS = 256
"""Granularity, in positions, of cache buffers: their sizes are multiples of it."""
SHARED_TOKENS = 1024
"""Length, in tokens, up to which rows share one rectangle of buffers; longer rows have their own buffers."""
QUANTISED_FROM_TOKENS = SHARED_TOKENS
"""Shortest prompt, in tokens, whose keys and values are quantised by default: shorter ones would save little."""
GROUP_SIZES = (64, 32)
"""Sizes of groups, in numbers that share a scale and a bias; the first that divides keys and values is used."""
KV_REFUSALS = {
    "latents": "its keys and values are compressed into latents already",
    "no_positions": "none of its layers keeps the keys and values of every token",
    "head_size": f"the size of its heads is no multiple of {GROUP_SIZES[-1]}",
}
"""Reasons why a model's keys and values cannot be quantised, by code."""

_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def is_fused(config: Mapping[str, Any], architecture: str) -> bool:
    """Return whether prefill attention is fused: it stores no scores. `architecture` is mlx's GPU name, "" on a
    CPU. A CPU never fuses it, Metal only for some head sizes, other GPUs always."""
    is_metal = architecture.startswith("applegpu")
    return _attention_sizes(text_part(config)) <= FUSED_SIZES if is_metal else bool(architecture)


def prefill_pairs(*, fused: bool) -> int:
    """Return the maximum query-key pairs of a prefill chunk. Unfused attention stores a score for each. Fused attention
    does not, but macOS kills long command buffers: this limit allows chunks of 2,048 tokens up to position 65k."""
    return 1 << 27 if fused else 1 << 23


class RowSize(NamedTuple):
    """Final length of a row and length of its prompt, in tokens; the prompt decides whether the row is quantised."""

    tokens: int
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one model of a unit, by use."""

    weights_bytes: int = 0
    cache_bytes: int = 0
    """Keys, values and recurrent states."""
    peak_bytes: int = 0
    """Activations of a prefill chunk, and logits."""
    row_bytes: int = 0
    """Bytes of a row that do not depend on its length: windows and recurrent states."""
    position_bytes: int = 0
    """Keys and values of one token in the layers that cache every token."""
    quantised_bytes: int = 0
    """Keys and values of one token in these layers of the main model, in a quantised row."""
    saved_bytes: int = 0
    """Bytes per token that quantisation saves."""
    quantised_from_tokens: int = 0

    @property
    def total_bytes(self) -> int:
        """Total bytes."""
        return self.fixed_bytes + self.cache_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes held whether or not a request runs."""
        return self.weights_bytes + self.peak_bytes

    def row_position_bytes(self, row: RowSize) -> int:
        """Return the bytes per token in a row of this size."""
        return self.position_bytes - (self.saved_bytes if self._quantises(row) else 0)

    def rows_bytes(self, sizes: Sequence[RowSize]) -> int:
        """Return the maximum bytes of the caches of these rows. Drafters' caches are never quantised, so they count
        every row in full, short ones in the shared rectangle."""
        rows, positions = _buffer_layout([size.tokens for size in sizes])
        unquantised_lengths = [size.tokens for size in sizes if not self._quantises(size)]
        quantised = sum(_reserved_positions(size.tokens) for size in sizes if self._quantises(size))
        saved = (positions - _buffer_layout(unquantised_lengths)[1]) * (self.quantised_bytes + self.saved_bytes)
        return rows * self.row_bytes + positions * self.position_bytes - saved + quantised * self.quantised_bytes

    def _quantises(self, row: RowSize) -> bool:
        return self.saved_bytes > 0 and row.prompt_tokens >= self.quantised_from_tokens

    def __add__(self, other: "Footprint") -> "Footprint":
        """Return the sum; the two models compute one after the other, so only the larger peak counts."""
        totals = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Footprint(**totals | {"peak_bytes": max(self.peak_bytes, other.peak_bytes)})


def _buffer_layout(lengths: Sequence[int]) -> tuple[int, int]:
    """Return the total rows and positions of the buffers for rows of these lengths, in tokens. All short rows share one
    rectangle, as wide as the longest of them; each long row has its own buffer."""
    short = [tokens for tokens in lengths if tokens <= SHARED_TOKENS]
    positions = sum(map(_reserved_positions, lengths)) - sum(map(_reserved_positions, short))
    rows = len(lengths) - len(short)
    if short:
        shared = 1 << (len(short) - 1).bit_length()
        rows, positions = rows + shared, positions + shared * _reserved_positions(max(short))
    return rows, positions


def unit_footprint(spec: ModelSpecification, *, widen: bool) -> Footprint:
    """Return the footprint of a unit, drafters included; takes some ms. Raises ModelUnavailable for a broken folder."""
    drafters = (drafter_footprint(drafter, spec, widen=widen) for drafter in spec.drafters)
    return sum(drafters, main_footprint(spec, widen=widen))


def main_footprint(spec: ModelSpecification, *, widen: bool) -> Footprint:
    """Return the footprint of the main model alone. Raises ModelUnavailable for a broken folder."""
    folder = inspect_folder(Path(spec.path))
    return _footprint(folder, spec, widen=widen, quantisation=quantisation_of(spec, folder.config))


def drafter_footprint(draft: DrafterSpecification, spec: ModelSpecification, *, widen: bool) -> Footprint:
    """Return the memory that one drafter adds to the unit `spec`. Raises ModelUnavailable for a broken folder."""
    folder = inspect_folder(Path(draft.path))
    if draft.method in FEATURE_METHODS:
        folder = _drafter_alone(folder, inside=draft.path == spec.path)
        if packing := Packing.for_target(inspect_folder(Path(spec.path)).config):
            folder = dataclasses.replace(folder, tensors=packing.packed(folder.tensors, item_bytes=4 if widen else 2))
    return _footprint(folder, spec, widen=widen)


def cache_families(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cache families of a model (`trim`, `slice`, `snapshot`), as its config shows them."""
    layer_counts = zip(("trim", "slice", "snapshot"), _layer_kinds(text_part(config)), strict=True)
    return tuple(name for name, layers in layer_counts if layers)


def quantisation_of(spec: ModelSpecification, config: Mapping[str, Any]) -> Quantisation:
    """Return the quantisation chosen for keys and values, or `UNQUANTISED` if this model's cannot be quantised."""
    return UNQUANTISED if kv_refusal(config) else spec.quantisation


def kv_refusal(config: Mapping[str, Any]) -> str:
    """Return the code of `KV_REFUSALS` that applies to a model; "" if none does."""
    text = text_part(config)
    if text_number(text, "kv_lora_rank"):
        return "latents"
    if not _layer_kinds(text)[0]:
        return "no_positions"
    return "" if group_size(_head_size(text)) else "head_size"


def group_size(*dimensions: int) -> int:
    """Return the first of `GROUP_SIZES` that divides all `dimensions` of keys and values; 0 if none does."""
    divisors = (size for size in GROUP_SIZES if all(dimension and dimension % size == 0 for dimension in dimensions))
    return next(divisors, 0)


def _drafter_alone(folder: ModelFolder, *, inside: bool) -> ModelFolder:
    """Return a feature drafter's folder with a config of its own layers only. The main model's footprint includes the
    weights of a head `inside` its checkpoint. An MTP config lists the target's layers; the head has few, all full."""
    nested = folder.config.get("transformer_layer_config")
    config = {**(nested if isinstance(nested, dict) else {}), **text_part(folder.config), "text_config": None}
    if inside or folder.drafter == MTP.name:
        layers = text_number(config, "mtp_num_hidden_layers", "num_nextn_predict_layers") or 1
        config["layer_types"] = ["full_attention"] * layers
    return dataclasses.replace(folder, config=config, tensors={} if inside else folder.tensors)


def weights_bytes(folder: ModelFolder, *, widen: bool) -> int:
    """Return the bytes of all tensors in memory: packed integers keep their size, 8-bit floats are widened, and the
    4-bit zero points of AutoAWQ and GPTQ become biases of 16 bits or, with `widen`, 32."""
    sizes = ((name, tensor.dtype, tensor.size_bytes) for name, tensor in folder.tensors.items())
    return sum(_tensor_bytes(name, dtype, size, widen=widen) for name, dtype, size in sizes)


def _tensor_bytes(name: str, dtype: str, size: int, *, widen: bool) -> int:
    if name.endswith(".qzeros"):
        return size * (8 if widen else 4)
    if dtype in {"F8_E4M3", "F8_E5M2"}:
        return size * (4 if widen else 2)
    if dtype in _FLOAT_BYTES and widen:
        return size * 4 // _FLOAT_BYTES[dtype]
    return size


def _footprint(
    folder: ModelFolder, spec: ModelSpecification, *, widen: bool, quantisation: Quantisation = UNQUANTISED
) -> Footprint:
    shape = _Shape.read(text_part(folder.config))
    fused = is_fused(folder.config, "" if widen else "applegpu")
    item_bytes = 4 if widen else 2
    limit = context_tokens(folder.config)
    if folder.is_encoder:
        longest = min(limit, spec.max_context_tokens or limit)
        peak = shape.encoder_peak_bytes(longest, item_bytes=item_bytes, fused=not widen)
        return Footprint(weights_bytes(folder, widen=widen), peak_bytes=peak)
    budget = min(limit, spec.max_context_tokens or CONTEXT_BUDGET_TOKENS)
    position, bits = shape.position_bytes(item_bytes=item_bytes), quantisation.bits
    quantised = shape.quantised_bytes(bits, item_bytes=item_bytes) if bits else 0
    saved = position - quantised if bits else 0
    peak = shape.peak_bytes(
        budget, rows=spec.max_rows, chunk=spec.prefill_chunk_tokens, item_bytes=item_bytes, fused=fused
    )
    return Footprint(
        weights_bytes(folder, widen=widen),
        shape.cache_bytes(budget, rows=spec.max_rows, item_bytes=item_bytes) - budget * saved,
        peak + (budget * shape.position_width * item_bytes if bits else 0),  # one layer at a time is unpacked
        shape.row_bytes(chunk=spec.prefill_chunk_tokens, item_bytes=item_bytes),
        position,
        quantised,
        saved,
        quantisation.from_tokens,
    )


def grown_capacity(tokens: int) -> int:
    """Return the positions to allocate for a buffer that grows to `tokens`: an eighth more, so that copies amortise."""
    return tokens + tokens // 8


def _reserved_positions(tokens: int) -> int:
    """Return an upper bound for `grown_capacity`, rounded up to whole steps."""
    return grown_capacity(tokens) + GROWTH_STEP_TOKENS


@dataclass(frozen=True, slots=True)
class _Shape:
    """Values of a config that determine the sizes of caches and activations; 0 where the config states none."""

    full_layers: int
    sliding_layers: int
    recurrent_layers: int
    window: int
    position_width: int
    """Numbers stored per token and attention layer."""
    head_size: int
    state_size: int
    """Numbers stored per row and recurrent layer."""
    channels: int
    """Numbers per token that a recurrent layer convolves."""
    heads: int
    hidden: int
    intermediate: int
    vocabulary: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "_Shape":
        full, sliding, recurrent = _layer_kinds(config)
        return cls(
            full_layers=full,
            sliding_layers=sliding,
            recurrent_layers=recurrent,
            window=text_number(config, "sliding_window"),
            position_width=_position_width(config),
            head_size=_head_size(config),
            state_size=_state_size(config),
            channels=_channels(config),
            heads=text_number(config, *HEADS_KEYS),
            hidden=text_number(config, *HIDDEN_KEYS),
            intermediate=max(text_number(config, "intermediate_size"), text_number(config, "moe_intermediate_size")),
            vocabulary=text_number(config, *VOCABULARY_KEYS),
        )

    def cache_bytes(self, budget: int, *, rows: int, item_bytes: int) -> int:
        """Return the bytes of `budget` tokens shared by all rows, plus windows and states for every row."""
        window = min(budget, rows * self.window)
        positions = self.full_layers * budget + self.sliding_layers * window
        return positions * self.position_width * item_bytes + rows * self.states_bytes

    @property
    def states_bytes(self) -> int:
        """Bytes of three copies of a row's recurrent states: before a step, after it, and at the end of the prompt."""
        return 3 * self.recurrent_layers * self.state_size * 4

    def row_bytes(self, *, chunk: int, item_bytes: int) -> int:
        """Return the bytes of a window and a chunk in each sliding layer, of the states, and of a shared chunk in the
        full layers, where prefill chunks of other rows write past this row's end."""
        window = self.sliding_layers * _reserved_positions(self.window + chunk) * self.position_width * item_bytes
        shared = min(chunk, SHARED_CHUNK_TOKENS)
        return window + self.states_bytes + (shared + shared // 4) * self.position_bytes(item_bytes=item_bytes)

    def position_bytes(self, *, item_bytes: int) -> int:
        """Return the bytes of one token in the layers that cache every token."""
        return self.full_layers * self.position_width * item_bytes

    def quantised_bytes(self, bits: int, *, item_bytes: int) -> int:
        """Return the bytes of one token in these layers when quantised: `bits` per number, scale and bias per group."""
        numbers = self.full_layers * self.position_width
        return numbers * bits // 8 + 2 * item_bytes * numbers // group_size(self.head_size)

    def peak_bytes(self, budget: int, *, rows: int, chunk: int, item_bytes: int, fused: bool) -> int:
        """Return the bytes of a prefill chunk or verify step: activations of one layer, logits, values recorded by
        recurrent layers and, unless fused, the scores, their mask and the positions compared for the mask."""
        verified = rows * (1 + longest_draft(rows))
        tokens = max(min(chunk, budget), verified)
        width = max(self.hidden, self.heads * self.head_size)
        activations = tokens * (12 * width + 3 * self.intermediate) * item_bytes
        pairs = max(min(tokens, SMALLEST_CHUNK_TOKENS) * budget, min(tokens * budget, prefill_pairs(fused=False)))
        scores = 0 if fused else pairs * (4 * self.heads + 1) + 4 * budget
        recorded = verified * self.recurrent_layers * RECORDED_CHANNELS * self.channels * 4
        return activations + recorded + scores + verified * self.vocabulary * 4

    def encoder_peak_bytes(self, longest: int, *, item_bytes: int, fused: bool) -> int:
        """Return one layer's bytes for a batch or one longer text: activations, masks, and scores unless fused."""
        tokens = max(longest, BATCH_TOKENS)
        fused = fused and self.hidden in {size * self.heads for size in FUSED_SIZES}
        scores = tokens * longest * 4 * (1 if fused else 1 + 2 * self.heads)
        return tokens * (12 * self.hidden + 4 * self.intermediate) * item_bytes + scores


def _layer_kinds(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Count the layers that cache every token, a window of tokens, or a state of fixed size.

    If a hybrid's config lists no kinds of layers (parallel heads), each layer counts as full and as recurrent.
    """
    layers = text_number(config, *LAYER_KEYS)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        full, sliding = (sum(map(kinds.count, names)) for names in (FULL_ATTENTION, WINDOW_ATTENTION))
        return full, sliding, len(kinds) - full - sliding
    if interval := text_number(config, "full_attention_interval"):
        return layers // interval, 0, layers - layers // interval
    if pattern := text_number(config, "sliding_window_pattern"):
        return layers // pattern, layers - layers // pattern, 0
    attention = layers if text_number(config, *HEADS_KEYS) else 0
    return attention, 0, layers if _state_size(config) else 0


def _position_width(config: Mapping[str, Any]) -> int:
    """Return the numbers per token and layer: one vector in latent attention, else a key and a value per KV head."""
    if rank := text_number(config, "kv_lora_rank"):
        return rank + text_number(config, "qk_rope_head_dim")
    heads = text_number(config, *KEY_VALUE_HEADS_KEYS, *HEADS_KEYS)
    return 2 * heads * _head_size(config)


def _head_size(config: Mapping[str, Any]) -> int:
    heads = text_number(config, *HEADS_KEYS)
    return text_number(config, "head_dim") or (text_number(config, *HIDDEN_KEYS) // heads if heads else 0)


def _attention_sizes(config: Mapping[str, Any]) -> set[int]:
    """Return the sizes of a head's keys; in latent attention, the sum of their two parts."""
    latent = text_number(config, "qk_nope_head_dim") + text_number(config, "qk_rope_head_dim")
    return ({latent} if latent else {_head_size(config), text_number(config, "global_head_dim")}) - {0}


def _state_size(config: Mapping[str, Any]) -> int:
    """Return the numbers in one recurrent state: a key-by-value matrix per head (gated delta) or heads × width × state
    (Mamba), plus the last inputs of the convolution, which it reads again."""
    kernel = text_number(config, "linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv")
    delta = text_number(config, "linear_num_value_heads") * text_number(config, "linear_key_head_dim")
    matrix = delta * text_number(config, "linear_value_head_dim") or _mamba_inner(config) * _mamba_state(config)
    return matrix + kernel * _channels(config)


def _channels(config: Mapping[str, Any]) -> int:
    """Return the numbers per token that a recurrent layer convolves: queries, keys and values, or Mamba's inputs."""
    if keys := text_number(config, "linear_num_key_heads") * text_number(config, "linear_key_head_dim"):
        return 2 * keys + text_number(config, "linear_num_value_heads") * text_number(config, "linear_value_head_dim")
    return _mamba_inner(config) + 2 * _mamba_state(config) * text_number(config, "mamba_n_groups", "n_groups")


def _mamba_state(config: Mapping[str, Any]) -> int:
    return text_number(config, "mamba_d_state", "state_size", "ssm_state_size")


def _mamba_inner(config: Mapping[str, Any]) -> int:
    heads = text_number(config, "mamba_n_heads", "mamba_num_heads") or text_number(config, "num_heads")
    inner = heads * (text_number(config, "mamba_d_head", "mamba_head_dim") or text_number(config, "head_dim"))
    return inner or (text_number(config, "intermediate_size") if _mamba_state(config) else 0)
