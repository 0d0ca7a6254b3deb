"""A smaller model of the same tokenizer drafts token by token, all K forwards in one lazy graph.

Its cache lags lazily: after a stretch without drafts (several requests in a batch) the first proposal feeds what it
missed, and after full acceptance the next first forward is two tokens wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters import Proposal, Verdict
from app.engine.runner import Runner
from app.engine.sampling import SampledRow, adjust, draw

CATCH_UP_CHUNK_TOKENS = 512
CATCH_UP_WIDTH_TOKENS = 16
"""Up to this lag the missed tokens ride in the first draft forward; beyond, they are prefilled in chunks."""


@dataclass
class _Flight:
    """A proposal under way: cached length of each row when all its known tokens were fed, and state snapshots after
    each further draft."""

    lengths: dict[str, int]
    snapshots: list[list[list[mx.array | None]]]


class DraftModel:
    """Drafts with a second model. `target_vocabulary` is the width of the target's logits."""

    name = "draft_model"

    def __init__(self, runner: Runner, *, target_vocabulary: int, max_context_tokens: int) -> None:
        self.runner = runner
        self.target_vocabulary = target_vocabulary
        self.max_context_tokens = max_context_tokens
        self._flight = _Flight({}, [])

    @property
    def nbytes(self) -> int:
        return self.runner.caches.nbytes

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        fits = [len(row.tokens) + row.num_draft_tokens <= self.max_context_tokens for row in rows]
        reasons = tuple("" if fit else "the draft model's context is full" for fit in fits)
        counts = tuple(row.num_draft_tokens if fit else 0 for row, fit in zip(rows, fits, strict=True))
        if not any(counts):
            return Proposal(None, counts, reasons)
        drafting = [index for index, count in enumerate(counts) if count]
        for index in drafting:
            self._catch_up(rows[index])
        slots = self.runner.caches.table.slots
        order = sorted(drafting, key=lambda index: slots[rows[index].sequence_id])
        tokens = self._draft([rows[index] for index in order], [sampled[index] for index in order])
        if order != list(range(len(rows))):
            place = [order.index(index) if index in order else 0 for index in range(len(rows))]
            tokens = tokens[mx.array(place)]
        return Proposal(tokens, counts, reasons)

    def _catch_up(self, row: DecodeRow) -> None:
        """Prefill what the drafter missed, except the few tokens that the first draft forward takes along."""
        name = row.sequence_id
        if name not in self.runner.caches.table.slots:
            self.runner.claim(name)
        while len(row.tokens) - self.runner.length(name) > CATCH_UP_WIDTH_TOKENS:
            start = self.runner.length(name)
            stop = min(len(row.tokens) - 1, start + CATCH_UP_CHUNK_TOKENS)
            chunk = mx.array([list(row.tokens[start:stop])], dtype=mx.int32)
            _, forward = self.runner.forward([name], chunk, [stop - start])
            self.runner.commit(forward, [stop - start])
            mx.async_eval(self.runner.caches.arrays())

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> mx.array:
        """int32 [rows, K] by K chained forwards; nothing is read on the way."""
        names = [row.sequence_id for row in rows]
        missed = [list(row.tokens[self.runner.length(row.sequence_id) :]) for row in rows]
        widths = [len(tokens) for tokens in missed]
        width = max(widths)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in missed]
        logits, forward = self.runner.forward(names, mx.array(padded, dtype=mx.int32), widths)
        self.runner.commit(forward, widths)
        if width > 1:
            last = mx.array(widths, dtype=mx.int32)[:, None, None] - 1
            logits = mx.take_along_axis(logits, last, axis=1)
        self._flight = _Flight({name: self.runner.length(name) for name in names}, [self._snapshot()])
        drafts = [self._pick(logits, sampled, [])]
        for _ in range(max(row.num_draft_tokens for row in rows) - 1):
            mx.async_eval(drafts[-1])  # the device drafts this one while the host builds the next forward
            logits, forward = self.runner.forward(names, drafts[-1], [1] * len(names))
            self.runner.commit(forward, [1] * len(names))
            self._flight.snapshots.append(self._snapshot())
            drafts.append(self._pick(logits, sampled, drafts))
        return mx.concatenate(drafts, axis=1)

    def _snapshot(self) -> list[list[mx.array | None]]:
        return self.runner.state_rows()

    def _pick(self, logits: mx.array, sampled: Sequence[SampledRow], drafts: Sequence[mx.array]) -> mx.array:
        """int32 [rows, 1]: drawn with the same noise as the target will use at that position (Gumbel coupling)."""
        logits = logits[..., : self.target_vocabulary].astype(mx.float32)
        ahead = [
            SampledRow(row.parameters, row.tokens, row.prompt_length, row.pending + len(drafts)) for row in sampled
        ]
        fed = mx.concatenate(list(drafts), axis=1) if drafts else None
        return draw(adjust(logits, ahead, fed), ahead, noise_vocabulary=self.target_vocabulary)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Rewind to the accepted drafts; the last draft was never fed, so full acceptance leaves one token to feed."""
        choice: dict[int, int] = {}
        deepest = len(self._flight.snapshots) - 1
        for verdict in verdicts:
            name = verdict.sequence_id
            if name not in self._flight.lengths:
                continue
            stay = min(verdict.accepted, deepest)
            choice[self.runner.caches.table.slots[name]] = stay
            self.runner.rewind(name, self._flight.lengths[name] + stay)
        if self.runner.caches.states:
            self.runner.restore_rows(self._flight.snapshots, choice)
        self._flight = _Flight({}, [])

    def release(self, sequence_id: str) -> None:
        self.runner.release(sequence_id)
