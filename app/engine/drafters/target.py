"""What feature drafters borrow from the target: its token embedding and its head."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

from app.core.config_values import text_part
from app.engine.layers import embedding_of, head_of


class Target:
    """Embedding and head of a loaded model. Raises ValueError when they are in no known place."""

    def __init__(self, model: nn.Module, config: Mapping[str, Any], vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._embedding = embedding_of(model)
        self._head = head_of(model)
        settings = text_part(config)
        scaled = str(config.get("model_type", "")).startswith("gemma")
        self._scale = float(settings["hidden_size"]) ** 0.5 if scaled else 1.0
        cap = settings.get("final_logit_softcapping")
        self._cap = float(cap) if cap else 0.0

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [rows, width, hidden] of int32 `tokens` [rows, width], as the target's first layer reads them."""
        embedded: mx.array = self._embedding(tokens)
        return embedded if self._scale == 1.0 else embedded * self._scale

    def logits(self, hidden: mx.array) -> mx.array:
        """float32 logits [rows, width, vocabulary] of hidden states behind the final norm."""
        logits: mx.array = self._head(hidden)[..., : self.vocabulary_size].astype(mx.float32)
        return mx.tanh(logits / self._cap) * self._cap if self._cap else logits
