"""What a command knows before it speaks to a server: its words, the environment, and what is stored.

Imported by every command. Most of them make one HTTP call, so the store is glanced at, without its libraries.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.core.errors import InvalidSetting
from app.model_settings import ModelSettings
from app.settings import Settings, read_settings
from app.store.glance import FILE_NAME, Glance, glance


def given(*, model_dirs: Sequence[Path] = (), drafts: Sequence[str] = (), **words: Any) -> Settings:
    """What the environment says, and over it the command line. Raises `InvalidSetting`."""
    settings = read_settings(**{name: value for name, value in words.items() if value is not None})
    extra: dict[str, Any] = {}
    if model_dirs:
        extra["model_dirs"] = (*(folder.expanduser().absolute() for folder in model_dirs), *settings.model_dirs)
    if drafts:
        extra["drafts"] = {**settings.drafts, **read_settings(drafts=",".join(drafts)).drafts}
    return settings.with_command_line(**extra)


def known(settings: Settings) -> Settings | None:
    """What is given, what is stored, and defaults; None where the store has to be opened to tell."""
    stored = glance(settings.home / FILE_NAME)
    if stored is None:
        return None
    try:
        return settings.over(stored.settings)
    except (InvalidSetting, AttributeError):  # a stored value that means nothing (any more)
        return None


def stored_choices(settings: Settings) -> dict[str, ModelSettings]:
    """What is stored for each model that something is stored for."""
    stored = glance(settings.home / FILE_NAME)
    return choices_in(stored) if stored is not None else {}


def choices_in(stored: Glance) -> dict[str, ModelSettings]:
    """The same of what a glance found."""
    return {name: ModelSettings.read(values) for name, values in stored.models.items()}
