"""Parts of the three drafters: norms, rotary positions, attention over given keys, MLP."""

from __future__ import annotations

import torch
from models import COMMON, ROPE_THETA
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, INNER, HEADS, KEY_HEADS, HEAD_SIZE = 256, 768, 4, 2, 64


class Norm(nn.Module):
    """RMS norm; a centred one stores its weight minus one, as Qwen3-Next does."""

    def __init__(self, size: int, *, centred: bool = False) -> None:
        """Start at the identity."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.shift = 1.0 if centred else 0.0

    def forward(self, values: Tensor) -> Tensor:
        """Scale to unit mean square, then by the weight."""
        values = values.float()
        scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + COMMON["rms_norm_eps"])
        return values * scale * (self.weight + self.shift)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a projection without bias."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=COMMON["initializer_range"])
    return layer


def rotate(values: Tensor, positions: Tensor) -> Tensor:
    """Apply half-split rotary positions: values [batch, heads, count, size], positions [batch, count]."""
    half = values.shape[-1] // 2
    frequency = ROPE_THETA ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * frequency
    first, second = values.chunk(2, dim=-1)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention whose keys and values the caller collects."""

    def __init__(self, inputs: int, *, head_norms: bool, gated: bool = False) -> None:
        """Build projections for inputs of this width; gated attention is Qwen3-Next's, with centred norms."""
        super().__init__()
        self.gated = gated
        self.q_proj = linear(inputs, HEADS * HEAD_SIZE * (2 if gated else 1))
        self.k_proj = linear(inputs, KEY_HEADS * HEAD_SIZE)
        self.v_proj = linear(inputs, KEY_HEADS * HEAD_SIZE)
        self.o_proj = linear(HEADS * HEAD_SIZE, HIDDEN)
        self.q_norm = Norm(HEAD_SIZE, centred=gated) if head_norms else nn.Identity()
        self.k_norm = Norm(HEAD_SIZE, centred=gated) if head_norms else nn.Identity()

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return [batch, heads, count, size] keys and values."""
        shape = (*inputs.shape[:2], KEY_HEADS, HEAD_SIZE)
        keys = self.k_norm(self.k_proj(inputs).view(shape)).transpose(1, 2)
        return rotate(keys, positions), self.v_proj(inputs).view(shape).transpose(1, 2)

    def forward(self, inputs: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend from inputs [batch, count, width] where mask [batch, count, keys] is true."""
        query = self.q_proj(inputs).view(*inputs.shape[:2], HEADS, -1)
        gate = None
        if self.gated:
            query, gate = query.chunk(2, dim=-1)
        query = rotate(self.q_norm(query).transpose(1, 2), positions)
        groups = HEADS // KEY_HEADS
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        query, keys = query.to(values.dtype), keys.to(values.dtype)
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None])
        attended = attended.transpose(1, 2)
        if gate is not None:
            attended = attended * gate.sigmoid()
        return self.o_proj(attended.reshape(*inputs.shape[:2], -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(HIDDEN, INNER),
            linear(HIDDEN, INNER),
            linear(INNER, HIDDEN),
        )

    def forward(self, values: Tensor) -> Tensor:
        """Return the update, without the residual."""
        return self.down_proj(functional.silu(self.gate_proj(values)) * self.up_proj(values))


class Layer(nn.Module):
    """One decoder layer; `inputs` is the attention's width (twice the hidden size in EAGLE-3)."""

    def __init__(self, inputs: int = HIDDEN, *, head_norms: bool, gated: bool = False) -> None:
        """Build the parts under their published names."""
        super().__init__()
        self.input_layernorm = Norm(HIDDEN, centred=gated)
        if inputs != HIDDEN:
            self.hidden_norm = Norm(HIDDEN)
        self.self_attn = Attention(inputs, head_norms=head_norms, gated=gated)
        self.post_attention_layernorm = Norm(HIDDEN, centred=gated)
        self.mlp = Mlp()

    def after_attention(self, residual: Tensor, update: Tensor) -> Tensor:
        """Add the attention's update, then the MLP's."""
        residual = residual + update
        return residual + self.mlp(self.post_attention_layernorm(residual))
