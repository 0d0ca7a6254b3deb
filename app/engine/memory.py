"""How much memory a model needs, how much there is, and what mlx holds now. All sizes in bytes.

Admission is ours (`mx.set_memory_limit` is no cap) and nothing is ever wired (`mx.set_wired_limit` is behind macOS
kernel panics): this file only counts. `estimate` reads safetensors headers and configs, never a weight. An estimate
is what a unit may hold while it serves: weights in the dtype they are computed in, its drafters', keys and values of a
context budget, recurrent states of every row, and the activations of one prefill chunk.
"""

import dataclasses
import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from app.core.drafter_folder import FEATURE_METHODS
from app.core.errors import InvalidRequest
from app.core.messages import ModelSpecification
from app.core.model_folder import ModelFolder, inspect_folder
from app.core.sizes import parse_size

GIGABYTE = 10**9
LIMIT_VARIABLE = "PACELINE_MEMORY_LIMIT"
WORKING_SET_SHARE = 0.9
DEFAULT_CONTEXT_TOKENS = 32_768
"""Context of a model whose config states none."""
CONTEXT_BUDGET_TOKENS = 16_384
"""Tokens, over all rows together, whose keys and values are set aside when no context length was chosen."""
VERIFY_WIDTH = 17
"""Positions of one row whose logits may exist at once: sixteen drafts and the current token."""

_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "seq_length", "n_ctx")


# --- what there is --------------------------------------------------------------------------------------------


