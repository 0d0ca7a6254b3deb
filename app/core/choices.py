"""What is chosen for one model on this computer, by a person or by `paceline bench --apply`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """How a model drafts. None: unset, the setting or the usual way decides."""

    drafts: tuple[str, ...] | None = None
    """Ids of its drafters, best first; empty: none."""
    methods: tuple[str, ...] | None = None
    num_draft_tokens: int | None = None
    policy: str | None = None
    acceptance: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
