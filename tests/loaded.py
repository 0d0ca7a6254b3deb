"""Models as the worker says that they are in memory."""

from typing import Any

from app.core.unit import DrafterSpecification, LoadedModel, ModelSpecification, Stay


def loaded(
    model_id: str, *drafts: DrafterSpecification, state: str = "ready", pinned: bool = False, **fields: Any
) -> LoadedModel:
    """A model in memory with these drafters, for an hour after its last request."""
    unit = ModelSpecification(id=model_id, path=f"/models/{model_id}", drafters=drafts)
    return LoadedModel(unit=unit, state=state, stay=Stay(pinned=pinned, idle_seconds=3600.0), **fields)
