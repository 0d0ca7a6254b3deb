"""Results of a forward other than tokens: log probabilities, embeddings of prompts, and the seconds of its phases."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp
from typing import Any

import mlx.core as mx

from app.core.errors import ModelUnavailable
from app.core.request import Request
from app.core.statistics import PhaseSeconds
from app.core.step import TokenLogprobs
from app.engine.runner import AloneRunner, Forward, Runner
from app.models.drafters.config import FINAL

SLOW_SECONDS = 1.0
"""Step duration, in seconds, above which the next step is evaluated in parts. A long prefill always is."""
LONG_TOKENS, STEP_PARTS = 256, 8
"""Minimum width of a long prefill, in tokens, and number of parts of one evaluation."""


@dataclass(frozen=True)
class Scores:
    """Log probabilities (nat) from raw logits: `chosen` [rows, slots], those of the scored tokens, and, if requested,
    `top`: the ids of the likeliest tokens and their log probabilities, [rows, slots, k] each."""

    chosen: mx.array
    top: tuple[mx.array, ...] = ()

    def arrays(self) -> list[mx.array]:
        return [self.chosen, *self.top]

    def rows(self, index: mx.array) -> "Scores":
        return Scores(self.chosen[index], tuple(array[index] for array in self.top))

    @cached_property
    def _chosen(self) -> Any:
        """`chosen` as numbers; waits for the device."""
        return self.chosen.tolist()

    def confidences(self, row: int, count: int) -> tuple[float, ...]:
        """Return the probabilities of the tokens chosen in the first `count` slots of a row."""
        return tuple(map(exp, self._chosen[row][:count]))

    def row_logprobs(self, row: int, count: int, top: int) -> tuple[TokenLogprobs, ...]:
        """Return the log probabilities of a row's first `count` slots, with `top` tokens each; waits for the device."""
        chosen = self._chosen[row][:count]
        if not self.top:
            return tuple(map(TokenLogprobs, chosen))
        likeliest: list[Any] = [array[row, :count, :top].tolist() for array in self.top]
        return tuple(
            TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
            for logprob, ids, values in zip(chosen, *likeliest, strict=True)
        )

    def all_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the log probabilities of all slots of the only row."""
        count, top = self.chosen.shape[1], self.top[0].shape[2] if self.top else 0
        return self.row_logprobs(0, count, top)


def score(logits: mx.array, tokens: mx.array, top: int) -> Scores:
    """Score `tokens` [rows, slots] and the `top` likeliest by log softmax of float32 `logits` [rows, slots, any]."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(logits, tokens[..., None], axis=-1) - total)[..., 0]
    if top == 0:
        return Scores(chosen)
    best = mx.argpartition(-logits, kth=top - 1, axis=-1)[..., :top]
    values = mx.take_along_axis(logits, best, axis=-1) - total
    order = mx.argsort(-values, axis=-1)
    return Scores(chosen, (mx.take_along_axis(best, order, axis=-1), mx.take_along_axis(values, order, axis=-1)))


class Pooling:
    """Pooled hidden states of embedding requests. `admit` raises ModelUnavailable if the states cannot be read."""

    def __init__(self, runner: Runner, taps: Sequence[int]) -> None:
        self._runner = runner
        self._taps = tuple(taps)
        self._poolings: dict[str, str] = {}
        self._pooled: dict[str, tuple[mx.array, int]] = {}
        """Sum of a sequence's states so far, or the last state, and the number of its states; by sequence id."""

    def admit(self, request: Request) -> None:
        """Start a request. The first embedding request makes all later forwards return their final hidden states."""
        if not request.embeds:
            return
        if isinstance(self._runner, AloneRunner):
            raise ModelUnavailable("the hidden states of this model cannot be read")
        if FINAL not in self._taps:
            self._taps = (*self._taps, FINAL)
            self._runner.tap(self._taps)
        self._poolings[request.id] = request.embeds

    def release(self, sequence_id: str) -> None:
        self._poolings.pop(sequence_id, None)
        self._pooled.pop(sequence_id, None)

    def pool(self, forward: Forward) -> list[mx.array]:
        """Pool a forward's hidden states; return the arrays to evaluate with it."""
        if not self._poolings:
            return []
        for index, (name, width) in enumerate(zip(forward.sequence_ids, forward.widths, strict=True)):
            if name in self._poolings:
                states = forward.features[FINAL][index, :width].astype(mx.float32)
                previous, count = self._pooled.get(name, (mx.zeros(states.shape[-1]), 0))
                is_mean = self._poolings[name] == "mean"
                self._pooled[name] = previous + mx.sum(states, axis=0) if is_mean else states[-1], count + width
        return [pooled for pooled, _ in self._pooled.values()]

    def embedding(self, sequence_id: str) -> tuple[float, ...]:
        """Return the pooled state as a unit vector; empty for a request without an embedding."""
        if sequence_id not in self._pooled:
            return ()
        pooled, count = self._pooled[sequence_id]
        pooled = pooled / count
        values: list[float] = (pooled / mx.maximum(mx.linalg.norm(pooled), 1e-12)).tolist()  # type: ignore[assignment]
        return tuple(values)


class StepTimer:
    """Times the phases of a decode step, if `is_timed`: then the host waits for the device at the end of each."""

    def __init__(self, *, is_timed: bool) -> None:
        self._ends = {"begun": time.perf_counter()} if is_timed else None

    def end(self, phase: str, arrays: Callable[[], Sequence[Any]] = list) -> None:
        """Record the end of a phase, once its `arrays` are evaluated."""
        if self._ends is not None:
            mx.eval(arrays())
            self._ends[phase] = time.perf_counter()

    def phase_seconds(self) -> PhaseSeconds | None:
        """Return the seconds of each phase; None for a step that is not timed."""
        if (ends := self._ends) is None:
            return None
        drafted, verified = ends["drafted"] - ends["begun"], ends["verified"] - ends["launched"]
        return PhaseSeconds(drafted, verified, ends["rewound"] - ends["verified"])


class CacheWrites:
    """Evaluates what forwards wrote to a model's caches. If steps are slow, it does so in parts and reports progress
    after each: the supervisor takes silence for a stuck kernel."""

    def __init__(self, runner: Runner, slow_seconds: float) -> None:
        self._runner = runner
        self._slow_seconds = slow_seconds
        self.are_slow = True
        """Whether the last step took longer than `slow_seconds`, or none has run yet."""

    def record_step(self, seconds: float) -> None:
        """Record the duration of a step."""
        self.are_slow = seconds > self._slow_seconds

    def evaluate(self, *, in_parts: bool = False) -> None:
        """Evaluate the writes now if steps are slow, or `in_parts` is set; else they are evaluated with the results."""
        arrays = self._runner.arrays() if in_parts or self.are_slow else []
        size = max(1, ceil(len(arrays) / STEP_PARTS))
        for begin in range(0, len(arrays), size):
            mx.eval(arrays[begin : begin + size])
            self._runner.on_progress()
