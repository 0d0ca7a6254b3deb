"""Tiny random encoders as folders, with tensors named as in published checkpoints, and their outputs, computed by plain
numpy for one text at a time."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

Array = NDArray[np.float64]
Weights = dict[str, Array]

KINDS = ("bert", "roberta", "xlm-roberta", "camembert", "modernbert")
HIDDEN, HEADS, WIDE, LAYERS, CONTEXT_TOKENS = 64, 2, 96, 4, 48
REACH = 3
"""Number of tokens that a local layer of ModernBERT attends to on either side."""
WORDS = "the cat sat on mat and dog ran far away from red house while rain fell over green hill to blue sea ##ing"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
VOCABULARY += WORDS.split()
PADDING = {"roberta": 1, "xlm-roberta": 0, "camembert": 5}
"""Padding token's id, by kind: these kinds count positions from the id after it."""
THETAS = {True: 160_000.0, False: 10_000.0}
EPS = 1e-5


def config_of(kind: str) -> dict[str, Any]:
    """The `config.json` of a kind."""
    common: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": WIDE,
    }
    if kind == "modernbert":
        return common | {
            "architectures": ["ModernBertModel"],
            "hidden_activation": "gelu",
            "norm_eps": EPS,
            "local_attention": 2 * REACH,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": THETAS[True],
            "local_rope_theta": THETAS[False],
            "max_position_embeddings": CONTEXT_TOKENS,
        }
    first = PADDING[kind] + 1 if kind in PADDING else 0
    return common | {
        "architectures": ["BertModel" if kind == "bert" else "RobertaModel"],
        "hidden_act": "gelu",
        "layer_norm_eps": EPS,
        "type_vocab_size": 2 if kind == "bert" else 1,
        "max_position_embeddings": CONTEXT_TOKENS + first,
        "pad_token_id": PADDING.get(kind, 0),
    }


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint, by name."""
    vocabulary = config["vocab_size"]
    shapes: dict[str, tuple[int, ...]]
    if config["model_type"] == "modernbert":
        shapes = {"embeddings.tok_embeddings.weight": (vocabulary, HIDDEN), "embeddings.norm.weight": (HIDDEN,)}
        for layer in range(LAYERS):
            start = f"layers.{layer}."
            if layer:
                shapes[f"{start}attn_norm.weight"] = (HIDDEN,)
            shapes |= {
                f"{start}attn.Wqkv.weight": (3 * HIDDEN, HIDDEN),
                f"{start}attn.Wo.weight": (HIDDEN, HIDDEN),
                f"{start}mlp_norm.weight": (HIDDEN,),
                f"{start}mlp.Wi.weight": (2 * WIDE, HIDDEN),
                f"{start}mlp.Wo.weight": (HIDDEN, WIDE),
            }
        return shapes | {"final_norm.weight": (HIDDEN,)}
    shapes = {
        "embeddings.word_embeddings.weight": (vocabulary, HIDDEN),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], HIDDEN),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], HIDDEN),
    }
    linear = {"embeddings.LayerNorm": (HIDDEN,), "pooler.dense": (HIDDEN, HIDDEN)}
    for layer in range(LAYERS):
        start = f"encoder.layer.{layer}."
        linear |= {f"{start}attention.self.{name}": (HIDDEN, HIDDEN) for name in ("query", "key", "value")}
        linear |= {
            f"{start}attention.output.dense": (HIDDEN, HIDDEN),
            f"{start}attention.output.LayerNorm": (HIDDEN,),
            f"{start}intermediate.dense": (WIDE, HIDDEN),
            f"{start}output.dense": (HIDDEN, WIDE),
            f"{start}output.LayerNorm": (HIDDEN,),
        }
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def weights_of(config: dict[str, Any], seed: int = 0) -> Weights:
    """Return random weights with a spread at which every layer and position affects the output."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes_of(config).items():
        is_norm = "norm" in name.lower() and name.endswith("weight")
        spread = 0.3 if len(shape) == 1 or "embeddings" in name else 1.5 / math.sqrt(shape[-1])
        values = random.normal(1.0 if is_norm else 0.0, spread, shape)
        weights[name] = values.astype(np.float32).astype(np.float64)
    return weights


