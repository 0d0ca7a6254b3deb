"""Warm-up: runs the step shapes of an idle model to measure them, and so that no request waits for a compilation.

It drives the engine as a scheduler would, with requests of its own. Their texts are periodic, so that n-gram drafters
find matches too. The governor relies on its measurements for shapes that no request has run. It leaves the engine as
empty as before, even if it ends early, and adds nothing to the prefix cache.
"""

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace

from app.core.clock import Clock
from app.core.request import OFF, Request, SamplingParameters, SpeculationRequest
from app.core.step import (
    DecodeRow,
    DecodeStep,
    EngineLimits,
    EnginePort,
    PrefillRow,
    PrefillStep,
    StepCost,
    StepResult,
)
from app.core.unit import ModelSpecification
from app.models.draft_lengths import draft_lengths
from app.models.drafters.methods import TEXT_METHODS
from app.models.machine_files import CostFiles

Key = tuple[str, int, int, int]
"""Shape of a step: method, rows, drafts per row, context in tokens."""
WarmUpSteps = Generator[None, None, tuple[StepCost, ...]]

REQUEST_ID = "warm-up"
GREEDY, SAMPLED = SamplingParameters(temperature=0.0), SamplingParameters(top_p=0.9, repetition_penalty=1.1)
"""Parameters of the requests that are measured, and of one that only has its operations compiled."""
BUDGET_SECONDS, MAX_SECONDS, BUDGET_CHUNKS = 3.0, 12.0, 40
"""Budget: the time of 40 first prefill chunks, at least 3 s and at most 12 s: large models have as many shapes as small
ones. A shape that would overrun the budget is skipped; the governor learns its cost from requests."""
LEAST_SECONDS = 0.001
"""Budget, in seconds, of a warm-up that measures only the minimum."""
FIRST_CHUNK_TOKENS, PROMPT_TOKENS = 8, 48
PROMPT_SHARE = 0.1
"""Share of the budget; if the first chunk takes more, the rest of the prompt is skipped."""
PERIOD = 36
"""Period of the text, in tokens: no token occurs twice in a verify forward of 32, as equal tokens share experts."""
ROUNDS = 2
"""Number of rounds that measure each shape. A round runs a new shape twice, first to warm it up; the fastest run
counts. The rounds are spread out, so that a pause of the machine spoils only one."""
BATCH_ROWS = 4
"""Second number of rows to measure, after 1, if batches may draft: it stands for larger batches, 1 for smaller ones."""


def by_shape(costs: Iterable[StepCost]) -> dict[Key, StepCost]:
    """Return costs by their shapes."""
    return {_key(cost): cost for cost in costs}


def warm_up(
    engine: EnginePort,
    costs: dict[Key, StepCost],
    *,
    rows: int = 1,
    clock: Clock = time.perf_counter,
    budget_seconds: float = 0.0,
) -> WarmUpSteps:
    """Measure step costs for one row and for `rows`, yielding between steps; return all costs.

    `costs`, those known on this machine, are updated in place. Known shapes run once a round, and their costs are only
    lowered: a higher measurement means a busy machine. Costs learnt from requests are kept. However short the budget, a
    plain step and the first drafter's shortest proposal are measured.
    """
    known_shapes = {shape for shape, cost in costs.items() if cost.seconds > 0 and not cost.is_learnt}
    started = ends = clock()
    pace = 1.0
    measured = [(row_count, GREEDY) for row_count in dict.fromkeys((1, rows))] * ROUNDS
    for index, (row_count, sampling) in enumerate([measured[0], (1, SAMPLED), *measured[1:]]):
        if index and clock() >= ends:
            break
        with contextlib.closing(_Batch(engine, clock, row_count, sampling)) as batch:
            seconds = batch.begin()
            yield
            if not index:
                ends = started + (budget_seconds or min(MAX_SECONDS, max(BUDGET_SECONDS, BUDGET_CHUNKS * seconds)))
            if seconds > PROMPT_SHARE * (ends - started):
                batch.shorten()
            yield from batch.catch_up()
            shapes = _shapes(engine.limits, row_count)
            for done, (method, drafts) in enumerate(shapes if sampling is GREEDY else shapes[:2]):
                runs = 1 if sampling is SAMPLED or (method, row_count, drafts, 0) in known_shapes else 2
                late = clock() + runs * _expected_seconds(costs, method, row_count, drafts) > ends
                if not batch.has_room(drafts) or (late and (index or done > 1)):
                    continue
                for cost in batch.run(method, drafts, runs):
                    pace = _learn(costs, cost, pace) if cost is not None and sampling is GREEDY else pace
                    yield
    return tuple(costs.values())


