"""Small stand-ins for pool, engine, scheduler and text, with every failure on request. Tokens are bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.core.errors import InvalidRequest, ModelUnavailable, PacelineError, QueueFull
from app.core.messages import LoadedModel, ModelSpecification
from app.core.ports import EngineLimits
from app.core.request import Request
from app.core.step import (
    DecodeRow,
    DecodeStep,
    FinishReason,
    RowOutcome,
    Statistics,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from app.engine.pool import Evicted, Loaded, LoadFailed, PoolEvent, Progress

END = 0
"""The stop token."""


class FakeEngine:
    """Row i of request r says `script` again and again, `width` bytes a step, the first `width - 1` of them drafted."""

    def __init__(self, script: bytes = b"abcdefghij", *, rows: int = 4, width: int = 3) -> None:
        self.limits = EngineLimits(max_context_tokens=200, max_rows=rows)
        self.script = script
        self.width = width
        self.rows: dict[str, int] = {}
        self.fail_next = ""
        self.steps = 0

    def admit(self, request: Request) -> int:
        if b"!" in bytes(request.prompt_tokens):
            raise RuntimeError("admission failed")
        self.rows[request.id] = 0
        return 1

    def step(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        assert isinstance(plan, DecodeStep)
        if self.fail_next:
            message, self.fail_next = self.fail_next, ""
            raise RuntimeError(message)
        outcomes = []
        for row in plan.rows:
            told = self.rows[row.sequence_id]
            emitted = tuple(self.script[(told + i) % len(self.script)] for i in range(self.width))
            self.rows[row.sequence_id] = told + self.width
            drafted = self.width - 1
            logprobs = tuple(TokenLogprobs(-0.5, ((token, -0.5), (65, -2.0))) for token in emitted)
            outcomes.append(RowOutcome(row.sequence_id, emitted, 0, drafted, drafted, logprobs, "ngram"))
        return StepResult(tuple(outcomes), seconds=0.01)

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        self.rows.pop(request_id, None)


@dataclass
class Life:
    request: Request
    tokens: list[int] = field(default_factory=list)


class FakeScheduler:
    """First come, first served, every row in every step."""

    def __init__(self, limits: EngineLimits, *, queue_limit: int = 8) -> None:
        self.limits = limits
        self.queue_limit = queue_limit
        self.queue: dict[str, Life] = {}
        self.rows: dict[str, Life] = {}
        self.released: list[tuple[str, tuple[int, ...]]] = []
        self.broken: set[str] = set()

    def _check(self, name: str) -> None:
        if name in self.broken:
            raise ZeroDivisionError(name)

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.rows)

    @property
    def running(self) -> int:
        return len(self.rows)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def submit(self, request: Request) -> None:
        self._check("submit")
        if len(request.prompt_tokens) >= self.limits.max_context_tokens:
            raise InvalidRequest("too long", code="context_length_exceeded")
        if len(self.queue) >= self.queue_limit:
            raise QueueFull("full", retry_after_seconds=1)
        self.queue[request.id] = Life(request)

    def cancel(self, request_id: str) -> list[TokenEvent]:
        self._check("cancel")
        life = self.queue.pop(request_id, None) or self.rows.pop(request_id, None)
        return [] if life is None else [self._end(life, FinishReason.CANCELLED)]

    def next_admission(self) -> Request | None:
        if not self.queue or len(self.rows) >= self.limits.max_rows:
            return None
        request_id, life = next(iter(self.queue.items()))
        self.rows[request_id] = self.queue.pop(request_id)
        return life.request

    def admitted(self, request_id: str, cached_tokens: int) -> None:
        assert request_id in self.rows

    def plan(self) -> StepPlan | None:
        self._check("plan")
        rows = tuple(DecodeRow(name, (), 0, 0, 1) for name in self.rows)
        return DecodeStep(rows) if rows else None

    def commit(self, result: StepResult) -> list[TokenEvent]:
        self._check("commit")
        return [self._commit(outcome) for outcome in result.outcomes if outcome.sequence_id in self.rows]

    def _commit(self, outcome: RowOutcome) -> TokenEvent:
        life = self.rows[outcome.sequence_id]
        tokens = outcome.emitted[: life.request.max_tokens - len(life.tokens)]
        reason = FinishReason.LENGTH if len(life.tokens) + len(tokens) == life.request.max_tokens else None
        if END in tokens:
            tokens, reason = tokens[: tokens.index(END)], FinishReason.STOP
        life.tokens += tokens
        end = self._end(self.rows.pop(outcome.sequence_id), reason) if reason else None
        return TokenEvent(
            outcome.sequence_id,
            tokens,
            drafted=outcome.drafted,
            accepted=min(outcome.accepted, len(tokens)),
            method=outcome.method,
            logprobs=outcome.logprobs if life.request.sampling.top_logprobs is not None else (),
            finish_reason=reason,
            statistics=end.statistics if end else Statistics(),
        )

    def _end(self, life: Life, reason: FinishReason, error: str = "") -> TokenEvent:
        self.released.append((life.request.id, tuple(life.tokens)))
        statistics = Statistics(completion_tokens=len(life.tokens), steps=1, methods=("ngram",), reason="as scripted")
        return TokenEvent(life.request.id, finish_reason=reason, statistics=statistics, error=error)

    def fail_running(self, message: str) -> list[TokenEvent]:
        self._check("fail_running")
        events = [self._end(life, FinishReason.FAILED, message) for life in self.rows.values()]
        self.rows.clear()
        return events

    def drain_released(self) -> list[tuple[str, tuple[int, ...]]]:
        released, self.released = self.released, []
        return released


class FakePool:
    """Loads in three slices; a folder named "broken" fails, "refused" and "crash" are not even begun."""

    def __init__(self, *, make_engine: Callable[[], FakeEngine] = FakeEngine) -> None:
        self.make_engine = make_engine
        self.engines: dict[str, FakeEngine] = {}
        self.loads: dict[str, tuple[ModelSpecification, int]] = {}
        self.leases: dict[str, int] = {}
        self.events: list[PoolEvent] = []
        self.pinned: dict[str, bool] = {}
        self.idle: dict[str, float | None] = {}
        self.evict_on_expire: set[str] = set()

    @property
    def loading(self) -> bool:
        return bool(self.loads or self.events)

    def acquire(self, spec: ModelSpecification) -> None:
        folder = spec.path.rpartition("/")[2]
        if folder == "refused":
            raise ModelUnavailable("refused", retry_after_seconds=5)
        if folder == "crash":
            raise OSError("no such disk")
        if spec.id not in self.engines and spec.id not in self.loads:
            self.loads[spec.id] = (spec, 0)
        self.leases[spec.id] = self.leases.get(spec.id, 0) + 1

    def release(self, model_id: str) -> None:
        assert self.leases.get(model_id, 0) > 0, f"{model_id} is released too often"
        self.leases[model_id] -= 1

    def engine(self, model_id: str) -> FakeEngine | None:
        return self.engines.get(model_id)

    def advance(self) -> list[PoolEvent]:
        for model_id, (spec, slices) in tuple(self.loads.items())[:1]:
            if slices < 2:
                self.loads[model_id] = (spec, slices + 1)
                self.events.append(Progress(model_id, "weights", (slices + 1) / 3))
            elif spec.path.endswith("/broken"):
                self._fail(model_id, ModelUnavailable("the folder is broken"))
            else:
                del self.loads[model_id]
                self.engines[model_id] = self.make_engine()
                self.events.append(Loaded(model_id, 0.3))
        events, self.events = self.events, []
        return events

    def _fail(self, model_id: str, error: PacelineError) -> None:
        del self.loads[model_id]
        self.leases[model_id] = 0
        self.events.append(LoadFailed(model_id, error))

    def cancel_load(self, model_id: str) -> None:
        if model_id in self.loads:
            self._fail(model_id, ModelUnavailable("cancelled", code="load_cancelled"))

    def unload(self, model_id: str) -> None:
        if self.leases.get(model_id):
            raise ModelUnavailable("in use")
        self._evict(model_id)

    def _evict(self, model_id: str) -> None:
        if self.engines.pop(model_id, None):
            self.events.append(Evicted(model_id))

    def pin(self, model_id: str, pinned: bool) -> None:
        self.pinned[model_id] = pinned

    def set_idle(self, model_id: str, seconds: float | None) -> None:
        self.idle[model_id] = seconds

    def expire(self) -> list[PoolEvent]:
        for model_id in self.evict_on_expire:
            if not self.leases.get(model_id):
                self._evict(model_id)
        events, self.events = self.events, []
        return events

    def snapshot(self) -> tuple[LoadedModel, ...]:
        return tuple(LoadedModel(id=name, state="ready") for name in self.engines)

    def memory(self) -> tuple[int, int, int]:
        return (len(self.engines), 0, 0)


@dataclass(frozen=True)
class Chunk:
    text: str = ""
    tokens_used: int = 0
    accepted_spans: tuple[tuple[int, int], ...] = ()
    stopped: bool = False


class FakeStream:
    """Latin-1; holds back what may begin a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop
        self.held = ""

    def feed(self, tokens: Sequence[int], accepted: int) -> Chunk:
        for number, token in enumerate(tokens):
            if token == 255:
                raise BaseExceptionGroup("a panic", [RuntimeError("of the tokenizer")])
            self.held += chr(token)
            for stop in self.stop:
                if stop in self.held:
                    text = self.held.partition(stop)[0]
                    return Chunk(text, number + 1, ((0, len(text)),) if text else (), stopped=True)
        keep = max((len(stop) - 1 for stop in self.stop), default=0)
        text = self.held[: max(0, len(self.held) - keep)]
        self.held = self.held[len(text) :]
        return Chunk(text, len(tokens), ((0, min(accepted, len(text))),) if text and accepted else ())

    def finish(self) -> Chunk:
        return Chunk(self.held)


class FakeText:
    """One byte a token."""

    stop_token_ids = frozenset({END})
    vocabulary_size = 256

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, template_arguments: dict[str, Any]
    ) -> list[int]:
        if template_arguments.get("panic"):
            raise BaseExceptionGroup("a panic", [RuntimeError("of the template")])
        return [byte for message in messages for byte in str(message["content"]).encode("latin-1")]

    def encode(self, text: str) -> list[int]:
        return list(text.encode("latin-1"))

    def token_text(self, token: int) -> tuple[str, bytes]:
        return chr(token), bytes([token])

    def open_stream(self, stop: tuple[str, ...], after: Sequence[int]) -> FakeStream:
        return FakeStream(stop)
