"""A target and its drafters in memory, before an engine is opened for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx import nn

from app.core.errors import ModelUnavailable
from app.core.unit import ModelSpecification
from app.models.drafters.methods import DRAFT_MODEL
from app.models.machine_files import Stored


class Findings(Stored, frozen=True):
    """Findings of a probe: how a model's forwards must run over slot caches, or, in `error`, why they cannot."""

    rows_isolated: bool = False
    """Whether rows disturb one another, so that each runs separately."""
    recordable: bool = False
    """Whether its recurrent scans can be recorded, so that part of a forward can be committed."""
    attends_per_buffer: bool = False
    """Whether attention may be called once per buffer; else keys and values are padded into one array."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter in memory. `vocabulary_size` counts the tokens that it chooses from, padding included."""

    method: str
    id: str
    model: nn.Module
    config: Mapping[str, Any]
    max_context_tokens: int
    vocabulary_size: int


class NoDrafter(ModelUnavailable):
    """No drafter of a method is loaded with the model; `drafter` is what messages call it."""

    def __init__(self, drafter: str) -> None:
        super().__init__(f"no {drafter} is loaded with this model")
        self.drafter = drafter


@dataclass(frozen=True, slots=True)
class LoadedUnit:
    """A target and its drafters, in memory. `vocabulary_size` counts embedding rows, padding included."""

    spec: ModelSpecification
    target: nn.Module
    config: Mapping[str, Any]
    weights_bytes: int
    max_context_tokens: int
    vocabulary_size: int
    drafters: tuple[LoadedDrafter, ...] = ()
    load_failures: Mapping[str, str] = field(default_factory=dict)
    """Method -> why its drafter failed to load."""
    findings: Mapping[str, Findings] = field(default_factory=dict)
    """Findings by method, "" for the target; models that have not been probed are absent."""
    on_progress: Callable[[], None] = lambda: None
    """Callback between the parts of a long step."""

    def drafter(self, method: str) -> LoadedDrafter:
        """Return the drafter of a method. Raises ModelUnavailable if it is known why there is none, else NoDrafter."""
        for drafter in self.drafters:
            if drafter.method == method:
                return drafter
        if method in self.load_failures:
            raise ModelUnavailable(self.load_failures[method])
        if self.spec.live.draft_unavailable:
            raise ModelUnavailable(self.spec.live.draft_unavailable)
        raise NoDrafter("draft model" if method == DRAFT_MODEL.name else f"{method} drafter")
