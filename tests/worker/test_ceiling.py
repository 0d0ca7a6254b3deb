"""A memory ceiling under more work than fits: real models, real pool, real scheduler. No request fails that fits
alone, every text is the one that its request gets alone, and mlx's peak memory is at most 3 % above the ceiling."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

from app.core.errors import PacelineError
from app.core.request import Request, SamplingParameters
from app.core.step import EnginePort, FinishReason, StepCost, TokenEvent
from app.core.unit import ModelSpecification
from app.engine import memory
from app.engine.loading.pool import EnginePool, open_pool
from app.models.footprint import Footprint, RowSize, unit_footprint
from app.scheduler.scheduler import Scheduler
from app.worker.served_model import ServedModel
from app.worker.thread_commands import Submission
from tests.tiny import write_tiny_model

CONTEXT_TOKENS = 700
LONGEST_PROMPT_TOKENS, ANSWER_TOKENS = 500, (5, 60, 120, 120)
SHARED_STARTS = 0.3
TYPICAL_ANSWER_TOKENS = 12
"""Expected length of an answer, in tokens: so short that most answers outgrow the memory promised to them."""
FAMILIES = ("qwen3", "gemma3", "qwen3_next")
QUICK_MIXES = (0, 2, 10)
"""Seeds of quick mixes: one per family, of few tokens; the second one preempts rows."""
MIXES, MIXES_TOGETHER = 200, 10
"""Number of mixes in a soak, and in each of its tests, which are small enough to share two CPUs evenly."""


@dataclass
class RecordingTextThread:
    """Stands in for the text thread; records the tokens, the end or the refusal of each request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, TokenEvent] = field(default_factory=dict)
    refused_for: dict[str, PacelineError] = field(default_factory=dict)

    def queued(self, request_id: str, at: float) -> None:
        self.tokens[request_id] = []

    def refused(self, request_id: str, error: PacelineError) -> None:
        self.refused_for[request_id] = error

    def in_memory(self, paths: frozenset[str]) -> None:
        """Do nothing: there are no idle text processes to end."""

    def emitted(self, events: Sequence[TokenEvent], at: float) -> None:
        for event in events:
            assert event.request_id not in self.ends, "told something behind the end"
            self.tokens[event.request_id] += event.tokens
            if event.finish_reason:
                self.ends[event.request_id] = event


def open_scheduler(specification: ModelSpecification, engine: EnginePort, costs: Sequence[StepCost]) -> Scheduler:
    return Scheduler(engine.limits, policy="auto", measured=costs, typical_answer_tokens=TYPICAL_ANSWER_TOKENS)


@dataclass
class Machine:
    """One model under a ceiling. Requests arrive while others run; `late` yields the number of steps between two."""

    pool: EnginePool
    spec: ModelSpecification
    records: RecordingTextThread = field(default_factory=RecordingTextThread)

    def load(self) -> None:
        """Finish the load; peak memory counts from then on."""
        while self.pool.loading:
            self.pool.advance()
        mx.reset_peak_memory()

    def run(self, requests: Sequence[Request], late: Iterator[int]) -> None:
        served = ServedModel(
            open_scheduler=open_scheduler,
            text_thread=self.records,  # type: ignore[arg-type]  # it only records
            save_costs=lambda _spec, _costs: None,
            pool=self.pool,
            model_id=self.spec.id,
            clock=lambda: 0.0,
        )
        waiting = list(requests)
        steps = 0
        while waiting or served.has_work:
            if waiting and (steps <= 0 or not served.has_work):
                request = waiting.pop(0)
                steps = next(late)
                self.pool.acquire(self.spec)
                served.enqueue(Submission(request.id, self.spec, (request,)))
                if self.pool.loading:
                    self.load()
                engine = self.pool.engine(self.spec.id)
                assert engine is not None
                served.open(engine)
            served.step()
            steps -= 1


@cache
def model_folder(root: Path, family: str) -> Path:
    return write_tiny_model(root / family, family, context_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ceiling")


def some_requests(chance: random.Random, footprint: Footprint, bytes_together: int) -> list[Request]:
    """Return requests of various lengths, some sampled, some greedy, some with the same start as the one before. With a
    row for each, they would take `bytes_together` bytes or a little more."""
    requests: list[Request] = []
    while bytes_together > 0:
        lengths = chance.choice((8, 60, 60, 250, LONGEST_PROMPT_TOKENS)), chance.choice(ANSWER_TOKENS)
        known = requests[-1].prompt_tokens if requests and chance.random() < SHARED_STARTS else ()
        fresh = (chance.randrange(32, 127) for _ in range(lengths[0]))
        requests.append(
            Request(
                id=f"r{len(requests)}",
                prompt_tokens=(*known, *fresh)[: lengths[0]],
                max_tokens=lengths[1],
                sampling=SamplingParameters(seed=len(requests), temperature=chance.choice((0.0, 0.8))),
                owner=chance.choice(("alice", "bob")),
            )
        )
        bytes_together -= footprint.rows_bytes([RowSize(sum(lengths))])
    return requests


def check_mix(root: Path, seed: int, times_too_many: float) -> int:
    """Check one mix of lengths and arrivals, whose requests need `times_too_many` times the memory for rows; return the
    number of preemptions."""
    chance = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    spec = ModelSpecification(
        id=family,
        path=str(model_folder(root, family)),
        max_context_tokens=CONTEXT_TOKENS,
        max_rows=6,
        prefill_chunk_tokens=64,
        prefix_cache_bytes=1 << 20,
    )
    footprint = unit_footprint(spec, widen=True)
    alone = footprint.rows_bytes([RowSize(LONGEST_PROMPT_TOKENS + max(ANSWER_TOKENS))])
    rows_bytes = max(footprint.cache_bytes, int(1.7 * alone))
    ceiling_bytes = footprint.fixed_bytes + rows_bytes
    requests = some_requests(chance, footprint, int(times_too_many * rows_bytes))
    memory.release()
    before = mx.get_active_memory()
    crowd = Machine(open_pool(ceiling_bytes), spec)
    crowd.run(requests, iter(lambda: chance.randint(0, 40), None))
    held = mx.get_peak_memory() - before
    crowd.pool.unload(spec.id)
    assert crowd.records.refused_for == {}
    assert held <= 1.03 * ceiling_bytes
    lone = Machine(open_pool(100 * ceiling_bytes), spec)
    for request in requests:
        lone.run([request], iter(int, 1))
    lone.pool.unload(spec.id)
    assert crowd.records.tokens == lone.records.tokens
    assert {end.finish_reason for end in crowd.records.ends.values()} <= {FinishReason.LENGTH, FinishReason.STOP}
    assert crowd.records.ends.keys() == {request.id for request in requests}
    return sum(end.statistics.preemptions for end in crowd.records.ends.values())


@pytest.mark.soak
@pytest.mark.landing
def test_requests_that_do_not_fit_together_are_answered_as_if_they_were_alone(root: Path) -> None:
    assert {seed % len(FAMILIES) for seed in QUICK_MIXES} == set(range(len(FAMILIES)))
    assert sum(check_mix(root, seed, 1.3) for seed in QUICK_MIXES) > 0, "rows gave way"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first_seed", range(0, MIXES, MIXES_TOGETHER))
def test_two_hundred_mixes_of_up_to_ten_times_the_memory_are_answered_as_if_alone(root: Path, first_seed: int) -> None:
    seeds = range(first_seed, first_seed + MIXES_TOGETHER)
    assert sum(check_mix(root, seed, random.Random(seed).uniform(1.5, 10.0)) for seed in seeds) > 0, "rows gave way"
