"""Encoders listed in `app/models/encoders.py`: BERT (arXiv 1810.04805), RoBERTa, ModernBERT (arXiv 2412.13663).

XLM-RoBERTa and CamemBERT count positions as RoBERTa does. Modules have the names used in checkpoints, so that weights
and per-layer quantisation settings match. mlx-embeddings is not used: it is under the GPL and needs packages for
images, sound and data sets.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from app.core.errors import ModelUnavailable
from app.models.config_values import Config, ConfigValues, first_position, stated_context
from app.models.folder import ModelFolder

PREFIX = re.compile(r"^(bert|roberta|model)\.")
"""Prefix of tensor names in a checkpoint that was saved with a head on top."""
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
ACTIVATIONS = {"gelu": nn.gelu, "gelu_new": nn.gelu_approx, "gelu_pytorch_tanh": nn.gelu_approx, "relu": nn.relu}
SIZES = ("group_size", "bits", "mode")
"""Config keys of a quantisation."""


class Normed(nn.Module):
    """A linear layer whose sum with the residual is normalised."""

    def __init__(self, inputs: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps)

    def __call__(self, x: mx.array, past: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(x) + past)


class BertLayer(nn.Module):
    """Attention and a feed-forward layer, each normalised after its residual sum."""

    def __init__(self, values: ConfigValues, hidden: int, eps: float) -> None:
        super().__init__()
        wide = values.whole("intermediate_size")
        self.heads = heads_of(values, hidden)
        self.act = activation(values.get("hidden_act"))
        self.attention = nn.Module()
        self.attention.self = nn.Module()
        for name in ("query", "key", "value"):
            self.attention.self[name] = nn.Linear(hidden, hidden)
        self.attention.output = Normed(hidden, hidden, eps)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(hidden, wide)
        self.output = Normed(wide, hidden, eps)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        own = self.attention.self
        queries, keys, values = (split(projection(x), self.heads) for projection in (own.query, own.key, own.value))
        x = self.attention.output(attend(queries, keys, values, mask), x)
        return self.output(self.act(self.intermediate.dense(x)), x)


class BertEncoder(nn.Module):
    """BERT, RoBERTa, XLM-RoBERTa and CamemBERT."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        values = ConfigValues(config)
        hidden, eps = values.whole("hidden_size"), values.real("layer_norm_eps", 1e-12)
        self.first = first_position(config)
        parts = self.embeddings = nn.Module()
        parts.word_embeddings = nn.Embedding(values.whole("vocab_size"), hidden)
        parts.position_embeddings = nn.Embedding(self.first + stated_context(config), hidden)
        parts.token_type_embeddings = nn.Embedding(values.whole("type_vocab_size", default=2), hidden)
        parts.LayerNorm = nn.LayerNorm(hidden, eps)
        self.encoder = nn.Module()
        self.encoder.layer = [BertLayer(values, hidden, eps) for _ in range(values.whole("num_hidden_layers"))]

    def layer_outputs(self, tokens: mx.array, real: mx.array) -> Iterator[mx.array]:
        parts, width = self.embeddings, tokens.shape[1]
        positions = parts.position_embeddings(mx.arange(self.first, self.first + width))
        kinds = parts.token_type_embeddings(mx.zeros((1,), dtype=mx.int32))
        x = parts.LayerNorm(parts.word_embeddings(tokens) + positions + kinds)
        for layer in self.encoder.layer:
            x = layer(x, real[:, None, None, :])
            yield x


