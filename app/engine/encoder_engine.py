"""Engine of a loaded encoder: each text is encoded in one forward, without a cache, into a vector.
The scheduler sees a text as a prompt with one drawn token, which is not sent to the client."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx

from app.core.request import Request
from app.core.step import (
    DecodeRow,
    EngineLimits,
    PrefillRow,
    PrefillStep,
    RowOutcome,
    StepPlan,
    StepResult,
)
from app.core.unit import PrefixState
from app.engine import memory
from app.engine.encoders import Encoder, pooled
from app.engine.forward_results import SLOW_SECONDS
from app.engine.loaded_unit import LoadedUnit
from app.engine.runner import padded
from app.models.encoders import BATCH_ROWS, BATCH_TOKENS

PLACEHOLDER_TOKEN = 0
"""Token id that an encoder emits in place of an answer."""


class EncoderEngine:
    """`EnginePort` over an encoder. It allows many rows, because they hold no caches between steps."""

    cache_bytes = 0
    prefix_cache_bytes = 0
    cache_families: tuple[str, ...] = ()
    prefix_state = PrefixState()

    def __init__(self, encoder: Encoder, unit: LoadedUnit, *, slow_seconds: float = SLOW_SECONDS) -> None:
        self.on_progress = unit.on_progress
        self._slow_seconds = slow_seconds
        self._token_seconds = math.inf
        """Seconds per token in the last forward; infinite before the first one."""
        self._encoder = encoder
        self._poolings: dict[str, str] = {}
        self._vectors: dict[str, tuple[float, ...]] = {}
        self.limits = EngineLimits(
            max_context_tokens=unit.max_context_tokens,
            max_rows=BATCH_ROWS,
            prefill_chunk_tokens=BATCH_TOKENS,
            vocabulary_size=unit.vocabulary_size,
        )

    def fetch(self, request: Request) -> bool:  # noqa: ARG002 - texts are not cached
        return True

    def admit(self, request: Request) -> int:
        self._poolings[request.id] = request.embeds
        return 0

    def release(self, sequence_id: str, tokens: Sequence[int]) -> None:  # noqa: ARG002 - texts are not cached
        self._poolings.pop(sequence_id, None)
        self._vectors.pop(sequence_id, None)

    def step(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        with memory.all_or_nothing(self.close):
            self._encode([row for row in plan.rows if row.sequence_id not in self._vectors])
        if isinstance(plan, PrefillStep):
            result = StepResult(prefilled=tuple((row.sequence_id, len(row.tokens) - 1) for row in plan.rows))
        else:
            result = StepResult(tuple(self._outcome(row) for row in plan.rows))
        return replace(result, seconds=time.perf_counter() - started)

    def _encode(self, rows: Sequence[PrefillRow | DecodeRow]) -> None:
        """Run one forward over whole texts, whichever chunk of them is planned."""
        if not rows:
            return
        started, texts = time.perf_counter(), [list(row.tokens) for row in rows]
        tokens = padded(texts)
        real = mx.arange(tokens.shape[1]) < mx.array([len(text) for text in texts])[:, None]
        states, is_slow = tokens, tokens.size * self._token_seconds > self._slow_seconds
        for states in self._encoder.layer_outputs(tokens, real):
            if is_slow:  # the supervisor takes silence for a stuck kernel
                mx.eval(states)
                self.on_progress()
        vectors = pooled(states, real, [self._poolings[row.sequence_id] for row in rows])
        for row, vector in zip(rows, cast("list[list[float]]", vectors.tolist()), strict=True):
            self._vectors[row.sequence_id] = tuple(vector)
        self._token_seconds = (time.perf_counter() - started) / tokens.size
        mx.clear_cache()

    def _outcome(self, row: DecodeRow) -> RowOutcome:
        return RowOutcome(
            row.sequence_id, (PLACEHOLDER_TOKEN,), len(row.tokens), embedding=self._vectors[row.sequence_id]
        )

    def drop_prefix_cache(self, retained_share: float = 0.0) -> None:
        """Do nothing: there is no prefix cache."""

    def bound_prefix_cache(self, limit_bytes: int) -> None:
        """Do nothing: there is no prefix cache."""

    def close(self) -> None:
        """Drop all rows and vectors."""
        self._poolings.clear()
        self._vectors.clear()