def _learn(costs: dict[Key, StepCost], cost: StepCost, pace: float) -> float:
    """Add a measured `cost` to `costs`; return the machine's pace, the factor by which other programs slow all steps.

    Only plain steps of known cost measure the pace; after others it stays `pace`. The cost is divided by the pace. Then
    it fills in values that its shape lacks, and lowers those that were not learnt from requests.
    """
    best = costs.get(_key(cost))
    if best and not cost.drafts and min(best.seconds, cost.seconds) > 0:
        slowdown = cost.seconds / best.seconds
        pace = slowdown if best.is_learnt else max(1.0, slowdown)
    usual = replace(cost, seconds=cost.seconds / pace, draft_seconds=cost.draft_seconds / pace)
    best = best or usual

    def kept(known: float, measured: float) -> float:
        return known if known > 0 and (best.is_learnt or not 0 < measured < known) else measured

    drafting = kept(best.draft_seconds, usual.draft_seconds)
    costs[_key(cost)] = replace(best, seconds=kept(best.seconds, usual.seconds), draft_seconds=drafting)
    return pace


def _shapes(limits: EngineLimits, rows: int) -> list[tuple[str, int]]:
    """Return shapes as (method, drafts), most informative first: plain, every drafter's shortest proposal, the other
    draft lengths with the cheapest drafter (their verify forwards cost the same for all methods), and the longest
    proposals of the other drafters."""
    lengths, drafters = draft_lengths(limits.cheap_tokens, rows), limits.available
    shapes = [(OFF, 0), *((method, lengths[0]) for method in drafters)]
    if drafters:
        cheapest = next((name for name in drafters if name in TEXT_METHODS), drafters[0])
        shapes += [(cheapest, length) for length in lengths[1:]]
        shapes += [
            (method, min(lengths[-1], limits.longest_drafts.get(method, lengths[-1])))
            for method in drafters
            if method != cheapest
        ]
    return shapes


def _key(cost: StepCost) -> Key:
    return cost.method, cost.rows, cost.drafts, cost.context_tokens


def _expected_seconds(costs: Mapping[Key, StepCost], method: str, rows: int, drafts: int) -> float:
    """Return an upper bound on a step's seconds, as if every token cost as much extra as the first draft."""
    plain = costs.get((OFF, 1, 0, 0))
    if plain is None:
        return 0.0
    narrow = max((cost.seconds for cost in costs.values() if (cost.rows, cost.drafts) == (1, 1)), default=0.0)
    own = costs.get((method, 1, 1, 0))
    drafting = drafts * own.draft_seconds if own else 0.0
    return plain.seconds + (rows * (1 + drafts) - 1) * max(0.0, narrow - plain.seconds) + rows * drafting