def ceiling_from(total_bytes: int, recommended_bytes: int | None) -> int:
    """The most that models may hold: RAM less a reserve of 4 GB (8 GB from 16 GB RAM up), within the GPU's share.

    A machine too small for the reserve keeps half. Source: shared reference, reliability §3.2.
    """
    reserve = 4 * GIGABYTE if total_bytes < 16 * GIGABYTE else 8 * GIGABYTE
    ceiling = max(total_bytes - reserve, total_bytes // 2)
    if recommended_bytes:
        ceiling = min(ceiling, int(recommended_bytes * WORKING_SET_SHARE))
    return ceiling


def ceiling_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """The ceiling of this machine, or what `PACELINE_MEMORY_LIMIT` says. Raises InvalidRequest when that is no size."""
    if override := environment.get(LIMIT_VARIABLE):
        try:
            return parse_size(override)
        except ValueError as error:
            raise InvalidRequest(str(error), parameter=LIMIT_VARIABLE) from error
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return ceiling_from(psutil.virtual_memory().total, int(recommended) if recommended else None)


def device_name() -> str:
    """The device that computes, for people: for example "Apple M3 Max (gpu)"."""
    device = mx.default_device()
    kind = "gpu" if device.type == mx.DeviceType.gpu else "cpu"
    return f"{mx.device_info().get('device_name', 'unknown')} ({kind})"


def computes_in_float32() -> bool:
    """On the CPU half precision is slow, so weights become float32; on Metal and CUDA the checkpoint's dtype stays."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


# --- what mlx holds -------------------------------------------------------------------------------------------


def active() -> int:
    """Bytes in live arrays."""
    return int(mx.get_active_memory())


def cached() -> int:
    """Bytes in freed buffers that mlx keeps for reuse."""
    return int(mx.get_cache_memory())


def peak() -> int:
    """The most bytes that were ever in live arrays."""
    return int(mx.get_peak_memory())


def readings() -> tuple[int, int, int]:
    """Active, cached and peak bytes."""
    return active(), cached(), peak()


def release() -> None:
    """Give freed buffers back to the system: collect cycles that hold arrays, then empty mlx's cache."""
    gc.collect()
    mx.clear_cache()


# --- what a model needs ---------------------------------------------------------------------------------------


def estimate(spec: ModelSpecification, *, float32: bool | None = None) -> int:
    """Bytes that the unit of `spec` may hold while it serves; reads headers and configs only, some milliseconds.

    `float32` says whether weights are widened; None asks the device. Raises ModelUnavailable for a broken folder.
    """
    widen = computes_in_float32() if float32 is None else float32
    needed = _model_bytes(inspect_folder(Path(spec.path)), spec, widen=widen)
    for draft in spec.drafts:
        folder = inspect_folder(Path(draft.path))
        if draft.method in FEATURE_METHODS:
            folder = _drafter_alone(folder, inside=draft.path == spec.path)
        needed += _model_bytes(folder, spec, widen=widen)
    return needed


def _drafter_alone(folder: ModelFolder, *, inside: bool) -> ModelFolder:
    """A feature drafter with the sizes of its own layers. The weights of one `inside` the main model's checkpoint were
    counted there; a multi-token head tells the layers of its target, but has one or a few, all with attention."""
    nested = folder.config.get("transformer_layer_config")
    config = {**(nested if isinstance(nested, dict) else {}), **text_config(folder.config), "text_config": None}
    if inside or folder.drafter == "mtp":
        layers = _number(config, "mtp_num_hidden_layers", "num_nextn_predict_layers") or 1
        config["layer_types"] = ["full_attention"] * layers
    return dataclasses.replace(folder, config=config, tensors={} if inside else folder.tensors)


def context_tokens(config: Mapping[str, Any]) -> int:
    """The longest context that a config states, in tokens."""
    return _number(text_config(config), *_CONTEXT_KEYS) or DEFAULT_CONTEXT_TOKENS


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model: multimodal configs nest them under `text_config`."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def weights_bytes(folder: ModelFolder, *, widen: bool) -> int:
    """Bytes of all tensors as they are computed with; packed integers keep their size, 8-bit floats unpack."""
    return sum(_tensor_bytes(tensor.dtype, tensor.size_bytes, widen=widen) for tensor in folder.tensors.values())


def _tensor_bytes(dtype: str, size: int, *, widen: bool) -> int:
    if dtype in {"F8_E4M3", "F8_E5M2"}:
        return size * (4 if widen else 2)
    if dtype in _FLOAT_BYTES and widen:
        return size * 4 // _FLOAT_BYTES[dtype]
    return size


def _model_bytes(folder: ModelFolder, spec: ModelSpecification, *, widen: bool) -> int:
    shape = _Shape.read(text_config(folder.config))
    item = 4 if widen else 2
    limit = context_tokens(folder.config)
    budget = min(limit, spec.max_context_tokens or CONTEXT_BUDGET_TOKENS)
    return (
        weights_bytes(folder, widen=widen)
        + shape.cache_bytes(budget, rows=spec.max_rows, item=item)
        + shape.peak_bytes(budget, rows=spec.max_rows, chunk=spec.prefill_chunk_tokens, item=item, fused=not widen)
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """The numbers of a config that decide about caches and activations; what is not stated counts as zero."""

    full_layers: int
    sliding_layers: int
    recurrent_layers: int
    window: int
    position_width: int
    """Numbers kept per token and attention layer."""
    state_size: int
    """Numbers kept per row and recurrent layer."""
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
            window=_number(config, "sliding_window"),
            position_width=_position_width(config),
            state_size=_state_size(config),
            heads=_number(config, "num_attention_heads"),
            hidden=_number(config, "hidden_size", "d_model"),
            intermediate=max(_number(config, "intermediate_size"), _number(config, "moe_intermediate_size")),
            vocabulary=_number(config, "vocab_size"),
        )

    def cache_bytes(self, budget: int, *, rows: int, item: int) -> int:
        """Keys and values of `budget` tokens shared by all rows; windows and states once for every row."""
        window = min(budget, rows * self.window)
        positions = self.full_layers * budget + self.sliding_layers * window
        return positions * self.position_width * item + self.recurrent_layers * rows * self.state_size * 4

    def peak_bytes(self, budget: int, *, rows: int, chunk: int, item: int, fused: bool) -> int:
        """Activations of one prefill chunk in one layer, or logits of one verify step; unfused kernels keep scores."""
        activations = chunk * (8 * self.hidden + 3 * self.intermediate) * item
        scores = 0 if fused else chunk * budget * self.heads * 4
        return activations + scores + rows * VERIFY_WIDTH * self.vocabulary * 4


def _number(config: Mapping[str, Any], *keys: str) -> int:
    return next((int(value) for key in keys if isinstance(value := config.get(key), int | float)), 0)


def _layer_kinds(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """How many layers keep every token, a window of tokens, or a state of fixed size.

    A hybrid that does not say which layer is which (parallel heads) counts each layer as both.
    """
    layers = _number(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
        return full, sliding, len(kinds) - full - sliding
    if interval := _number(config, "full_attention_interval"):
        return layers // interval, 0, layers - layers // interval
    if pattern := _number(config, "sliding_window_pattern"):
        return layers // pattern, layers - layers // pattern, 0
    attention = layers if _number(config, "num_attention_heads") else 0
    return attention, 0, layers if _state_size(config) else 0


def _position_width(config: Mapping[str, Any]) -> int:
    """Latent attention keeps one compressed vector; the others a key and a value per key-value head."""
    if rank := _number(config, "kv_lora_rank"):
        return rank + _number(config, "qk_rope_head_dim")
    heads = _number(config, "num_attention_heads")
    dimension = _number(config, "head_dim") or (_number(config, "hidden_size") // heads if heads else 0)
    return 2 * (_number(config, "num_key_value_heads") or heads) * dimension


def _state_size(config: Mapping[str, Any]) -> int:
    """Numbers in one recurrent state: a key-by-value matrix per head (gated delta) or heads × width × state (Mamba)."""
    delta = _number(config, "linear_num_value_heads") * _number(config, "linear_key_head_dim")
    if delta:
        return delta * _number(config, "linear_value_head_dim")
    state = _number(config, "mamba_d_state", "state_size", "ssm_state_size")
    heads = _number(config, "mamba_n_heads", "mamba_num_heads") or _number(config, "num_heads")
    width = _number(config, "mamba_d_head", "mamba_head_dim") or _number(config, "head_dim")
    return heads * width * state or _number(config, "intermediate_size") * state
