"""A loaded target with its drafters: values, nothing runs yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx import nn

from app.core.errors import ModelUnavailable
from app.core.messages import ModelSpecification


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A drafter in memory. `vocabulary_size` counts the tokens that it chooses from, padding included."""

    method: str
    id: str
    model: nn.Module
    config: Mapping[str, Any]
    max_context_tokens: int
    vocabulary_size: int


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
        """The drafter of that method. Raises ModelUnavailable, which says why there is none."""
        for draft in self.drafts:
            if draft.method == method:
                return draft
        kind = "draft model" if method == "draft_model" else f"{method} drafter"
        missing = f"no {kind} is loaded with this model: pass one with `--draft` or `draft_model`"
        raise ModelUnavailable(self.spec.draft_unavailable or missing)
