"""Ten real workloads replayed without their models. Traces from `bench/record_traces.py` say what each drafter proposed
at every position of the texts, how much was accepted, how sure the target was, and what steps cost. The real scheduler
decides: the seconds that it sees are noisy, those that it is judged by are not."""

import json
import random
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, sqrt
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from app.core.reason import NO_REASON, Reason
from app.core.request import Request, SpeculationRequest
from app.core.statistics import PhaseSeconds
from app.core.step import (
    DecodeRow,
    DecodeStep,
    EngineLimits,
    Offer,
    PrefillRow,
    PrefillStep,
    RowOutcome,
    StepCost,
    StepPlan,
    StepResult,
)
from app.models.draft_lengths import LONGEST_CHAIN, draft_lengths
from app.scheduler.scheduler import Scheduler
from app.serving.sweep.grid import GOVERNOR, PLAIN, Setting
from bench.comparison.verdict import Rates

TRACES = Path(__file__).parent / "traces.json"
FIXED_LENGTHS = (1, 2, 4, 7, 15)
"""Draft lengths of fixed settings, in tokens. Longer drafts were not recorded."""
CHIP_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 15)
"""Draft lengths of fixed settings on chips, in tokens: those above and those that are cheap there."""
DELIVERY_SECONDS = 0.0001
"""Seconds of a step that only delivers a forward launched earlier."""
NOISE, PAUSE_RATE, PAUSE = 0.08, 0.01, 5.0
DRIFT, DRIFT_STEPS = 0.13, 40
"""Typical deviation of a machine's pace from its mean (as a logarithm), and about how many steps it lasts: as seen on
the two cores where the traces were recorded, in 3,240 plain steps in a row."""
SLOWDOWN = 0.00065
"""Share by which each token of context slows every step down: 3.7 ms became 7.3 ms at 1.5k tokens."""
ROUNDS = 3


@cache
def recorded() -> dict[str, Any]:
    """Return the contents of the traces file."""
    traces: dict[str, Any] = json.loads(TRACES.read_text())
    return traces


class Step(NamedTuple):
    """One decode step, described by what its price depends on. `drafts` is -1 for a plain step with nothing launched
    ahead, None for one that only delivered an earlier forward. `unread` counts tokens that its drafter had missed."""

    method: str
    rows: int
    drafts: int | None
    context: int
    unread: int = 0


class Pricing(Protocol):
    """Prices of steps on some machine."""

    def of(self, step: Step) -> tuple[float, float]:
        """Return the price of drafting, and that of the rest of the step."""


