"""Places where models lie without a setting: the Hugging Face cache, LM Studio's folders, and the embedded models."""

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from app.core.errors import ModelUnavailable
from app.models.safe_files import read_file, read_object

SETTINGS_BYTES = 1 << 20

Source = Literal["folder", "hugging_face", "lm_studio", "embedded"]


def known_places(environment: Mapping[str, str], home: Path) -> list[tuple[Source, Path]]:
    """Return every such place with its kind; it need not exist."""
    return [
        ("hugging_face", _hugging_face_cache(environment, home)),
        *(("lm_studio", folder) for folder in _lm_studio_folders(home)),
        ("embedded", Path(str(importlib.resources.files("app").joinpath("demo_models")))),
    ]


def _hugging_face_cache(environment: Mapping[str, str], home: Path) -> Path:
    """Return the hub cache as huggingface_hub finds it: HF_HUB_CACHE or its older name, HF_HOME, XDG_CACHE_HOME, then
    the home folder."""
    if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    caches = environment.get("XDG_CACHE_HOME")
    return (Path(caches).expanduser() if caches else home / ".cache") / "huggingface" / "hub"


def _lm_studio_folders(home: Path) -> tuple[Path, ...]:
    """Return LM Studio's model folders: the one in its settings, and the defaults of newer and older versions.

    If LM Studio's home folder was moved, `~/.lmstudio-home-pointer` contains its path.
    """
    home_path = _first_line(home / ".lmstudio-home-pointer")
    studio_homes = [Path(home_path).expanduser()] if home_path else []
    studio_homes += [home / ".lmstudio", home / ".cache" / "lm-studio"]
    configured = [
        folder
        for studio_home in studio_homes
        if (folder := _downloads_folder(studio_home / "settings.json")) is not None
    ]
    return tuple(dict.fromkeys([*configured, *(studio_home / "models" for studio_home in studio_homes)]))


def _first_line(path: Path) -> str:
    try:
        return read_file(path, SETTINGS_BYTES).decode().strip().partition("\n")[0].strip()
    except (ModelUnavailable, UnicodeDecodeError):
        return ""


def _downloads_folder(settings: Path) -> Path | None:
    try:
        folder = read_object(settings, SETTINGS_BYTES).get("downloadsFolder")
    except ModelUnavailable:
        return None
    return Path(folder).expanduser() if isinstance(folder, str) and folder else None
