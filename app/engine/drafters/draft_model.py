"""Drafters with a model of their own, such as a smaller model with the same tokenizer, that draft token by token.

Each draft continues the drafts before it, and all K forwards form one lazy graph. The cache catches up lazily: after
steps without drafts (several requests in a batch, say) the next proposals feed the missed tokens, a slice in each step
until none are left, and after full acceptance the next proposal begins with a forward of two tokens.
"""

import time
from collections.abc import Mapping, Sequence

import mlx.core as mx

from app.core.clock import Clock
from app.core.errors import ModelUnavailable
from app.core.reason import DRAFTER_READS, NO_REASON, Reason
from app.core.slices import SLICE_SECONDS
from app.core.step import DecodeRow
from app.engine.caches.lanes import reservation
from app.engine.caches.rollback import UnknownCacheError
from app.engine.drafters.drafter import Drafter, Observation, Proposal
from app.engine.drafters.forced_prefix import ForcedPrefix
from app.engine.loaded_unit import LoadedUnit
from app.engine.probe import open_runner
from app.engine.runner import Runner, last_of, padded
from app.engine.sampling.acceptance import fit_vocabulary
from app.engine.sampling.drawing import SampledRow, adjust, draw, noise_ahead

CATCH_UP_CHUNK_TOKENS = (16, 512)
"""Shortest and longest chunk, in tokens, in which missed tokens are prefilled."""
QUICK_CHUNK_SECONDS = SLICE_SECONDS / 4
"""Duration of a chunk, in seconds, below which the next one is twice as long. After more than a slice it is halved."""
CATCH_UP_WIDTH_TOKENS = 16
"""Maximum number of missed tokens that the first draft forward feeds; more are prefilled row by row, in chunks."""


