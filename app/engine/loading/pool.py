"""Pool of loaded models: one actor on the MLX thread owns loading, leases, eviction and memory accounting.

`acquire` takes a lease and, if the model is not loaded, makes room and starts its load; `advance` runs one slice of a
load and reports what happened. Room is made before a load, never after: a load that cannot fit is refused; else prefix
caches are dropped, then idle units evicted, least recently used first. A leased or pinned unit is never evicted, and a
refused load evicts nothing. Memory is accounted by what each unit reserves or holds, never by a global gauge.

A lease ends with `release`, or on its own when `LoadFailed` reports that the load ended without a model.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from app.core.clock import Clock
from app.core.dispensable import Dispensable
from app.core.errors import (
    CONTEXT_OVERFLOW,
    InsufficientMemory,
    InvalidRequest,
    ModelInUse,
    ModelUnavailable,
    PacelineError,
)
from app.core.messages import KeepModels, LoadProgress, Pressure
from app.core.pool_events import Evicted, Loaded, LoadFailed, PoolEvent, WarmedUp
from app.core.setting_texts import bytes_text
from app.core.step import EnginePort, StepCost
from app.core.unit import UNSPECIFIED_STAY, LoadedModel, ModelSpecification, Stay
from app.engine import memory
from app.engine.encoder_engine import EncoderEngine
from app.engine.loaded_unit import LoadedUnit
from app.engine.loading.opening import load_and_probe, open_unit, phased
from app.engine.loading.resident import Resident
from app.engine.loading.warm_up import NO_WARM_UPS, WarmUps, by_shape
from app.engine.loading.wiring import Wiring, wirable_memory
from app.engine.prefix.disk import NO_DISK, Disk
from app.models.footprint import Footprint, RowSize

RETRY_AFTER_SECONDS = 5
"""Retry hint, in seconds, while running requests hold the memory or the unit that is needed."""
REST_SECONDS = 2.0
"""Time without requests and loads, in seconds, after which models are warmed up."""
RETAINED_SHARE = 0.5
"""Share of the in-memory prefix caches that is retained each time the system runs short of memory."""

logger = logging.getLogger("paceline.pool")

LoadSteps = Generator[tuple[str, float], None, LoadedUnit]


class EnginePool:
    """All calls come from the one MLX thread. `clock` is injected so that idle times can be tested."""

    def __init__(
        self,
        *,
        ceiling_bytes: int,
        load: Callable[[ModelSpecification], LoadSteps],
        open_engine: Callable[[LoadedUnit], EnginePort],
        estimate: Callable[[ModelSpecification], Footprint],
        costs: WarmUps = NO_WARM_UPS,
        clock: Clock = time.monotonic,
        reclaim: Callable[[], None] = memory.release,
        wiring: Wiring | None = None,
        disk: Disk = NO_DISK,
    ) -> None:
        self._ceiling_bytes = ceiling_bytes
        self._load = load
        self._open_engine = open_engine
        self._estimate = estimate
        self._costs = costs
        self._clock = clock
        self._free_buffers = reclaim
        self._wiring = wiring or Wiring()
        self._disk = disk
        self._entries: dict[str, Resident] = {}
        self._settings = KeepModels()
        self._events: list[PoolEvent] = []
        self._reclaim_pending = False
        self.on_progress: Callable[[], None] = lambda: None
        """Callback between the parts of a long step of any engine."""
        self.pressure: Pressure = "normal"
        """System memory pressure, set by `Loop`."""

    # --- leases -----------------------------------------------------------------------------------------------

    def acquire(self, spec: ModelSpecification, stay: Stay = UNSPECIFIED_STAY) -> None:
        """Take a lease on the unit of `spec`, starting its load or joining one in progress if it is not ready.

        `stay` applies from now until the model leaves memory, or its settings change.
        Raises InsufficientMemory (with `retry_after_seconds` when waiting helps) or ModelInUse; in either case no lease
        is taken and nothing is evicted.
        """
        entry = self._entries.get(spec.id)
        requested_stay = UNSPECIFIED_STAY if entry is None else entry.requested_stay
        if entry is not None and not entry.spec.same_unit(spec):
            if entry.leases:
                message = f"{spec.id} is in use with other drafters or settings: retry when its requests have finished"
                raise ModelInUse(message, retry_after_seconds=RETRY_AFTER_SECONDS)
            entry = None
        if entry is None:
            entry = self._start(spec)
        entry.interrupt_warm_up()
        entry.leases += 1
        entry.last_used = self._clock()
        entry.requested_stay = stay.over(requested_stay)

    def release(self, model_id: str) -> None:
        """Give back a lease; do nothing if the model is no longer loaded. The unit stays until its idle limit."""
        entry = self._entries.get(model_id)
        if entry is not None and entry.leases:
            entry.leases -= 1
            entry.last_used = self._clock()

    def engine(self, model_id: str) -> EnginePort | None:
        """Return the engine if the model is ready, else None."""
        entry = self._entries.get(model_id)
        return entry.ready_engine if entry else None

    # --- rows -------------------------------------------------------------------------------------------------

    def check_row(self, model_id: str, row: RowSize) -> None:
        """Raise InvalidRequest if `row` can never fit next to the model's weights and the other pinned models."""
        if (entry := self._entries.get(model_id)) is None:
            return
        others = [other for other in self._entries.values() if other is not entry and self._stay(other).pinned]
        occupied_bytes = entry.footprint.fixed_bytes + sum(other.working_bytes for other in others)
        token_bytes, free_bytes = entry.footprint.row_position_bytes(row), max(0, self._ceiling_bytes - occupied_bytes)
        needed = row.tokens * token_bytes
        if needed > free_bytes:
            message = (
                f"prompt and expected answer are {row.tokens} tokens, whose keys and values take {bytes_text(needed)}; "
                f"beside the weights {bytes_text(free_bytes)} of {bytes_text(self._ceiling_bytes)} are left: shorten "
                "the prompt, lower max_tokens or raise memory_limit in the settings"
            )
            values = {"required_tokens": row.tokens, "context_tokens": free_bytes // token_bytes}
            raise InvalidRequest(message, code=CONTEXT_OVERFLOW, values=values)

    def reserve(self, model_id: str, rows: Sequence[RowSize]) -> bool:
        """Reserve memory for all `rows` of a model; return False if they must wait until other rows have ended.

        While no model has rows reserved, it always succeeds: some request has to make progress.
        """
        entry = self._entries.get(model_id)
        if entry is None:
            return False
        reserved = entry.footprint.rows_bytes(rows)
        if reserved > entry.rows_bytes:
            evictable = self._evictable()
            others = [other for other in self._entries.values() if other not in evictable and other is not entry]
            used = sum(other.footprint.fixed_bytes + other.row_bytes_held for other in others)
            needed = entry.footprint.fixed_bytes + max(reserved, entry.cache_bytes)
            if used + needed > self._ceiling_bytes and any(other.rows_bytes for other in self._entries.values()):
                return False
        entry.rows_bytes = reserved
        if entry.engine is not None:  # its prefix cache may use the rest, and no more
            left = self._ceiling_bytes - self.accounted_bytes + entry.prefix_bytes
            entry.engine.bound_prefix_cache(max(0, left))
        self._free_memory(0)
        return True

    # --- loading ----------------------------------------------------------------------------------------------

    @property
    def loading(self) -> bool:
        """Whether `advance` has work to do or events to report."""
        return bool(self._events) or any(entry.steps for entry in self._entries.values())

    @property
    def next_load(self) -> str:
        """Id of the model whose load `advance` continues; empty if there is none."""
        return next((model_id for model_id, entry in self._entries.items() if entry.steps), "")

    def advance(self) -> list[PoolEvent]:
        """Return the events since the last call or, if there are none, those of one slice of the oldest load.

        An eviction is reported before the load that required it begins, so that users of the engine drop it first.
        """
        entry = self._entries.get(self.next_load)
        if entry is not None and entry.steps is not None and not self._events and not self.must_wait:
            self._reclaim_evicted()
            self._advance(entry, entry.steps)
        events, self._events = self._events, []
        return events

    def cancel_load(self, model_id: str) -> None:
        """Abandon a load in progress and free what it has read, unless it is leased."""
        entry = self._entries.get(model_id)
        if entry is not None and entry.steps and not entry.leases:
            self._evict(entry)
            self._reclaim()

    def unload(self, model_id: str) -> None:
        """Unload an idle model now, pinned or not. Raises ModelInUse while it is leased."""
        entry = self._entries.get(model_id)
        if entry is None:
            return
        if entry.leases:
            message = f"{model_id} is in use by {entry.leases} requests: retry when they have finished"
            raise ModelInUse(message, retry_after_seconds=RETRY_AFTER_SECONDS)
        self._evict(entry)
        self._reclaim()

    # --- warm-up ----------------------------------------------------------------------------------------------

    @property
    def next_warm_up(self) -> str:
        """Id of the model that the next `warm_up` call works on; empty if none needs a warm-up or none may run now.

        A warm-up waits for `REST_SECONDS` without a request or a load, and for normal memory pressure.
        """
        entries, now = self._entries.values(), self._clock()
        if self.loading or self.pressure != "normal":
            return ""
        if any(entry.leases or now < entry.last_used + REST_SECONDS for entry in entries):
            return ""
        return next((entry.spec.id for entry in entries if not entry.is_warm), "")

    def warm_up(self, known: Callable[[], Sequence[StepCost]] = tuple) -> list[PoolEvent]:
        """Run one step of the warm-up of an idle model, if any needs one; return the event of the warm-up's end.
        `known` returns the costs learnt since the load. An error ends only the warm-up: the model keeps serving."""
        entry = self._entries.get(self.next_warm_up)
        if entry is None or entry.engine is None:
            return []
        if entry.warm_up is None:
            newer = by_shape(known()).items()
            entry.costs |= {shape: cost for shape, cost in newer if cost.is_learnt or shape not in entry.costs}
            entry.warm_up = self._costs.warm_up(entry.engine, entry.spec, entry.costs)
        try:
            for _ in entry.warm_up:
                return []
        except Exception:
            logger.exception("%s could not be warmed up", entry.spec.id)
        entry.warm_up, entry.is_warm = None, True
        self._reclaim()
        return [WarmedUp(entry.spec.id, tuple(entry.costs.values()))]

    # --- retention --------------------------------------------------------------------------------------------

    def set_stays(self, settings: KeepModels) -> None:
        """Set how long models stay. If that changes a model's setting, it overrides what requests have specified."""
        for name, entry in self._entries.items():
            if settings.of(name) != self._settings.of(name):
                entry.requested_stay = UNSPECIFIED_STAY
        self._settings = settings

    def update_specification(self, spec: ModelSpecification) -> None:
        """Update the values of a loaded unit's specification that no engine depends on, if `spec` is the same unit."""
        entry = self._entries.get(spec.id)
        if entry is not None and entry.spec.same_unit(spec):
            entry.spec = spec

    def expire(self) -> list[PoolEvent]:
        """Evict models past their idle limit and make room where caches outgrew the ceiling. Call it periodically."""
        if not self._events:
            self._reclaim_evicted()
        with Dispensable("the prefix cache on disk", logger).guarded():
            if self._disk.collect():  # also the arrays of models that have left memory
                self.trim()
        before, self._events = self._events, []
        now = self._clock()
        for entry in self._evictable():
            if self._stay(entry).seconds_left(now - entry.last_used) == 0:
                self._evict(entry)
        self._free_memory(0)
        if self._events:
            self._reclaim()
        events, self._events = self._events, before
        return events

    def clear_prefixes(self) -> None:
        """Drop every cached prefix, on disk also those of models that are not in memory."""
        self._drop_prefix_caches()
        with Dispensable("the prefix cache on disk", logger).guarded():
            self._disk.clear()

    # --- reporting and relief ---------------------------------------------------------------------------------

    @property
    def accounted_bytes(self) -> int:
        """Bytes that all units hold or have reserved, prefix caches included."""
        return sum(entry.working_bytes + entry.prefix_bytes for entry in self._entries.values())

    def snapshot(self) -> tuple[LoadedModel, ...]:
        """Return the state of every model in the pool; `ServedModel.describe` adds their requests."""
        return tuple(entry.describe(self._stay(entry)) for entry in self._entries.values())

    def free_unused(self) -> None:
        """Drop prefix caches and evict idle models that are not pinned, because memory is critically short."""
        self._drop_prefix_caches()
        for entry in self._evictable():
            self._evict(entry)
        self._reclaim()

    @property
    def must_wait(self) -> bool:
        """Whether queued requests and loads must wait for running rows: the system is critically short of memory."""
        return self.pressure == "critical" and any(entry.rows_bytes for entry in self._entries.values())

    def relieve(self) -> int:
        """Drop half of the prefix caches or, at critical pressure, all that is unused; return the bytes freed."""
        before = self.accounted_bytes
        if self.pressure == "critical":
            self.free_unused()
        else:
            self._drop_prefix_caches(RETAINED_SHARE)
            self.trim()
        return before - self.accounted_bytes

    def trim(self) -> None:
        """Return buffers freed by steps to the system; cheap enough to call between steps."""
        memory.trim()

    # --- internals --------------------------------------------------------------------------------------------

    def _start(self, spec: ModelSpecification) -> Resident:
        """Make room and begin the load, evicting an idle unit of the same id with another specification."""
        footprint = self._estimate(spec)
        needed = footprint.total_bytes
        self._check_room(spec.id, needed)
        if (old := self._entries.get(spec.id)) is not None:
            self._evict(old)
        self._free_memory(needed)
        self._reclaim()
        now = self._clock()
        self._entries[spec.id] = entry = Resident(spec, footprint, started=now, last_used=now)
        entry.steps = self._steps(entry)
        return entry

    def _check_room(self, model_id: str, needed: int) -> None:
        """Raise InsufficientMemory if it cannot fit even with all idle units evicted; hint a retry if waiting helps."""
        needs, limit = f"{model_id} needs {bytes_text(needed)}", self._ceiling_bytes
        ceiling = f"the ceiling is {bytes_text(limit)}"
        if needed > limit:
            raise InsufficientMemory(f"{needs}, {ceiling}: use a smaller model or raise memory_limit in the settings")
        others = {name: entry for name, entry in self._entries.items() if name != model_id}
        used = sum(other.working_bytes for other in others.values() if self._stay(other).pinned)
        if used + needed > limit:
            reason = f"{ceiling} and pinned models hold {bytes_text(used)}"
            raise InsufficientMemory(f"{needs}, {reason}: unpin one or raise memory_limit in the settings")
        used += sum(other.working_bytes for other in others.values() if other.leases and not self._stay(other).pinned)
        if used + needed > limit:
            message = (
                f"{needs}, {ceiling} and models in use hold {bytes_text(used)}: retry when their requests have finished"
            )
            raise InsufficientMemory(message, retry_after_seconds=RETRY_AFTER_SECONDS)

    def _steps(self, entry: Resident) -> Generator[tuple[str, float], None, None]:
        """Run a whole load: read the weights, open the engine."""
        unit = yield from self._load(entry.spec)
        entry.unit = replace(unit, on_progress=self.on_progress)
        self._reclaim()
        entry.engine = self._open_engine(entry.unit)
        entry.is_warm = isinstance(entry.engine, EncoderEngine)
        if not entry.is_warm:
            costs = yield from phased("measuring", self._costs.first_costs(entry.engine, entry.spec))
            entry.costs = by_shape(costs)
        self._reclaim()

    def _free_memory(self, needed: int) -> None:
        """Drop prefix caches, then evict idle units, until `needed` bytes fit; both least recently used first."""
        for entry in sorted(self._entries.values(), key=attrgetter("last_used")):
            if entry.engine is not None and self.accounted_bytes + needed > self._ceiling_bytes:
                entry.engine.drop_prefix_cache()
        for entry in self._evictable():
            if self.accounted_bytes + needed > self._ceiling_bytes:
                self._evict(entry)

    def _evictable(self) -> list[Resident]:
        """Return the units that may be evicted, loads without leases included, least recently used first."""
        free = (entry for entry in self._entries.values() if not entry.leases and not self._stay(entry).pinned)
        return sorted(free, key=attrgetter("last_used"))

    def _drop_prefix_caches(self, retained_share: float = 0.0) -> None:
        for entry in self._entries.values():
            if entry.engine is not None:
                entry.engine.drop_prefix_cache(retained_share)

    def _evict(self, entry: Resident) -> None:
        if entry.steps:
            self._events.append(LoadProgress(model_id=entry.spec.id, phase="abandoned", fraction=0.0))
        self._remove(entry)
        self._reclaim_pending = True
        self._events.append(Evicted(entry.spec.id))

    def _remove(self, entry: Resident) -> None:
        del self._entries[entry.spec.id]
        if entry.unit is not None:
            self._wiring.unwire()
        entry.close()

    def _reclaim(self) -> None:
        """Return freed buffers. Then wire the loaded weights, unless evicted weights may still be referenced."""
        self._free_buffers()
        if not self._reclaim_pending:
            weights_bytes = sum(entry.unit.weights_bytes for entry in self._entries.values() if entry.unit)
            self._wiring.wire(weights_bytes, self._drop_prefix_caches)

    def _reclaim_evicted(self) -> None:
        """Reclaim again after an eviction was reported: users of the engine have dropped it, so more is free now."""
        if self._reclaim_pending:
            self._reclaim_pending = False
            self._reclaim()

    def _advance(self, entry: Resident, steps: Generator[tuple[str, float], None, None]) -> None:
        """Run one slice. Any error ends only this load; the loop and the other models continue."""
        model_id = entry.spec.id
        try:
            phase, fraction = next(steps)
            self._events.append(LoadProgress(model_id=model_id, phase=phase, fraction=fraction))
        except StopIteration:
            entry.steps = None
            entry.last_used = self._clock()
            self._events.append(Loaded(model_id, entry.last_used - entry.started, tuple(entry.costs.values())))
        except PacelineError as error:
            self._fail(entry, error)
        except Exception as error:
            logger.exception("loading %s failed", model_id)
            message = f"{model_id} cannot be loaded: {type(error).__name__}: {error}; `paceline doctor` checks it"
            self._fail(entry, ModelUnavailable(message))

    def _fail(self, entry: Resident, error: PacelineError) -> None:
        """End a failed load. The error is reported without its traceback, whose frames would keep the weights alive."""
        self._remove(entry)
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self._events.append(LoadFailed(entry.spec.id, error))
        self._reclaim()

    def _stay(self, entry: Resident) -> Stay:
        """Return how long a model stays: as requests specified, else as in the settings."""
        return entry.requested_stay.over(self._settings.of(entry.spec.id))


def open_pool(
    ceiling_bytes: int, costs: WarmUps = NO_WARM_UPS, *, wire: bool = False, disk: Disk = NO_DISK
) -> EnginePool:
    """Open this machine's pool. `wire` keeps weights resident where that is safe; `disk` stores prefix caches."""
    return EnginePool(
        ceiling_bytes=ceiling_bytes,
        load=partial(load_and_probe, files=costs),
        open_engine=partial(open_unit, disk=disk),
        estimate=memory.footprint,
        costs=costs,
        wiring=Wiring(wirable_memory() if wire else None),
        disk=disk,
    )
