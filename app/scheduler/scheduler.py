"""Scheduler of one loaded model: which requests run, what the next step feeds, and what each client gets.

plan() → engine.step(plan) → commit(result), all on one thread; nothing here blocks or touches a tensor, and the only
clock is injected. Prefill chunks and decode steps alternate, so a running stream waits for at most one chunk. Every
request gets exactly one event with a `finish_reason`, and `drain_released` returns each of its rows exactly once.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from app.core.clock import Clock
from app.core.errors import (
    InvalidRequest,
    ModelUnavailable,
    PacelineError,
    QueueFull,
    SpeculationUnavailable,
    context_overflow,
)
from app.core.reason import Reason
from app.core.request import AUTO, OFF, DraftingPolicy, Request, SpeculationRequest
from app.core.statistics import PhaseSeconds
from app.core.step import (
    DecodeRow,
    DecodeStep,
    EngineLimits,
    FinishReason,
    PrefillStep,
    RowOutcome,
    StepCost,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from app.core.turns import Turns
from app.models.footprint import SMALLEST_CHUNK_TOKENS, RowSize
from app.scheduler.governor import DraftChoice
from app.scheduler.prefill import ChunkSizes, plan_prefill
from app.scheduler.sequence import TYPICAL_ANSWER_TOKENS, LiveSequence, cache_length_error, expected_size
from app.scheduler.speculation import Speculation

LONGEST_RETRY_SECONDS = 60


class WaitingQueue(Turns[str, LiveSequence]):
    """Waiting sequences by request id; owners take turns, and at most `limit` sequences of each wait."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a queue holds at least one request, not {limit}")
        super().__init__()
        self.limit = limit
        self._service_seconds = 0.0

    def push(self, sequence: LiveSequence, *, rows: int) -> None:
        """Append to the owner's queue; `rows` rows serve all queues. Raises `QueueFull` if `limit` wait there."""
        request = sequence.request
        if self.waiting(request.owner) >= self.limit:
            # While the queue is full all rows are busy, so a row becomes free every (service time / rows) seconds.
            seconds = min(LONGEST_RETRY_SECONDS, max(1, math.ceil(self._service_seconds / rows)))
            raise QueueFull(
                f"{self.limit} requests are waiting already; try again in {seconds} s",
                retry_after_seconds=seconds,
            )
        self.append(request.owner, request.id, sequence)

    def record_service_time(self, seconds: float) -> None:
        """Record the `seconds` from admission to the natural end of a request, on which retry hints are based."""
        weight = 0.25 if self._service_seconds else 1.0
        self._service_seconds += weight * (seconds - self._service_seconds)


def check_request(request: Request, *, limits: EngineLimits, policy: DraftingPolicy) -> None:
    """Raise `InvalidRequest` when the request cannot run here, `SpeculationUnavailable` when its method cannot, and
    `ModelUnavailable` when its tokens are of another model."""
    length, room = len(request.prompt_tokens), limits.max_context_tokens
    if not length:
        raise InvalidRequest("the prompt is empty; send at least one token", code="empty_prompt")
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", parameter="max_tokens")
    if length + (not request.embeds) > room:
        raise context_overflow(length, room)
    if max(request.prompt_tokens) >= limits.vocabulary_size:
        message = "the model's files were replaced after it was loaded; it is loaded again once its requests have ended"
        raise ModelUnavailable(message, retry_after_seconds=2)
    _check_speculation(request, limits=limits, policy=policy)


def _check_speculation(request: Request, *, limits: EngineLimits, policy: DraftingPolicy) -> None:
    """Raise unless every method requested by name can run; only `auto` may fall back."""
    requested = request.speculation
    if requested.num_draft_tokens is not None and requested.num_draft_tokens < 0:
        raise InvalidRequest("num_draft_tokens must not be negative", parameter="num_draft_tokens")
    named = {AUTO: requested.methods, OFF: ()}.get(requested.method, (requested.method,))
    if named and (requested.policy or policy) == "off":
        raise SpeculationUnavailable(
            f"speculation is switched off for this model (policy 'off'), so {' and '.join(named)} cannot run"
        )
    for method in named:
        if method not in limits.available:
            reason = limits.unavailable.get(method, f"{method} is not loaded with this model")
            raise SpeculationUnavailable(str(reason))


DEFAULT_SPECULATION = SpeculationRequest()
RECOVERY_ANSWERS = 16
"""Number of finished answers after which one more row may run, and chunks double, after a lack of memory."""


