"""A loaded target with its drafters: values, nothing runs yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx import nn

from app.core.drafters import DRAFT_MODEL
from app.core.errors import ModelUnavailable
from app.core.messages import ModelSpecification

NOT_THE_UNITS = frozenset(
    {"policy", "num_draft_tokens", "queue_limit", "draft_unavailable", "context_tokens", "longest_token_bytes"}
)
"""Of a specification: what an open engine does not depend on; whatever is not named here is the unit's."""


def same_unit(old: ModelSpecification, new: ModelSpecification) -> bool:
    """Whether an engine opened for `old` serves `new`: only what the scheduler or the server alone reads may differ."""
    return all(getattr(old, name) == getattr(new, name) for name in old.__struct_fields__ if name not in NOT_THE_UNITS)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A drafter in memory. `vocabulary_size` counts the tokens that it chooses from, padding included."""

    method: str
    id: str
    model: nn.Module
    config: Mapping[str, Any]
    max_context_tokens: int
    vocabulary_size: int


class NoDraft(ModelUnavailable):
    """No drafter of a method came with the model: no `drafter`, in words."""

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
    drafts: tuple[LoadedDraft, ...] = ()

    def draft(self, method: str) -> LoadedDraft:
        """The drafter of that method. Raises NoDraft, or ModelUnavailable that says why there is none."""
        for draft in self.drafts:
            if draft.method == method:
                return draft
        if self.spec.draft_unavailable:
            raise ModelUnavailable(self.spec.draft_unavailable)
        raise NoDraft("draft model" if method == DRAFT_MODEL.name else f"{method} drafter")
