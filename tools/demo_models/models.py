"""The three models' configurations and their PyTorch reference implementations."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.03,
    "attention_bias": False,
    "hidden_act": "silu",
}

ROPE_THETA = 10_000.0

ASSISTANT: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}

DRAFT: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}

HYBRID: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "full_attention_interval": 4,
    "partial_rotary_factor": 1.0,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0,
    "moe_intermediate_size": 0,
    "norm_topk_prob": True,
    "mlp_only_layers": list(range(6)),
}

NAMES = ("demo-assistant", "demo-draft", "demo-hybrid")


def build(name: str, seed: int) -> torch.nn.Module:
    """Return a freshly initialised model."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    if name == "demo-hybrid":
        rope["partial_rotary_factor"] = HYBRID["partial_rotary_factor"]
        return Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON, **HYBRID, rope_parameters=rope))
    sizes = ASSISTANT if name == "demo-assistant" else DRAFT
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, **sizes, rope_parameters=rope))


def published_config(name: str) -> dict[str, Any]:
    """Return config.json's content as mlx-lm and transformers read it."""
    sizes = {"demo-assistant": ASSISTANT, "demo-draft": DRAFT, "demo-hybrid": HYBRID}[name]
    hybrid = name == "demo-hybrid"
    shared = {key: value for key, value in COMMON.items() if key not in ("bos_token_id", "initializer_range")}
    return {
        "architectures": ["Qwen3NextForCausalLM" if hybrid else "Qwen3ForCausalLM"],
        "model_type": "qwen3_next" if hybrid else "qwen3",
        **shared,
        **sizes,
        "rope_theta": ROPE_THETA,
        "torch_dtype": "float16",
    }
