"""A model as it is now, for API and pages: what is on disk, what the worker says of it, what is set for it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.core.config_values import context_tokens
from app.core.messages import DraftSpecification, LoadedModel, LoadProgress
from app.hub.catalog import CatalogModel
from app.model_settings import ModelSettings
from app.serving.context import Context
from app.serving.resolver import STATES


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model. Bytes as the names say; 0 and empty where nobody knows, or nobody knows yet."""

    model: CatalogModel
    settings: ModelSettings
    loaded: LoadedModel | None
    progress: LoadProgress | None
    """Of a load under way."""
    quarantine: str
    """Why it may not run for the moment."""
    drafts: tuple[DraftSpecification, ...]
    """What it is loaded with, else what it would get."""
    looking: bool
    """Its drafters are not known yet."""

    @property
    def problem(self) -> str:
        """Why it cannot be loaded; empty when nothing is known to be wrong."""
        return self.model.problem or self.quarantine

    @property
    def state(self) -> str:
        """`loading`, `loaded`, `unloading`, `available` or `unusable`."""
        if self.progress is not None:
            return "loading"
        if self.loaded is not None:
            return STATES.get(self.loaded.state, self.loaded.state)
        return "unusable" if self.problem else "available"

    @property
    def context_tokens(self) -> int:
        """The longest context."""
        told = self.loaded.max_context_tokens if self.loaded is not None else 0
        return told or self.model.context or (context_tokens(self.model.config) if self.model.config else 0)

    def as_object(self) -> dict[str, Any]:
        """What API and pages say alike, as JSON."""
        return {
            "id": self.model.id,
            "kind": self.model.kind,
            "source": self.model.source,
            "size_bytes": self.model.size_bytes,
            "state": self.state,
            "looking": self.looking,
            "drafts": drafts_object(self.drafts),
        }


def drafts_object(drafts: Iterable[DraftSpecification]) -> list[dict[str, str]]:
    """The drafters of a unit as JSON."""
    return [{"id": draft.id, "method": draft.method} for draft in drafts]


def entry_of(context: Context, model: CatalogModel, *, looking: bool = False) -> ModelEntry:
    """The entry of a model; while `looking` for drafters, nobody waits for them. Reads the disk."""
    loaded = context.resolver.loaded().get(model.id)
    looking = looking and loaded is None and model.kind == "main" and not model.problem
    return ModelEntry(
        model=model,
        settings=context.live.model(model.id),
        loaded=loaded,
        progress=context.worker.progress.get(model.id),
        quarantine=str(context.worker.quarantined.get(model.id, "")),
        drafts=() if looking else context.resolver.drafts_of(model, loaded),
        looking=looking,
    )
