"""Tiny configurations of every model family of mlx-lm, made from the names of the fields in its `ModelArgs`.

`configuration` takes each field's value from `USUAL`; the values that `SPECIFIC` has for the family override these.
"""

import importlib
import pkgutil
from dataclasses import fields
from typing import Any

import mlx_lm.models
from mlx import nn

from tests.tiny import fill_at_random

VOCABULARY = 97
LAYERS = 4
WINDOW = 8

USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "qkv_bias": False,
    "sliding_window": WINDOW,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    # recurrent layers
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_num_heads": 4,
    "state_size": 16,
    "n_groups": 1,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": "auto",
    "conv_L_cache": 3,
    "conv_bias": False,
    # scales
    "logits_scaling": 1.0,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
    "dim_model_base": 32,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}

HALF_SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
HALF_LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)

TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "llama",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Text model of each family that wraps one as its `text_config`; mlx-lm does not run the vision tower."""

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale_all_dim": 1.0}
LINEAR = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}
QWEN3_5 = {
    "text_config": {
        **{name: USUAL[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")},
        **{name: USUAL[name] for name in USUAL if name.startswith("linear_")},
        "model_type": "qwen3_5",
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
SPECIFIC: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 32, "num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": HALF_SLIDING, "num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1, "num_key_value_heads": 4},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1, "num_key_value_heads": 4},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": LAYERS,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "greedy"},
    "deepseek_v32": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": HALF_SLIDING, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["sliding_attention", "conv_mixer", "full_attention", "conv_mixer"]},
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "gemma3n": {
        "text_config": {
            **{name: USUAL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")},
            **{name: USUAL[name] for name in ("num_attention_heads", "num_key_value_heads", "vocab_size")},
            **{name: USUAL[name] for name in ("sliding_window", "rope_theta", "rms_norm_eps")},
            "model_type": "gemma3n",
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "max_position_embeddings": 4096,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": HALF_SLIDING,
            "activation_sparsity_pattern": [0.5] * LAYERS,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 1.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4_text": {
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
    },
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0}, "num_key_value_heads": 4},
    "gpt2": {"n_ctx": 4096, "n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 4096},
    "gpt_bigcode": {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_inner": 48, "n_positions": 4096},
    "gpt_neox": {"rotary_emb_base": 10000.0, "rotary_pct": 0.5},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 4096, "rotary_dim": 4},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
    },
    "hunyuan": {
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "text_config": {
            **{name: USUAL[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")},
            **{name: USUAL[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "linear_attn_config": LINEAR,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        }
    },
    "kimi_linear": {"linear_attn_config": LINEAR, "model_max_length": 4096},
    "laguna": {"layer_types": HALF_SLIDING},
    "lfm2": {
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "lfm2_moe": {"use_expert_bias": True, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "lille-130m": {"block_size": 4096, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": LAYERS},
    "llama4": {
        "text_config": {
            **{name: USUAL[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")},
            **{name: USUAL[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")},
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "max_position_embeddings": 4096,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 1,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 1,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
    },
    "mamba": {"time_step_rank": 2},
    "mellum": {
        "layer_types": HALF_SLIDING,
        "rope_parameters": {kind: {"rope_theta": 10000.0} for kind in HALF_SLIDING},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "minicpm3": {"rope_scaling": {"long_factor": [1.0] * 4, "original_max_position_embeddings": 4096}},
    "minimax": {"rotary_dim": 4},
    "minimax_m3_vl": {
        "text_config": {
            **{name: USUAL[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")},
            **{name: USUAL[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")},
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 3,
        }
    },
    "ministral3": {
        "layer_types": HALF_SLIDING,
        "rope_parameters": {
            **YARN,
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral4": {"rope_parameters": {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}},
    "muse_spark": {
        "text_config": {
            **{name: USUAL[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers", "rms_norm_eps")},
            **{name: USUAL[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
            "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0] * 2,
            "layer_types": HALF_SLIDING,
            "sliding_window": WINDOW,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 1.0,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 32,
            "moe_intermediate_size": 16,
        }
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": index == 1, "replace_with_linear": index == 2},
                "ffn": {"ffn_mult": 1.0, "no_op": index == 2, "replace_with_linear": index == 1},
            }
            for index in range(LAYERS)
        ]
    },
    "nemotron_h": {"mamba_head_dim": 16, "ssm_state_size": 16, "hybrid_override_pattern": "M*M-"},
    "olmo_hybrid": {"linear_allow_neg_eigval": False, "layer_types": HALF_LINEAR},
    "openelm": {
        "num_transformer_layers": LAYERS,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0] * LAYERS,
    },
    "phi3small": {
        "vocab_size": 100352,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
    },
    "phixtral": {"num_vocab": VOCABULARY, "model_dim": 32, "rotary_dim": 4},
    "plamo": {"n_shared_head": 2},
    "plamo3": {"sliding_window_pattern": 2, "sliding_window": 4096},
    "plamo2": {"hidden_size_per_head": 8, "attention_window_size": 4096, "mamba_step": 2},
    "prism_hadamard_qwen35": {
        "text_config": {**QWEN3_5["text_config"], "hidden_size": 128},
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
    },
    "qwen": {"kv_channels": 8},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": {
        "text_config": {
            **QWEN3_5["text_config"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "spark2_5": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in HALF_SLIDING},
        "layer_types": HALF_SLIDING,
    },
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": HALF_SLIDING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 16,
    },
}


NOT_MODELS = {
    "activations": "activation functions",
    "base": "what all models share",
    "bitlinear_layers": "the layers of `bitnet`",
    "cache": "the caches",
    "gated_delta": "a scan",
    "mla": "the layers of latent attention",
    "pipeline": "layers on several machines",
    "rope_utils": "positions",
    "ssm": "a scan",
    "switch_layers": "experts",
}
"""Modules of `mlx_lm.models` that are not models, and what they contain."""
NOT_RUN = {
    "bitnet": "its kernel is for Metal only",
    "muse_spark": "its kernels are for Metal only",
    "olmo": "it needs the package `ai2-olmo`",
}
"""Models that cannot run on every computer, and why."""
UNSOUND = {"phi3small": "in mlx-lm its tokens attend to later tokens of the same forward"}
"""Models whose answers, in mlx-lm itself, depend on how a prompt is split into forwards, and why."""


def families() -> list[str]:
    """Return the names of all modules of `mlx_lm.models`."""
    return sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))


def configuration(family: str) -> dict[str, Any]:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    names = [field.name for field in fields(module.ModelArgs)]
    own = {"text_config": configuration(TEXT_OF[family])} if family in TEXT_OF else SPECIFIC.get(family, {})
    return {"model_type": family} | {name: USUAL[name] for name in names if name in USUAL} | own


def family_model(family: str, *, seed: int = 0, noise: float = 0.0) -> nn.Module:
    """Return a random float32 model of the family."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(configuration(family)))
    fill_at_random(model, seed=seed, noise=noise)
    model.eval()
    return model
