"""Small stand-ins for pool, engine and text, and a scheduler that fails on request. Tokens are bytes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from app.core.clock import Clock
from app.core.errors import InvalidRequest, ModelInUse, ModelUnavailable, PacelineError
from app.core.messages import Generate, KeepModels, LoadProgress, Pressure
from app.core.pool_events import Evicted, Loaded, LoadFailed, PoolEvent, WarmedUp
from app.core.request import Request, SpeculationRequest
from app.core.step import (
    DecodeRow,
    EngineLimits,
    PrefillStep,
    RowOutcome,
    StepCost,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from app.core.unit import UNSPECIFIED_STAY, LoadedModel, ModelSpecification, Stay
from app.models.footprint import RowSize
from app.scheduler.scheduler import Scheduler
from app.text.detokenizer import TokenTable
from app.worker.texts import Prompt, PromptFailure, PromptFuture
from tests.loaded import loaded

END = 0
"""Id of the stop token."""
WARM_COSTS = (StepCost("ngram", 1, 7, 0.25),)
"""Costs that a fake warm-up measures."""


class FakeEngine:
    """Every row emits `script` again and again; all requested drafts are accepted."""

    def __init__(self, script: bytes = b"abcdefghij", *, rows: int = 4, context_tokens: int = 200) -> None:
        self.limits = EngineLimits(max_context_tokens=context_tokens, max_rows=rows, drafters=("ngram",))
        self.on_progress: Callable[[], None] = lambda: None
        self.script = script
        self.rows: set[str] = set()
        self.fail_next = ""
        self.dead_end = ""
        """Reason, reported for every row, why its grammar allows no further token."""
        self.steps = 0
        self.refusal: PacelineError | None = None
        """Error with which the engine refuses prompts that contain a question mark."""
        self.is_lost = False
        """Whether reading prompts from disk raises."""
        self.on_disk: set[str] = set()
        """Ids of requests whose prompts are still being read from disk."""
        self.reads = 0
        self.released: list[str] = []

    def fetch(self, request: Request) -> bool:
        if self.is_lost:
            raise MemoryError
        is_there = request.id.partition("#")[0] not in self.on_disk
        self.reads += not is_there
        return is_there

    def admit(self, request: Request) -> int:
        if b"!" in bytes(request.prompt_tokens):
            self.is_lost = b"!!" in bytes(request.prompt_tokens)
            raise RuntimeError("admission failed")
        if self.refusal is not None and b"?" in bytes(request.prompt_tokens):
            raise self.refusal
        self.rows.add(request.id)
        return min(1, len(request.prompt_tokens) - 1)

    def step(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.fail_next:
            message, self.fail_next = self.fail_next, ""
            raise RuntimeError(message)
        if isinstance(plan, PrefillStep):
            return StepResult(prefilled=tuple((row.sequence_id, row.end) for row in plan.rows))
        return StepResult(tuple(self._decode(row) for row in plan.rows), seconds=0.01)

    def _decode(self, row: DecodeRow) -> RowOutcome:
        assert row.sequence_id in self.rows
        position, drafts = len(row.tokens) - row.prompt_length, row.num_draft_tokens
        emitted = tuple(self.script[(position + i) % len(self.script)] for i in range(drafts + 1))
        logprobs = tuple(TokenLogprobs(-0.5, ((token, -0.5), (65, -2.0))) for token in emitted)
        computed = len(row.tokens) + drafts
        return RowOutcome(
            row.sequence_id, emitted, computed, drafts, drafts, logprobs, row.method, dead_end=self.dead_end
        )

    def release(self, request_id: str, tokens: Sequence[int]) -> None:
        self.released.append(request_id.partition("#")[0])
        self.rows.discard(request_id)


class BreakableScheduler(Scheduler):
    """The real scheduler, except that methods named in `broken` raise."""

    def __init__(
        self, limits: EngineLimits, *, queue_limit: int, clock: Clock, measured: Sequence[StepCost] = ()
    ) -> None:
        super().__init__(
            limits,
            default_speculation=SpeculationRequest(method="draft_model", num_draft_tokens=2),
            measured=measured,
            queue_limit=queue_limit,
            clock=clock,
        )
        self.broken: set[str] = set()
        self.beside_others: list[bool] = []
        """Whether other models had rows, by step planned."""

    def _check(self, name: str) -> None:
        if name in self.broken:
            raise ZeroDivisionError(name)

    def submit(self, request: Request) -> None:
        self._check("submit")
        super().submit(request)

    def cancel(self, request_id: str) -> list[TokenEvent]:
        self._check("cancel")
        return super().cancel(request_id)

    def plan(self, *, beside_others: bool = False) -> StepPlan | None:
        self._check("plan")
        self.beside_others.append(beside_others)
        return super().plan(beside_others=beside_others)

    def commit(self, result: StepResult) -> list[TokenEvent]:
        self._check("commit")
        return super().commit(result)

    def fail_running(self, message: str) -> list[TokenEvent]:
        self._check("fail_running")
        return super().fail_running(message)


class FakePool:
    """Loads in three slices. The folder "broken" fails to load; for "refused" and "crash", `acquire` itself raises."""

    def __init__(self, *, make_engine: Callable[[], FakeEngine] = FakeEngine) -> None:
        self.make_engine = make_engine
        self.engines: dict[str, FakeEngine] = {}
        self.loads: dict[str, tuple[ModelSpecification, int]] = {}
        self.leases: dict[str, int] = {}
        self.events: list[PoolEvent] = []
        self.kept = KeepModels()
        self.said: dict[str, Stay] = {}
        """Stay requested by requests and loads, later ones taking precedence, by model."""
        self.used: list[ModelSpecification] = []
        self.evict_on_expire: set[str] = set()
        self.held = False
        self.cold: list[str] = []
        """Ids of models that are still to be warmed up."""
        self.known_costs: Sequence[StepCost] = ()
        """Costs passed to the last warm-up."""
        self.room_tokens = 10**9
        self.held_tokens = 0
        self.reserved: dict[str, int] = {}
        self.trims = self.sheds = 0
        self.on_progress: Callable[[], None] = lambda: None
        self.pressure: Pressure = "normal"

    @property
    def loading(self) -> bool:
        return bool(self.loads or self.events)

    @property
    def next_load(self) -> str:
        return next(iter(self.loads), "")

    @property
    def next_warm_up(self) -> str:
        return next(iter(self.cold), "")

    def warm_up(self, known: Callable[[], Sequence[StepCost]] = tuple) -> list[PoolEvent]:
        self.known_costs = known()
        return [WarmedUp(self.cold.pop(0), WARM_COSTS)]

    def acquire(self, spec: ModelSpecification, stay: Stay = UNSPECIFIED_STAY) -> None:
        folder = spec.path.rpartition("/")[2]
        if folder == "refused":
            raise ModelUnavailable("refused", retry_after_seconds=5)
        if folder == "crash":
            raise OSError("no such disk")
        if spec.id not in self.engines and spec.id not in self.loads:
            self.loads[spec.id] = (spec, 0)
        self.said[spec.id] = stay.over(self.said.get(spec.id, UNSPECIFIED_STAY))
        self.leases[spec.id] = self.leases.get(spec.id, 0) + 1

    def release(self, model_id: str) -> None:
        assert self.leases.get(model_id, 0) > 0, f"{model_id} is released too often"
        self.leases[model_id] -= 1

    def engine(self, model_id: str) -> FakeEngine | None:
        return self.engines.get(model_id)

    def check_row(self, model_id: str, row: RowSize) -> None:
        if row.tokens > self.room_tokens:
            raise InvalidRequest(f"{row.tokens} tokens never fit", code="context_length_exceeded")

    def reserve(self, model_id: str, rows: Sequence[RowSize]) -> bool:
        tokens = sum(row.tokens for row in rows)
        others = sum(reserved for other, reserved in self.reserved.items() if other != model_id)
        fits = tokens <= self.room_tokens - self.held_tokens - others
        if fits:
            self.reserved[model_id] = tokens
        return fits

    def advance(self) -> list[PoolEvent]:
        for model_id, (spec, slices) in () if self.held else tuple(self.loads.items())[:1]:
            if slices < 2:
                self.loads[model_id] = (spec, slices + 1)
                self.events.append(LoadProgress(model_id=model_id, phase="weights", fraction=(slices + 1) / 3))
            elif spec.path.endswith("/broken"):
                self._fail(model_id, ModelUnavailable("the folder is broken"))
            else:
                del self.loads[model_id]
                self.engines[model_id] = self.make_engine()
                self.engines[model_id].on_progress = self.on_progress
                self.events.append(Loaded(model_id, 0.3))
        events, self.events = self.events, []
        return events

    def _fail(self, model_id: str, error: PacelineError) -> None:
        del self.loads[model_id]
        self.leases[model_id] = 0
        self.events.append(LoadFailed(model_id, error))

    def cancel_load(self, model_id: str) -> None:
        if not self.leases[model_id] and self.loads.pop(model_id, None):
            self.events += [LoadProgress(model_id=model_id, phase="abandoned", fraction=0.0), Evicted(model_id)]

    def unload(self, model_id: str) -> None:
        if self.leases.get(model_id):
            raise ModelInUse("in use", retry_after_seconds=1)
        self.evict(model_id)

    def evict(self, model_id: str) -> None:
        if self.engines.pop(model_id, None):
            self.events.append(Evicted(model_id))

    def set_stays(self, settings: KeepModels) -> None:
        self.kept = settings

    def update_specification(self, spec: ModelSpecification) -> None:
        self.used.append(spec)

    def expire(self) -> list[PoolEvent]:
        leaving = {name for name, stay in self.said.items() if stay.idle_seconds == 0}
        for model_id in self.evict_on_expire | leaving:
            if not self.leases.get(model_id):
                self.evict(model_id)
        events, self.events = self.events, []
        return events

    def snapshot(self) -> tuple[LoadedModel, ...]:
        return tuple(loaded(name) for name in self.engines)

    def free_unused(self) -> None:
        self.sheds += 1

    @property
    def must_wait(self) -> bool:
        return self.pressure == "critical" and any(self.reserved.values())

    def relieve(self) -> int:
        return 0

    def trim(self) -> None:
        self.trims += 1

    def memory(self) -> tuple[int, int, int]:
        return (len(self.engines), 0, 0)


TABLE = TokenTable(pieces=[bytes([byte]) for byte in range(256)], stop_token_ids=frozenset({END}), vocabulary_size=256)
"""Token table in which every token is one byte."""


def fake_read(command: Generate) -> PromptFuture:
    """Read a prompt immediately, in this process; fail if its folder is missing or its text is not Latin-1."""
    future: PromptFuture = Future()
    if not Path(command.model.path).is_dir():
        raise ModelUnavailable("no folder")
    try:
        future.set_result(Prompt(_tokens(command), TABLE, {"tokenize": 0.5}))
    except UnicodeError as error:
        future.set_result(PromptFailure(PacelineError(f"unreadable: {error}"), {"render": 0.25}))
    return future


def _tokens(command: Generate) -> tuple[int, ...]:
    said = [str(message["content"]) for message in command.messages or ()]
    return tuple(command.tokens or "".join([command.text or "", *said]).encode("latin-1"))
