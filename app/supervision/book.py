"""The models of the worker as the server knows them: in memory, loading, requested, and to be restored."""

from collections.abc import Container

import msgspec

from app.core.messages import Generate, Heartbeat, KeepModels, LoadModel, LoadProgress, Snapshot
from app.core.unit import UNSPECIFIED_STAY, LoadedModel, ModelSpecification

LOAD_ENDED = frozenset({"ready", "failed", "abandoned"})
"""Phases of the last `LoadProgress` of a load."""


class ModelBook:
    """Models of the worker, across all workers that a server starts. Written on the event loop, read by any thread."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        """State of the worker at its last heartbeat."""
        self.progress: dict[str, LoadProgress] = {}
        """Model id -> the last progress of a load under way."""
        self.settings = KeepModels()
        """Settings for how long models stay in memory."""
        self._requested: dict[str, ModelSpecification] = {}
        """Most recently requested unit of each model id, in order of the last request."""
        self._former: dict[str, LoadedModel] = {}
        """Models that earlier workers had in memory, by id, until a new load of them ends."""
        self._arrived: set[str] = set()
        """Ids of models that are ready since the last snapshot, which does not show that yet."""
        self._restored: set[str] = set()
        """Ids of former models that the next worker loads as soon as it is ready; the others wait for a request."""

    def loaded(self) -> dict[str, LoadedModel]:
        """Return the models in the worker's memory, by id."""
        return {model.id: model for model in self.snapshot.models}

    def unit(self, model_id: str, *, in_flight: bool) -> ModelSpecification | None:
        """Return the unit with which a model is, or soon will be, in memory; None for neither. A model that the next
        worker loads as soon as it is ready counts as in memory.

        | in memory | in flight or loading | unit                                          |
        |-----------|----------------------|-----------------------------------------------|
        | in use    | any                  | the one in memory: it is not replaced         |
        | idle      | yes                  | the one requested last, which will replace it |
        | idle      | no                   | the one in memory                             |
        | no        | yes                  | the one requested last                        |
        | no        | no                   | None                                          |
        """
        loaded = self.loaded().get(model_id, self._former.get(model_id) if model_id in self._restored else None)
        if (loaded is None or not loaded.leases) and (in_flight or model_id in self.progress):
            return self._requested.get(model_id)
        return loaded.unit if loaded is not None else None

    def request(self, unit: ModelSpecification) -> None:
        """Record a unit as the one requested last."""
        self._requested.pop(unit.id, None)
        self._requested[unit.id] = unit

    def with_former_stay(self, command: Generate | LoadModel) -> Generate | LoadModel:
        """Return `command`, with unset values of its stay filled in from those of its model in an earlier worker."""
        former = self._former.get(command.model.id)
        if former is None:
            return command
        stay = command.stay.over(former.stay)
        self._former[former.id] = msgspec.structs.replace(former, stay=stay)
        return msgspec.structs.replace(command, stay=stay)

    def keep(self, settings: KeepModels) -> bool:
        """Record the settings for how long models stay in memory; return whether they have changed."""
        if settings == self.settings:
            return False
        for name, model in self._former.items():
            if settings.of(name) != self.settings.of(name):
                self._former[name] = msgspec.structs.replace(model, stay=UNSPECIFIED_STAY)
        self.settings = settings
        return True

    def not_restored(self, model_id: str) -> None:
        """Record that a model could not be loaded again; only its stay is still known."""
        self._restored.discard(model_id)

    def forget(self, model_id: str) -> None:
        """Forget that an earlier worker had a model."""
        self._former.pop(model_id, None)
        self._restored.discard(model_id)

    def handle(self, event: Heartbeat | LoadProgress) -> None:
        """Record what the worker reports about its models."""
        if isinstance(event, LoadProgress):
            self.progress.pop(event.model_id, None)
            if event.phase == "ready":
                self._arrived.add(event.model_id)
            elif event.phase in LOAD_ENDED:
                self.forget(event.model_id)
            else:
                self.progress[event.model_id] = event
        elif event.snapshot is not None:
            self.snapshot = event.snapshot
            while self._arrived:
                self.forget(self._arrived.pop())

    def handle_exit(self, *, may_restore: bool) -> None:
        """Record that the worker ended. With `may_restore`, the next worker loads the models that were ready in it."""
        ready = {model.id: model for model in self.snapshot.models if model.state == "ready"}
        self._former |= ready
        self._restored = self._restored | ready.keys() if may_restore else set()
        self.progress.clear()
        self._arrived.clear()
        self.snapshot = Snapshot()

    def to_restore(self, quarantined: Container[str]) -> list[ModelSpecification]:
        """Return the units that a new worker loads, most recently requested first, without quarantined models."""
        ids = [name for name in reversed(self._requested) if name in self._restored and name not in quarantined]
        self._restored = set(ids)
        self._requested |= {model_id: self._former[model_id].unit for model_id in ids}
        return [self._requested[model_id] for model_id in ids]
