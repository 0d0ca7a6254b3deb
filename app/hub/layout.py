"""Where model folders lie on disk: flat folders, `organisation/name` folders and the Hugging Face cache.

Only directory listings are read here, and of each at most `MAX_ENTRIES`. A missing or forbidden folder holds no models
and is no error; one that cannot be read for the moment is told, because it may hold some.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import ModelUnavailable
from app.core.safe_files import MOMENTARY, read_file, read_object

SETTINGS_BYTES = 1 << 20
MAX_ENTRIES = 20_000
"""Of one folder: what lies behind them is not looked for, so that nobody waits for a folder of millions."""


@dataclass(frozen=True, slots=True)
class FolderCandidate:
    """A folder that looks like a model, under the id that clients use."""

    id: str
    path: Path


def candidates(root: Path, unread: list[Path]) -> list[FolderCandidate]:
    """Models at `root` itself, one level below (`name`) or two levels below (`organisation/name`), sorted by id.

    Those that are reached through a link come last: a folder is listed once, and best where it really is. Folders that
    cannot be read for the moment are added to `unread`.
    """
    real = Path(os.path.realpath(root))
    found = list(_Search(unread).below(root))
    return sorted(found, key=lambda each: real / each.path.relative_to(root) != Path(os.path.realpath(each.path)))


@dataclass(frozen=True, slots=True)
class _Search:
    unread: list[Path]

    def below(self, root: Path) -> Iterator[FolderCandidate]:
        if self._looks_like_model(root):
            yield FolderCandidate(root.name, root)
            return
        for folder in self._folders(root):
            if folder.name.startswith("models--"):
                yield from self._snapshot(folder)
            elif self._looks_like_model(folder):
                yield FolderCandidate(folder.name, folder)
            else:
                nested = (child for child in self._folders(folder) if self._looks_like_model(child))
                yield from (FolderCandidate(f"{folder.name}/{child.name}", child) for child in nested)

    def _snapshot(self, repository: Path) -> Iterator[FolderCandidate]:
        """The snapshot of `refs/main`, or the newest one, of a `models--organisation--name` folder."""
        snapshots = repository / "snapshots"
        try:
            revision = (repository / "refs" / "main").read_text("ascii").strip()
        except (OSError, ValueError):
            revision = ""
        folder = snapshots / revision
        if not (revision.isalnum() and folder.is_dir()):
            folder = max(self._folders(snapshots), key=_modified, default=repository)
        if self._looks_like_model(folder):
            yield FolderCandidate("/".join(repository.name.split("--")[1:]), folder)

    def _looks_like_model(self, folder: Path) -> bool:
        """A folder with a config, or with safetensors weights that lack one (listed as broken). GGUF is neither."""
        if os.path.lexists(folder / "config.json"):
            return True
        return any(name.endswith(".safetensors") and not name.startswith(".") for name, _ in self._entries(folder))

    def _folders(self, folder: Path) -> list[Path]:
        names = (name for name, is_folder in self._entries(folder) if is_folder and not name.startswith("."))
        return [folder / name for name in sorted(names)]

    def _entries(self, folder: Path) -> list[tuple[str, bool]]:
        """Names, and whether they are folders."""
        try:
            with os.scandir(folder) as entries:
                return [(each.name, _is_folder(each)) for each in itertools.islice(entries, MAX_ENTRIES)]
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in MOMENTARY:
                self.unread.append(folder)
            return []


def hugging_face_cache(environment: Mapping[str, str], home: Path) -> Path:
    """The hub cache as huggingface_hub finds it: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, then the home folder."""
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"]).expanduser()
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    caches = environment.get("XDG_CACHE_HOME")
    return (Path(caches).expanduser() if caches else home / ".cache") / "huggingface" / "hub"


def lm_studio_folders(home: Path) -> tuple[Path, ...]:
    """Where LM Studio keeps models: the folder that its settings name, and those of its newer and older versions.

    Its own home may lie elsewhere, which `~/.lmstudio-home-pointer` then says.
    """
    pointed = _first_line(home / ".lmstudio-home-pointer")
    homes = [Path(pointed).expanduser()] if pointed else []
    homes += [home / ".lmstudio", home / ".cache" / "lm-studio"]
    named = [folder for each in homes if (folder := _downloads_folder(each / "settings.json")) is not None]
    return tuple(dict.fromkeys([*named, *(each / "models" for each in homes)]))


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


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and Path(entry.path).is_dir())


def _modified(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