class ModernBertLayer(nn.Module):
    """Rotary attention and a gated feed-forward layer, both pre-norm; the first layer's input is normalised already."""

    def __init__(self, values: ConfigValues, hidden: int, *, is_first: bool, theta: float) -> None:
        super().__init__()
        wide, eps, biased = values.whole("intermediate_size"), values.real("norm_eps", 1e-5), values.flag("norm_bias")
        self.heads, self.theta = heads_of(values, hidden), theta
        self.act = activation(values.get("hidden_activation"))
        self.attn_norm = nn.Identity() if is_first else nn.LayerNorm(hidden, eps, bias=biased)
        self.attn = nn.Module()
        self.attn.Wqkv = nn.Linear(hidden, 3 * hidden, bias=values.flag("attention_bias"))
        self.attn.Wo = nn.Linear(hidden, hidden, bias=values.flag("attention_bias"))
        self.mlp_norm = nn.LayerNorm(hidden, eps, bias=biased)
        self.mlp = nn.Module()
        self.mlp.Wi = nn.Linear(hidden, 2 * wide, bias=values.flag("mlp_bias"))
        self.mlp.Wo = nn.Linear(wide, hidden, bias=values.flag("mlp_bias"))

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        queries, keys, values = (
            split(projected, self.heads) for projected in mx.split(self.attn.Wqkv(self.attn_norm(x)), 3, axis=-1)
        )
        queries, keys = (
            mx.fast.rope(vectors, vectors.shape[-1], traditional=False, base=self.theta, scale=1.0, offset=0)
            for vectors in (queries, keys)
        )
        x = x + self.attn.Wo(attend(queries, keys, values, mask))
        inputs, gates = mx.split(self.mlp.Wi(self.mlp_norm(x)), 2, axis=-1)
        return x + self.mlp.Wo(self.act(inputs) * gates)


class ModernBertEncoder(nn.Module):
    """Local attention over `local_attention` tokens, and global attention in every third layer by default."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        values = ConfigValues(config)
        hidden, layers = values.whole("hidden_size"), values.whole("num_hidden_layers")
        eps, biased = values.real("norm_eps", 1e-5), values.flag("norm_bias")
        self.window_radius = values.whole("local_attention", default=128) // 2
        every = values.whole("global_attn_every_n_layers", default=3)
        kinds = values.get("layer_types")
        self.is_global = [
            kinds[index] == "full_attention" if isinstance(kinds, list) and len(kinds) == layers else index % every == 0
            for index in range(layers)
        ]
        self.embeddings = nn.Module()
        self.embeddings.tok_embeddings = nn.Embedding(values.whole("vocab_size"), hidden)
        self.embeddings.norm = nn.LayerNorm(hidden, eps, bias=biased)
        self.layers = [
            ModernBertLayer(values, hidden, is_first=index == 0, theta=rope_theta(values, is_global=is_global))
            for index, is_global in enumerate(self.is_global)
        ]
        self.final_norm = nn.LayerNorm(hidden, eps, bias=biased)

    def layer_outputs(self, tokens: mx.array, real: mx.array) -> Iterator[mx.array]:
        positions = mx.arange(tokens.shape[1])
        distance = mx.abs(positions[:, None] - positions)
        all_real = real[:, None, None, :]
        # a padding position may have no real one in its window: it attends to itself, so that no softmax is empty
        local = (all_real & (distance <= self.window_radius)) | (distance == 0)
        x = self.embeddings.norm(self.embeddings.tok_embeddings(tokens))
        for layer, is_global in zip(self.layers, self.is_global, strict=True):
            x = layer(x, all_real if is_global else local)
            yield x
        yield self.final_norm(x)


Encoder = BertEncoder | ModernBertEncoder
"""Either encoder. `layer_outputs` takes `tokens` int32 [rows, width] and `real` bool [rows, width], false for padding.
It yields the lazy hidden states [rows, width, hidden] after each layer, the final ones last. Values at padding
positions mean nothing, and no real position attends to them."""


def build_encoder(folder: ModelFolder) -> Encoder:
    """Build the encoder of a folder with lazy weights. Raises ModelUnavailable for missing or misshapen tensors."""
    encoder = (ModernBertEncoder if folder.model_type == "modernbert" else BertEncoder)(folder.config)
    weights: dict[str, mx.array] = {}
    for name in folder.weight_files:
        tensors = cast("dict[str, mx.array]", mx.load(str(folder.path / name)))
        weights |= {_canonical_name(key): value for key, value in tensors.items()}
    _quantise(encoder, folder.config, weights)
    own = dict(nn.utils.tree_flatten(encoder.parameters()))
    missing = [name for name in own if name not in weights or own[name].shape != weights[name].shape]
    if missing:
        raise ModelUnavailable(
            f"tensors of its config are missing or of another shape (first {missing[0]}); download it again"
        )
    encoder.load_weights([(name, weights[name]) for name in own])
    encoder.eval()
    return encoder


def _canonical_name(name: str) -> str:
    """Return a tensor's name without the prefix that a head adds, and with an old spelling replaced."""
    name = PREFIX.sub("", name)
    old = next((suffix for suffix in OLD_NAMES if name.endswith(suffix)), "")
    return name.removesuffix(old) + OLD_NAMES[old] if old else name


