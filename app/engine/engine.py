"""One loaded model with its drafters: rows come, steps run, rows go. Steps are planned by the scheduler; nothing here
knows a queue.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from app.core.ports import EngineLimits
from app.core.reason import Reason
from app.core.request import Request
from app.core.step import PrefillRow, PrefillStep, StepCost, StepPlan, StepResult
from app.engine.decoding import Decoder, Scores, score
from app.engine.drafters import Outcome
from app.engine.drafters.registry import REGISTRY, Drafters, open_drafters
from app.engine.prefix_cache import PrefixCache
from app.engine.rollback import UnknownCacheError
from app.engine.runner import AloneRunner, Runner, StateRow, padded
from app.engine.unit import LoadedUnit


class Engine:
    """`EnginePort` over mlx. One thread loads, steps and frees it."""

    def __init__(
        self,
        runner: Runner,
        drafters: Drafters,
        limits: EngineLimits,
        prefixes: PrefixCache,
        *,
        acceptance: str = "coupled",
    ) -> None:
        self.runner = runner
        self.drafters = drafters
        self.limits = limits
        self.measured: Sequence[StepCost] = ()
        self.prefixes = prefixes
        self._requests: dict[str, Request] = {}
        self._checkpoints: dict[str, dict[int, StateRow]] = {}
        self._decoder = Decoder(runner, drafters, self._requests, acceptance=acceptance)

    @property
    def cache_families(self) -> tuple[str, ...]:
        return self.runner.caches.families or ("alone",)

    @property
    def cache_bytes(self) -> int:
        return sum(runner.caches.nbytes for runner in (self.runner, *self.drafters.runners.values()))

    @property
    def prefix_cache_bytes(self) -> int:
        return self.prefixes.nbytes

    def drop_prefix_cache(self) -> None:
        self.prefixes.clear()

    def bound_prefix_cache(self, limit_bytes: int) -> None:
        """Keep at most so much of former prompts, and never more than was set for the model."""
        self.prefixes.bound(limit_bytes)

    def admit(self, request: Request) -> int:
        self.runner.claim(request.id)
        self._requests[request.id] = request
        self.drafters.admit(request)
        if request.scores_prompt:
            return 0  # what is found in the cache has no logits any more
        runners = self.drafters.runners
        # Those that read the target's features know of a prompt only what they followed.
        bound = {
            name
            for name, one in runners.items()
            if self.drafters.available[name].taps and request.id in one.caches.table.slots
        }
        return self.prefixes.restore(request, self.runner, runners, bound)

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._decoder.forget(request_id)
        length, checkpoints = self.runner.length(request_id), self._checkpoints.pop(request_id, {})
        if self.runner.caches.states and length <= len(tokens):
            checkpoints[length] = self.runner.state_row(request_id)
        kept = tuple(tokens[:length])
        usable = {point: row for point, row in checkpoints.items() if point <= len(kept)}
        self.prefixes.store(request, kept, usable, self.runner, self.drafters.runners)
        self.runner.release(request_id)
        self.drafters.release(request_id)

    def close(self) -> None:
        """Drop every row, cache and drafter state."""
        self._reset()
        self.prefixes.clear()

    def _reset(self) -> None:
        self._decoder.ahead = None
        for name in list(self._requests):
            self.drafters.release(name)
        self._requests.clear()
        self._checkpoints.clear()
        self.runner.clear()

    def step(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        try:
            result = self._prefill(plan.rows) if isinstance(plan, PrefillStep) else self._decoder.decode(plan)
            emitted = {outcome.sequence_id: outcome.emitted for outcome in result.outcomes}
            names = {row.sequence_id: row.tokens for row in plan.rows}
            offers = {name: self.drafters.offers(name, tokens, emitted.get(name, ())) for name, tokens in names.items()}
        except BaseException:
            self._reset()
            raise
        return replace(result, offers=offers, seconds=time.perf_counter() - started)

    def _prefill(self, rows: Sequence[PrefillRow]) -> StepResult:
        """One forward over pieces of prompts."""
        by_id = {row.sequence_id: row for row in rows}
        rows = [by_id[name] for name in self.runner.ordered(list(by_id))]
        for row in rows:
            self.runner.caches.table.check(row.sequence_id, row.start)
        widths = [row.end - row.start for row in rows]
        tokens = padded([row.tokens[row.start : row.end] for row in rows])
        logits, forward = self.runner.forward([row.sequence_id for row in rows], tokens, widths)
        scores = self._score_prompts(logits, rows)
        wanted = [array for each in scores.values() for array in each.arrays()]
        self.runner.commit(forward, widths)
        self.drafters.observe(Outcome(forward, [row.tokens for row in rows], widths))
        mx.eval(self.runner.arrays(), wanted)
        for row in rows if self.runner.caches.states else ():
            if row.end == len(row.tokens) - 1:  # the end of a prompt: here recurrent states can be put back
                self._checkpoints[row.sequence_id] = {row.end: self.runner.state_row(row.sequence_id)}
        del forward, logits
        mx.clear_cache()
        return StepResult(
            prefilled=tuple((row.sequence_id, row.end) for row in rows),
            prompt_logprobs={name: each.read_all() for name, each in scores.items()},
            width=max(widths),
        )

    def _score_prompts(self, logits: mx.array, rows: Sequence[PrefillRow]) -> dict[str, Scores]:
        """Of the prompt's tokens behind each one that was fed, for the rows that want it; `logits` lie as they do."""
        scores = {}
        for place, row in enumerate(rows):
            request = self._requests[row.sequence_id]
            end = min(row.end, len(request.prompt_tokens) - 1)
            if request.scores_prompt and row.start < end:
                behind = mx.array([row.tokens[row.start + 1 : end + 1]], dtype=mx.int32)
                mine = logits[place : place + 1, : end - row.start].astype(mx.float32)
                scores[row.sequence_id] = score(mine, behind, request.sampling.top_logprobs or 0)
        return scores


def open_engine(unit: LoadedUnit) -> Engine:
    """Caches, drafters and limits for a loaded unit."""
    spec, max_rows, prefix_cache_bytes = unit.spec, unit.spec.max_rows, unit.spec.prefix_cache_bytes
    runner: Runner
    try:
        runner = Runner(unit.target, chunk_tokens=spec.prefill_chunk_tokens)
    except UnknownCacheError as error:
        detail = f"the model's cache cannot be rolled back ({error}): it decodes alone, without drafts"
        runner, max_rows, prefix_cache_bytes = AloneRunner(unit.target), 1, 0
        drafters = Drafters({}, dict.fromkeys(REGISTRY, Reason("cannot_draft", {"detail": detail})))
    else:
        drafters = open_drafters(unit)
        runner.tap(drafters.taps)
    limits = EngineLimits(
        max_context_tokens=unit.max_context_tokens,
        max_rows=max_rows,
        prefill_chunk_tokens=spec.prefill_chunk_tokens,
        drafters=tuple(drafters.available),
        longest_drafts=drafters.longest,
        unavailable=drafters.unavailable,
    )
    return Engine(runner, drafters, limits, PrefixCache(prefix_cache_bytes), acceptance=spec.acceptance)
