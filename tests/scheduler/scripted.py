"""An engine without a model: the next token is a function of the tokens so far, and acceptance follows a script;
`forced` says how many tokens a grammar would force after a text, all of which are accepted.

It checks what a real engine relies on: `computed` is the cached length, every planned row was admitted, drafts fit into
the remaining tokens, and a row is freed exactly once, with tokens that really are in its cache.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.core.reason import NO_REASON, Reason
from app.core.request import Constraint, Request, SpeculationRequest
from app.core.step import (
    DecodeRow,
    DecodeStep,
    EngineLimits,
    FinishReason,
    Offer,
    PrefillStep,
    RowOutcome,
    StepCost,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from app.scheduler.scheduler import Scheduler

VOCABULARY = 23


def next_token(tokens: Sequence[int]) -> int:
    """Return a token that depends on the last three and the length: a lost, doubled or swapped one changes the rest."""
    value = len(tokens) * 31
    for token in tokens[-3:]:
        value = (value * 17 + token + 5) % 100_003
    return value % VOCABULARY


def naive_output(request: Request, max_context_tokens: int) -> list[int]:
    """Return the simplest loop's output: up to the stop token (excluded), `max_tokens` or the end of the context."""
    tokens = list(request.prompt_tokens)
    for _ in range(min(request.max_tokens, max_context_tokens - len(tokens))):
        token = next_token(tokens)
        if token in request.stop_token_ids:
            break
        tokens.append(token)
    return tokens[len(request.prompt_tokens) :]


def some_request(
    name: str,
    *,
    prompt: int = 5,
    max_tokens: int = 10,
    stops: frozenset[int] = frozenset(),
    method: str = "auto",
    num_draft_tokens: int | None = None,
    owner: str = "",
    constraint: Constraint | None = None,
) -> Request:
    return Request(
        id=name,
        owner=owner,
        prompt_tokens=tuple((7 * place + len(name)) % VOCABULARY for place in range(prompt)),
        max_tokens=max_tokens,
        stop_token_ids=stops,
        speculation=SpeculationRequest(method=method, num_draft_tokens=num_draft_tokens),
        constraint=constraint,
    )


def speculative_limits(*, rows: int = 4, context: int = 4_096, chunk: int = 16) -> EngineLimits:
    return EngineLimits(context, rows, prefill_chunk_tokens=chunk, drafters=("draft_model", "ngram"))


@dataclass
class ManualClock:
    """A clock that moves only when a test changes `now`."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedEngine:
    """`accepts(drafts)` says how many drafts of a row are right; the rates are probabilities of unusual events."""

    limits: EngineLimits = field(default_factory=speculative_limits)
    accepts: Callable[[int], int] = lambda drafts: drafts
    forced: Callable[[Sequence[int]], int] = lambda _: 0
    appended: int = 0
    """Number of forced tokens appended to the accepted drafts, as far as `max_draft_tokens` allows."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    carry_rate: float = 0.0
    rewind_rate: float = 0.0
    missing_rate: float = 0.0
    silent_rate: float = 0.0
    cached_prefix_rate: float = 0.0
    seconds: Callable[[int], float] = lambda width: 0.01 + 0.0001 * width
    rows: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)

    def fetch(self, request: Request) -> bool:
        return True

    def admit(self, request: Request) -> int:
        assert request.id not in self.rows, "admitted twice"
        assert len(self.rows) < self.limits.max_rows
        cached = self.chance.randrange(len(request.prompt_tokens)) if self._happens(self.cached_prefix_rate) else 0
        self.rows[request.id] = list(request.prompt_tokens[:cached])
        self.prompts[request.id] = request.prompt_tokens
        return cached

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        cache = self.rows.pop(request_id)
        assert cache[: len(tokens)] == list(tokens), "released tokens that are not in the cache"
        self.freed.append(request_id)

    def step(self, plan: StepPlan) -> StepResult:
        if isinstance(plan, PrefillStep):
            return self._prefill(plan)
        assert plan.rows
        outcomes = tuple(self._decode(row) for row in plan.rows if not self._happens(self.missing_rate))
        appended = {outcome.sequence_id: outcome.drafted for outcome in outcomes if outcome.appended}
        width = max(
            len(row.tokens) - row.computed + max(row.num_draft_tokens, appended.get(row.sequence_id, 0))
            for row in plan.rows
        )
        tokens = {row.sequence_id: row.tokens for row in plan.rows}
        forced = {
            outcome.sequence_id: self.forced([*tokens[outcome.sequence_id], *outcome.emitted]) for outcome in outcomes
        }
        offers: dict[str, dict[str, Offer]] = {name: {} for name in tokens}
        return StepResult(outcomes, offers=offers, forced=forced, seconds=self.seconds(width), width=width)

    def _prefill(self, plan: PrefillStep) -> StepResult:
        width = max(row.end - row.start for row in plan.rows)
        assert width * len(plan.rows) <= self.limits.prefill_chunk_tokens
        for row in plan.rows:
            cache = self.rows[row.sequence_id]
            assert row.start == len(cache)
            assert row.start < row.end < len(row.tokens)
            cache.extend(row.tokens[row.start : row.end])
        return StepResult(prefilled=tuple((row.sequence_id, row.end) for row in plan.rows), seconds=0.05, width=width)

    def _decode(self, row: DecodeRow) -> RowOutcome:
        cache = self.rows[row.sequence_id]
        assert row.computed == len(cache), "computed is not the cached length"
        assert list(row.tokens[: row.computed]) == cache
        assert 0 < len(row.tokens) - row.computed <= 17
        assert row.prompt_length == len(self.prompts[row.sequence_id])
        assert row.num_draft_tokens + 1 <= row.remaining
        assert len(row.tokens) + row.remaining <= self.limits.max_context_tokens
        silent = row.num_draft_tokens > 0 and self._happens(self.silent_rate)
        drafted = 0 if silent else row.num_draft_tokens
        forced = min(drafted, self.forced(row.tokens))
        accepted = max(forced, self.accepts(drafted)) if drafted else 0
        appended = min(self.appended, row.max_draft_tokens - accepted) if drafted else 0
        if appended:
            drafted = accepted = accepted + appended
        emitted: list[int] = []
        for _ in range(accepted + 1):
            emitted.append(next_token([*row.tokens, *emitted]))
        self._cache(cache, row, emitted, partial=accepted < drafted)
        return RowOutcome(
            sequence_id=row.sequence_id,
            emitted=tuple(emitted),
            computed=len(cache),
            drafted=drafted,
            accepted=accepted,
            appended=appended,
            logprobs=tuple(TokenLogprobs(-float(token)) for token in emitted),
            method=row.method if drafted else "off",
            why_not_drafted=Reason("no_match") if silent else NO_REASON,
        )

    def _cache(self, cache: list[int], row: DecodeRow, emitted: list[int], *, partial: bool) -> None:
        if partial and self._happens(self.carry_rate):
            return
        cache[:] = [*row.tokens, *emitted[:-1]]
        if self._happens(self.rewind_rate):
            del cache[self.chance.randrange(len(cache) + 1) :]

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self.chance.random() < rate