class Prices:
    """Prices of one model on the CPU that recorded it, interpolated linearly. A long context slows down every step."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._reading: Mapping[str, float] = model["reading"]
        self._points: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
        for method, rows, drafts, seconds, draft_seconds in model["steps"]:
            self._points.setdefault((method, rows), {})[drafts] = (seconds, draft_seconds)

    def of(self, step: Step) -> tuple[float, float]:
        slowness = 1 + SLOWDOWN * step.context
        if step.drafts is None:
            return 0.0, slowness * DELIVERY_SECONDS
        if step.drafts <= 0:
            return 0.0, slowness * self._points["off", self._rows("off", step.rows)][step.drafts][0]
        drafting = self._between(step.method, step.rows, step.drafts, 1) + self._reading[step.method] * step.unread
        return slowness * drafting, slowness * self._between(step.method, step.rows, step.drafts, 0)

    def _rows(self, method: str, rows: int) -> int:
        return min((known for name, known in self._points if name == method), key=lambda known: abs(known - rows))

    def _between(self, method: str, rows: int, drafts: int, part: int) -> float:
        points = self._points[method, self._rows(method, rows)]
        known = sorted(points)
        place = min(max(1, bisect_left(known, drafts)), len(known) - 1)
        left, right = known[place - 1], known[place]
        share = min(1.0, max(0.0, (drafts - left) / (right - left)))
        return points[left][part] + share * (points[right][part] - points[left][part])


@dataclass
class TraceEngine:
    """Replays recorded requests. `steps` are those that ran, `seconds` their total price without noise, `requests` the
    recordings by request id. The first `prefix_tokens` of every prompt are cached by target and drafters."""

    model: Mapping[str, Any]
    chance: random.Random | None = None
    prices: Pricing = None  # type: ignore[assignment] - None: the recorded prices
    cheap_tokens: tuple[int, ...] = ()
    prefix_tokens: int = 0
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    requests: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prices = self.prices or Prices(self.model)
        drafters = tuple(self.model["drafters"])
        longest = {name: min(LONGEST_CHAIN, self.model["longest"].get(name, LONGEST_CHAIN)) for name in drafters}
        self.limits = EngineLimits(65_536, 8, drafters=drafters, longest_drafts=longest, cheap_tokens=self.cheap_tokens)
        self._ahead: set[str] = set()
        self._read: dict[tuple[str, str], int] = {}
        self._drift = 0.0

    def measured(self, rows: int = 1) -> tuple[StepCost, ...]:
        """Return the costs that a load would have measured with `rows` rows."""
        shapes, lengths = (
            [("off", 0)],
            [most for most in draft_lengths(self.cheap_tokens, rows) if most <= LONGEST_CHAIN],
        )
        for method in self.limits.drafters:
            longest = self.limits.longest_drafts[method]
            shapes += [(method, length) for length in (lengths if method == "ngram" else (1, longest))]
        steps = [(method, drafts, self.prices.of(Step(method, rows, drafts, 0))) for method, drafts in shapes]
        return tuple(
            StepCost(method, rows, drafts, self._noisy(rest), self._noisy(drafting) if drafts else 0.0)
            for method, drafts, (drafting, rest) in steps
        )

    def step(self, plan: StepPlan) -> StepResult:
        if isinstance(plan, PrefillStep):
            read = tuple((row.sequence_id, row.end) for row in plan.rows)
            return StepResult(prefilled=read, offers={row.sequence_id: self._offers(row, 0) for row in plan.rows})
        result = self._decode(plan)
        emitted = {outcome.sequence_id: len(outcome.emitted) for outcome in result.outcomes}
        return replace(
            result,
            offers={row.sequence_id: self._offers(row, emitted.get(row.sequence_id, 0)) for row in plan.rows},
        )

    def _decode(self, plan: DecodeStep) -> StepResult:
        rows = plan.rows
        context = max(len(row.tokens) for row in rows)
        if self._ahead:
            delivered = [row for row in rows if row.sequence_id in self._ahead]
            self._ahead = set()
            return self._plain(rows, delivered, Step("off", len(rows), None, context))
        drafted = [self._drafted(row) for row in rows]
        if not any(drafted):
            wanted = any(row.num_draft_tokens for row in rows)
            return self._plain(rows, rows, Step("off", len(rows), -1 if wanted else 0, context))
        return self._verify(rows, drafted, timed=plan.timed)

    def _plain(self, rows: Sequence[DecodeRow], delivered: Sequence[DecodeRow], step: Step) -> StepResult:
        seconds = self._spend(step)[1]
        if not any(row.num_draft_tokens for row in rows):
            self._ahead = {row.sequence_id for row in rows if row.remaining > 1}
            seconds += self._spend(step._replace(drafts=0))[1] if self._ahead else 0.0
        ran = step.drafts is not None
        reasons = {row.sequence_id: Reason("no_match") for row in delivered if row.num_draft_tokens and ran}
        outcomes = (
            RowOutcome(
                row.sequence_id,
                (0,),
                len(row.tokens),
                why_not_drafted=reasons.get(row.sequence_id, NO_REASON),
                confidences=self._confidences(row, 1),
            )
            for row in delivered
        )
        return StepResult(tuple(outcomes), seconds=self._noisy(seconds))

    def _verify(self, rows: Sequence[DecodeRow], drafted: Sequence[int], *, timed: bool) -> StepResult:
        widest = max(rows, key=lambda row: row.num_draft_tokens)
        unread = 0
        for row in (row for row, count in zip(rows, drafted, strict=True) if count):
            unread += len(row.tokens) - self._read.get((row.sequence_id, row.method), self.prefix_tokens)
            self._read[row.sequence_id, row.method] = len(row.tokens)
        accepted = [min(count, self._trace(row, 1)) if count else 0 for row, count in zip(rows, drafted, strict=True)]
        outcomes = tuple(
            RowOutcome(
                row.sequence_id,
                (0,) * (right + 1),
                len(row.tokens) + right,
                drafted=count,
                accepted=right,
                method=row.method if count else "off",
                confidences=self._confidences(row, right + 1),
            )
            for row, count, right in zip(rows, drafted, accepted, strict=True)
        )
        context = max(len(row.tokens) for row in rows)
        told_drafting, rest = map(
            self._noisy, self._spend(Step(widest.method, len(rows), max(drafted), context, unread))
        )
        return StepResult(
            outcomes,
            seconds=told_drafting + rest,
            width=1 + max(drafted),
            phase_seconds=PhaseSeconds(told_drafting, rest) if timed else None,
        )

    def _drafted(self, row: DecodeRow) -> int:
        if not row.num_draft_tokens:
            return 0
        return min(row.num_draft_tokens, self._trace(row, 0), row.remaining - 1)

    def _trace(self, row: DecodeRow, part: int) -> int:
        traces = self.requests[row.sequence_id]["traces"]
        return int(traces[row.method][part][len(row.tokens) - row.prompt_length], 36)

    def _confidences(self, row: DecodeRow, count: int) -> tuple[float, ...]:
        confidences, place = self.requests[row.sequence_id]["confidences"], len(row.tokens) - row.prompt_length
        return tuple(value / 1_000 for value in confidences[place : place + count])

    def _offers(self, row: DecodeRow | PrefillRow, emitted: int) -> dict[str, Offer]:
        """Return the n-gram offers. Every token of a text is 0, and every wrong draft is 1."""
        request = self.requests[row.sequence_id]
        proposed, accepted, matched = request["traces"]["ngram"]
        place = len(row.tokens) + emitted - request["prompt"] - self.prefix_tokens
        if place >= len(proposed):
            return {}
        right = int(accepted[place], 36)
        return {"ngram": Offer((0,) * right + (1,) * (int(proposed[place], 36) - right), int(matched[place], 36))}

    def _spend(self, step: Step) -> tuple[float, float]:
        """Record a step and return its price without noise: drafting, and the rest."""
        self.steps.append(step)
        drafting, rest = self.prices.of(step)
        self.seconds += drafting + rest
        return drafting, rest

    def _noisy(self, seconds: float) -> float:
        if self.chance is None:
            return seconds
        pause = PAUSE if self.chance.random() < PAUSE_RATE else 1.0
        self._drift += DRIFT * sqrt(2 / DRIFT_STEPS) * self.chance.gauss(0, 1) - self._drift / DRIFT_STEPS
        return seconds * pause * exp(self._drift) * (1 + NOISE * abs(self.chance.gauss(0, 1)))


class Server:
    """One model with its scheduler, which keeps what it learns through all workloads."""

    def __init__(self, engine: TraceEngine, *, measured_rows: Sequence[int] = (1,)) -> None:
        self.engine = engine
        measured = [cost for rows in measured_rows for cost in engine.measured(rows)]
        self.scheduler = Scheduler(engine.limits, policy="auto", measured=measured)
        self._number = 0

    def answer(self, workload: Mapping[str, Any], setting: Setting) -> float:
        """Run a workload and return its tokens per second of decoding."""
        before, requests = self.engine.seconds, workload["requests"]
        for group in [requests] if workload["together"] else [[request] for request in requests]:
            self._run(group, setting)
        return sum(request["tokens"] for request in requests) / (self.engine.seconds - before)

    def _run(self, group: Sequence[Mapping[str, Any]], setting: Setting) -> None:
        scheduler, engine = self.scheduler, self.engine
        for recording in group:
            self._number += 1
            speculation = SpeculationRequest(method=setting.method, num_draft_tokens=setting.drafts or None)
            request = Request(
                id=f"r{self._number}",
                prompt_tokens=(0,) * (engine.prefix_tokens + recording["prompt"]),
                max_tokens=recording["tokens"],
                speculation=speculation,
            )
            engine.requests = {**(engine.requests if len(group) > 1 else {}), request.id: recording}
            scheduler.submit(request)
        while scheduler.has_work:
            while (admitted := scheduler.next_admission()) is not None:
                scheduler.admitted(admitted.id, engine.prefix_tokens)
            plan = scheduler.plan()
            if plan is not None:
                scheduler.commit(engine.step(plan))
            scheduler.drain_released()


def recorded_server(name: str, chance: random.Random | None) -> Server:
    """Return a server of one model, with the prices of the CPU where it was recorded."""
    return Server(TraceEngine(recorded()["models"][name], chance))


def settings_of(name: str, lengths: Sequence[int] = FIXED_LENGTHS) -> list[Setting]:
    """Return plain decoding, and every method at each of `lengths`, cut to the longest draft of the method."""
    model = recorded()["models"][name]
    return [
        PLAIN,
        *(
            Setting(method, length)
            for method in model["drafters"]
            for length in sorted({min(length, model["longest"].get(method, length)) for length in lengths})
        ),
    ]


@cache
def fixed_steps() -> dict[str, dict[Setting, list[Step]]]:
    """Return the steps of each workload under each fixed setting; they do not depend on prices."""
    by_workload: dict[str, dict[Setting, list[Step]]] = {}
    for workload in recorded()["workloads"]:
        for setting in settings_of(workload["model"], CHIP_LENGTHS):
            engine = TraceEngine(recorded()["models"][workload["model"]])
            Server(engine).answer(workload, setting)
            by_workload.setdefault(workload["name"], {})[setting] = engine.steps
    return by_workload


@cache
def fixed_rates() -> dict[str, dict[Setting, float]]:
    """Return the tokens per second by workload and fixed setting."""
    return {
        workload["name"]: {
            setting: recorded_server(workload["model"], None).answer(workload, setting)
            for setting in settings_of(workload["model"])
        }
        for workload in recorded()["workloads"]
    }


def governed_rates(seed: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the governor's median rate by workload over `rounds` rounds; a `seed` above 0 shuffles the workloads."""
    chance = random.Random(seed)
    workloads = list(recorded()["workloads"])
    if seed:
        chance.shuffle(workloads)
    servers = {name: recorded_server(name, chance) for name in recorded()["models"]}
    answers = [
        (workload["name"], servers[workload["model"]].answer(workload, GOVERNOR)) for workload in workloads * rounds
    ]
    return {
        workload["name"]: median(rate for name, rate in answers if name == workload["name"]) for workload in workloads
    }


def rates(seeds: Iterable[int], rounds: int = ROUNDS) -> list[Rates]:
    """Return the rates of all workloads; the governor's have one value per seed."""
    lives = [governed_rates(seed, rounds) for seed in seeds]
    return [
        Rates(
            name,
            sweep := {setting: (rate,) * len(lives) for setting, rate in fixed.items()},
            {**sweep, GOVERNOR: [life[name] for life in lives]},
        )
        for name, fixed in fixed_rates().items()
    ]
