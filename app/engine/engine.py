"""Engine of one loaded model with its drafters: it admits rows, runs the scheduler's steps and releases rows."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from app.core.dispensable import Dispensable
from app.core.request import AcceptanceRule, Request
from app.core.step import (
    EngineLimits,
    Offer,
    PrefillRow,
    PrefillStep,
    RowOutcome,
    StepPlan,
    StepResult,
)
from app.core.unit import PrefixState
from app.engine import memory
from app.engine.caches.lanes import reservation
from app.engine.constraints import Constraints
from app.engine.decoding import Decoder, EngineRow
from app.engine.drafters.drafter import Drafter, Observation
from app.engine.drafters.registry import Drafters
from app.engine.forward_results import LONG_TOKENS, SLOW_SECONDS, CacheWrites, Pooling, Scores, score
from app.engine.prefix.cache import PrefixCache, checkpoints_of
from app.engine.runner import Runner, padded
from app.engine.sampling.strict import StrictRows

logger = logging.getLogger("paceline.engine")


class Engine:
    """`EnginePort` over mlx. One thread loads, steps and frees it."""

    def __init__(
        self,
        runner: Runner,
        drafters: Drafters,
        limits: EngineLimits,
        prefixes: PrefixCache,
        *,
        acceptance: AcceptanceRule = "coupled",
        slow_seconds: float = SLOW_SECONDS,
    ) -> None:
        by_rejection = acceptance == "rejection"
        self._acceptance = acceptance
        self.strict_rows = StrictRows(runner)
        self.runner = runner
        self.drafters = drafters
        self.limits = replace(
            limits,
            unavailable=drafters.unavailable,
            stops_at_checkpoints=any(model.needs_snapshots for model in (runner, *drafters.runners.values())),
        )
        self.prefixes = prefixes
        self._prefix_use = Dispensable("the prefix cache", logger)
        self._constraints = Constraints(by_rejection=by_rejection)
        self._pooling = Pooling(runner, drafters.taps)
        self._writes = CacheWrites(runner, slow_seconds)
        self._rows: dict[str, EngineRow] = {}
        self._decoder = Decoder(
            runner,
            drafters,
            self._rows,
            constraints=self._constraints,
            pooling=self._pooling,
            strict_rows=self.strict_rows,
            writes=self._writes,
            by_rejection=by_rejection,
        )

    @property
    def cache_families(self) -> tuple[str, ...]:
        families = self.runner.caches.families or ("alone",)
        bits = self.runner.quantisation.bits
        return (*families, *(["apart"] if self.runner.rows_isolated else []), *([f"{bits}-bit"] if bits else []))

    @property
    def cache_bytes(self) -> int:
        return sum(runner.cache_bytes for runner in (self.runner, *self.drafters.runners.values()))

    @property
    def prefix_cache_bytes(self) -> int:
        return self.prefixes.memory.nbytes

    @property
    def prefix_state(self) -> PrefixState:
        return self.prefixes.state

    def drop_prefix_cache(self, retained_share: float = 0.0) -> None:
        with self._prefix_use.guarded():
            self.prefixes.trim(retained_share)

    def bound_prefix_cache(self, limit_bytes: int) -> None:
        """Limit the prefix cache to the model's setting (by default a share of `limit_bytes`) and to `limit_bytes`."""
        with self._prefix_use.guarded():
            self.prefixes.bound(limit_bytes)

    def fetch(self, request: Request) -> bool:
        is_there = not self._is_strict(request) or self.strict_rows.prepare(request.id, request.prompt_tokens)
        if is_there and not (request.scores_prompt or request.embeds):
            with self._prefix_use.guarded():
                is_there = self.prefixes.fetch(request, self.runner, self._drafters_with_rows(request))
        return is_there

    def admit(self, request: Request) -> int:
        self._rows[request.id] = EngineRow(request)  # first, so that `release` frees it if anything below fails
        if self._is_strict(request):
            self.strict_rows.admit(request.id, request.prompt_tokens)
        self._claim(request)
        for component in (self._constraints, self.drafters, self._pooling):
            component.admit(request)
        if request.scores_prompt or request.embeds:
            return 0  # cached positions have no logits or hidden states
        restored: int | None = None
        with self._prefix_use.guarded(undo=self.prefixes.clear):
            restored = self.prefixes.restore(request, self.runner, self._drafters_with_rows(request))
        if restored is None:  # the cache failed: the row begins empty
            self.runner.release(request.id)
            self.drafters.release(request.id)
            self._claim(request)
            self.drafters.admit(request)
        return restored or 0

    def _is_strict(self, request: Request) -> bool:
        return (request.speculation.acceptance or self._acceptance) == "strict"

    def _claim(self, request: Request) -> None:
        length = len(request.prompt_tokens)
        bits = self.runner.quantisation.bits_of(length)
        self.runner.claim(request.id, reservation(length, request.max_tokens), bits)

    def _drafters_with_rows(self, request: Request) -> dict[str, Drafter]:
        """Return the request's drafters that have rows of their own."""
        return {
            name: drafter for name, drafter in self.drafters.allowed_for(request).items() if drafter.runner is not None
        }

    def release(self, sequence_id: str, tokens: Sequence[int]) -> None:
        row = self._rows.pop(sequence_id, None)
        if row is None:
            self.prefixes.drop_fetched(sequence_id)
            self.strict_rows.release(sequence_id)
            return
        self._decoder.release(sequence_id)
        try:
            if tokens:  # a launched forward may have read the last emitted token too
                self._cache_row(row.request, row.tokens or tokens, self.runner.length(sequence_id), ended=True)
        except (RuntimeError, MemoryError):
            logger.warning("a finished prompt was not cached: the device is out of memory")
        finally:
            self.runner.release(sequence_id)
            self._forget(sequence_id)

    def _cache_row(self, request: Request, tokens: Sequence[int], length: int, *, ended: bool) -> None:
        # running out of memory must end the whole step, so that error is raised again
        with self._prefix_use.guarded(undo=self.prefixes.clear, is_vital=memory.is_exhausted):
            self._store_row(request, tokens, length, ended=ended)

    def _store_row(self, request: Request, tokens: Sequence[int], length: int, *, ended: bool) -> None:
        """Store the row's first `length` tokens for later requests, if it has ended or this is one of its checkpoints.
        Another prompt may continue differently: so each drafter catches up to exactly this position, and no further.
        Drafters begin with the first chunk: at the checkpoint, one slice would not suffice."""
        length = min(length, len(tokens))
        if not self.prefixes.keeps(length):
            return
        known_tokens = tokens[: length + int(ended and not self.runner.needs_snapshots)]
        drafters = self._drafters_with_rows(request)
        for drafter in drafters.values():
            if drafter.taps or not ended:
                drafter.commit(request.id, known_tokens)
        if ended or length in checkpoints_of(request):
            self.prefixes.store(request, known_tokens, length, self.runner, drafters)

    def close(self) -> None:
        """Drop every row, cache and drafter state."""
        self._reset()
        self.prefixes.close()

    def _reset(self) -> None:
        self._decoder.clear()
        self.strict_rows.stop_measuring()
        for name in self._rows:
            self._forget(name)
        self._rows.clear()
        self.runner.clear()

    def _forget(self, sequence_id: str) -> None:
        for component in (self._constraints, self._pooling, self.strict_rows, self.drafters):
            component.release(sequence_id)

    def step(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        for row in plan.rows:
            self._rows[row.sequence_id].tokens = row.tokens
        with memory.all_or_nothing(self._reset):
            for runner in (self.runner, *self.drafters.runners.values()):
                runner.separate_long_rows()
            result = self._prefill(plan.rows) if isinstance(plan, PrefillStep) else self._decoder.step(plan)
            forced, offers = self._forced_and_offers(plan, result.outcomes)
        seconds = time.perf_counter() - started
        self._writes.record_step(seconds)
        return replace(result, forced=forced, offers=offers, seconds=seconds + result.seconds)

    def _forced_and_offers(
        self, plan: StepPlan, outcomes: Sequence[RowOutcome]
    ) -> tuple[dict[str, int], dict[str, dict[str, Offer]]]:
        """Return, by sequence id, how many next tokens a grammar forces, and the drafters' offers that follow them."""
        emitted = {outcome.sequence_id: outcome.emitted for outcome in outcomes}
        forced, offers = dict[str, int](), dict[str, dict[str, Offer]]()
        for row in plan.rows:
            name, new = row.sequence_id, emitted.get(row.sequence_id, ())
            prompt_length = len(self._rows[name].request.prompt_tokens)
            alternatives = self._constraints.forced(name, row.tokens, prompt_length, new)
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
        self.drafters.observe(Observation(forward, [row.tokens for row in rows], widths))
        self._writes.evaluate(in_parts=max(widths) >= LONG_TOKENS)
        mx.eval(self.runner.arrays(), to_evaluate)
        for row in rows if self.limits.stops_at_checkpoints else ():
            if row.end <= max(checkpoints_of(request := self._rows[row.sequence_id].request)):
                self._cache_row(request, row.tokens, row.end, ended=False)
        del forward, logits
        mx.clear_cache()
        return StepResult(
            prefilled=tuple((row.sequence_id, row.end) for row in rows),
            prompt_logprobs={name: row_scores.all_logprobs() for name, row_scores in scores.items()},
            width=max(widths),
        )

    def _score_prompts(self, logits: mx.array, rows: Sequence[PrefillRow]) -> dict[str, Scores]:
        """Score the prompt token that follows each fed token, for rows that want scores; `logits` are in row order."""
        scores = {}
        for index, row in enumerate(rows):
            request = self._rows[row.sequence_id].request
            end = min(row.end, len(request.prompt_tokens) - 1)
            if request.scores_prompt and row.start < end:
                next_tokens = mx.array([row.tokens[row.start + 1 : end + 1]], dtype=mx.int32)
                row_logits = logits[index : index + 1, : end - row.start].astype(mx.float32)
                scores[row.sequence_id] = score(row_logits, next_tokens, request.sampling.top_logprobs or 0)
        return scores
