"""A smaller model of the same tokenizer drafts token by token, all K forwards in one lazy graph.

Its cache lags lazily: after a stretch without drafts (several requests in a batch) the first proposal feeds what it
missed, and after full acceptance the next first forward is two tokens wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters import Drafter, Outcome, Proposal, propose_in_slot_order
from app.engine.drafters.chain import Chain
from app.engine.runner import Runner
from app.engine.sampling import SampledRow

CATCH_UP_CHUNK_TOKENS = 512
CATCH_UP_WIDTH_TOKENS = 16
"""Up to this lag the missed tokens ride in the first draft forward; beyond, they are prefilled in chunks."""


@dataclass
class _Flight:
    """A proposal under way: cached length of each row when all its known tokens were fed, and state snapshots after
    each further draft."""

    lengths: dict[str, int]
    snapshots: list[list[list[mx.array | None]]]


class DraftModel(Drafter):
    """Drafts with a second model. `target_vocabulary` is the width of the target's logits."""

    name = "draft_model"
    runner: Runner

    def __init__(self, runner: Runner, *, target_vocabulary: int, max_context_tokens: int) -> None:
        self.runner = runner
        self.target_vocabulary = target_vocabulary
        self.max_context_tokens = max_context_tokens
        self._flight = _Flight({}, [])

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        fits = [len(row.tokens) + row.num_draft_tokens <= self.max_context_tokens for row in rows]
        reasons = ["" if fit else "the draft model's context is full" for fit in fits]
        counts = [row.num_draft_tokens if fit else 0 for row, fit in zip(rows, fits, strict=True)]
        for row, count in zip(rows, counts, strict=True):
            if count:
                self._catch_up(row)
        return propose_in_slot_order(rows, sampled, counts, reasons, self.runner, self._draft)

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

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        """int32 [rows, width] and logits by chained forwards; nothing is read on the way."""
        names = [row.sequence_id for row in rows]
        missed = [list(row.tokens[self.runner.length(row.sequence_id) :]) for row in rows]
        widths = [len(tokens) for tokens in missed]
        padded = [tokens + [0] * (max(widths) - len(tokens)) for tokens in missed]
        logits, forward = self.runner.forward(names, mx.array(padded, dtype=mx.int32), widths)
        self.runner.commit(forward, widths)
        if max(widths) > 1:
            last = mx.array(widths, dtype=mx.int32)[:, None, None] - 1
            logits = mx.take_along_axis(logits, last, axis=1)
        self._flight = _Flight({name: self.runner.length(name) for name in names}, [self._snapshot()])
        drawn = Chain(sampled, self.target_vocabulary)
        drawn.pick(logits)
        for _ in range(width - 1):
            logits, forward = self.runner.forward(names, drawn.drafts[-1], [1] * len(names))
            self.runner.commit(forward, [1] * len(names))
            self._flight.snapshots.append(self._snapshot())
            drawn.pick(logits)
        return drawn.result()

    def _snapshot(self) -> list[list[mx.array | None]]:
        return self.runner.state_rows()

    def observe(self, outcome: Outcome) -> None:
        """Rewind to the accepted drafts; the last draft was never fed, so full acceptance leaves one token to feed."""
        choice: dict[int, int] = {}
        deepest = len(self._flight.snapshots) - 1
        for name, accepted in zip(outcome.sequence_ids, outcome.accepted, strict=True):
            if name not in self._flight.lengths:
                continue
            stay = min(accepted, deepest)
            choice[self.runner.caches.table.slots[name]] = stay
            self.runner.rewind(name, self._flight.lengths[name] + stay)
        if choice and self.runner.caches.states:
            self.runner.restore_rows(self._flight.snapshots, choice)
        self._flight = _Flight({}, [])
