"""The drafters that read their target's hidden states, under the tensor names of published checkpoints.

Positions: an anchor at position p is the last token emitted; the target has computed 0 to p - 1.
"""

from __future__ import annotations

from typing import Any

import torch
from drafter_parts import HEAD_SIZE, HEADS, HIDDEN, INNER, KEY_HEADS, Layer, Norm, linear
from models import COMMON, HYBRID, ROPE_THETA
from torch import Tensor, nn

TAPS = (1, 3, 4)
MASK_TOKEN = 3
BLOCK = 8
DRAFT_VOCABULARY = 1024
NAMES = ("demo-assistant-dflash", "demo-assistant-eagle3", "demo-hybrid-mtp")
TARGETS = {
    "demo-assistant-dflash": "demo-assistant",
    "demo-assistant-eagle3": "demo-assistant",
    NAMES[2]: "demo-hybrid",
}


class DFlash(nn.Module):
    """Block diffusion: one pass fills the masked slots after the anchor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear(len(TAPS) * HIDDEN, HIDDEN)
        self.hidden_norm = Norm(HIDDEN)
        self.layers = nn.ModuleList(Layer(head_norms=True) for _ in range(3))
        self.norm = Norm(HIDDEN)

    def forward(self, features: Tensor, block: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the normed states of embedded slots [batch, slots, hidden].

        The features fill positions from 0; the mask is [batch, slots, features + slots].
        """
        context = self.hidden_norm(self.fc(features))
        before = torch.arange(features.shape[1])[None].expand(features.shape[0], -1)
        for layer in self.layers:
            inputs = layer.input_layernorm(block)
            keys, values = layer.self_attn.keys_values(context, before)
            own_keys, own_values = layer.self_attn.keys_values(inputs, positions)
            keys, values = torch.cat([keys, own_keys], dim=2), torch.cat([values, own_values], dim=2)
            block = layer.after_attention(block, layer.self_attn(inputs, positions, keys, values, mask))
        return self.norm(block)


class Eagle3(nn.Module):
    """One layer over (token, state) pairs; its output before the norm is the state of the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear(len(TAPS) * HIDDEN, HIDDEN)
        self.midlayer = Layer(2 * HIDDEN, head_norms=False)
        self.norm = Norm(HIDDEN)
        self.lm_head = linear(HIDDEN, DRAFT_VOCABULARY)
        self.register_buffer("d2t", torch.zeros(DRAFT_VOCABULARY, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(COMMON["vocab_size"], dtype=torch.bool))

    def first_state(self, features: Tensor) -> Tensor:
        """Join the taps."""
        return self.fc(features).float()

    def pair(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor, Layer]:
        """Return the residual, the attention's input and the layer."""
        layer = self.midlayer
        return state, torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], dim=-1), layer

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next step's state and the head's input."""
        return hidden, self.norm(hidden)

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Keep the tokens that were counted most."""
        kept = counts.argsort(descending=True, stable=True)[:DRAFT_VOCABULARY].sort().values
        self.d2t.copy_(kept - torch.arange(DRAFT_VOCABULARY))
        self.t2d.zero_()[kept] = True


class MtpHead(nn.Module):
    """The tensors below `mtp.`: Qwen3-Next's multi-token head, its norms centred on zero."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Norm(HIDDEN, centred=True)
        self.pre_fc_norm_hidden = Norm(HIDDEN, centred=True)
        self.fc = linear(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Layer(head_norms=True, gated=True)])
        self.norm = Norm(HIDDEN, centred=True)


class Mtp(nn.Module):
    """Multi-token prediction; the state after its norm feeds the shared head and the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.mtp = MtpHead()

    def first_state(self, features: Tensor) -> Tensor:
        """Take the target's hidden state after its final norm as it is."""
        return features

    def pair(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor, Layer]:
        """Return the residual, the attention's input and the layer."""
        parts = [self.mtp.pre_fc_norm_embedding(embedded), self.mtp.pre_fc_norm_hidden(state)]
        hidden, layer = self.mtp.fc(torch.cat(parts, dim=-1)).float(), self.mtp.layers[0]
        return hidden, layer.input_layernorm(hidden), layer

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next step's state and the head's input."""
        normed = self.mtp.norm(hidden)
        return normed, normed


def build_drafter(name: str, seed: int) -> nn.Module:
    """Return a freshly initialised drafter."""
    torch.manual_seed(seed)
    return {NAMES[0]: DFlash, NAMES[1]: Eagle3, NAMES[2]: Mtp}[name]()


def published_config(name: str) -> dict[str, Any]:
    """Return config.json's content in the layout of the method's published checkpoints."""
    shared = {key: value for key, value in COMMON.items() if key not in ("bos_token_id", "initializer_range")}
    shared |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_SIZE,
        "rope_theta": ROPE_THETA,
        "num_target_layers": 6,
        "torch_dtype": "float16",
    }
    return {NAMES[0]: _dflash_config, NAMES[1]: _eagle_config, NAMES[2]: _mtp_config}[name](shared)


def _dflash_config(shared: dict[str, Any]) -> dict[str, Any]:
    """Return the config, in which tap ids count decoder layers from 0 and stand for their outputs."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(TAPS)},
        "num_hidden_layers": 3,
        **shared,
    }


def _eagle_config(shared: dict[str, Any]) -> dict[str, Any]:
    """Return the config: a tap's id is that of a layer's output in the section, as in DFlash's, else of its input."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **shared,
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "target_hidden_size": HIDDEN,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
    }


def _mtp_config(shared: dict[str, Any]) -> dict[str, Any]:
    """Return the config as vLLM derives it, with every value of the target's config."""
    return {
        "architectures": ["Qwen3NextMTP"],
        "model_type": "qwen3_next_mtp",
        "num_nextn_predict_layers": 1,
        **shared,
        **HYBRID,
        "target_hidden_size": HIDDEN,
    }