def tokenizer_of(kind: str) -> Tokenizer:
    """Return a WordPiece tokenizer that adds [CLS] and [SEP], and truncates and pads, as published files often do."""
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    frame = [(name, VOCABULARY.index(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", frame)
    tokenizer.enable_truncation(max_length=16)
    tokenizer.enable_padding(length=16)
    return tokenizer


def write_tiny_encoder(
    folder: Path,
    kind: str = "bert",
    *,
    pooling: str | None = None,
    prefix: str = "",
    bits: int = 0,
    dtype: mx.Dtype = mx.float32,
    changes: dict[str, Any] | None = None,
    modules: Sequence[str] = ("Transformer", "Pooling", "Normalize"),
) -> Path:
    """Write a folder that loads. `pooling` adds the files of sentence-transformers; `prefix` goes before every tensor's
    name; `bits` quantises linear layers and word embeddings as mlx-lm's converter does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(kind) | (changes or {})
    tensors = {name: mx.array(value.astype(np.float32)) for name, value in weights_of(config_of(kind)).items()}
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits}
        wide = [name for name, value in tensors.items() if value.ndim == 2 and "position" not in name]
        for name in wide:
            if "token_type" not in name:
                path = name.removesuffix(".weight")
                packed = mx.quantize(tensors[name], group_size=32, bits=bits)
                tensors |= dict(zip((name, f"{path}.scales", f"{path}.biases"), packed, strict=True))
    tensors = {
        prefix + name: value.astype(dtype) if value.dtype == mx.float32 else value for name, value in tensors.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_of(kind).save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT_TOKENS, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if pooling is not None:
        told_modules = [
            {"idx": place, "name": str(place), "path": "", "type": f"sentence_transformers.models.{name}"}
            for place, name in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(told_modules))
        (folder / "data_config.json").write_text(json.dumps([{"name": "pairs.jsonl.gz", "lines": 9, "weight": 1}]))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24, "do_lower_case": False}))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        flags = {
            f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        }
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN, **flags}))
    return folder


# --- the same models in numpy, one text and one head at a time -----------------------------------------------------


def states_of(config: dict[str, Any], weights: Weights, tokens: Sequence[int]) -> Array:
    """Return the last hidden states of one text, [tokens, hidden]."""
    return (_modern_states if config["model_type"] == "modernbert" else _bert_states)(config, weights, tokens)


def embedding_of(config: dict[str, Any], weights: Weights, tokens: Sequence[int], pooling: str) -> Array:
    """Return the pooled embedding of one text, [hidden], with norm 1."""
    states = states_of(config, weights, tokens)
    vector = {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[pooling]
    return np.asarray(vector / np.linalg.norm(vector))


def _bert_states(config: dict[str, Any], weights: Weights, tokens: Sequence[int]) -> Array:
    def linear(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Array, name: str) -> Array:
        return _norm(x, weights[f"{name}.weight"]) + weights[f"{name}.bias"]

    first = config["pad_token_id"] + 1 if config["model_type"] != "bert" else 0
    parts = [weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")]
    x = np.stack([parts[0][token] + parts[1][first + place] + parts[2][0] for place, token in enumerate(tokens)])
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        start = f"encoder.layer.{layer}."
        queries, keys, values = (linear(x, f"{start}attention.self.{name}") for name in ("query", "key", "value"))
        seen = _attention(queries, keys, values, lambda _query, _key: True)
        x = norm(linear(seen, f"{start}attention.output.dense") + x, f"{start}attention.output.LayerNorm")
        wide = _gelu(linear(x, f"{start}intermediate.dense"))
        x = norm(linear(wide, f"{start}output.dense") + x, f"{start}output.LayerNorm")
    return x


def _modern_states(config: dict[str, Any], weights: Weights, tokens: Sequence[int]) -> Array:
    x = _norm(weights["embeddings.tok_embeddings.weight"][list(tokens)], weights["embeddings.norm.weight"])
    for layer in range(LAYERS):
        start = f"layers.{layer}."
        sees_all = layer % 3 == 0
        normed = _norm(x, weights[f"{start}attn_norm.weight"]) if layer else x
        queries, keys, values = np.split(normed @ weights[f"{start}attn.Wqkv.weight"].T, 3, axis=1)
        queries, keys = (_rotated(states, THETAS[sees_all]) for states in (queries, keys))
        reach = len(tokens) if sees_all else REACH
        seen = _attention(queries, keys, values, lambda query, key, reach=reach: abs(query - key) <= reach)
        x = x + seen @ weights[f"{start}attn.Wo.weight"].T
        inputs, gates = np.split(
            _norm(x, weights[f"{start}mlp_norm.weight"]) @ weights[f"{start}mlp.Wi.weight"].T, 2, axis=1
        )
        x = x + (_gelu(inputs) * gates) @ weights[f"{start}mlp.Wo.weight"].T
    return _norm(x, weights["final_norm.weight"])


def _norm(x: Array, weight: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPS) * weight)


def _gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))))


def _attention(queries: Array, keys: Array, values: Array, sees: Callable[[int, int], bool]) -> Array:
    size = HIDDEN // HEADS
    out = np.zeros_like(values)
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        for query in range(len(queries)):
            seen = [key for key in range(len(keys)) if sees(query, key)]
            scores = keys[seen][:, part] @ queries[query, part] / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[query, part] = weights / weights.sum() @ values[seen][:, part]
    return out


def _rotated(x: Array, theta: float) -> Array:
    """Rotate each head's pairs of dimensions (i, i + half) by the angle position × theta^(-2i / size)."""
    size = HIDDEN // HEADS
    half = size // 2
    out = x.copy()
    for place in range(len(x)):
        for head in range(HEADS):
            for number in range(half):
                angle = place * theta ** (-2 * number / size)
                first, second = head * size + number, head * size + number + half
                out[place, first] = x[place, first] * math.cos(angle) - x[place, second] * math.sin(angle)
                out[place, second] = x[place, second] * math.cos(angle) + x[place, first] * math.sin(angle)
    return out
