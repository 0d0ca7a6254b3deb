"""Settings of the server that cannot stand together: declared here once, told alike by page, API and command line."""

from dataclasses import dataclass

from app.core.conflict import Conflict
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Situation:
    """The settings and what else decides whether they can stand together."""

    settings: Settings
    has_keys: bool = False
    """Whether an API key was created."""

    @property
    def has_any_key(self) -> bool:
        """Whether there is a key that could let anybody in."""
        return self.has_keys or self.settings.api_key is not None


BEYOND_LOOPBACK: Conflict[Situation] = Conflict(
    ("host",),
    "other machines reach this address, so a key is needed: set PACELINE_API_KEY, make one with "
    "`paceline keys create`, or listen on 127.0.0.1",
    lambda now: not now.settings.is_loopback and not now.has_any_key,
)
"""The one conflict with which the server does not start."""
CONFLICTS: tuple[Conflict[Situation], ...] = (
    BEYOND_LOOPBACK,
    Conflict(
        ("require_key",),
        "nobody has a key yet: create one first, or set PACELINE_API_KEY",
        lambda now: now.settings.require_key and not now.has_any_key,
    ),
    Conflict(
        ("policy", "drafts", "speculative_config", "num_draft_tokens"),
        "the policy off never drafts: unset drafts, speculative_config and num_draft_tokens, or choose another policy",
        lambda now: (
            now.settings.policy == "off"
            and bool(
                now.settings.speculative_config
                or now.settings.num_draft_tokens
                or set(now.settings.drafts.values()) - {"off"}
            )
        ),
    ),
)