@dataclass
class Loop:
    """The worker's loop around one scheduler and one scripted engine; it records all events and plans."""

    scheduler: Scheduler
    engine: ScriptedEngine
    events: dict[str, list[TokenEvent]] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def tell(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            own_events = self.events.setdefault(event.request_id, [])
            assert not any(earlier.finish_reason for earlier in own_events), "an event after the terminal one"
            own_events.append(event)

    def turn(self) -> None:
        """Run one turn: free rows, admit, step."""
        self.free()
        while request := self.scheduler.next_admission():
            self.scheduler.admitted(request.id, self.engine.admit(request))
            self.admitted.append(request.id)
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.tell(self.scheduler.commit(self.engine.step(plan)))

    def free(self) -> None:
        for request_id, tokens in self.scheduler.drain_released():
            self.engine.release(request_id, tokens)

    def finish(self, limit: int = 5_000) -> None:
        """Run turns until no work is left; a scheduler that makes no progress fails here."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.turn()
        raise AssertionError("the loop did not end")

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.submit(request)
        self.finish()

    def output(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.tokens]

    def end(self, request_id: str) -> TokenEvent:
        ends = [event for event in self.events[request_id] if event.finish_reason]
        assert len(ends) == 1
        return ends[0]

    def decode_rows(self, request_id: str) -> list[DecodeRow]:
        steps = [plan for plan in self.plans if isinstance(plan, DecodeStep)]
        return [row for step in steps for row in step.rows if row.sequence_id == request_id]


def check_against_naive(loop: Loop, request: Request) -> None:
    """Check output, finish reason and counters of a request that ran to its natural end."""
    expected = naive_output(request, loop.engine.limits.max_context_tokens)
    room = min(request.max_tokens, loop.engine.limits.max_context_tokens - len(request.prompt_tokens))
    stopped = len(expected) < room
    end = loop.end(request.id)
    assert loop.output(request.id) == expected
    assert end.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert end.statistics.completion_tokens == len(expected) + stopped
    logprobs = [logprob for event in loop.events[request.id] for logprob in event.logprobs]
    assert [logprob.logprob for logprob in logprobs] == [-float(token) for token in expected]


def build(
    *,
    engine: ScriptedEngine | None = None,
    policy: str = "single",
    queue_limit: int = 128,
    measured: Sequence[StepCost] = (),
) -> Loop:
    engine = engine or ScriptedEngine()
    return Loop(Scheduler(engine.limits, policy=policy, queue_limit=queue_limit, measured=measured), engine)
