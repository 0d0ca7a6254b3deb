"""What the endpoints ask of the worker's client and of the catalog of models; tests pass fakes."""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from app.core.messages import (
    Accepted,
    Delta,
    Event,
    Finished,
    Generate,
    LoadProgress,
    ModelLoaded,
    ModelSpecification,
    Ready,
    Snapshot,
)
from app.core.reason import Reason
from app.hub.catalog import CatalogModel
from app.model_settings import ModelSettings


class Worker(Protocol):
    """The worker process as the server sees it. Every method raises a `PacelineError` when it cannot."""

    @property
    def ready(self) -> bool: ...

    @property
    def ready_info(self) -> Ready | None: ...

    @property
    def snapshot(self) -> Snapshot: ...

    @property
    def progress(self) -> Mapping[str, LoadProgress]:
        """Model id -> how far its load is, while it loads."""
        ...

    @property
    def quarantined(self) -> Mapping[str, Reason]:
        """Model id -> why it is not loaded any more."""
        ...

    @property
    def restarts(self) -> int: ...

    @property
    def draining(self) -> bool:
        """Whether the worker finishes what runs before another one takes its place."""
        ...

    @property
    def last_exit(self) -> Reason:
        """Why the last worker ended; no reason when none has."""
        ...

    @property
    def retry_after_seconds(self) -> int:
        """When a worker should be ready for who asks again then."""
        ...

    def release_quarantine(self, model_id: str) -> None:
        """Let a model run again. Raises InvalidRequest when it is not quarantined."""
        ...

    def renew(self, drain_seconds: float = 0.0) -> None:
        """Replace the worker once its running requests have finished, or after so many seconds."""
        ...

    def generate(self, command: Generate) -> AsyncGenerator[Accepted | Delta | Finished, None]:
        """The events of one request; closing the generator cancels the request."""
        ...

    async def load(self, model: ModelSpecification) -> ModelLoaded: ...

    def keep(self, model_id: str, *, pinned: bool | None, idle_seconds: float | None) -> None:
        """Say how long a model stays, whether it is loaded or not; negative seconds: for ever; None: as it was."""
        ...

    async def unload(self, model_id: str) -> None: ...

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event of the worker; the answer ends the subscription."""
        ...


class Catalog(Protocol):
    """The models on this computer. Calls may read the disk: make them in a thread."""

    def models(self) -> Sequence[CatalogModel]: ...

    def find(self, id: str) -> CatalogModel:  # noqa: A002 - the word of the API
        """Raises `ModelNotFound`."""
        ...

    def refresh(self) -> None:
        """Look at the disk anew at the next call."""
        ...

    def is_looking(self) -> bool:
        """Whether it is not known yet which drafters the models get; asking begins to find out, and waits a moment."""
        ...


class Fit(Protocol):
    """Whether a drafter fits a main model, and why not."""

    @property
    def fits(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class Pairings(Protocol):
    """Which drafter fits which main model. Calls may read the disk: make them in a thread."""

    def pair(self, main: CatalogModel, draft: CatalogModel) -> Fit: ...

    def default_draft(
        self, main: CatalogModel, models: Sequence[CatalogModel], methods: Collection[str]
    ) -> CatalogModel | None:
        """The best drafter of one of `methods` for a model that nobody chose one for."""
        ...

    def suits(self, main: CatalogModel, draft: CatalogModel, models: Sequence[CatalogModel]) -> bool:
        """Whether no other model's name is nearer to the drafter's."""
        ...


class SettingsKeeper(Protocol):
    """Where settings are kept between starts, as plain JSON values. Calls may read and write a file."""

    @property
    def version(self) -> int:
        """Another number after anybody, in any process, kept something."""
        ...

    def settings(self) -> Mapping[str, Any]: ...

    def change_settings(self, changes: Mapping[str, Any], *, source: str) -> None:
        """Keep all of these or none; None forgets one."""
        ...

    def models(self) -> Mapping[str, ModelSettings]: ...

    def save_model(self, model_id: str, settings: ModelSettings, *, source: str) -> None: ...

    def has_keys(self) -> bool:
        """Whether an API key was created that still counts."""
        ...
