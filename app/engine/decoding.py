"""The decode step, from top to bottom: draft → verify → accept → rewind (→ replay, under `strict`, in slices).

Plain decoding is a decode step with zero drafts, plus one forward launched ahead, so that the device never waits for
the host. Tokens of a launched forward are delivered first, whatever is planned next for its rows.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Any, NamedTuple

import mlx.core as mx

from app.core.reason import NO_REASON, Reason
from app.core.request import OFF, Request
from app.core.slices import run_slice
from app.core.step import DecodeRow, DecodeStep, RowOutcome, StepResult
from app.engine.constraints import Constraints
from app.engine.drafters.drafter import Observation, Proposal
from app.engine.drafters.registry import Drafters
from app.engine.feeding import LaunchedForward, feed, feed_drafts
from app.engine.forward_results import CacheWrites, Pooling, Scores, StepTimer, score
from app.engine.runner import Forward, Runner, last_of
from app.engine.sampling.acceptance import Verified, accept
from app.engine.sampling.drawing import DRAFT_SALT, SampledRow, TokenCounts, adjust, draw, penalises
from app.engine.sampling.strict import StrictRows


@dataclass(slots=True)
class EngineRow:
    """A request in the engine. `tokens` is a live view of prompt and output, None before the first step. `counts` are
    those of its tokens, kept only if the request has penalties."""

    request: Request
    tokens: Sequence[int] | None = None
    counts: TokenCounts | None = field(init=False)

    def __post_init__(self) -> None:
        self.counts = TokenCounts() if penalises(self.request.sampling) else None


class Acceptance(NamedTuple):
    """Outcome of a verify forward. Per row: `results`, the number of drafts verified and the scores of drawn tokens.
    Per step: `replayed`, the number of tokens that `strict` reread."""

    results: list[Verified]
    drafted: Sequence[int]
    scores: Scores
    replayed: int = 0

    @property
    def is_doubtful(self) -> bool:
        """Whether plain decoding might draw another last token; true only for a `strict` row, alone in its step."""
        return self.results[0].is_doubtful

    def committed(self, rows: Sequence[DecodeRow]) -> list[int]:
        """Return how many fed tokens of each row to keep in the cache: the known ones and the accepted drafts."""
        return [
            len(row.tokens) - row.computed + result.accepted for row, result in zip(rows, self.results, strict=True)
        ]


@dataclass(slots=True)
class UnfinishedStep:
    """A step of one `strict` row whose replay takes several slices. `seconds` is the time of those that are over."""

    sequence_id: str
    width: int
    timer: StepTimer
    work: Generator[None, None, tuple[RowOutcome, ...]]
    seconds: float = 0.0
    waits: bool = False
    """Whether it is the other rows' turn."""


