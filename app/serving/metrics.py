"""Metrics over all requests: Prometheus counters, and the token rate of the last day.

The counters have their own registry; their names include the units. Labels come from bounded sets only: route
templates, ids of models in the catalog, names of methods.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from app.core.clock import Clock
from app.core.messages import PRESSURES, Delta, Event, Heartbeat, TextWork
from app.core.statistics import Statistics
from app.supervision.client import WorkerClient

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
MODEL_BYTES = ("weights_bytes", "cache_bytes", "prefix_cache_bytes")
SPAN_SECONDS = 120
SPAN_MINUTES = 24 * 60
SMOOTHED_SECONDS = 3
"""Complete seconds over which the current speed is averaged: the rate of a single second fluctuates too much."""


class Metrics:
    """The metrics that `/metrics` exposes. Called from the event loop only."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "paceline_requests", "HTTP requests answered.", ("endpoint", "method", "status"), registry=registry
        )
        self._stream_errors = Counter(
            "paceline_stream_errors", "Streams that ended with an error frame.", ("code",), registry=registry
        )
        self._tokens = {
            name: Counter(f"paceline_{name}", text, ("model",), registry=registry)
            for name, text in (
                ("prompt_tokens", "Prompt tokens of accepted requests."),
                ("cached_prompt_tokens", "Prompt tokens that the prefix cache held."),
                ("generated_tokens", "Tokens sent to clients."),
            )
        }
        self._first_token = self._histogram("time_to_first_token_seconds", "From the request to its first token.")
        between = self._histogram("time_between_tokens_seconds", "Between two tokens of one choice.")
        self._between, self._generated = cache(between.labels), cache(self._tokens["generated_tokens"].labels)
        self._steps = Histogram(
            "paceline_step_seconds", "Duration of one worker step.", buckets=SECONDS, registry=registry
        )
        self._text_seconds = Counter("paceline_text_seconds", "Text work, seconds.", ("work",), registry=registry)
        self._drafts = {
            field: Counter(f"paceline_spec_decode_{name}", text, ("model", "method"), registry=registry)
            for field, name, text in (
                ("steps", "num_drafts", "Steps that verified at least one draft."),
                ("drafted", "num_draft_tokens", "Draft tokens verified."),
                ("accepted", "num_accepted_tokens", "Draft tokens accepted."),
                ("draft_seconds", "draft_seconds", "Seconds spent drafting."),
                ("verify_seconds", "verify_seconds", "Seconds spent verifying drafts."),
            )
        }
        self._accepted_at = Counter(
            "paceline_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft (from 0).",
            ("model", "method", "position"),
            registry=registry,
        )
        self._worker_gauges = WorkerGauges(registry)

    def answered(self, endpoint: str, method: str, status: int) -> None:
        """Count an answered HTTP request; `endpoint` is a route template."""
        self._requests.labels(endpoint, method, str(status)).inc()

    def stream_failed(self, code: str) -> None:
        """Count a stream that ended with an error frame."""
        self._stream_errors.labels(code).inc()

    def accepted(self, model: str, prompt_tokens: int) -> None:
        """Count the tokens of a prompt that the worker accepted."""
        self._tokens["prompt_tokens"].labels(model).inc(prompt_tokens)

    def emitted(self, model: str, tokens: int, *, first: bool, seconds: float) -> None:
        """Count `tokens` that arrived `seconds` after the request if `first`, else after the choice's previous tokens.

        The label lookups are cached: they cost more than the increment itself.
        """
        self._generated(model).inc(tokens)
        if first:
            self._first_token.labels(model).observe(seconds)
        else:
            self._between(model).observe(seconds / max(tokens, 1))

    def finished(self, model: str, usage: Statistics, cached_tokens: int) -> None:
        """Count a finished choice; `cached_tokens` is 0 for all but the first choice of a prompt."""
        self._tokens["cached_prompt_tokens"].labels(model).inc(cached_tokens)
        for statistics in usage.by_method:
            if statistics.drafted == 0:
                continue
            for field, counter in self._drafts.items():
                counter.labels(model, statistics.method).inc(getattr(statistics, field))
            for position, count in enumerate(statistics.accepted_per_position):
                self._accepted_at.labels(model, statistics.method, str(position)).inc(count)

    def drafting(self, model: str) -> dict[str, dict[str, Any]]:
        """Return drafting counters of a model since the server started, by method, with accepted tokens by position."""
        by_method: dict[str, dict[str, Any]] = {}
        for name, counter in self._drafts.items():
            for method, _, value in _samples(counter, model):
                by_method.setdefault(method, {"accepted_at": {}})[name] = value
        for method, position, value in _samples(self._accepted_at, model):
            by_method.setdefault(method, {"accepted_at": {}})["accepted_at"][position] = value
        return by_method

    def observe(self, event: Event) -> None:
        """Count worker events: the duration of every step, and the seconds spent on text, such as tokenization."""
        if isinstance(event, Heartbeat):
            for seconds in event.step_seconds:
                self._steps.observe(seconds)
        if isinstance(event, TextWork):
            for work, seconds in event.seconds.items():
                self._text_seconds.labels(work).inc(seconds)

    def expose(self, worker: WorkerClient) -> bytes:
        """Return the text of `/metrics`."""
        self._worker_gauges.update(worker)
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"paceline_{name}", text, ("model",), buckets=SECONDS, registry=self.registry)


