"""What drafters share that read the target's hidden states: features wait, row by row, until the context takes them.

A prompt's features enter the drafter's context chunk by chunk. Those of decode steps wait for the next proposal, so
that a plain stretch costs nothing; at most `WAITING_TOKENS` of them are kept. What was dropped, or came from a prefix
cache without features, is a gap: the context goes on behind it at the right positions.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters import Drafter, Outcome, Proposal, propose_in_slot_order
from app.engine.runner import Runner
from app.engine.sampling import SampledRow

WAITING_TOKENS = 256
EXTEND_AT_ONCE_TOKENS = 32


class Waiting:
    """Features of one row that its context does not hold yet: positions `start` … `stop` - 1, one after the other."""

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._parts: list[mx.array] = []

    def add(self, start: int, features: mx.array) -> None:
        """Features [1, n, size] of the positions from `start` on; older ones than a gap or the bound are dropped."""
        if start != self.stop:
            self._parts, self.start = [], start
        self._parts.append(features)
        self.stop = start + features.shape[1]
        while self.stop - self.start > WAITING_TOKENS and len(self._parts) > 1:
            self.start += self._parts.pop(0).shape[1]

    def take(self, count: int) -> mx.array:
        """The oldest `count` features [1, count, size]."""
        joined = self._parts[0] if len(self._parts) == 1 else mx.concatenate(self._parts, axis=1)
        self._parts = [joined[:, count:]] if count < joined.shape[1] else []
        self.start += count
        return joined[:, :count]


class FeatureDrafter(Drafter):
    """A drafter over `runner`, whose module has a verb `extend(inputs, cache)` that writes the context.

    `shift` 1: a feature enters together with the token behind it (EAGLE, MTP); 0: alone (DFlash).
    """

    runner: Runner
    longest: int
    shift = 0

    def __init__(self, runner: Runner, *, taps: Sequence[int], longest: int, max_context_tokens: int) -> None:
        self.runner = runner
        self.taps = tuple(taps)
        self.longest = longest
        self.max_context_tokens = max_context_tokens
        self._waiting: dict[str, Waiting] = {}

    def admit(self, sequence_id: str) -> None:
        self.runner.claim(sequence_id)
        self._waiting[sequence_id] = Waiting()

    def release(self, sequence_id: str) -> None:
        self._waiting.pop(sequence_id, None)
        super().release(sequence_id)

    def observe(self, outcome: Outcome) -> None:
        """Keep the features of what stayed; a prompt's go into the context at once."""
        members = [row for row, name in enumerate(outcome.sequence_ids) if name in self._waiting and outcome.kept[row]]
        if not members or not outcome.features:
            return
        features = mx.concatenate([outcome.features[tap] for tap in self.taps], axis=-1)
        for row in members:
            name, kept = outcome.sequence_ids[row], outcome.kept[row]
            self._waiting[name].add(outcome.starts[row], features[row : row + 1, :kept])
            if kept >= EXTEND_AT_ONCE_TOKENS:
                self._extend([name], [outcome.tokens[row]])
                mx.async_eval(self.runner.caches.arrays())

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        reasons = [self._refusal(row) for row in rows]
        counts = [
            0 if reason else min(row.num_draft_tokens, self.longest) for row, reason in zip(rows, reasons, strict=True)
        ]
        return propose_in_slot_order(rows, sampled, counts, reasons, self.runner, self._draft)

    def _refusal(self, row: DecodeRow) -> str:
        """Why a row gets no drafts now; "" when it does."""
        waiting = self._waiting.get(row.sequence_id)
        if waiting is None:
            return "the drafter does not follow this request"
        if len(row.tokens) + min(row.num_draft_tokens, self.longest) > self.max_context_tokens:
            return "the drafter's context is full"
        if waiting.stop != len(row.tokens) - 1 or waiting.start == waiting.stop:
            return "the hidden states of the last tokens are still to come"
        return ""

    def _extend(self, names: Sequence[str], tokens: Sequence[Sequence[int]]) -> tuple[Any, list[int]]:
        """Let the context take all waiting features that can enter; the module's output [rows, width, …] and widths."""
        widths, parts = [], []
        for name, row in zip(names, tokens, strict=True):
            waiting = self._waiting[name]
            if self.runner.length(name) != waiting.start:
                self.runner.skip(name, waiting.start)
            start, width = waiting.start, min(waiting.stop, len(row) - self.shift) - waiting.start
            widths.append(width)
            parts.append(self._input(waiting.take(width), row[start + self.shift : start + self.shift + width]))
        width = max(widths)
        padded = [mx.pad(part, [(0, 0), (0, width - part.shape[1]), (0, 0)]) for part in parts]
        inputs = padded[0] if len(padded) == 1 else mx.concatenate(padded)
        output, forward = self.runner.forward(names, inputs, widths, call=self.runner.model.extend)
        self.runner.commit(forward, widths)
        return output, widths

    def _input(self, features: mx.array, tokens: Sequence[int]) -> mx.array:  # noqa: ARG002
        """What the module's `extend` reads for features [1, n, size] and, shifted, the tokens behind them."""
        return features

    def _draft(
        self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int
    ) -> tuple[mx.array, mx.array | None]:
        """int32 [rows, width] drafts and the logits they were drawn from; `rows` are in slot order."""
        raise NotImplementedError
