"""Loaded models as the worker reports them."""

from typing import Any

from app.core.unit import DrafterSpecification, LoadedModel, ModelSpecification, Stay


def loaded(
    model_id: str,
    *drafts: DrafterSpecification,
    size_bytes: int = 0,
    state: str = "ready",
    pinned: bool = False,
    **fields: Any,
) -> LoadedModel:
    """Return a loaded model with these drafters, to be unloaded an hour after its last request."""
    unit = ModelSpecification(id=model_id, path=f"/models/{model_id}", size_bytes=size_bytes, drafters=drafts)
    return LoadedModel(unit=unit, state=state, stay=Stay(pinned=pinned, idle_seconds=3600.0), **fields)
