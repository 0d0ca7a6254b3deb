"""Parts of a model that drafters use (hidden states, embedding, head), and the forward widths that are cheap for it.

Hidden states are captured by a subclass of each layer's class that records its output, so no forward code is repeated.
If a part has no known name, ModelUnavailable is raised.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from app.core.errors import ModelUnavailable
from app.models.config_values import EXPERTS_KEYS, Config, text_number, text_part
from app.models.draft_lengths import cheap_tokens
from app.models.drafters.config import FINAL

FINAL_NORMS = ("norm", "norm_f", "final_layernorm")
EMBEDDINGS = ("embed_tokens", "tok_embeddings", "embeddings", "wte")

UNREADABLE = (
    "the model's hidden states cannot be read: {} in no known place; draft with n-grams or a draft model instead"
)


class Taps:
    """Captures the outputs of some layers of `model` in every forward. Raises ModelUnavailable for a missing layer."""

    def __init__(self, model: nn.Module, layer_ids: Iterable[int]) -> None:
        self.layer_ids = tuple(sorted(set(layer_ids)))
        self._captured: dict[int, mx.array] = {}
        if not self.layer_ids:
            return
        trunk = find_trunk(model)
        for layer_id in self.layer_ids:
            if not FINAL <= layer_id < len(trunk["layers"]):
                raise ModelUnavailable(f"the model has no layer {layer_id}")
            module = _final_norm(trunk) if layer_id == FINAL else trunk["layers"][layer_id]
            kind: Any = type(module)
            if not hasattr(kind, "tapped"):
                module.__class__ = _tapped(kind)
            module.capture = partial(self._captured.__setitem__, layer_id)

    def take(self) -> dict[int, mx.array]:
        """Return the outputs of the last forward, [rows, width, hidden] by layer id, and forget them."""
        captured = dict(self._captured)
        self._captured.clear()
        return captured


class Target:
    """Embedding and head of a loaded model, as its forward uses them. Raises ModelUnavailable if none is found."""

    def __init__(self, model: nn.Module, config: Config, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._embedding: Any = _embedding(find_trunk(model))
        heads = (module["lm_head"] for _, module in model.named_modules() if "lm_head" in module)
        self._head: Any = next(heads, None) or self._embedding.as_linear
        settings = text_part(config)
        scaled = str(config.get("model_type", "")).startswith("gemma")
        self._scale = float(settings["hidden_size"]) ** 0.5 if scaled else 1.0
        self._cap = float(settings.get("final_logit_softcapping") or 0.0)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed int32 `tokens` [rows, width] as the target's first layer reads them: [rows, width, hidden]."""
        embedded: mx.array = self._embedding(tokens)
        return embedded if self._scale == 1.0 else embedded * self._scale

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 logits [rows, width, vocabulary] of hidden states after the final norm."""
        logits: mx.array = self._head(hidden)[..., : self.vocabulary_size].astype(mx.float32)
        return mx.tanh(logits / self._cap) * self._cap if self._cap else logits


def find_trunk(model: nn.Module) -> nn.Module:
    """Return the module with the token embedding, decoder layers and final norm. Raises ModelUnavailable."""
    trunks = [module for _, module in model.named_modules() if "layers" in module and _embedding(module) is not None]
    if not trunks:
        raise ModelUnavailable(UNREADABLE.format("its layers are"))
    return max(trunks, key=lambda module: len(module["layers"]))


def _embedding(module: nn.Module) -> Any:
    return next((module[name] for name in EMBEDDINGS if name in module), None)


def _final_norm(trunk: nn.Module) -> nn.Module:
    name = next((name for name in FINAL_NORMS if name in trunk), None)
    if name is None:
        raise ModelUnavailable(UNREADABLE.format("its final norm is"))
    norm: nn.Module = trunk[name]
    return norm


@cache
def _tapped(kind: Any) -> Any:
    """Return a subclass of a layer's class that captures outputs; parameters, attributes and results are unchanged."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = kind.__call__(self, *arguments, **keywords)
        self.capture(result[0] if isinstance(result, tuple) else result)
        return result

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "tapped": kind})


def cheap_tokens_of(model: nn.Module, config: Config, architecture: str) -> tuple[int, ...]:
    """Return the forward widths, in tokens, that are cheap on this chip for most of the weights and for experts."""
    sizes, experts = Counter[str](), 0
    for module in model.modules():
        if "scales" in module:
            sizes[module.mode] += module.weight.nbytes
        if isinstance(module, QuantizedSwitchLinear):
            experts = text_number(config, *EXPERTS_KEYS)
    mode = max(sizes, key=sizes.__getitem__, default="")
    return cheap_tokens(architecture, mode=mode, experts_per_token=experts)
