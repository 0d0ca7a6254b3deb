"""Where model folders lie on disk: flat folders, `organisation/name` folders and the Hugging Face cache.

Only directory listings are read here. A missing or unreadable folder holds no models and is no error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

SETTINGS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that looks like a model, under the id that clients use."""

    id: str
    path: Path


def candidates(root: Path) -> Iterator[Candidate]:
    """Models at `root` itself, one level below (`name`) or two levels below (`organisation/name`), sorted by id."""
    if _looks_like_model(root):
        yield Candidate(root.name, root)
        return
    for folder in _folders(root):
        if folder.name.startswith("models--"):
            yield from _snapshot(folder)
        elif _looks_like_model(folder):
            yield Candidate(folder.name, folder)
        else:
            nested = (child for child in _folders(folder) if _looks_like_model(child))
            yield from (Candidate(f"{folder.name}/{child.name}", child) for child in nested)


def hugging_face_cache(environment: Mapping[str, str], home: Path) -> Path:
    """The hub cache as huggingface_hub finds it: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, then the home folder."""
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"]).expanduser()
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    caches = environment.get("XDG_CACHE_HOME")
    return (Path(caches).expanduser() if caches else home / ".cache") / "huggingface" / "hub"


def lm_studio_folder(home: Path) -> Path | None:
    """The folder that LM Studio downloads to, from its settings or its two defaults; None when there is none."""
    told = _downloads_folder(home / ".lmstudio" / "settings.json")
    places = (told, home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models")
    return next((place for place in places if place is not None and place.is_dir()), None)


def _downloads_folder(settings: Path) -> Path | None:
    try:
        if not settings.is_file() or settings.stat().st_size > SETTINGS_BYTES:
            return None
        content = msgspec.json.decode(settings.read_bytes())
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    folder = content.get("downloadsFolder") if isinstance(content, dict) else None
    return Path(folder).expanduser() if isinstance(folder, str) and folder else None


def _snapshot(repository: Path) -> Iterator[Candidate]:
    """The snapshot of `refs/main`, or the newest one, of a `models--organisation--name` folder."""
    snapshots = repository / "snapshots"
    try:
        revision = (repository / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        revision = ""
    folder = snapshots / revision
    if not (revision.isalnum() and folder.is_dir()):
        folder = max(_folders(snapshots), key=_modified, default=repository)
    if _looks_like_model(folder):
        yield Candidate("/".join(repository.name.split("--")[1:]), folder)


def _modified(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _looks_like_model(folder: Path) -> bool:
    """A folder with a config, or with safetensors weights that lack one (listed as broken). GGUF is neither."""
    return any(name == "config.json" or name.endswith(".safetensors") for name in _names(folder))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError):
        return []


def _folders(root: Path) -> list[Path]:
    return [path for name in _names(root) if (path := root / name).is_dir()]