def draw_after(
    drafts: Sequence[mx.array],
    logits: mx.array,
    sampled: Sequence[SampledRow],
    vocabulary: int,
    noise: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Draw int32 [rows, slots] after `drafts` ([rows, 1] each); return them and the logits that they were drawn from.

    The latter are `logits` [rows, slots, any] in float32 after bias and penalties; tokens of the target's `vocabulary`
    that the drafter does not know get -inf. The noise is the target's at the same position (Gumbel coupling, arXiv
    2408.07978), unless a row has a salt; `noise` is the noise for these slots, if it was made ahead.
    """
    shifted = [row._replace(pending=row.pending + len(drafts)) for row in sampled]
    logits = fit_vocabulary(logits, vocabulary).astype(mx.float32)
    logits = adjust(logits, shifted, mx.concatenate(list(drafts), axis=1) if drafts else None)
    return draw(logits, shifted, noise), logits


class DraftModel(Drafter):
    """Drafts with the model of `runner` (its method `extend` if it has one), in rows of up to `max_context_tokens`.

    `target_vocabulary` is the width of the target's logits, `rows` the number of embeddings of the draft model, which
    may lack those of pictures: such a token is read as the last one it knows.
    """

    name = "draft_model"
    runner: Runner

    def __init__(
        self,
        runner: Runner,
        *,
        target_vocabulary: int,
        max_context_tokens: int,
        rows: int = 1 << 31,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.runner = runner
        self._last_row = rows - 1
        self._clock = clock
        self._chunk_tokens = CATCH_UP_CHUNK_TOKENS[0] * 4
        self._seconds_left = SLICE_SECONDS
        """Time for reading missed tokens that is left in this step, in seconds."""
        self._target_vocabulary = target_vocabulary
        self._max_context_tokens = max_context_tokens
        self._extend = getattr(runner.model, "extend", None)
        self._states: list[list[tuple[mx.array, ...]]] = []
        """Recurrent states of the last chain: before its first draft, and after each draft that was fed."""

    @classmethod
    def open(cls, unit: LoadedUnit) -> Drafter:
        draft = unit.drafter(cls.name)
        try:
            runner = open_runner(
                draft.model,
                chunk_tokens=unit.spec.prefill_chunk_tokens,
                findings=unit.findings.get(draft.method),
                on_progress=unit.on_progress,
            )
        except UnknownCacheError as error:
            raise ModelUnavailable(f"the draft model's cache cannot be rolled back: {error}") from error
        return cls(
            runner,
            target_vocabulary=unit.vocabulary_size,
            max_context_tokens=draft.max_context_tokens,
            rows=draft.vocabulary_size,
        )

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        self._seconds_left = SLICE_SECONDS
        limits = [min(row.num_draft_tokens, self.longest or row.num_draft_tokens) for row in rows]
        reasons = tuple(
            Reason("drafter_full") if len(row.tokens) + limit > self._max_context_tokens else self._refusal(row)
            for row, limit in zip(rows, limits, strict=True)
        )
        counts = tuple(0 if reason else limit for reason, limit in zip(reasons, limits, strict=True))
        indices = {row.sequence_id: index for index, row in enumerate(rows) if counts[index]}
        if not indices:
            return Proposal.none(reasons)
        order = [indices[name] for name in self.runner.ordered(list(indices))]
        tokens, logits = self._draft([rows[index] for index in order], [sampled[index] for index in order], max(counts))
        if order != list(range(len(rows))):  # back to the order of `rows`; rows without drafts get arbitrary ones
            restore_order = mx.array([order.index(index) if index in order else 0 for index in range(len(rows))])
            tokens, logits = tokens[restore_order], logits[restore_order]
        return Proposal(tokens, counts, reasons, logits)

    def _refusal(self, row: DecodeRow) -> Reason:
        """Read what the row has missed, while the step has time; return why it gets no drafts, or `NO_REASON`."""
        name, tokens = row.sequence_id, row.tokens
        self.runner.claim_once(name, reservation(len(tokens), row.remaining))
        if len(tokens) - self.runner.length(name) > CATCH_UP_WIDTH_TOKENS:
            self._prefill(name, tokens[:-1])
        is_behind = len(tokens) - self.runner.length(name) > CATCH_UP_WIDTH_TOKENS
        return DRAFTER_READS if is_behind else NO_REASON

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        """Draft int32 [rows, width] for `rows` in slot order; return the drafts and their logits, all lazy."""
        tokens_by_id = {row.sequence_id: row.tokens for row in rows}
        output = self._catch_up(tokens_by_id)
        self._states, forced_prefix = [], ForcedPrefix([row.forced for row in rows])
        drafts: list[mx.array] = []
        logits: list[mx.array] = []
        noise = noise_ahead(sampled, width, self._target_vocabulary)
        while True:
            self._states.append(self.runner.state_rows())
            draft, draft_logits = draw_after(
                drafts, self._logits(output), sampled, self._target_vocabulary, noise[len(drafts)]
            )
            draft = forced_prefix.choose(len(drafts), draft)
            mx.async_eval(draft)  # the device drafts while the host builds the next forward
            drafts.append(draft)
            logits.append(draft_logits)
            if len(drafts) == width:
                return mx.concatenate(drafts, axis=1), mx.concatenate(logits, axis=1)
            output = self._feed(list(tokens_by_id), self._inputs(draft, output), [1] * len(tokens_by_id))

    def _catch_up(self, tokens_by_id: Mapping[str, Sequence[int]]) -> mx.array:
        """Feed the tokens in `tokens_by_id` that a row has not read yet; return each row's last output [rows, 1, …]."""
        unread = [tokens[self.runner.length(name) :] for name, tokens in tokens_by_id.items()]
        return self._feed(list(tokens_by_id), self._padded(unread), [len(tokens) for tokens in unread])

    def _prefill(self, name: str, tokens: Sequence[int]) -> None:
        """Feed those of `tokens` that the row has not read yet, in chunks, while the step has time."""
        min_tokens, max_tokens = CATCH_UP_CHUNK_TOKENS
        while (start := self.runner.length(name)) < len(tokens) and self._seconds_left > 0:
            started, chunk = self._clock(), tokens[start : start + self._chunk_tokens]
            self._feed([name], self._padded([chunk]), [len(chunk)])
            mx.eval(self.runner.caches.arrays())
            seconds = self._clock() - started
            self._seconds_left -= seconds
            if seconds > SLICE_SECONDS:
                self._chunk_tokens = max(min_tokens, self._chunk_tokens // 2)
            elif seconds < QUICK_CHUNK_SECONDS:
                self._chunk_tokens = min(max_tokens, self._chunk_tokens * 2)

    def commit(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Feed `tokens` while the step has time, unless the model's rows can be cut at any position."""
        if self.runner.needs_snapshots:
            self.runner.claim_once(sequence_id)
            self._prefill(sequence_id, tokens)

    def _padded(self, rows: Sequence[Sequence[int]]) -> mx.array:
        return padded([[min(token, self._last_row) for token in tokens] for tokens in rows])

    def _inputs(self, tokens: mx.array, output: mx.array) -> mx.array:  # noqa: ARG002
        """Return the model's inputs for int32 `tokens` [rows, width]; `output` [rows, width, …] precedes each token."""
        return tokens

    def _logits(self, output: mx.array) -> mx.array:
        return output

    def _feed(self, names: Sequence[str], inputs: mx.array, widths: Sequence[int]) -> mx.array:
        """Run the model over `inputs` [rows, width, …] and commit the real tokens; return each row's last output."""
        output, forward = self.runner.forward(names, inputs, widths, call=self._extend)
        self.runner.commit(forward, widths)
        return last_of(output, widths)

    def observe(self, observation: Observation) -> None:
        """Rewind rejected drafts. Accepted ones are kept in the cache, so that they need not be fed again."""
        self._seconds_left = SLICE_SECONDS
        slots, rejected = self.runner.caches.table.slots, {}
        for name, tokens, accepted in zip(
            observation.forward.sequence_ids, observation.tokens, observation.accepted, strict=False
        ):
            if name in slots and self.runner.length(name) > len(tokens) + accepted:
                self.runner.rewind(name, len(tokens) + accepted)
                rejected[slots[name]] = accepted
        if rejected:
            self.runner.restore_rows(self._states, rejected)
        self._states = []
