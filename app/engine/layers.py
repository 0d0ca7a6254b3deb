"""Taps: hidden states of a model, caught by one generic wrapper around its decoder layers.

No model's forward code is repeated: the layer's class gets a subclass that notes what the layer puts out.
"""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import mlx.core as mx
from mlx import nn

from app.core.drafter_config import FINAL

FINAL_NORMS = ("norm", "norm_f", "final_layernorm")
EMBEDDINGS = ("embed_tokens", "tok_embeddings", "embeddings", "wte")


class Taps:
    """Catches the outputs of some layers of `model` in every forward. Raises ValueError for a layer it has not."""

    def __init__(self, model: nn.Module, layer_ids: Iterable[int]) -> None:
        self.layer_ids = tuple(sorted(set(layer_ids)))
        self._caught: dict[int, mx.array] = {}
        if not self.layer_ids:
            return
        trunk = find_trunk(model)
        for layer_id in self.layer_ids:
            if not FINAL <= layer_id < len(trunk["layers"]):
                raise ValueError(f"the model has no layer {layer_id}")
            module = _final_norm(trunk) if layer_id == FINAL else trunk["layers"][layer_id]
            kind: Any = type(module)
            if not hasattr(kind, "tapped"):
                module.__class__ = _tapped(kind)
            module.catch = partial(self._caught.__setitem__, layer_id)

    def take(self) -> dict[int, mx.array]:
        """What the last forward put out: tap → [rows, width, hidden]."""
        caught = dict(self._caught)
        self._caught.clear()
        return caught


def find_trunk(model: nn.Module) -> nn.Module:
    """The module that holds the token embedding, the decoder layers and the final norm. Raises ValueError."""
    trunks = [module for _, module in model.named_modules() if "layers" in module and _embedding(module) is not None]
    if not trunks:
        raise ValueError("the model keeps its layers in no known place")
    return max(trunks, key=lambda module: len(module["layers"]))


def embedding_of(model: nn.Module) -> Any:
    """The token embedding. Raises ValueError."""
    return _embedding(find_trunk(model))


def head_of(model: nn.Module) -> Any:
    """From hidden states behind the final norm [..., hidden] to logits [..., vocabulary]. Raises ValueError."""
    for _, module in model.named_modules():
        if "lm_head" in module:
            return module["lm_head"]
    return embedding_of(model).as_linear


def _embedding(module: nn.Module) -> Any:
    return next((module[name] for name in EMBEDDINGS if name in module), None)


def _final_norm(trunk: nn.Module) -> nn.Module:
    name = next((name for name in FINAL_NORMS if name in trunk), None)
    if name is None:
        raise ValueError("the model has its final norm in no known place")
    norm: nn.Module = trunk[name]
    return norm


@cache
def _tapped(kind: Any) -> Any:
    """A subclass of the module's own class, so that its parameters, attributes and result stay what they are."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = kind.__call__(self, *arguments, **keywords)
        self.catch(result[0] if isinstance(result, tuple) else result)
        return result

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "tapped": kind})