class _Batch:
    """Requests of a warm-up, of unequal lengths. Periodic texts replace the drawn tokens: only lengths are checked."""

    def __init__(self, engine: EnginePort, clock: Clock, rows: int, sampling: SamplingParameters) -> None:
        self._engine = engine
        self.clock = clock
        self.rows = rows
        self._sampling = sampling
        self.limits = engine.limits
        length = min(PROMPT_TOKENS, self.limits.max_context_tokens // 2)
        self._tokens = {
            f"{REQUEST_ID} {row}": [_token(position + 2 * row) for position in range(max(2, length - row))]
            for row in range(rows)
        }
        self._computed = dict.fromkeys(self._tokens, 0)

    def has_room(self, drafts: int) -> bool:
        """Return whether a shape with that many `drafts` still fits into the context."""
        return max(map(len, self._tokens.values())) + 2 * (1 + drafts) + 2 < self.limits.max_context_tokens

    def begin(self) -> float:
        """Admit the requests and prefill their first chunk; return the seconds of the prefill.
        Prompts are declared one token long, so that none enters the prefix cache or reserves room in advance."""
        for name, tokens in self._tokens.items():
            request = Request(
                id=name,
                prompt_tokens=tuple(tokens[:1]),
                max_tokens=self.limits.max_context_tokens,
                sampling=self._sampling,
                speculation=SpeculationRequest(acceptance="coupled"),  # `strict` measures a request's own text
            )
            self._computed[name] = self._engine.admit(request)
        started = self.clock()
        self._prefill(FIRST_CHUNK_TOKENS)
        return self.clock() - started

    def shorten(self) -> None:
        """Drop the rest of the prompts, on a slow machine."""
        for name, tokens in self._tokens.items():
            del tokens[self._computed[name] + 1 :]

    def close(self) -> None:
        """Leave the engine as empty as before."""
        for name in self._tokens:
            self._engine.release(name, ())

    def run(self, method: str, drafts: int, runs: int) -> Iterator[StepCost | None]:
        """Run a shape, `runs` times if it drafts; yield each measured cost, and None after any other step."""
        if not drafts:
            yield from self.catch_up()
            seconds = []
            for remaining in (4, 3, 2, 1):  # the first step fills the pipeline, the last one launches nothing ahead
                seconds.append(self._decode(OFF, 0, remaining=remaining).seconds)
                yield None
            yield StepCost(OFF, self.rows, 0, min(seconds[1:3]))
            return
        for _ in range(runs):
            yield from self.catch_up()
            result = self._decode(method, drafts)
            drafted = max((outcome.drafted for outcome in result.outcomes), default=0)
            if not drafted:
                return
            draft_seconds = result.phase_seconds.draft_seconds if result.phase_seconds else 0.0
            yield StepCost(method, self.rows, drafted, result.seconds - draft_seconds, draft_seconds)

    def catch_up(self) -> Iterator[None]:
        """Prefill all but the last token of each text, yielding after each chunk."""
        while any(len(tokens) - self._computed[name] > 1 for name, tokens in self._tokens.items()):
            self._prefill(self.limits.prefill_chunk_tokens)
            yield None

    def _prefill(self, most: int) -> None:
        most = min(most, self.limits.prefill_chunk_tokens)
        ends = {name: min(len(tokens) - 1, self._computed[name] + most) for name, tokens in self._tokens.items()}
        rows = tuple(
            PrefillRow(name, self._tokens[name], self._computed[name], end)
            for name, end in ends.items()
            if end > self._computed[name]
        )
        self._engine.step(PrefillStep(rows))
        self._computed.update(ends)

    def _decode(self, method: str, drafts: int, *, remaining: int | None = None) -> StepResult:
        rows = tuple(
            DecodeRow(
                sequence_id=name,
                tokens=tokens,
                prompt_length=len(tokens),
                computed=self._computed[name],
                remaining=remaining or drafts + 1,
                method=method,
                num_draft_tokens=drafts,
            )
            for name, tokens in self._tokens.items()
        )
        result = self._engine.step(DecodeStep(rows, timed=True))
        for row, outcome in enumerate(result.outcomes):
            tokens = self._tokens[outcome.sequence_id]
            tokens += [_token(len(tokens) + 2 * row + position) for position in range(len(outcome.emitted))]
            self._computed[outcome.sequence_id] = outcome.computed
        return result


def _token(position: int) -> int:
    """Return the token at a position of the periodic text. All ids are below 90, so every vocabulary has them."""
    return 1 + 37 * (position % PERIOD) % 89


class WarmUps(CostFiles):
    """Step costs on this machine, and the warm-ups that measure them."""

    def first_costs(self, engine: EnginePort, spec: ModelSpecification) -> WarmUpSteps:
        """Return the costs stored for this unit or, if there are none, measure the least that keeps the first requests
        from trying a drafter that costs as much as its target."""
        known = self.load(spec)
        return known or (yield from warm_up(engine, {}, budget_seconds=LEAST_SECONDS))

    def warm_up(self, engine: EnginePort, spec: ModelSpecification, costs: dict[Key, StepCost]) -> Generator[None]:
        """Warm up an engine of the pool and store what it measured; the known `costs` are updated in place."""
        rows = min(BATCH_ROWS, engine.limits.max_rows) if spec.live.policy == "auto" else 1
        self.save(spec, (yield from warm_up(engine, costs, rows=rows)))


NO_WARM_UPS = WarmUps(None, ())
"""Warm-ups of a program that stores nothing."""
