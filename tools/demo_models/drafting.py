"""Run a target for its greedy choices and features, and drafters from anchors, in training and measurement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from drafters import BLOCK, MASK_TOKEN, TAPS, DFlash, Eagle3
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Target:
    """A frozen model, with what drafters borrow from it."""

    model: nn.Module
    features_of: str

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding, which is the head too."""
        return self.model.model.embed_tokens

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greedy choice after every position and the features drafters read."""
        output = self.model(input_ids=tokens, use_cache=False, output_hidden_states=self.features_of == "taps")
        picks = output.logits.argmax(-1)
        if self.features_of == "taps":
            return picks, torch.cat([output.hidden_states[tap + 1] for tap in TAPS], dim=-1)
        return picks, self.final_hidden

    def keep_final_hidden(self) -> None:
        """Keep the state after the final norm of every pass."""

        def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            self.final_hidden = output

        self.model.model.norm.register_forward_hook(keep)


def frozen_target(model: nn.Module, features_of: str) -> Target:
    """Freeze a model; features are `taps` or the `final` state after the last norm."""
    model.eval().requires_grad_(requires_grad=False)
    target = Target(model, features_of)
    if features_of == "final":
        target.keep_final_hidden()
    return target


def documents_of(tokens: Tensor) -> Tensor:
    """Number the conversations of packed rows; each one's end-of-text token still belongs to it."""
    ends = (tokens == 0).long()
    return ends.cumsum(-1) - ends


def visible(documents: Tensor, anchors: Tensor) -> Tensor:
    """Return which positions lie before each anchor in its conversation: [batch, anchors, positions]."""
    same = documents[:, None, :] == documents.gather(1, anchors)[:, :, None]
    return same & (torch.arange(documents.shape[1])[None, None] < anchors[:, :, None])


def dflash_states(drafter: DFlash, target: Target, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Return the states of slots 1 to 7 of every anchor's block: [batch, anchors, 7, hidden]."""
    batch, count = anchors.shape
    slots = torch.full((batch, count, BLOCK), MASK_TOKEN)
    slots[:, :, 0] = tokens.gather(1, anchors)
    positions = (anchors[:, :, None] + torch.arange(BLOCK)).reshape(batch, -1)
    context = visible(documents_of(tokens), anchors).repeat_interleave(BLOCK, dim=1)
    owner = torch.arange(count).repeat_interleave(BLOCK)
    own = (owner[:, None] == owner[None])[None].expand(batch, -1, -1)
    block = target.embedding(slots.reshape(batch, -1))
    states = drafter(features, block, positions, torch.cat([context, own], dim=-1))
    return states.view(batch, count, BLOCK, -1)[:, :, 1:]


class Chain:
    """Steps of EAGLE-3 or MTP from many anchors at once; each attends to the true pairs before it and its own steps."""

    def __init__(self, drafter: nn.Module, target: Target, features: Tensor, tokens: Tensor, anchors: Tensor) -> None:
        """Collect the keys of every true pair: state of t with token t + 1, at rotary position t."""
        self.drafter, self.target, self.anchors = drafter, target, anchors
        self.states = drafter.first_state(features)[:, :-1]
        embedded = target.embedding(tokens[:, 1:])
        self.residual, self.inputs, layer = drafter.pair(self.states, embedded)
        positions = torch.arange(self.states.shape[1])[None].expand(tokens.shape[0], -1)
        self.keys, self.values = layer.self_attn.keys_values(self.inputs, positions)
        self.mask = visible(documents_of(tokens), anchors)[:, :, :-1]
        self.own = torch.eye(anchors.shape[1], dtype=torch.bool)[None].expand(tokens.shape[0], -1, -1)
        self.count = 0

    def first(self) -> Tensor:
        """Return the head's input for the pair just before each anchor."""
        index = (self.anchors - 1)[:, :, None].expand(-1, -1, self.residual.shape[-1])
        wide = (self.anchors - 1)[:, :, None].expand(-1, -1, self.inputs.shape[-1])
        layer = self._layer()
        update = layer.self_attn(self.inputs.gather(1, wide), self.anchors - 1, self.keys, self.values, self.mask)
        return self._finish(layer, self.residual.gather(1, index), update)

    def following(self, tokens: Tensor) -> Tensor:
        """Feed one more token to every anchor with the state its last step left; return the head's input."""
        self.count += 1
        positions = self.anchors - 1 + self.count
        residual, inputs, layer = self.drafter.pair(self.state, self.target.embedding(tokens))
        keys, values = layer.self_attn.keys_values(inputs, positions)
        self.keys, self.values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.mask = torch.cat([self.mask, self.own], dim=-1)
        return self._finish(layer, residual, layer.self_attn(inputs, positions, self.keys, self.values, self.mask))

    def logits(self, headed: Tensor) -> Tensor:
        """Apply the drafter's own head, or the target's."""
        head = self.drafter.lm_head.weight if isinstance(self.drafter, Eagle3) else self.target.embedding.weight
        return functional.linear(headed, head)

    def _layer(self) -> nn.Module:
        return self.drafter.midlayer if isinstance(self.drafter, Eagle3) else self.drafter.mtp.layers[0]

    def _finish(self, layer: nn.Module, residual: Tensor, update: Tensor) -> Tensor:
        self.state, headed = self.drafter.outputs(layer.after_attention(residual, update))
        return headed


@torch.no_grad()
def propose(
    drafter: nn.Module, target: Target, features: Tensor, tokens: Tensor, anchors: Tensor, count: int
) -> Tensor:
    """Return the tokens drafted greedily from every anchor: [batch, anchors, count]."""
    if isinstance(drafter, DFlash):
        states = dflash_states(drafter, target, features, tokens, anchors)
        return functional.linear(states, target.embedding.weight).argmax(-1)[:, :, :count]
    chain = Chain(drafter, target, features, tokens, anchors)
    headed, drafted = chain.first(), []
    while True:
        chosen = chain.logits(headed).argmax(-1)
        drafted.append(chosen + drafter.d2t[chosen] if isinstance(drafter, Eagle3) else chosen)
        if len(drafted) == count:
            return torch.stack(drafted, dim=-1)
        headed = chain.following(drafted[-1])
