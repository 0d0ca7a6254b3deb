"""The worker's signs of life: a heartbeat after every step and once a second, with a snapshot when models changed."""

from collections.abc import Callable

import msgspec

from app.core.messages import Event, Heartbeat, LoadedModel, Snapshot
from app.core.ports import Clock

HEARTBEAT_SECONDS = 1.0


class Pulse:
    """Beats from the loop, so that a loop that is stuck is silent, and the supervisor notices."""

    def __init__(
        self,
        *,
        send: Callable[[Event], None],
        models: Callable[[], tuple[LoadedModel, ...]],
        memory: Callable[[], tuple[int, int, int]],
        pending: Callable[[], bool],
        clock: Clock,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._send = send
        self._models = models
        self._memory = memory
        self._pending = pending
        self._clock = clock
        self._heartbeat_seconds = heartbeat_seconds
        self._next_at = clock()
        self._told: Snapshot | None = None

    @property
    def seconds_to_next(self) -> float:
        """How long the loop may sleep; 0 when a beat is due."""
        return max(0.0, self._next_at - self._clock())

    def beat_if_due(self) -> None:
        """The beat of every second."""
        if self._clock() >= self._next_at:
            self.beat(0.0)

    def show(self) -> None:
        """Models came or went: tell it before anybody is told that it happened."""
        self._next_at = self._clock()
        self.beat(0.0)

    def beat(self, step_seconds: float) -> None:
        """One heartbeat; `step_seconds` of the step it follows, 0 for none."""
        now = self._clock()
        snapshot = None
        if now >= self._next_at:
            self._next_at = now + self._heartbeat_seconds
            snapshot = self._changed_snapshot()
        self._send(Heartbeat(pending=self._pending(), step_seconds=step_seconds, snapshot=snapshot))

    def _changed_snapshot(self) -> Snapshot | None:
        active, cached, peak = self._memory()
        snapshot = Snapshot(models=self._models(), active_bytes=active, cached_bytes=cached, peak_bytes=peak)
        if self._told is not None and _timeless(snapshot) == _timeless(self._told):
            return None
        self._told = snapshot
        return snapshot


def _timeless(snapshot: Snapshot) -> Snapshot:
    """Without what changes by the mere passing of time."""
    models = tuple(msgspec.structs.replace(model, idle_seconds=0.0) for model in snapshot.models)
    return msgspec.structs.replace(snapshot, models=models)
