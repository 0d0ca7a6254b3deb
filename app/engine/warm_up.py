"""The last part of a load: every shape runs once, so that no user's token pays for a compilation, and is then measured.

It drives an engine from outside, as a scheduler would, with a request of its own whose text repeats itself, so that
n-grams find something too. What it measures is what the governor starts from. The engine is as empty afterwards as
before, and nothing enters the prefix cache.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from app.core.clock import Clock
from app.core.draft_lengths import DRAFT_LENGTHS, LONGEST_DRAFT
from app.core.drafters import TEXT_METHODS
from app.core.errors import ModelUnavailable
from app.core.messages import ModelSpecification
from app.core.request import Request, SamplingParameters
from app.core.safe_files import read_object, write_privately
from app.core.step import (
    DecodeRow,
    DecodeStep,
    EnginePort,
    PrefillRow,
    PrefillStep,
    StepCost,
    StepResult,
)

Key = tuple[str, int, int]
"""Method, rows, drafts."""
WarmUpSteps = Generator[tuple[str, float], None, tuple[StepCost, ...]]

REQUEST_ID = "warm-up"
PHASE = "warming up"
BUDGET_SECONDS = 1.5
"""No shape is begun that would probably end later: the governor learns the others from requests."""
FIRST_PIECE_TOKENS, PROMPT_TOKENS = 8, 64
QUICK_SECONDS = 0.1
"""A machine that reads the first piece slower than this is spared the rest of the prompt."""
PERIOD = 6
ROUNDS = 2
"""How often every shape is measured, by two runs of which the first is to warm it; the fastest counts. Rounds lie
apart, so that a pause of the machine spoils one of them."""
MAX_FILE_BYTES = 1 << 20
MAX_COSTS = 4_096

_logger = logging.getLogger("paceline.costs")


def warm_up(
    engine: EnginePort,
    *,
    known: Sequence[StepCost] = (),
    clock: Clock = time.perf_counter,
    budget_seconds: float = BUDGET_SECONDS,
) -> WarmUpSteps:
    """Yield (phase, fraction 0–1) between steps; the return value is what steps cost here.

    With `known` costs, of an earlier load on this machine, the shapes run once, and only what that shows to be cheaper
    than it was known is corrected: nothing but a busy machine can have made it dear.
    """
    ends = clock() + budget_seconds
    runs = 1 if known else 2
    sequence = _Sequence(engine, clock)
    costs = {_key(cost): cost for cost in known}
    shapes = _shapes(engine.limits.drafters) * (1 if known else ROUNDS)
    try:
        yield PHASE, 0.0
        yield from ((PHASE, 0.0) for _ in sequence.read_prompt())
        for done, (method, drafts) in enumerate(shapes):
            late = clock() + runs * _expected_seconds(costs, method, drafts) > ends
            if not sequence.has_room(drafts) or (late and done > 1):
                continue
            for cost in sequence.run(method, drafts, runs):
                if cost is not None and (not known or _key(cost) in costs):
                    best = costs.get(_key(cost), cost)
                    seconds = min(best.seconds, cost.seconds)
                    costs[_key(cost)] = replace(
                        best, seconds=seconds, draft_seconds=min(best.draft_seconds, cost.draft_seconds)
                    )
                yield PHASE, (done + 1) / len(shapes)
    finally:
        engine.release(REQUEST_ID, ())
    return tuple(costs.values())


def _shapes(drafters: Sequence[str]) -> list[tuple[str, int]]:
    """(method, drafts), the most telling first: plain, every drafter's shortest and longest proposal, then the verify
    forwards of the other lengths with the drafter that costs least."""
    shapes = [("off", 0)]
    shapes += [(method, length) for length in (DRAFT_LENGTHS[0], LONGEST_DRAFT) for method in drafters]
    if drafters:
        cheapest = next((name for name in drafters if name in TEXT_METHODS), drafters[0])
        shapes += [(cheapest, length) for length in DRAFT_LENGTHS[1:-1]]
    return shapes


def _key(cost: StepCost) -> Key:
    return cost.method, cost.rows, cost.drafts


def _expected_seconds(costs: Mapping[Key, StepCost], method: str, drafts: int) -> float:
    """At most what a step should take: as if both parts grew with every draft as with the first one."""
    plain = costs.get(("off", 1, 0))
    if plain is None:
        return 0.0
    narrow = max((cost.seconds for (_, rows, length), cost in costs.items() if (rows, length) == (1, 1)), default=0.0)
    own = costs.get((method, 1, 1))
    return plain.seconds + drafts * (max(0.0, narrow - plain.seconds) + (own.draft_seconds if own else 0.0))


class _Sequence:
    """The one request. What it is told it has read is its own text: the engine only compares lengths."""

    def __init__(self, engine: EnginePort, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._limit = engine.limits.max_context_tokens
        self._tokens = [_token(place) for place in range(max(2, min(PROMPT_TOKENS, self._limit // 2)))]
        self._computed = 0

    def has_room(self, drafts: int) -> bool:
        """Whether another shape still fits into the context."""
        return len(self._tokens) + 2 * (1 + drafts) + 2 < self._limit

    def read_prompt(self) -> Iterator[None]:
        """Admit the request and prefill it, on a slow machine only its beginning."""
        request = Request(
            id=REQUEST_ID,
            prompt_tokens=tuple(self._tokens),
            max_tokens=self._limit,
            sampling=SamplingParameters(temperature=0.0),
        )
        self._computed = self._engine.admit(request)
        began = self._clock()
        self._prefill(FIRST_PIECE_TOKENS)
        yield
        if self._clock() - began > QUICK_SECONDS:
            del self._tokens[self._computed + 1 :]
        yield from self._catch_up()

    def run(self, method: str, drafts: int, runs: int) -> Iterator[StepCost | None]:
        """Run a shape so often and tell what each run cost; None after steps that say nothing."""
        if not drafts:
            yield from self._catch_up()
            for remaining in (3, 2, 1):  # the first step builds up the pace, the last one launches nothing ahead
                result = self._decode("off", 0, remaining=remaining)
                yield StepCost("off", 1, 0, result.seconds) if remaining == 2 else None
            return
        for _ in range(runs):
            yield from self._catch_up()
            result = self._decode(method, drafts)
            drafted = result.outcomes[0].drafted if result.outcomes else 0
            if not drafted:
                return
            draft_seconds = result.parts.draft_seconds if result.parts else 0.0
            yield StepCost(method, 1, drafted, result.seconds - draft_seconds, draft_seconds)

    def _catch_up(self) -> Iterator[None]:
        """Prefill everything but the last token."""
        while len(self._tokens) - self._computed > 1:
            self._prefill(self._engine.limits.prefill_chunk_tokens)
            yield None

    def _prefill(self, most: int) -> None:
        most = min(most, self._engine.limits.prefill_chunk_tokens)
        end = min(len(self._tokens) - 1, self._computed + most)
        self._engine.step(PrefillStep((PrefillRow(REQUEST_ID, self._tokens, self._computed, end),)))
        self._computed = end

    def _decode(self, method: str, drafts: int, *, remaining: int | None = None) -> StepResult:
        row = DecodeRow(
            sequence_id=REQUEST_ID,
            tokens=self._tokens,
            prompt_length=len(self._tokens),
            computed=self._computed,
            remaining=remaining or drafts + 1,
            method=method,
            num_draft_tokens=drafts,
        )
        result = self._engine.step(DecodeStep((row,), timed=True))
        for outcome in result.outcomes:
            for _ in outcome.emitted:
                self._tokens.append(_token(len(self._tokens)))
            self._computed = outcome.computed
        return result


def _token(place: int) -> int:
    """A text that repeats itself. Every vocabulary has these ids."""
    return 1 + 37 * (place % PERIOD) % 89


class _KeptCosts(msgspec.Struct, frozen=True):
    """The content of a file. `key` says in words what its name is the hash of."""

    key: list[str]
    costs: list[StepCost]


class CostFiles:
    """What steps cost on this machine, kept from one load to the next: one small file for each unit in `folder` (None:
    nothing is kept). `machine` names device and libraries. Called from the MLX thread.

    Nothing here raises: a file that is missing, broken or of another machine only means that all is measured again.
    """

    def __init__(self, folder: Path | None, machine: Sequence[str]) -> None:
        self._folder = folder
        self._machine = list(machine)
        self._written: dict[Path, tuple[StepCost, ...]] = {}

    def recall(self, spec: ModelSpecification) -> tuple[StepCost, ...]:
        """What was kept for this unit; empty when there is nothing to trust."""
        path = self._path(spec)
        if path is None or not path.exists():
            return ()
        try:
            kept = msgspec.convert(read_object(path, MAX_FILE_BYTES), _KeptCosts)
        except (ModelUnavailable, msgspec.ValidationError) as error:
            _logger.warning("%s is ignored and will be replaced: %s", path.name, error)
            return ()
        if kept.key != self._key(spec) or len(kept.costs) > MAX_COSTS or not all(map(_is_sound, kept.costs)):
            _logger.warning("%s is ignored and will be replaced: it does not fit", path.name)
            return ()
        self._written[path] = tuple(kept.costs)
        return self._written[path]

    def keep(self, spec: ModelSpecification, costs: Sequence[StepCost]) -> None:
        """Write what is known now, unless that was written already. Readers see the old file or the new one."""
        path, costs = self._path(spec), tuple(costs)
        if path is None or not costs or self._written.get(path) == costs:
            return
        self._written[path] = costs
        rounded = [
            replace(each, seconds=round(each.seconds, 7), draft_seconds=round(each.draft_seconds, 7)) for each in costs
        ]
        content: Any = _KeptCosts(self._key(spec), rounded)
        try:
            write_privately(path, msgspec.json.format(msgspec.json.encode(content), indent=1))
        except OSError as error:
            _logger.warning("the costs of %s cannot be kept: %s", spec.id, error.strerror)

    def warm_up(self, engine: EnginePort, spec: ModelSpecification) -> WarmUpSteps:
        """The warm-up of a pool: what was measured once on this machine is not measured again."""
        measured = yield from warm_up(engine, known=self.recall(spec))
        self.keep(spec, measured)
        return measured

    def _key(self, spec: ModelSpecification) -> list[str]:
        drafts = [text for draft in spec.drafts for text in (draft.method, draft.id, draft.path)]
        return [*self._machine, spec.id, spec.path, *drafts]

    def _path(self, spec: ModelSpecification) -> Path | None:
        if self._folder is None:
            return None
        name = hashlib.sha256(json.dumps(self._key(spec)).encode()).hexdigest()[:32]
        return self._folder / f"{name}.json"


def _is_sound(cost: StepCost) -> bool:
    times = (cost.seconds, cost.draft_seconds)
    return cost.rows > 0 and cost.drafts >= 0 and all(math.isfinite(time) and 0 <= time < 3600 for time in times)
