"""Settings that are kept nowhere: for what runs without a store, or must not hear what it says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.core.errors import StoreUnavailable
from app.model_settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Unkept:
    """A keeper of nothing but what it is made with; it refuses the rest."""

    values: Mapping[str, Any] = field(default_factory=dict)
    model_values: Mapping[str, ModelSettings] = field(default_factory=dict)
    version: int = 0

    def settings(self) -> Mapping[str, Any]:
        """What it was made with."""
        return self.values

    def models(self) -> Mapping[str, ModelSettings]:
        """What it was made with."""
        return self.model_values

    def change_settings(self, changes: Mapping[str, Any], *, source: str) -> None:  # noqa: ARG002 - the port's
        """Refused."""
        raise StoreUnavailable("nothing is kept here")

    def save_model(self, model_id: str, settings: ModelSettings, *, source: str) -> None:  # noqa: ARG002 - the port's
        """Refused."""
        raise StoreUnavailable("nothing is kept here")

    def has_keys(self) -> bool:
        """None are known."""
        return False
