"""Settings of the server that cannot stand together, or not on this computer: declared here once, told alike by page,
API and command line."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.model_settings import Conflict
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Situation:
    """The settings and what else decides whether they can stand together."""

    settings: Settings
    has_keys: bool = False
    """Whether an API key was created."""
    models: frozenset[str] | None = None
    """The models on this computer, by id and alias; None: nobody looked."""

    @property
    def has_any_key(self) -> bool:
        """Whether there is a key that could let anybody in."""
        return self.has_keys or self.settings.api_key is not None

    def lacks(self, names: Iterable[str]) -> bool:
        """Whether one of these is no model of this computer."""
        return self.models is not None and not self.models.issuperset(names)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


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
        ("default_model",),
        "no model on this computer is called so: `paceline ls` names them",
        lambda now: bool(now.settings.default_model) and now.lacks([now.settings.default_model]),
        wording="no_model",
    ),
    Conflict(
        ("drafts",),
        "a model or drafter of these is not on this computer: `paceline ls` names them",
        lambda now: now.lacks(
            name
            for main, drafters in now.settings.drafts.items()
            for name in (main, *drafters.split("+"))
            if name != "off"
        ),
        wording="no_model",
    ),
    Conflict(
        ("memory_limit",),
        "this computer has less memory than that: give less, or leave it empty",
        lambda now: (now.settings.memory_limit or 0) > psutil.virtual_memory().total,
    ),
    Conflict(
        ("model_dirs",),
        "there is no such folder: check how it is written",
        lambda now: not all(map(_is_folder, now.settings.model_dirs)),
        wording="no_folder",
    ),
    Conflict(
        ("downloads_folder",),
        "neither this folder nor the one around it is there: check how it is written",
        lambda now: (folder := now.settings.downloads_folder) is not None and not _is_folder(folder.parent),
        wording="no_folder",
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
