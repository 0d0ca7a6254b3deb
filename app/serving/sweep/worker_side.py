"""Turns on the running worker: ordinary greedy requests, one per row of a cell, timed as their tokens arrive.

Every setting of a round gets the same prompts. Plain decoding runs first, twice in the first round, so that the prefix
cache helps all settings equally; a drafter that reads the target's features still prefills each prompt itself. Only
decoding is timed: the time until every row has emitted a token is `prompt_seconds`. `describe_machine` and
`describe_versions` record the conditions, without which the numbers mean nothing.
"""

import asyncio
import contextlib
import os
import platform
import secrets
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import psutil

from app.core.clock import Clock
from app.core.errors import PacelineError
from app.core.messages import MEASUREMENT, Delta, Finished, Generate
from app.core.request import SamplingParameters, SpeculationRequest
from app.core.statistics import Statistics
from app.core.unit import ModelSpecification
from app.machine.host import chip_name
from app.serving.sweep.grid import (
    MAIN,
    MIN_TOKENS,
    PLAIN,
    TOKENS,
    WARM_UP_TOKENS,
    Cell,
    MeasuredTurn,
    TurnRequest,
    long_prompt,
)
from app.supervision.client import WorkerClient

MIN_USED_SHARE = 0.1
"""Smallest share of the drafting steps with which a method counts as used."""
DISTRIBUTIONS = ("paceline", "mlx", "mlx-lm", "numpy", "transformers")


class DecodeClock:
    """Measures the decode phase: it begins once every row has emitted a token."""

    def __init__(self, rows: Iterable[Hashable], now: Clock = perf_counter) -> None:
        self._waiting = set(rows)
        self._now = now
        self._started = self._stopped = 0.0
        self._tokens = 0

    def count(self, row: Hashable, tokens: int) -> None:
        """Count `tokens` more tokens of `row`, at the current time."""
        self._stopped = self._now()
        if not self._waiting:
            self._tokens += tokens
            return
        self._waiting.discard(row)
        self._started = self._stopped

    @property
    def started(self) -> float:
        """Time of the first token of the last row to begin; 0 before any token."""
        return self._started

    @property
    def tokens_per_second(self) -> float:
        """Rate over the decode phase; 0 when there was none."""
        elapsed = self._stopped - self._started
        return self._tokens / elapsed if elapsed > 0 else 0.0


class TurnRunner:
    """Runs turns on one unit; `chats`: whether the model has a chat template."""

    def __init__(
        self, worker: WorkerClient, unit: ModelSpecification, prompts: Sequence[str], *, chats: bool, clock: Clock
    ) -> None:
        self._worker = worker
        self._unit = unit
        self._prompts = tuple(prompts)
        self._chats = chats
        self._clock = clock
        self._ignoring_end: set[tuple[Cell, int]] = set()

    async def turn(self, request: TurnRequest) -> MeasuredTurn:
        """Run one turn; cancelling it cancels its requests in the worker. Raises the PacelineError of a request."""
        turn = await self._run(request)
        round_key = (request.cell, request.number)
        if (
            request.setting == PLAIN
            and round_key not in self._ignoring_end
            and turn.tokens < MIN_TOKENS * request.cell.rows
        ):
            self._ignoring_end.add(round_key)
            turn = await self._run(request)
        return turn

    async def _run(self, request: TurnRequest) -> MeasuredTurn:
        rows = range(request.cell.rows)
        clock = DecodeClock(rows, self._clock)
        began = self._clock()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._row(self._command(request, row), row, clock)) for row in rows]
        except* PacelineError as group_error:
            raise first_error(group_error) from None
        seconds = self._clock() - began
        usages = [task.result() for task in tasks]
        drafted = sum(usage.drafted for usage in usages)
        accepted = sum(usage.accepted for usage in usages)
        cycles = sum(usage.cycles for usage in usages)
        used: Counter[str] = Counter()
        for usage in usages:
            used.update({statistics.method: statistics.steps for statistics in usage.by_method if statistics.drafted})
        return MeasuredTurn(
            tokens_per_second=rate_of(usages, arrival_rate=clock.tokens_per_second, seconds=seconds),
            seconds=seconds,
            prompt_seconds=max(0.0, clock.started - began),
            acceptance=accepted / drafted if drafted else None,
            tokens_per_cycle=(accepted + cycles) / cycles if cycles else None,
            methods=tuple(name for name, steps in used.most_common() if steps >= MIN_USED_SHARE * used.total()),
            tokens=sum(usage.completion_tokens for usage in usages),
        )

    async def _row(self, command: Generate, row: int, clock: DecodeClock) -> Statistics:
        usage = Statistics()
        async with contextlib.aclosing(self._worker.generate(command)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.tokens:
                    clock.count(row, event.tokens)
                elif isinstance(event, Finished):
                    usage = event.usage
        return usage

    def _command(self, request: TurnRequest, row: int) -> Generate:
        prompt = self._prompts[(request.number + row) % len(self._prompts)]
        if request.cell.context > MAIN.context:
            prompt = long_prompt(prompt, f"{request.cell} {request.number} {row}", request.cell.context)
        setting = request.setting
        return Generate(
            id=f"measure-{secrets.token_hex(8)}",
            owner=MEASUREMENT,
            model=self._unit,
            messages=[{"role": "user", "content": prompt}] if self._chats else None,
            text=None if self._chats else prompt,
            max_tokens=WARM_UP_TOKENS if request.warm_up else TOKENS,
            ignore_end=(request.cell, request.number) in self._ignoring_end,
            sampling=SamplingParameters(temperature=0.0),
            speculation=SpeculationRequest(method=setting.method, num_draft_tokens=setting.drafts or None),
        )


def first_error(errors: ExceptionGroup[PacelineError]) -> PacelineError:
    """Return the first of the errors that ended the rows of a turn."""
    first = errors.exceptions[0]
    return first_error(first) if isinstance(first, ExceptionGroup) else first


def rate_of(usages: Sequence[Statistics], *, arrival_rate: float, seconds: float) -> float:
    """Return the rate at which tokens arrived, per second, limited to the worker's own decode rate.

    Deltas that are delayed by a busy server arrive in one lump and would look much too fast.
    """
    tokens = sum(usage.completion_tokens for usage in usages)
    shortest = min(usage.decode_seconds for usage in usages)
    if shortest > 0:
        return min(arrival_rate, tokens / shortest) if arrival_rate else tokens / shortest
    return arrival_rate or (tokens / seconds if seconds > 0 else 0.0)


def describe_machine() -> dict[str, Any]:
    """Return system, processor, memory and load."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "processor": chip_name(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
    }


def describe_versions() -> dict[str, str]:
    """Return the installed versions of the distributions that matter."""
    installed = {}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed
