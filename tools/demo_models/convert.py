"""Start a hybrid from a trained assistant: same embeddings, MLPs, norms and full-attention layers.

Only the gated-delta layers begin anew. Qwen3-Next's norms are zero-centred, and its attention has an
output gate: with weights of zero the gate passes one half, so the output projection is doubled.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight", "q_norm.weight", "k_norm.weight")


def gated_query(query: Tensor, heads: int) -> Tensor:
    """Interleave each head's query rows with as many zero rows for its gate."""
    rows = query.reshape(heads, -1, query.shape[-1])
    return torch.cat([rows, torch.zeros_like(rows)], dim=1).reshape(-1, query.shape[-1])


@torch.no_grad()
def borrow(model: torch.nn.Module, teacher: torch.nn.Module) -> int:
    """Copy into a model what its teacher has under the same name; return how many parameters were copied."""
    theirs = dict(teacher.named_parameters())
    hybrid = model.config.model_type == "qwen3_next"
    copied = 0
    for name, parameter in model.named_parameters():
        if name not in theirs:
            continue
        value = theirs[name]
        if hybrid and name.endswith(NORMS):
            value = value - 1.0
        elif hybrid and name.endswith("self_attn.q_proj.weight"):
            value = gated_query(value, model.config.num_attention_heads)
        elif hybrid and name.endswith("self_attn.o_proj.weight"):
            value = value * 2.0
        if value.shape == parameter.shape:
            parameter.copy_(value)
            copied += 1
    return copied
