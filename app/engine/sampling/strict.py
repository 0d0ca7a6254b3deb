"""The `strict` acceptance rule: decide again, as plain decoding would, tokens that a forward's width may have changed.

Forwards of different widths round differently, in logits and in the keys, values and states that they write. How far
this moves a logit is measured. Where a decision is closer than that, the row rewinds to where its cache last matched
plain decoding's, and its tokens since then are fed again one by one: then cache and logits are plain decoding's.

A row is tracked while it has the engine to itself: its prompt is read and its first token drawn without drafts.
A forward with other rows ends the tracking, because plain decoding of the row alone would not have run it.

Measuring and feeding again take many forwards: both run in slices, between the steps of other rows and models.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

import mlx.core as mx

from app.core.reason import Reason
from app.core.slices import run_slice
from app.core.step import DecodeRow
from app.engine.runner import RewindPoint, Runner, padded
from app.engine.sampling.acceptance import doubtful
from app.engine.sampling.drawing import SampledRow

SAMPLE_PROMPT, SAMPLE_TOKENS, SAMPLE_WIDTHS = 16, 48, (2, 3, 5, 8, 16)
MARGIN = 8.0
"""Safety factor on the logit shift measured in the sample (docs/speculation.md)."""
_SAMPLE = "strict sample"


class StrictRows:
    """Rows of one engine that `strict` tracks."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._fresh: set[str] = set()
        """Tracked rows that have not drawn a token yet."""
        self._rewind_points: dict[str, RewindPoint | None] = {}
        """Points where the other tracked rows' caches last matched plain decoding's; None while a cache matches."""
        self.max_shift: float | None = None
        """Largest measured logit shift caused by the width of a forward; None until measured."""
        self._measuring_for, self._measuring = "", self._measure(())
        """Id of the request whose admission waits for the measurement, and its rest."""

    @property
    def tolerance(self) -> float:
        """Largest logit shift that the width of a forward may cause; 0 means none."""
        return MARGIN * (self.max_shift or 0.0)

    def prepare(self, sequence_id: str, prompt: Sequence[int]) -> bool:
        """Measure a slice of the logit shift for a row that will be the only one; return whether it can be admitted."""
        try:
            return self._is_shared or self._measure_slice(sequence_id, prompt)
        except (RuntimeError, MemoryError):  # `admit` measures again: an error there fails this request alone
            self.stop_measuring()
            return True

    def admit(self, sequence_id: str, prompt: Sequence[int]) -> None:
        """Track a row about to be claimed if it will be the only one; what is not measured yet is measured now."""
        if self._is_shared:
            return
        while not self._measure_slice(sequence_id, prompt):
            pass
        self._fresh.add(sequence_id)

    def stop_measuring(self) -> None:
        """Give up a measurement in progress: the request that waits for it has gone."""
        self._measuring.close()
        self._measuring_for = ""

    @property
    def _is_shared(self) -> bool:
        """Whether other rows run."""
        return bool(self._runner.rows.keys() - {_SAMPLE})

    def _measure_slice(self, sequence_id: str, prompt: Sequence[int]) -> bool:
        """Measure a slice of the logit shift unless it is known; return whether it is known now."""
        if self.max_shift is None:
            if self._measuring_for != sequence_id:
                self.stop_measuring()
                self._measuring_for, self._measuring = sequence_id, self._measure(prompt)
            self.max_shift = run_slice(self._measuring)
        return self.max_shift is not None

    def _measure(self, prompt: Sequence[int]) -> Generator[None, None, float]:
        """Return the largest logit shift in a sample, yielding after each forward."""
        tokens = (list(prompt) * SAMPLE_TOKENS)[: SAMPLE_PROMPT + SAMPLE_TOKENS]
        alone = yield from self._sample_logits(tokens, 1)
        max_shift = 0.0
        for width in SAMPLE_WIDTHS:
            max_shift = max(max_shift, distance((yield from self._sample_logits(tokens, width)), alone))
        return max_shift

    def _sample_logits(self, tokens: Sequence[int], width: int) -> Generator[None, None, mx.array]:
        """Return logits float32 [tokens, vocabulary] after each sample token past the prompt, `width` at a time."""
        self._runner.claim(_SAMPLE, bits=self._runner.quantisation.bits)
        try:
            read = [self._feed(_SAMPLE, tokens[:SAMPLE_PROMPT])[:0]]
            for begin in range(SAMPLE_PROMPT, len(tokens), width):
                read.append(self._feed(_SAMPLE, tokens[begin : begin + width]))
                yield
            return mx.concatenate(read)
        finally:
            self._runner.release(_SAMPLE)

    def _feed(self, sequence_id: str, tokens: Sequence[int]) -> mx.array:
        """Feed and commit tokens; return their logits float32 [tokens, vocabulary]."""
        logits, forward = self._runner.forward([sequence_id], padded([tokens]), [len(tokens)])
        self._runner.commit(forward, [len(tokens)])
        logits = logits[0].astype(mx.float32)
        mx.eval(logits, self._runner.arrays())
        return logits

    def release(self, sequence_id: str) -> None:
        if self._measuring_for == sequence_id:
            self.stop_measuring()
        self._fresh.discard(sequence_id)
        self._rewind_points.pop(sequence_id, None)

    def untrack_shared(self, sequence_ids: Sequence[str]) -> None:
        """Stop tracking rows that are about to share a forward."""
        for name in sequence_ids if len(sequence_ids) > 1 else ():
            self.release(name)

    def begin_decoding(self, rows: Sequence[DecodeRow]) -> Sequence[DecodeRow]:
        """Begin to track a fresh row at its first token, which is drawn without drafts; return the rows to decode.
        A preempted row whose output was prefilled again is no longer tracked."""
        row = rows[0]
        if row.sequence_id in self._fresh:
            self.release(row.sequence_id)
            if len(row.tokens) == row.prompt_length:
                self._rewind_points[row.sequence_id] = None
                return [replace(row, num_draft_tokens=0, refusal=Reason("strict_first"))]
        return rows

    def has_diverged(self, rows: Sequence[DecodeRow]) -> bool:
        """Return whether a tracked row's cache may differ from plain decoding's: even plain steps are then doubtful."""
        return self._rewind_points.get(rows[0].sequence_id) is not None

    def save_point(self, rows: Sequence[DecodeRow]) -> None:
        """Save the rewind point of a tracked row before drafts are verified."""
        name = rows[0].sequence_id
        if self.tolerance and self._rewind_points.get(name, self) is None:
            self._rewind_points[name] = self._runner.rewind_point(name)

    def certain_slots(
        self, logits: mx.array, drawn: mx.array, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]
    ) -> mx.array:
        """Return int32 [rows]: how many slots of each row precede the first doubtful one.
        `drawn` are tokens [rows, slots] from `logits` [rows, slots, vocabulary]."""
        if not self.has_diverged(rows):
            return mx.full((len(rows),), drawn.shape[1], mx.int32)
        doubts = doubtful(logits[0], drawn[0], sampled[0], self.tolerance)
        return mx.sum(mx.cumprod((~doubts).astype(mx.int32)), keepdims=True)

    def replay(self, row: DecodeRow, wide: mx.array) -> Generator[None, None, tuple[mx.array, int]]:
        """Rewind the row and feed its tokens from there one by one, yielding after each. Raises KeyError unless it has
        diverged. Returns the last logits float32 [1, 1, vocabulary] (`wide`: those of a wide forward) and the token
        count."""
        name = row.sequence_id
        point = self._rewind_points[name]
        if point is None:
            raise KeyError(name)
        self._runner.return_to(name, point)
        self._rewind_points[name] = None
        alone = wide
        for token in row.tokens[point.length :]:
            alone = self._feed(name, [token])[None]
            yield
        self.max_shift = max(self.max_shift or 0.0, distance(wide, alone))
        return alone, len(row.tokens) - point.length


def distance(wide: mx.array, alone: mx.array) -> float:
    """Return the largest difference between logits; equal infinities differ by 0."""
    return float(mx.max(mx.where(wide == alone, 0.0, mx.abs(wide - alone))))
