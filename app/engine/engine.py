"""Engine of one loaded model with its drafters: it admits rows, runs the scheduler's steps and releases rows.

Plain decoding is a decode step with zero drafts, plus one forward launched ahead, so that the device never waits for
the host. A launched forward belongs to its rows: whatever is planned next, its tokens are delivered first.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import mlx.core as mx

from app.core.dispensable import Dispensable
from app.core.reason import NO_REASON, Reason
from app.core.request import OFF, Request
from app.core.step import (
    DecodeRow,
    DecodeStep,
    EngineLimits,
    Offer,
    PrefillRow,
    PrefillStep,
    PrefixState,
    RowOutcome,
    StepCost,
    StepPlan,
    StepResult,
)
from app.engine import memory
from app.engine.caches.lanes import reservation
from app.engine.constraints import Constraints
from app.engine.drafters import Drafter, Outcome, Proposal
from app.engine.drafters.registry import Drafters
from app.engine.feeding import LaunchedForward, feed, feed_drafts
from app.engine.forward_results import Pooling, Scores, StepTimer, score
from app.engine.prefix.cache import PrefixCache, checkpoints_of
from app.engine.runner import Runner, last_of, padded
from app.engine.sampling import DRAFT_SALT, SampledRow, TokenCounts, adjust, draw, penalises
from app.engine.sampling.acceptance import MODES, Verified, accept
from app.engine.sampling.strict import StrictRows

SLOW_SECONDS = 1.0
"""Duration of a step, in seconds, above which the next one is evaluated in parts; so is a prefill of `LONG_TOKENS`."""
LONG_TOKENS = 256
STEP_PARTS = 8

_logger = logging.getLogger("paceline.engine")


class Engine:
    """`EnginePort` over mlx. One thread loads, steps and frees it. `acceptance` is one of the `MODES`."""

    def __init__(
        self,
        runner: Runner,
        drafters: Drafters,
        limits: EngineLimits,
        prefixes: PrefixCache,
        *,
        acceptance: str = "coupled",
        slow_seconds: float = SLOW_SECONDS,
    ) -> None:
        if acceptance not in MODES:
            raise ValueError(f"acceptance must be one of {', '.join(MODES)}, not {acceptance}")
        self._salt = DRAFT_SALT if acceptance == "rejection" else 0
        self._acceptance = acceptance
        self.strict_rows = StrictRows(runner)
        self.runner = runner
        self.drafters = drafters
        self.limits = replace(
            limits, stops_at_checkpoints=any(model.needs_snapshots for model in (runner, *drafters.runners.values()))
        )
        self.measured: Sequence[StepCost] = ()
        self.prefixes = prefixes
        self._caching = Dispensable("the prefix cache", _logger, memory.is_exhausted)
        self._constraints = Constraints(by_rejection=bool(self._salt))
        self._pooling = Pooling(runner, drafters.taps)
        self._requests: dict[str, Request] = {}
        self._counts: dict[str, TokenCounts] = {}
        self._texts: dict[str, Sequence[int]] = {}
        """Live views of each row's prompt and output."""
        self._in_flight: LaunchedForward | None = None
        self._slow_seconds, self._is_slow = slow_seconds, True
        """Limit in seconds, and whether the last step exceeded it or none has run yet."""
        self._timer = StepTimer(is_timed=False)

    @property
    def cache_families(self) -> tuple[str, ...]:
        families = self.runner.caches.families or ("alone",)
        bits = self.runner.quantisation.bits
        return (*families, *(["apart"] if self.runner.rows_isolated else []), *([f"{bits}-bit"] if bits else []))

    @property
    def cache_bytes(self) -> int:
        return sum(runner.caches.nbytes for runner in (self.runner, *self.drafters.runners.values()))

    @property
    def prefix_cache_bytes(self) -> int:
        return self.prefixes.nbytes

    @property
    def prefix_state(self) -> PrefixState:
        return self.prefixes.state

    def drop_prefix_cache(self, retained_share: float = 0.0) -> None:
        self.prefixes.trim(retained_share)

    def clear_prefix_cache(self) -> None:
        """Clear the memory tier of this model and the disk tier of every model."""
        self.prefixes.clear()
        self.prefixes.disk.clear()

    def bound_prefix_cache(self, limit_bytes: int) -> None:
        """Limit the prefix cache to `limit_bytes`, and never to more than the model's setting."""
        self.prefixes.bound(limit_bytes)

    def fetch(self, request: Request) -> bool:
        if not (request.scores_prompt or request.embeds):
            with self._caching.guarded():
                return self.prefixes.fetch(request, self.runner, self._drafters_with_rows(request))
        return True

    def admit(self, request: Request) -> int:
        self._requests[request.id] = request  # first: whatever fails from here on, `release` frees it
        if (request.speculation.acceptance or self._acceptance) == "strict":
            self.strict_rows.admit(request.id, request.prompt_tokens, self.runner.on_progress)
        self._claim(request)
        if penalises(request.sampling):
            self._counts[request.id] = TokenCounts()
        self._constraints.admit(request)
        self.drafters.admit(request)
        self._pooling.admit(request)
        if request.scores_prompt or request.embeds:
            return 0  # cached positions have no logits or hidden states
        with self._caching.guarded(undo=self.prefixes.clear):
            return self.prefixes.restore(request, self.runner, self._drafters_with_rows(request))
        # The cache failed: the row begins empty.
        self.runner.release(request.id)
        self.drafters.release(request.id)
        self._claim(request)
        self.drafters.admit(request)
        return 0

    def _claim(self, request: Request) -> None:
        length = len(request.prompt_tokens)
        bits = self.runner.quantisation.bits_of(length)
        self.runner.claim(request.id, reservation(length, request.max_tokens), bits)

    def _drafters_with_rows(self, request: Request) -> dict[str, Drafter]:
        """Return the request's drafters that have rows of their own."""
        return {
            name: drafter for name, drafter in self.drafters.allowed_for(request).items() if drafter.runner is not None
        }

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            self.prefixes.drop_fetched(request_id)
            return
        if self._in_flight is not None:  # keep what was launched for the others
            self._in_flight = self._in_flight.only(
                [name for name in self._in_flight.sequence_ids if name != request_id]
            )
        text = self._texts.pop(request_id, tokens)
        try:
            if tokens:  # a launched forward may have read the last emitted token too
                self._cache_row(request, text, self.runner.length(request_id), ended=True)
        except (RuntimeError, MemoryError):
            _logger.warning("a finished prompt is not kept: the device has no memory left")
        finally:
            self.runner.release(request_id)
            self._forget(request_id)

    def _cache_row(self, request: Request, text: Sequence[int], length: int, *, ended: bool) -> None:
        with self._caching.guarded(undo=self.prefixes.clear):
            self._store_row(request, text, length, ended=ended)

    def _store_row(self, request: Request, text: Sequence[int], length: int, *, ended: bool) -> None:
        """Store the row's first `length` tokens for later requests.
        At a checkpoint, later texts diverge: no drafter may have read the next token, and all must have caught up."""
        length = min(length, len(text))
        if not self.prefixes.keeps(length):
            return
        known_tokens = text[: length + int(ended and not self.runner.needs_snapshots)]
        drafters = self._drafters_with_rows(request)
        for drafter in drafters.values():
            if drafter.taps or not ended:
                drafter.commit(request.id, known_tokens)
        self.prefixes.store(request, known_tokens, length, self.runner, drafters)

    def close(self) -> None:
        """Drop every row, cache and drafter state."""
        self._reset()
        self.prefixes.close()

    def _reset(self) -> None:
        self._in_flight = None
        for name in list(self._requests):
            self._forget(name)
        self._requests.clear()
        self._texts.clear()
        self.runner.clear()

    def _forget(self, request_id: str) -> None:
        self._counts.pop(request_id, None)
        for component in (self._constraints, self._pooling, self.strict_rows, self.drafters):
            component.release(request_id)

    def step(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        with memory.all_or_nothing(self._reset):
            for runner in (self.runner, *self.drafters.runners.values()):
                runner.separate_long_rows()
            result = self._prefill(plan.rows) if isinstance(plan, PrefillStep) else self._decode(plan)
            forced, offers = self._forced_and_offers(plan, result.outcomes)
        seconds = time.perf_counter() - started
        self._is_slow = seconds > self._slow_seconds
        return replace(result, forced=forced, offers=offers, seconds=seconds)

    def _forced_and_offers(
        self, plan: StepPlan, outcomes: Sequence[RowOutcome]
    ) -> tuple[dict[str, int], dict[str, dict[str, Offer]]]:
        """Return what is known of each row's next tokens: how many a grammar forces, and the offers behind them."""
        emitted = {outcome.sequence_id: outcome.emitted for outcome in outcomes}
        forced, offers = dict[str, int](), dict[str, dict[str, Offer]]()
        for row in plan.rows:
            name, new = row.sequence_id, emitted.get(row.sequence_id, ())
            self._texts[name] = row.tokens
            alternatives = self._constraints.forced(name, row.tokens, len(self._requests[name].prompt_tokens), new)
            forced_tokens = tuple(usual for usual, *_ in alternatives)
            forced[name] = len(forced_tokens)
            offers[name] = self.drafters.offers(name, row.tokens, (*new, *forced_tokens))
        return forced, offers

    def _prefill(self, rows: Sequence[PrefillRow]) -> StepResult:
        """Run one forward over chunks of prompts."""
        by_id = {row.sequence_id: row for row in rows}
        rows = [by_id[name] for name in self.runner.ordered(list(by_id))]
        for row in rows:
            self.runner.caches.table.check(row.sequence_id, row.start)
        self.strict_rows.untrack_shared(list(by_id))
        widths = [row.end - row.start for row in rows]
        tokens = padded([row.tokens[row.start : row.end] for row in rows])
        logits, forward = self.runner.forward([row.sequence_id for row in rows], tokens, widths)
        scores = self._score_prompts(logits, rows)
        to_evaluate = [array for row_scores in scores.values() for array in row_scores.arrays()] + self._pooling.pool(
            forward
        )
        self.runner.commit(forward, widths)
        self.drafters.observe(Outcome(forward, [row.tokens for row in rows], widths))
        self._evaluate_in_parts(long=max(widths) >= LONG_TOKENS)
        mx.eval(self.runner.arrays(), to_evaluate)
        for row in rows if self.limits.stops_at_checkpoints else ():
            if row.end in checkpoints_of(request := self._requests[row.sequence_id]):
                self._cache_row(request, row.tokens, row.end, ended=False)
        del forward, logits
        mx.clear_cache()
        return StepResult(
            prefilled=tuple((row.sequence_id, row.end) for row in rows),
            prompt_logprobs={name: row_scores.all_logprobs() for name, row_scores in scores.items()},
            width=max(widths),
        )

    def _evaluate_in_parts(self, *, long: bool = False) -> None:
        """Evaluate slow cache writes in parts, reporting progress: the supervisor takes silence for a stuck kernel."""
        arrays = self.runner.arrays() if long or self._is_slow else []
        size = max(1, ceil(len(arrays) / STEP_PARTS))
        for begin in range(0, len(arrays), size):
            mx.eval(arrays[begin : begin + size])
            self.runner.on_progress()

    def _score_prompts(self, logits: mx.array, rows: Sequence[PrefillRow]) -> dict[str, Scores]:
        """Score the prompt token after each fed one, for rows that ask for it; `logits` are in the order of `rows`."""
        scores = {}
        for index, row in enumerate(rows):
            request = self._requests[row.sequence_id]
            end = min(row.end, len(request.prompt_tokens) - 1)
            if request.scores_prompt and row.start < end:
                next_tokens = mx.array([row.tokens[row.start + 1 : end + 1]], dtype=mx.int32)
                row_logits = logits[index : index + 1, : end - row.start].astype(mx.float32)
                scores[row.sequence_id] = score(row_logits, next_tokens, request.sampling.top_logprobs or 0)
        return scores

    def _decode(self, plan: DecodeStep) -> StepResult:
        """Draft → verify → accept → rewind in one lazy graph with a single read, or read the forward in flight."""
        self._timer = StepTimer(is_timed=plan.timed)
        by_id = {row.sequence_id: row for row in plan.rows}
        rows = [by_id[name] for name in self.runner.ordered(list(by_id))]
        self.strict_rows.untrack_shared(list(by_id))
        if self._in_flight is not None and any(row.sequence_id in self._in_flight.sequence_ids for row in rows):
            return StepResult(self._decode_plain(rows, (NO_REASON,) * len(rows)))
        for row in rows:
            self.runner.caches.table.check(row.sequence_id, row.computed)
        requested = [self._constraints.with_forced_drafts(row) for row in self.strict_rows.limit_drafts(rows)]
        proposal = self.drafters.propose(requested, [self._sampled(row, salt=self._salt) for row in rows])
        proposal = self._constraints.append_forced(requested, proposal)
        if (drafts := proposal.tokens) is None:
            width = max(len(row.tokens) - row.computed for row in rows)
            if self.strict_rows.has_diverged(rows):
                return StepResult(self._verify(rows, proposal, mx.zeros((1, 0), mx.int32)), width=width)
            return StepResult(self._decode_plain(rows, proposal.reasons), width=width)
        mx.async_eval(drafts)  # the device drafts while the host builds the verify forward
        self._timer.end("drafted", lambda: [drafts])
        outcomes = self._verify(rows, proposal, drafts)
        return StepResult(outcomes, width=1 + max(proposal.counts), phase_seconds=self._timer.phase_seconds())

    def _decode_plain(self, rows: Sequence[DecodeRow], reasons: Sequence[Reason]) -> tuple[RowOutcome, ...]:
        """Read the forward in flight, launching it if necessary; if no row wants drafts, launch the next one first.
        A slow machine does not launch ahead: there each token is delivered as soon as it is known."""
        current, self._in_flight = self._in_flight or self._launch(rows, None), None
        if not self._is_slow and all(row.num_draft_tokens == 0 for row in rows) and not self._constraints.bind(rows):
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
        logits, forward = self.runner.forward(names, fed, widths)
        committed = self.runner.commit(forward, widths)
        self._pooling.pool(forward)
        self.drafters.observe(Outcome(forward, [row.tokens for row in rows], committed))
        logits = last_of(logits, widths).astype(mx.float32)
        drawn = self._draw(logits, rows, fed, launched)
        self._evaluate_in_parts()
        return LaunchedForward(tuple(names), drawn[:, 0], self._scores(logits, drawn, rows))

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
        sampling, counts = self._requests[row.sequence_id].sampling, self._counts.get(row.sequence_id)
        return SampledRow(sampling, row.tokens, row.prompt_length, pending, salt, counts)

    def _scores(self, logits: mx.array, drawn: mx.array, rows: Sequence[DecodeRow]) -> Scores:
        return score(logits, drawn, max(self._requests[row.sequence_id].sampling.top_logprobs or 0 for row in rows))

    def _outcome(
        self,
        row: DecodeRow,
        tokens: Sequence[int],
        scores: Scores,
        index: int,
        committed: int,
        reason: Reason,
        *,
        drafted: int = 0,
        appended: int = 0,
        replayed: int = 0,
    ) -> RowOutcome:
        """Build a row's outcome: all of `tokens` but the last were drafts; `index` is its row in `scores`."""
        top, emitted = self._requests[row.sequence_id].sampling.top_logprobs, tuple(tokens)
        return RowOutcome(
            sequence_id=row.sequence_id,
            emitted=emitted,
            computed=row.computed + committed,
            drafted=drafted,
            accepted=len(tokens) - 1,
            logprobs=() if top is None else scores.row_logprobs(index, len(tokens), top),
            method=row.method if drafted else OFF,
            why_not_drafted=reason,
            confidences=scores.confidences(index, len(tokens)),
            dead_end=self._constraints.failure(row, emitted),
            embedding=self._pooling.embedding(row.sequence_id),
            appended=appended,
            replayed=replayed,
        )

    def _verify(self, rows: Sequence[DecodeRow], proposal: Proposal, drafts: mx.array) -> tuple[RowOutcome, ...]:
        """Run one forward over known tokens and drafts; its single read returns drawn tokens and accepted counts."""
        self.strict_rows.save_point(rows)
        known_widths = [len(row.tokens) - row.computed for row in rows]
        widths = [size + count for size, count in zip(known_widths, proposal.counts, strict=True)]
        fed, positions = feed_drafts(rows, drafts)
        logits, forward = self.runner.forward([row.sequence_id for row in rows], fed, widths, record=True)
        self._pooling.pool(forward)
        if logits.shape[1] != positions.shape[1]:
            logits = mx.take_along_axis(logits, positions[..., None], axis=1)
        logits = logits.astype(mx.float32)
        packed, scores, drafted = self._accept(rows, proposal, drafts, logits)
        self._evaluate_in_parts()
        self._timer.end("launched")  # on the CPU the launch already waits for most of the forward
        mx.async_eval(packed, *scores.arrays())
        results = Verified.unpack(packed)
        self._timer.end("verified")
        counts = [row.accepted for row in results]
        committed = self.runner.commit(
            forward, [size + count for size, count in zip(known_widths, counts, strict=True)]
        )
        replayed = 0
        if results[0].is_doubtful:
            results[0], replayed = self._replay_doubtful(rows[0], results[0], logits)
            committed, scores = [known_widths[0] + counts[0]], self._scores(logits, mx.array([results[0].drawn]), rows)
        appended = proposal.appended or (0,) * len(rows)
        own = [size - more for size, more in zip(proposal.counts, appended, strict=True)]
        accepted = [min(count, size) for count, size in zip(counts, own, strict=True)]
        self.drafters.observe(Outcome(forward, [row.tokens for row in rows], committed, drafted, accepted))
        self._timer.end("rewound", lambda: [model.arrays() for model in (self.runner, *self.drafters.runners.values())])
        columns = zip(rows, results, committed, proposal.reasons, drafted, appended, strict=True)
        return tuple(
            self._outcome(
                row, verified.emitted, scores, index, size, why, drafted=count, appended=more, replayed=replayed
            )
            for index, (row, verified, size, why, count, more) in enumerate(columns)
        )

    def _accept(
        self, rows: Sequence[DecodeRow], proposal: Proposal, drafts: mx.array, logits: mx.array
    ) -> tuple[mx.array, Scores, Sequence[int]]:
        """Draw at every slot of `logits` float32 [rows, slots, vocabulary] and compare with the drafts.
        Returns each row's `Verified`, packed, the scores of the drawn tokens, and the drafts tried of each row."""
        sampled = [self._sampled(row) for row in rows]
        adjusted, draft_logits = adjust(logits, sampled, drafts), proposal.logits if self._salt else None
        adjusted, allowed_counts = self._constraints.mask(adjusted, rows, sampled, drafts, proposal.counts)
        # Under rejection no draft may be dropped for its value: the target's probability of a forbidden one is 0.
        drafted = proposal.counts if self._salt else allowed_counts
        drawn, accepted = accept(drafts, adjusted, sampled, drafted, draft_logits=draft_logits)
        certain = self.strict_rows.certain_slots(adjusted, drawn, rows, sampled)
        return Verified.pack(drawn, accepted, certain), self._scores(logits, drawn, rows), drafted

    def _replay_doubtful(self, row: DecodeRow, verified: Verified, logits: mx.array) -> tuple[Verified, int]:
        """Return what plain decoding draws in place of a doubtful token, and how many tokens were read again for it.
        The logits that it was drawn from replace those in `logits` float32 [1, slots, vocabulary]."""
        accepted_tokens, slot = verified.drawn[: verified.accepted], slice(verified.accepted, verified.accepted + 1)
        row = replace(row, tokens=[*row.tokens, *accepted_tokens])
        logits[:, slot], replayed = self.strict_rows.replay(row, logits[:, slot], self.runner.on_progress)
        drawn: Any = self._draw(logits[:, slot], [row]).tolist()
        return replace(verified, drawn=[*accepted_tokens, *drawn[0], *verified.drawn[slot.stop :]]), replayed
