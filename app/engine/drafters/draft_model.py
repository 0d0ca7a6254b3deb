"""A smaller model of the same tokenizer drafts token by token, all K forwards in one lazy graph.

Its cache lags lazily: after a stretch without drafts (several requests in a batch) the first proposal feeds what it
missed, and after full acceptance the next first forward is two tokens wide.
"""

from collections.abc import Sequence

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters import Drafter, Outcome
from app.engine.drafters.chain import ModelDrafter
from app.engine.rectangle import padded
from app.engine.rollback import UnknownCacheError
from app.engine.runner import Runner
from app.engine.unit import LoadedUnit

CATCH_UP_CHUNK_TOKENS = 512
CATCH_UP_WIDTH_TOKENS = 16
"""Up to this lag the missed tokens ride in the first draft forward; beyond, they are prefilled in chunks."""


class DraftModel(ModelDrafter):
    """Drafts with a second model."""

    name = "draft_model"

    @classmethod
    def open(cls, unit: LoadedUnit) -> Drafter | str:
        draft = unit.draft(cls.name)
        if isinstance(draft, str):
            return draft
        try:
            runner = Runner(draft.model, chunk_tokens=unit.spec.prefill_chunk_tokens)
        except UnknownCacheError as error:
            return f"the draft model's cache cannot be rolled back: {error}"
        return cls(runner, target_vocabulary=unit.vocabulary_size, max_context_tokens=draft.max_context_tokens)

    def _catch_up(self, rows: Sequence[DecodeRow]) -> tuple[mx.array, list[int]]:
        """Long gaps are prefilled row by row; the few tokens that are left then go in together."""
        names = [row.sequence_id for row in rows]
        for name, row in zip(names, rows, strict=True):
            while len(row.tokens) - (start := self.runner.length(name)) > CATCH_UP_WIDTH_TOKENS:
                chunk = row.tokens[start : min(len(row.tokens) - 1, start + CATCH_UP_CHUNK_TOKENS)]
                self._feed([name], mx.array([list(chunk)], dtype=mx.int32), [len(chunk)])
                mx.async_eval(self.runner.caches.arrays())
        missed = [row.tokens[self.runner.length(row.sequence_id) :] for row in rows]
        widths = [len(tokens) for tokens in missed]
        return self._feed(names, padded(missed), widths), widths

    def observe(self, outcome: Outcome) -> None:
        """What was accepted stays in the cache, so that it need not be fed again."""
        self._rewind(dict(zip(outcome.sequence_ids, outcome.accepted, strict=True)))
