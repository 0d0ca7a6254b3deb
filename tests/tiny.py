"""Tiny random models of every cache family: real mlx-lm modules, built in milliseconds, with well-spread logits.

`tiny_model` makes one in memory; `write_tiny_model` writes a Hugging Face folder that the loader and the tokenizer
accept; `related_draft` makes a draft model that often agrees with its target. Everything is a pure function of the
seed. Heads are never tied to embeddings, for then the likeliest next token would simply be the current one.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import falcon_h1, gemma3_text, llama, mamba2, qwen3, qwen3_next
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("qwen3", "llama", "gemma3", "qwen3_next", "falcon_h1", "mamba2")
END_OF_TEXT, IM_START, IM_END, PAD = 256, 257, 258, 259
"""Ids after the 256 bytes in the tokenizer of `write_tiny_model`; `IM_END` is the end-of-sequence token."""
BYTE_VOCABULARY_SIZE = 260

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_MODULES = {
    "qwen3": qwen3,
    "llama": llama,
    "gemma3": gemma3_text,
    "qwen3_next": qwen3_next,
    "falcon_h1": falcon_h1,
    "mamba2": mamba2,
}
_ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_SPECIFIC: dict[str, dict[str, Any]] = {
    "qwen3": {**_ATTENTION, "model_type": "qwen3", "num_hidden_layers": 2},
    "llama": {**_ATTENTION, "model_type": "llama", "num_hidden_layers": 2},
    "gemma3": {
        **_ATTENTION,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "qwen3_next": {
        **_ATTENTION,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
        "moe_intermediate_size": 0,
        "partial_rotary_factor": 0.5,
    },
    "falcon_h1": {
        **_ATTENTION,
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "max_position_embeddings": 4096,
    },
}


def tiny_config(family: str, *, vocabulary_size: int = 97, head_size: int = 16) -> dict[str, Any]:
    """The `config.json` of a family, as mlx-lm reads it."""
    return {**_SPECIFIC[family], "vocab_size": vocabulary_size, "head_dim": head_size}


def tiny_model(
    family: str,
    *,
    seed: int = 0,
    vocabulary_size: int = 97,
    quantised: bool = False,
    noise: float = 0.0,
    head_size: int = 16,
) -> nn.Module:
    """Return a random float32 model; `quantised`: in 4 bits, in groups of 32; `noise` perturbs the seed's weights."""
    module = _MODULES[family]
    config = tiny_config(family, vocabulary_size=vocabulary_size, head_size=head_size)
    model = module.Model(module.ModelArgs.from_dict(config))
    fill_at_random(model, seed=seed, noise=noise)
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    model.eval()
    mx.eval(model.parameters())
    return model


def related_draft(family: str, *, seed: int = 0, noise: float = 0.03, **changes: Any) -> nn.Module:
    """Return a draft that often agrees with `tiny_model(family, seed=seed, **changes)`; always with `noise` 0."""
    return tiny_model(family, seed=seed, noise=noise, **changes)


def write_tiny_model(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    vocabulary_size: int = BYTE_VOCABULARY_SIZE,
    quantised: bool = False,
    dtype: mx.Dtype = mx.float32,
    noise: float = 0.0,
    context_tokens: int = 4096,
    head_size: int = 16,
) -> Path:
    """Write a folder that loads: weights, config, and a tokenizer whose first 256 ids are the bytes themselves.

    Greedy text is nearly always printable ASCII: the head rows of all other tokens are scaled down.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model(family, seed=seed, vocabulary_size=vocabulary_size, noise=noise, head_size=head_size)
    tokens = mx.arange(vocabulary_size)[:, None]
    model.lm_head.weight = mx.where((tokens >= 32) & (tokens < 127), 1.5, 0.25) * model.lm_head.weight
    model.set_dtype(dtype)
    config = tiny_config(family, vocabulary_size=vocabulary_size, head_size=head_size) | {"eos_token_id": IM_END}
    config["max_position_embeddings"] = context_tokens
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
        config["quantization"] = {"group_size": 32, "bits": 4}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tiny_tokenizer(folder, context_tokens=context_tokens)
    return folder


def write_tiny_tokenizer(folder: Path, *, context_tokens: int = 4096) -> None:
    """Write a byte-level tokenizer without merges, with ChatML tokens and template."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def fill_at_random(model: nn.Module, *, seed: int, noise: float = 0.0) -> None:
    """Replace every weight by one drawn from the seed; the scales keep activations near one and logits near ±6.

    Arrays of integers, such as packed weights, stay as they are.
    """
    weights = dict(tree_flatten(model.parameters()))
    shapes = {name: value.shape for name, value in weights.items() if mx.issubdtype(value.dtype, mx.floating)}
    total = sum(_size(shape) for shape in shapes.values())
    draws = mx.random.normal((total,), key=mx.random.key(seed + 1))
    if noise:
        draws = draws + noise * mx.random.normal((total,), key=mx.random.key(seed + 7919))
    filled = []
    start = 0
    for name, shape in shapes.items():
        drawn = draws[start : start + _size(shape)].reshape(shape)
        filled.append((name, _scaled(name, drawn)))
        start += _size(shape)
    model.update(tree_unflatten(filled))


def _scaled(name: str, drawn: mx.array) -> mx.array:
    """Scale a weight by its role: state decay, norm, bias, embedding, head, or another matrix, by its fan-in."""
    if name.endswith("A_log"):
        return mx.log(mx.abs(drawn) + 0.5)
    if name.endswith((".D", "dt_bias")) or (drawn.ndim == 1 and "norm" in name):
        return 1.0 + 0.1 * drawn
    if drawn.ndim == 1:
        return 0.1 * drawn
    if "embed" in name:
        return 0.5 * drawn
    fan_in = _size(drawn.shape[1:])
    return drawn * (2.0 if "lm_head" in name else 1.4) / fan_in**0.5


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]