class Decoder:
    """Decodes the rows of one engine. `by_rejection`: a draft is accepted with probability min(1, p/q); otherwise only
    if the target draws the same token."""

    def __init__(
        self,
        runner: Runner,
        drafters: Drafters,
        rows: Mapping[str, EngineRow],
        *,
        constraints: Constraints,
        pooling: Pooling,
        strict_rows: StrictRows,
        writes: CacheWrites,
        by_rejection: bool,
    ) -> None:
        self._runner = runner
        self._drafters = drafters
        self._rows = rows
        self._constraints = constraints
        self._pooling = pooling
        self._strict_rows = strict_rows
        self._writes = writes
        self._by_rejection = by_rejection
        self._in_flight: LaunchedForward | None = None
        self._unfinished: UnfinishedStep | None = None

    def release(self, sequence_id: str) -> None:
        """Drop the row's token in flight and keep those of other rows. Unknown ids are fine."""
        if self._unfinished is not None and self._unfinished.sequence_id == sequence_id:
            self._unfinished = None
        if self._in_flight is not None:
            others = [name for name in self._in_flight.sequence_ids if name != sequence_id]
            self._in_flight = self._in_flight.only(others)

    def clear(self) -> None:
        """Drop the forward in flight and the unfinished step."""
        self._in_flight = self._unfinished = None

    # --- the step ---------------------------------------------------------------------------------------------

    def step(self, plan: DecodeStep) -> StepResult:
        """Run a step for the rows of `plan`, or deliver the forward in flight for them. While the step of one of them
        is unfinished, its slices alternate with steps of the others."""
        timer = StepTimer(is_timed=plan.timed)
        by_id = {row.sequence_id: row for row in plan.rows}
        if (unfinished := self._unfinished) is not None and unfinished.sequence_id in by_id:
            unfinished.waits = len(by_id) > 1 and not unfinished.waits
            if not unfinished.waits:
                return self._run_slice(unfinished)
            del by_id[unfinished.sequence_id]
        rows = [by_id[name] for name in self._runner.ordered(list(by_id))]
        self._strict_rows.untrack_shared(list(by_id))
        if self._in_flight is not None and any(row.sequence_id in self._in_flight.sequence_ids for row in rows):
            return StepResult(self._decode_plain(rows, (NO_REASON,) * len(rows)))
        for row in rows:
            self._runner.caches.table.check(row.sequence_id, row.computed)
        proposal = self._draft(rows)
        width = 1 + max(proposal.counts) if proposal.width else max(len(row.tokens) - row.computed for row in rows)
        if proposal.width or self._strict_rows.has_diverged(rows):  # without a draft, its next token may be in doubt
            work = self._decode_drafts(rows, proposal, timer)
            return self._run_slice(UnfinishedStep(rows[0].sequence_id, width, timer, work))
        return StepResult(self._decode_plain(rows, proposal.reasons), width=width)

    def _run_slice(self, step: UnfinishedStep) -> StepResult:
        """Run a slice of a step: its rows have no outcomes before the last one, which counts the time of all."""
        began = time.perf_counter()
        outcomes = run_slice(step.work)
        if outcomes is None:
            step.seconds += time.perf_counter() - began
            self._unfinished = step
            return StepResult()
        if self._unfinished is step:
            self._unfinished = None
        phase_seconds = None if step.seconds else step.timer.phase_seconds()
        return StepResult(outcomes, width=step.width, seconds=step.seconds, phase_seconds=phase_seconds)

    def _decode_drafts(
        self, rows: Sequence[DecodeRow], proposal: Proposal, timer: StepTimer
    ) -> Generator[None, None, tuple[RowOutcome, ...]]:
        """Verify, accept and rewind in one lazy graph; unless rows are constrained or replayed, the host waits once.
        Yields after each token that is replayed."""
        mx.async_eval(proposal.tokens)  # the device drafts while the host builds the verify forward
        timer.end("drafted", lambda: [proposal.tokens])
        logits, forward = self._verify(rows, proposal)
        acceptance = self._accept(rows, proposal, logits, timer)
        committed = self._rewind(rows, forward, acceptance)
        if acceptance.is_doubtful:  # drafters are informed first: they may draft for other rows meanwhile
            committed = acceptance.committed(rows)
            self._inform_drafters(rows, proposal, forward, acceptance, committed)
            acceptance = yield from self._replay(rows, logits, acceptance)
        else:
            self._inform_drafters(rows, proposal, forward, acceptance, committed)
        timer.end("rewound", lambda: [model.arrays() for model in (self._runner, *self._drafters.runners.values())])
        drafts_by_row = zip(proposal.reasons, acceptance.drafted, proposal.appended_counts, strict=True)
        columns = zip(rows, acceptance.results, committed, drafts_by_row, strict=True)
        return tuple(
            self._outcome(
                row,
                result.emitted,
                acceptance.scores,
                index,
                count,
                reason,
                method=row.method if drafted else OFF,
                drafted=drafted,
                appended=forced,
                replayed=acceptance.replayed,
            )
            for index, (row, result, count, (reason, drafted, forced)) in enumerate(columns)
        )

    def _draft(self, rows: Sequence[DecodeRow]) -> Proposal:
        """Propose drafts for each row: tokens that its grammar forces, the drafter's, then forced tokens again."""
        requested = [self._constraints.with_forced_drafts(row) for row in self._strict_rows.begin_decoding(rows)]
        salt = DRAFT_SALT if self._by_rejection else 0
        proposal = self._drafters.propose(requested, [self._sampled(row, salt=salt) for row in rows])
        return self._constraints.append_forced(requested, proposal)

    def _verify(self, rows: Sequence[DecodeRow], proposal: Proposal) -> tuple[mx.array, Forward]:
        """Run one forward over known tokens and drafts; return its logits float32 [rows, 1 + K, vocabulary]."""
        self._strict_rows.save_point(rows)
        fed, positions = feed_drafts(rows, proposal.tokens)
        widths = [len(row.tokens) - row.computed + count for row, count in zip(rows, proposal.counts, strict=True)]
        logits, forward = self._runner.forward([row.sequence_id for row in rows], fed, widths, record=True)
        self._pooling.pool(forward)
        if logits.shape[1] != positions.shape[1]:
            logits = mx.take_along_axis(logits, positions[..., None], axis=1)
        return logits.astype(mx.float32), forward

    def _accept(self, rows: Sequence[DecodeRow], proposal: Proposal, logits: mx.array, timer: StepTimer) -> Acceptance:
        """Draw at every slot of `logits` float32 [rows, slots, vocabulary] and compare with the drafts."""
        drafts, sampled = proposal.tokens, [self._sampled(row) for row in rows]
        adjusted = adjust(logits, sampled, drafts)
        adjusted, allowed_counts = self._constraints.mask(adjusted, rows, sampled, drafts, proposal.counts)
        # Rejection must not drop a draft for its value, and need not: a forbidden token has target probability 0.
        drafted = proposal.counts if self._by_rejection else allowed_counts
        draft_logits = proposal.logits if self._by_rejection else None
        drawn, accepted = accept(drafts, adjusted, sampled, drafted, draft_logits=draft_logits)
        certain = self._strict_rows.certain_slots(adjusted, drawn, rows, sampled)
        packed = Verified.pack(drawn, accepted, certain)
        scores = self._scores(logits, drawn, rows)
        self._writes.evaluate()
        timer.end("launched")  # on the CPU the launch already waits for most of the forward
        mx.async_eval(packed, *scores.arrays())
        results = Verified.unpack(packed)
        timer.end("verified")
        return Acceptance(results, drafted, scores)

    def _rewind(self, rows: Sequence[DecodeRow], forward: Forward, acceptance: Acceptance) -> Sequence[int]:
        """Commit the known tokens and accepted drafts of each row; return how many of its fed tokens are kept."""
        return self._runner.commit(forward, acceptance.committed(rows))

    def _replay(
        self, rows: Sequence[DecodeRow], logits: mx.array, acceptance: Acceptance
    ) -> Generator[None, None, Acceptance]:
        """Draw the doubtful token of a `strict` row, the only row of its step, as plain decoding would. The logits it
        is drawn from replace those of its slot in `logits` float32 [1, slots, vocabulary]."""
        (asked,), (result,) = rows, acceptance.results
        accepted_tokens, slot = result.drawn[: result.accepted], slice(result.accepted, result.accepted + 1)
        row = replace(asked, tokens=[*asked.tokens, *accepted_tokens])
        alone, replayed = yield from self._strict_rows.replay(row, logits[:, slot])
        logits[:, slot] = alone
        drawn: Any = self._draw(logits[:, slot], [row]).tolist()
        result = replace(result, drawn=[*accepted_tokens, *drawn[0], *result.drawn[slot.stop :]])
        scores = self._scores(logits, mx.array([result.drawn]), [row])
        return Acceptance([result], acceptance.drafted, scores, replayed)

    def _inform_drafters(
        self,
        rows: Sequence[DecodeRow],
        proposal: Proposal,
        forward: Forward,
        acceptance: Acceptance,
        committed: Sequence[int],
    ) -> None:
        """Let the drafters observe the forward, and how many of their own drafts were accepted."""
        own_counts = map(sub, proposal.counts, proposal.appended_counts)
        accepted = [min(result.accepted, own) for result, own in zip(acceptance.results, own_counts, strict=True)]
        texts = [row.tokens for row in rows]
        self._drafters.observe(Observation(forward, texts, committed, acceptance.drafted, accepted))

    # --- without drafts ---------------------------------------------------------------------------------------

    def _decode_plain(self, rows: Sequence[DecodeRow], reasons: Sequence[Reason]) -> tuple[RowOutcome, ...]:
        """Read the forward in flight, launching it if necessary. First launch the next one, unless a row wants drafts
        or a constraint may bind. A slow machine never launches ahead: it delivers each token as soon as it is known."""
        current, self._in_flight = self._in_flight or self._launch(rows, None), None
        wants_drafts = any(row.num_draft_tokens for row in rows)
        if not (self._writes.are_slow or wants_drafts or self._constraints.may_bind(rows)):
            continuing = [row for row in rows if row.remaining > 1 or row.sequence_id not in current.sequence_ids]
            if continuing:
                self._in_flight = self._launch(continuing, current.only([row.sequence_id for row in continuing]))
        tokens: Any = current.tokens.tolist()
        index = {name: place for place, name in enumerate(current.sequence_ids)}
        return tuple(
            self._outcome(row, [tokens[place]], current.scores, place, len(row.tokens) - row.computed, reason)
            for row, reason in zip(rows, reasons, strict=True)
            if (place := index.get(row.sequence_id)) is not None
        )

    def _launch(self, rows: Sequence[DecodeRow], launched: LaunchedForward | None) -> LaunchedForward:
        """Launch a forward without drafts and commit all of it. Rows in `launched` feed a token still on the device."""
        names = [row.sequence_id for row in rows]
        fed, widths = feed(rows, launched)
        logits, forward = self._runner.forward(names, fed, widths)
        committed = self._runner.commit(forward, widths)
        self._pooling.pool(forward)
        self._drafters.observe(Observation(forward, [row.tokens for row in rows], committed))
        logits = last_of(logits, widths).astype(mx.float32)
        drawn = self._draw(logits, rows, fed, launched)
        self._writes.evaluate()
        return LaunchedForward(tuple(names), drawn[:, 0], self._scores(logits, drawn, rows))

    # --- with and without drafts ------------------------------------------------------------------------------

    def _draw(
        self,
        logits: mx.array,
        rows: Sequence[DecodeRow],
        fed: mx.array | None = None,
        launched: LaunchedForward | None = None,
    ) -> mx.array:
        """Draw int32 [rows, 1] from `logits` float32 [rows, 1, vocabulary].
        Rows in `launched` were `fed` a token that the host has not read; then no constraint binds any row."""
        pending = launched.sequence_ids if launched else ()
        sampled = [self._sampled(row, int(row.sequence_id in pending)) for row in rows]
        adjusted = adjust(logits, sampled, fed if pending else None)
        if launched is None:
            adjusted, _ = self._constraints.mask(adjusted, rows, sampled)
        return draw(adjusted, sampled)

    def _sampled(self, row: DecodeRow, pending: int = 0, salt: int = 0) -> SampledRow:
        kept = self._rows[row.sequence_id]
        return SampledRow(kept.request.sampling, row.tokens, row.prompt_length, pending, salt, kept.counts)

    def _scores(self, logits: mx.array, drawn: mx.array, rows: Sequence[DecodeRow]) -> Scores:
        return score(logits, drawn, max(self._rows[row.sequence_id].request.sampling.top_logprobs or 0 for row in rows))

    def _outcome(
        self,
        row: DecodeRow,
        tokens: Sequence[int],
        scores: Scores,
        index: int,
        committed: int,
        reason: Reason,
        **drafting: Any,
    ) -> RowOutcome:
        """Build a row's outcome. `index` is its row in `scores`; `drafting` has the fields of a verify forward."""
        top = self._rows[row.sequence_id].request.sampling.top_logprobs
        emitted = tuple(tokens)
        return RowOutcome(
            sequence_id=row.sequence_id,
            emitted=emitted,
            computed=row.computed + committed,
            accepted=len(tokens) - 1,
            logprobs=() if top is None else scores.row_logprobs(index, len(tokens), top),
            why_not_drafted=reason,
            confidences=scores.confidences(index, len(tokens)),
            dead_end=self._constraints.failure(row, emitted),
            embedding=self._pooling.embedding(row.sequence_id),
            **drafting,
        )