def _samples(counter: Counter, model: str) -> Iterator[tuple[str, str, float]]:
    """Yield method, position and value of each sample of one model."""
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total") and sample.labels.get("model") == model:
                yield sample.labels["method"], sample.labels.get("position", ""), sample.value


class WorkerGauges:
    """Gauges of the worker's state, updated from its last snapshot on each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"paceline_{name}", text, labels, registry=registry)

        self._ready = gauge("worker_ready", "1 while the worker process answers.")
        self._restarts = Counter(
            "paceline_worker_restarts", "Times the worker process was started again.", registry=registry
        )
        self._counted_restarts = 0
        self._quarantined = gauge("quarantined_models", "Models quarantined after crashes.")
        self._memory = gauge("memory_bytes", "Memory of the worker's allocator.", ("kind",))
        self._pressure = gauge("memory_pressure", "The computer is short of memory: 0 no, 1 warning, 2 critical.")
        self._running = gauge("requests_running", "Requests that decode now.", ("model",))
        self._waiting = gauge("requests_waiting", "Requests in the queue.", ("model",))
        self._model_bytes = gauge("model_bytes", "Memory of one model.", ("model", "kind"))
        self._prefix_disk = gauge("prefix_disk_bytes", "Earlier prompts of a loaded model on disk.", ("model",))
        self._prefix_found = gauge(
            "prefix_found_tokens", "Prompt tokens restored from the prefix cache since the load.", ("model", "tier")
        )

    def update(self, worker: WorkerClient) -> None:
        """Set every gauge and count new restarts; gauges of unloaded models are removed."""
        snapshot = worker.book.snapshot
        self._ready.set(worker.ready)
        self._restarts.inc(worker.restarts - self._counted_restarts)
        self._counted_restarts = worker.restarts
        self._quarantined.set(len(worker.quarantined))
        for kind in ("active", "cached", "peak"):
            self._memory.labels(kind).set(getattr(snapshot, f"{kind}_bytes"))
        self._pressure.set(PRESSURES.index(snapshot.memory_pressure))
        for labelled in (self._running, self._waiting, self._model_bytes, self._prefix_disk, self._prefix_found):
            labelled.clear()
        for model in snapshot.models:
            self._running.labels(model.id).set(model.running)
            self._waiting.labels(model.id).set(model.waiting)
            for kind in MODEL_BYTES:
                self._model_bytes.labels(model.id, kind.removesuffix("_bytes")).set(getattr(model, kind))
            self._prefix_disk.labels(model.id).set(model.prefixes.disk_bytes)
            for tier, tokens in model.prefixes.restored_tokens.items():
                self._prefix_found.labels(model.id, tier).set(tokens)


@dataclass(slots=True)
class Period:
    """Counts within one second or minute; `number` is the clock's time in whole periods."""

    number: int
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class PaceHistory:
    """One value for each of the last seconds, the oldest first, and the current speed."""

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens_per_second: float
    acceptance: float | None
    """Share of drafted tokens accepted over the whole span; None if nothing was drafted or nothing runs now."""


class PeriodCounts:
    """Counts per period, for the last `count` periods."""

    def __init__(self, clock: Clock, period_seconds: int, count: int) -> None:
        self._clock = clock
        self._period_seconds = period_seconds
        self._count = count
        self._periods: deque[Period] = deque(maxlen=count + 1)

    def add(self, event: Delta) -> None:
        """Count the tokens of one event."""
        number = int(self._clock() // self._period_seconds)
        if not self._periods or self._periods[-1].number != number:
            self._periods.append(Period(number))
        period = self._periods[-1]
        period.tokens += event.tokens
        period.drafted += event.drafted
        period.accepted += event.accepted

    def full(self) -> list[Period]:
        """Return the last `count` complete periods, the oldest first."""
        now = int(self._clock() // self._period_seconds)
        by_number = {period.number: period for period in self._periods}
        return [by_number.get(number) or Period(number) for number in range(now - self._count, now)]


class Pace:
    """Token rate of all requests together: by second for two minutes, by minute for a day.

    Called from the event loop only.
    """

    def __init__(self, *, clock: Clock = time.monotonic, span_seconds: int = SPAN_SECONDS) -> None:
        self._seconds = PeriodCounts(clock, 1, span_seconds)
        self._minutes = PeriodCounts(clock, 60, SPAN_MINUTES)

    def on_event(self, event: Event) -> None:
        """Count a worker event."""
        if isinstance(event, Delta):
            self._seconds.add(event)
            self._minutes.add(event)

    def history(self) -> PaceHistory:
        """Return the counts of the complete seconds, without the current one."""
        full = self._seconds.full()
        recent = full[-SMOOTHED_SECONDS:]
        speed = sum(second.tokens for second in recent) / len(recent)
        drafted, accepted = sum(second.drafted for second in full), sum(second.accepted for second in full)
        return PaceHistory(
            tokens=tuple(second.tokens for second in full),
            drafted=tuple(second.drafted for second in full),
            accepted=tuple(second.accepted for second in full),
            tokens_per_second=round(speed, 1),
            acceptance=accepted / drafted if drafted and speed else None,
        )

    def minutes(self) -> tuple[int, ...]:
        """Return the tokens of each complete minute of the last day, the oldest first."""
        return tuple(minute.tokens for minute in self._minutes.full())