class Scheduler:
    """Continuous batching with counters instead of phases; plain decoding is speculation with zero drafts.

    `policy` is single, auto or off; `default_speculation` is for requests that set no draft length; `measured` are
    known step costs. `queue_limit` bounds the waiting requests of one owner. An answer is expected to have
    `typical_answer_tokens`; once it has them, it is expected to have as many more.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        policy: DraftingPolicy = "auto",
        default_speculation: SpeculationRequest = DEFAULT_SPECULATION,
        measured: Iterable[StepCost] = (),
        queue_limit: int = 128,
        typical_answer_tokens: int = TYPICAL_ANSWER_TOKENS,
        clock: Clock = time.monotonic,
    ) -> None:
        self._limits = limits
        self._typical_answer_tokens = typical_answer_tokens
        self._clock = clock
        self._queue = WaitingQueue(queue_limit)
        self._active: dict[str, LiveSequence] = {}
        self._rows, self._chunk_tokens, self._answers_since_shrink = limits.max_rows, limits.prefill_chunk_tokens, 0
        self._chunks = ChunkSizes(limits)
        self._released: dict[str, tuple[int, ...]] = {}
        self._speculation = Speculation(
            limits, policy=policy, default_speculation=default_speculation, measured=measured
        )
        self.costs = self._speculation.costs
        """Step costs on this machine, as measured and as learnt from requests."""
        self._plan: StepPlan | None = None
        self._choices: dict[str, DraftChoice] = {}

    @property
    def running(self) -> int:
        """Number of requests that have a row."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def rowless_since(self) -> float:
        """Time at which the next request was submitted, if no request has a row; infinite otherwise."""
        head = None if self._active else self._queue.head()
        return head.submitted_at if head else math.inf

    @property
    def prefill_progress(self) -> dict[str, int]:
        """Number of cached prompt tokens of each request that has a row but no output token yet."""
        return {name: sequence.computed for name, sequence in self._active.items() if not sequence.counters.generated}

    @property
    def expected(self) -> list[RowSize]:
        """Expected final length of each running request, in order of admission."""
        return [sequence.expected(self._limits.max_context_tokens) for sequence in self._active.values()]

    def expected_of(self, request: Request) -> RowSize:
        """Return the expected length of a request that is not running: the head of the queue, or one not queued yet."""
        head = self._queue.head()
        generated = head.counters.generated if head and head.request is request else 0
        return expected_size(request, generated, self._typical_answer_tokens, self._limits.max_context_tokens)

    @property
    def has_work(self) -> bool:
        """Whether any request waits, runs, or has a row to be freed."""
        return bool(self._queue or self._active or self._released)

    def configure(self, *, policy: DraftingPolicy, default_speculation: SpeculationRequest, queue_limit: int) -> None:
        """Apply changed settings from the next step on, to running requests too: lossless drafting changes no text."""
        self._queue.limit = queue_limit
        self._speculation.policy, self._speculation.default_speculation = policy, default_speculation

    # --- requests and rows ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `QueueFull`, or as `check_request` does, without side effects."""
        check_request(request, limits=self._limits, policy=self._speculation.policy)
        if request.id in self._queue or request.id in self._active or request.id in self._released:
            raise InvalidRequest(f"a request with the id {request.id} is running already", code="duplicate_request")
        if request.checkpoints and not self._limits.stops_at_checkpoints:
            request = msgspec.structs.replace(request, checkpoints=())
        if not (self._queue or self._active):  # idle: lift the limits that a lack of memory set
            self._rows, self._chunk_tokens = self._limits.max_rows, self._limits.prefill_chunk_tokens
        sequence = LiveSequence(request, self._clock(), self._typical_answer_tokens)
        self._queue.push(sequence, rows=self._limits.max_rows)

    def next_admission(self) -> Request | None:
        """Return the head of the queue if a row is free for it; rows not drained yet are not free."""
        head = self._queue.head()
        return head.request if head and len(self._active) + len(self._released) < self._rows else None

    def admitted(self, request_id: str, cached_tokens: int) -> None:
        """Record that the engine gave the request a row whose cache holds `cached_tokens` of its prompt.

        Raises KeyError unless the request is the head of the queue, and ValueError unless `cached_tokens` < prompt
        length; the request then stays queued until `fail` ends it.
        """
        sequence = self._queue.head()
        if sequence is None or sequence.request.id != request_id:
            raise KeyError(f"{request_id} is not the next to be admitted")
        if not 0 <= cached_tokens < sequence.prompt_length:
            raise ValueError(f"{cached_tokens} cached tokens of a prompt of {sequence.prompt_length}")
        self._queue.take()
        sequence.admit(cached_tokens, self._clock())
        self._active[request_id] = sequence

    def preempt(self) -> str:
        """Take the row of the newest request that can wait, so that older ones have memory; return its id, or "".
        The request keeps its tokens and waits at the head of the queue."""
        _, *others = self._active.values() or (None,)
        newest = next((sequence for sequence in reversed(others) if sequence.can_be_preempted), None)
        if newest is None:
            return ""
        self._preempt_row(newest)
        return newest.request.id

    def _preempt_row(self, sequence: LiveSequence) -> None:
        name = sequence.request.id
        self._released[name] = sequence.cached_prefix()
        del self._active[name]
        sequence.preempt()
        self._queue.put_back(sequence.request.owner, name, sequence)

    def shrink(self, message: str) -> list[TokenEvent]:
        """Requeue all rows after a step ran out of device memory and the engine dropped them.

        Emitted tokens are kept; all are prefilled again. Half as many rows run, in chunks of half the size. After every
        `RECOVERY_ANSWERS` answers one more row may run and chunks double; once idle, all limits are lifted. A request
        that ran alone fails the second time unless it got further and chunks can shrink.
        """
        rows = list(self._active.values())
        is_smallest_chunk = self._chunk_tokens <= SMALLEST_CHUNK_TOKENS
        self._rows, self._answers_since_shrink = max(1, len(rows) // 2), 0
        self._chunk_tokens = max(min(SMALLEST_CHUNK_TOKENS, self._chunk_tokens), self._chunk_tokens // 2)
        if len(rows) == 1:
            (only_row,) = rows
            if only_row.out_of_memory_at >= 0 and (is_smallest_chunk or only_row.computed <= only_row.out_of_memory_at):
                return [self._end(only_row, FinishReason.FAILED, error=message)]
            only_row.out_of_memory_at = only_row.computed
        for sequence in reversed(rows):
            self._preempt_row(sequence)
        return []

    def cancel(self, request_id: str) -> list[TokenEvent]:
        """End a request, waiting or running; return one terminal event, or none if it has ended already."""
        sequence = self._queue.remove(request_id) or self._active.get(request_id)
        return [self._end(sequence, FinishReason.CANCELLED, cached_prefix=sequence.cached_prefix())] if sequence else []

    def fail(self, request_id: str, error: str | PacelineError) -> list[TokenEvent]:
        """Fail one request, waiting or running (its admission raised, for example). Nothing of its row stays cached."""
        sequence = self._queue.remove(request_id) or self._active.get(request_id)
        return [self._end(sequence, FinishReason.FAILED, error=error)] if sequence else []

    def fail_running(self, message: str) -> list[TokenEvent]:
        """Fail every running request after a step raised, keeping nothing of their caches; waiting ones remain."""
        return [self._end(sequence, FinishReason.FAILED, error=message) for sequence in list(self._active.values())]

    def drain_released(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the rows for the engine to free, each once: (request id, the tokens whose cache entries are valid)."""
        released, self._released = list(self._released.items()), {}
        return released

    # --- planning -------------------------------------------------------------------------------------------------

    def plan(self, *, beside_others: bool = False) -> StepPlan | None:
        """Plan the next step; None if nothing runs. The oldest prompt is finished first. `beside_others`: requests of
        other models wait for this step, too.

        Short prompts skip prefill if no stream is running: one forward reads them all and draws their first tokens.
        Requests whose prompts were just read wait for one more chunk if it completes all others: they start together.
        """
        prefilling = [sequence for sequence in self._active.values() if sequence.needs_prefill]
        decoding = [sequence for sequence in self._active.values() if not sequence.needs_prefill]
        if not decoding and all(sequence.may_skip_prefill for sequence in prefilling):
            prefilling, decoding = [], prefilling
        just_read = {row.sequence_id for row in self._plan.rows} if isinstance(self._plan, PrefillStep) else set()
        streams = [row for row in decoding if row.counters.generated or row.request.id not in just_read]
        if prefilling and not (streams and just_read):
            alone = len(self._active) == 1 and not beside_others
            size = self._chunks.size(prefilling[0].computed, alone=alone, streams=bool(streams) or beside_others)
            step = plan_prefill(prefilling, min(size, self._chunk_tokens))
            if not (decoding and just_read) or sum(row.is_last for row in step.rows) == len(prefilling):
                self._plan = step
                return step
        self._plan = self._plan_decode(decoding) if decoding else None
        return self._plan

    def _plan_decode(self, decoding: list[LiveSequence]) -> DecodeStep:
        now = self._clock()
        self._choices = self._speculation.choose(decoding, others=len(self._active) - 1)
        rows = []
        for sequence in decoding:
            if sequence.decode_started_at is None and not sequence.needs_prefill:
                sequence.decode_started_at = now
            remaining = sequence.remaining(self._limits.max_context_tokens)
            choice = self._choices[sequence.request.id]
            drafts = min(choice.num_draft_tokens, remaining - 1)
            rows.append(
                DecodeRow(
                    sequence_id=sequence.request.id,
                    tokens=sequence.tokens,
                    prompt_length=sequence.prompt_length,
                    computed=sequence.computed,
                    remaining=remaining,
                    method=choice.method if drafts else OFF,
                    num_draft_tokens=drafts,
                    max_draft_tokens=min(choice.max_draft_tokens, remaining - 1),
                )
            )
        return DecodeStep(tuple(rows), timed=self._speculation.must_time(rows))

    # --- results --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[TokenEvent]:
        """Apply the result of a step; return one event per row that got tokens. Missing rows are unchanged."""
        plan = self._plan
        if isinstance(plan, PrefillStep) and result.prefilled:
            self._chunks.learn(len(plan.rows) * result.width, plan.rows[0].start, result.seconds)
        planned = {row.sequence_id: row for row in plan.rows} if isinstance(plan, DecodeStep) else {}
        phases = PhaseSeconds()
        if planned and result.outcomes:
            phases = self._speculation.observe(planned, self._active, result)
        self._speculation.observe_offers(self._active, result)
        events = [
            event
            for sequence_id, computed in result.prefilled
            for event in self._prefilled(sequence_id, computed, result.prompt_logprobs.get(sequence_id, ()))
        ]
        for outcome in result.outcomes:
            events += self._decoded(outcome, planned.get(outcome.sequence_id), phases)
        return events

    def _prefilled(self, sequence_id: str, computed: int, scores: tuple[TokenLogprobs, ...]) -> list[TokenEvent]:
        sequence = self._active.get(sequence_id)
        if sequence is None:
            return []
        if not 0 <= computed < len(sequence.tokens):
            return self.fail(sequence_id, cache_length_error(computed, len(sequence.tokens)))
        sequence.computed = computed
        unsent = sequence.unsent_scores(scores)
        return [TokenEvent(sequence_id, prompt_logprobs=unsent)] if unsent else []

    def _decoded(self, outcome: RowOutcome, row: DecodeRow | None, phases: PhaseSeconds) -> list[TokenEvent]:
        sequence = self._active.get(outcome.sequence_id)
        if sequence is None or row is None:
            return []
        if outcome.dead_end:
            return [self._end(sequence, FinishReason.DEAD_END, error=outcome.dead_end)]
        # At least the last token is not cached yet.
        if not 0 <= outcome.computed < len(sequence.tokens) + len(outcome.emitted):
            return self.fail(outcome.sequence_id, cache_length_error(outcome.computed, len(sequence.tokens)))
        refusal = self._record_refusal(sequence, outcome, row)
        event = sequence.append(outcome, self._limits.max_context_tokens, phases, refusal)
        if event.tokens and sequence.first_token_at is None:
            sequence.first_token_at = self._clock()
        if event.finish_reason:
            return [self._end(sequence, event.finish_reason, cached_prefix=sequence.cached_prefix(), event=event)]
        return [event] if outcome.emitted else []

    def _record_refusal(self, sequence: LiveSequence, outcome: RowOutcome, row: DecodeRow) -> Reason:
        """Count and return the reason why a step did not draft."""
        firm = reason = self._choices[outcome.sequence_id].refusal
        if not firm and not row.num_draft_tokens:
            reason = Reason("last_token")
        elif not firm and not outcome.drafted:
            reason = outcome.why_not_drafted or Reason("under_way")
        if reason:
            sequence.refusals.add(reason, firm=bool(firm))
        return reason

    def _end(
        self,
        sequence: LiveSequence,
        reason: FinishReason,
        *,
        cached_prefix: tuple[int, ...] = (),
        error: str | PacelineError = "",
        event: TokenEvent | None = None,
    ) -> TokenEvent:
        """End a sequence that is not queued; return its last event. Its `cached_prefix` may enter the prefix cache."""
        request_id, now = sequence.request.id, self._clock()
        if self._active.pop(request_id, None):
            self._released[request_id] = cached_prefix
        if reason in {FinishReason.STOP, FinishReason.LENGTH} and sequence.admitted_at is not None:
            self._queue.record_service_time(now - sequence.admitted_at)
            self._answers_since_shrink += 1
            if self._answers_since_shrink % RECOVERY_ANSWERS == 0:
                self._rows = min(self._limits.max_rows, self._rows + 1)
                self._chunk_tokens = min(self._limits.prefill_chunk_tokens, self._chunk_tokens * 2)
        self._speculation.forget(request_id)
        statistics = sequence.statistics(now)
        return replace(event or TokenEvent(request_id), finish_reason=reason, statistics=statistics, error=error)