def _quantise(encoder: Encoder, config: Config, weights: Mapping[str, mx.array]) -> None:
    """Quantise the layers whose weights are packed, as the config's `quantization` (mlx-lm's format) states."""
    stated = config.get("quantization")
    if not isinstance(stated, dict):
        return

    def packed(path: str, _module: nn.Module) -> bool | dict[str, Any]:
        own = stated.get(path, stated.get(f"model.{path}"))
        return f"{path}.scales" in weights and (own if isinstance(own, dict) else True)

    nn.quantize(encoder, **{key: stated[key] for key in SIZES if key in stated}, class_predicate=packed)


def heads_of(values: ConfigValues, hidden: int) -> int:
    """Return the number of attention heads. Raises ModelUnavailable unless it divides the hidden size."""
    heads = values.whole("num_attention_heads")
    if hidden % heads:
        raise ModelUnavailable(f"its hidden size {hidden} is no multiple of its {heads} heads; download it again")
    return heads


def activation(name: Any) -> Any:
    """Return the activation of that name, GELU for None. Raises ModelUnavailable for an unknown one."""
    if name is not None and name not in ACTIVATIONS:
        raise ModelUnavailable(f"its activation ({str(name)[:40]}) does not run here; choose another one")
    return ACTIVATIONS[name or "gelu"]


def rope_theta(values: ConfigValues, *, is_global: bool) -> float:
    """Return the rotary base of global or local layers, as transformers 5 or 4 spell it. Raises ModelUnavailable."""
    kind, old, usual = (
        ("full_attention", "global", 160_000.0) if is_global else ("sliding_attention", "local", 10_000.0)
    )
    own = ConfigValues(ConfigValues(values.section("rope_parameters")).section(kind))
    if values.get("rope_scaling") or own.get("rope_type") not in {None, "default"}:
        raise ModelUnavailable("its rotary positions are scaled, which is not supported; choose another one")
    return own.real("rope_theta", values.real(f"{old}_rope_theta", usual))


def split(x: mx.array, heads: int) -> mx.array:
    """Reshape [rows, width, hidden] → [rows, heads, width, hidden / heads]."""
    rows, width, hidden = x.shape
    return x.reshape(rows, width, heads, hidden // heads).transpose(0, 2, 1, 3)


def attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> mx.array:
    """Attend where `mask` is true, per head [rows, heads, width, dimension] → [rows, width, hidden]."""
    scale = queries.shape[-1] ** -0.5
    attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return attended.transpose(0, 2, 1, 3).reshape(attended.shape[0], attended.shape[2], -1)


def pooled(states: mx.array, real: mx.array, poolings: list[str]) -> mx.array:
    """Pool to unit vectors float32 [rows, hidden]: the `mean` of a row's real states, the `last` or first (`cls`)."""
    states, counts = states.astype(mx.float32), mx.sum(real, axis=1, keepdims=True)
    mean_states = mx.sum(mx.where(real[..., None], states, 0.0), axis=1) / counts
    last_states = mx.take_along_axis(states, counts[..., None] - 1, axis=1)[:, 0]
    by_pooling = {"mean": mean_states, "last": last_states, "cls": states[:, 0]}
    vectors = mx.stack([by_pooling[pooling][row] for row, pooling in enumerate(poolings)])
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
