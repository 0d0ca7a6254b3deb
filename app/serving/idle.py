"""How long models stay in memory: told to the worker when a load is done, and again when the settings change. Telling
it never loads a model that has gone meanwhile.

What is set for a model goes before `idle_seconds` of the server. A model that was loaded with a `ttl` of its own keeps
that one, until something is set for it.
"""

from app.core.messages import Event, LoadedModel, LoadProgress
from app.serving.live_settings import LiveSettings
from app.serving.resolver import Resolver
from app.worker.client import WorkerClient

LOADED = "ready"
DEFAULT_IDLE_SECONDS = 3600.0
"""The worker's own limit, which is told when a limit was taken back."""
FOR_EVER_SECONDS = 100 * 365 * 86400.0

Stay = tuple[bool, float | None]
"""Whether a model is pinned, and seconds without a request that unload it; None: the worker's own default."""
USUAL: Stay = (False, None)


class IdleLimit:
    """Listens to the worker and to the settings."""

    def __init__(self, worker: WorkerClient, resolver: Resolver, live: LiveSettings) -> None:
        self._worker = worker
        self._resolver = resolver
        self._live = live
        self._own: dict[str, float] = {}
        self._told: dict[str, Stay] = {}

    def keep_own(self, model_id: str, seconds: float) -> None:
        """The model got a limit of its own: leave it alone until something is set for it."""
        self._own[model_id] = seconds
        self._told[model_id] = self._wanted(model_id)

    def seconds_left(self, model: LoadedModel) -> float:
        """How long a model stays in memory if nobody asks for it."""
        limit = self._own.get(model.id, self._wanted(model.id)[1] or DEFAULT_IDLE_SECONDS)
        return FOR_EVER_SECONDS if model.pinned or limit < 0 else max(0.0, limit - model.idle_seconds)

    def hear(self, event: Event) -> None:
        """One event of the worker, on the event loop."""
        if not isinstance(event, LoadProgress) or event.phase != LOADED or event.model_id in self._own:
            return
        self._tell_if_new(event.model_id, always=True)

    def feel(self) -> None:
        """The settings changed: tell the worker what is new for the models that it holds, on the event loop."""
        for model_id in self._resolver.loaded():
            self._tell_if_new(model_id, always=False)

    def _tell_if_new(self, model_id: str, *, always: bool) -> None:
        """Tell what differs from what was told; with `always` also what is not usual: the worker may be a new one."""
        wanted, told = self._wanted(model_id), self._told.get(model_id, USUAL)
        if wanted == told and (wanted == USUAL or not always):
            return
        self._own.pop(model_id, None)
        self._told[model_id] = wanted
        pinned = wanted[0] if wanted[0] or told[0] else None
        idle_seconds = wanted[1] if wanted[1] is not None or told[1] is None else DEFAULT_IDLE_SECONDS
        self._worker.keep(model_id, pinned=pinned, idle_seconds=idle_seconds)

    def _wanted(self, model_id: str) -> Stay:
        model = self._live.model(model_id)
        return bool(model.pinned), model.idle_seconds or self._live.current.idle_seconds
