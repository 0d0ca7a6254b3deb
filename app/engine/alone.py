"""The runner for models whose caches no family covers: mlx-lm's own cache, one row, nothing rewound."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from app.engine.lanes import SlotTable
from app.engine.recording import Recording
from app.engine.rollback import Caches
from app.engine.runner import Forward


class AloneRunner:
    """Same verbs as `Runner`. One sequence at a time; every token fed stays."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.caches = Caches(table=SlotTable(), layers=[])

    def claim(self, sequence_id: str) -> None:
        """Raises RuntimeError when the one row is taken."""
        if self.caches.table.slots:
            raise RuntimeError("this model decodes one request at a time")
        self.caches.table.claim(sequence_id)
        self.caches.layers = make_prompt_cache(self.model)

    def release(self, sequence_id: str) -> None:
        if sequence_id in self.caches.table.slots:
            self.caches.table.release(sequence_id)
            self.caches.layers = []

    def length(self, sequence_id: str) -> int:
        return self.caches.table.length(sequence_id)

    def ordered(self, sequence_ids: Sequence[str]) -> list[str]:
        return list(sequence_ids)

    def forward(
        self, sequence_ids: Sequence[str], tokens: mx.array, widths: Sequence[int], *, record: bool = False
    ) -> tuple[mx.array, Forward]:
        if record:
            raise RuntimeError("this model cannot verify drafts: its cache cannot be rewound")
        selection = self.caches.table.select(sequence_ids, tokens.shape[1])
        logits: Any = self.model(tokens, cache=self.caches.layers)
        return logits, Forward(selection, tuple(sequence_ids), tuple(widths), Recording(), starts=selection.lengths)

    def commit(self, forward: Forward, keep: Sequence[int]) -> list[int]:
        if tuple(keep) != forward.widths:
            raise RuntimeError("this model's cache cannot be rewound")
        self.caches.table.lengths[0] += keep[0]
        return list(keep)

    def clear(self) -> None:
        for name in list(self.caches.table.slots):
            self.release(name)
