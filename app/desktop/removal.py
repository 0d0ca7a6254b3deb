"""`paceline uninstall`: the parts of Paceline on this computer, with sizes, and the removal of chosen ones.

Only files with names that Paceline writes are removed, so other files in a state folder stay. Links are not followed.
Models shared with other programs, and the user's own folders, are left alone.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from app.command import autostart
from app.command.service import stop
from app.core.download import MARKER, PARTIAL, PARTIAL_LOCK, PARTIAL_NAME
from app.core.errors import CommandError
from app.core.setting_texts import bytes_text
from app.desktop import bundle
from app.machine.installation import this_installation
from app.machine.own_files import ANY, own_files, own_folders, read_json_as, write_privately
from app.machine.prefix_files import PREFIX_FILE_NAME, PREFIX_PARTIAL_NAME
from app.settings import PREFIXES, Settings

Name = Literal["service", "app", "downloads", "caches", "state"]
TITLES: Mapping[Name, str] = {
    "service": "start at login",
    "app": "the app",
    "downloads": "models that Paceline downloaded",
    "caches": "logs, measured costs, earlier prompts, windows",
    "state": "settings, password, keys, conversations, history, measurements",
}
CACHES = (
    ("logs", r"(paceline|start)\.log(\.[0-9])?"),
    ("costs", r"[0-9a-f]{32}\.json"),
    (PREFIXES, ANY, f"{PREFIX_FILE_NAME}|{PREFIX_PARTIAL_NAME}"),
    (r"(tokenizers|window)\.json",),
)
CACHE_FOLDERS = "window|launch"
"""Pattern of folders that are removed whole, because a browser and coding agents choose the file names in them."""
STATE = (
    (r"paceline\.sqlite3(\.(new|newer|damaged-\d{8}-\d{6}|before-\d+(\.new)?)(-\d+)?)?(-wal|-shm|-journal)?",),
    (r"paceline\.sqlite3\.(lock|reserve)|(server|start|menubar)\.lock|server\.json(\.new)?|apps\.json|hub_token",),
    (r"open-[0-9a-f]{16}\.html",),
    ("languages", r"[A-Za-z0-9-]+\.json"),
)
"""Patterns of files below the home: each tuple has one pattern for each level of the path."""
APPS = Path("~/Applications")
APPS_FILE = "apps.json"
"""File that lists other folders into which an app was written."""

ShowProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Part:
    """A removable part of Paceline on this computer."""

    name: Name
    paths: tuple[Path, ...]
    size_bytes: int

    @property
    def text(self) -> str:
        """Description in one line."""
        where = os.path.commonpath(self.paths)
        return f"{self.name}: {TITLES[self.name]}, {bytes_text(self.size_bytes)} ({where})"


def installed_parts(settings: Settings) -> tuple[Part, ...]:
    """Return the existing parts, in the order of their removal."""
    agent = autostart.installed_agent(settings)
    apps = (folder / bundle.NAME for folder in (APPS.expanduser(), *_other_folders(settings.home)))
    paths_by_name: dict[Name, Sequence[Path]] = {
        "service": [agent.path] if agent is not None else [],
        "app": [app for app in apps if _is_ours(app)],
        "downloads": [path for folder in settings.model_folders for path in _downloads(folder)],
        "caches": [*_matching(settings.home, CACHES), *own_folders(settings.home, CACHE_FOLDERS)],
        "state": list(_matching(settings.home, STATE)),
    }
    return tuple(Part(name, tuple(paths), sum(map(size_of, paths))) for name, paths in paths_by_name.items() if paths)


def _is_ours(app: Path) -> bool:
    """Return whether `paceline app install` wrote the app; a foreign one must not block removing the rest."""
    try:
        return bundle.read_record(app) is not None
    except CommandError:
        return False


def record_app(home: Path, folder: Path, *, is_there: bool) -> None:
    """Record whether an app is installed in this folder. Raises `CommandError` if the home cannot be written."""
    folders = [os.fspath(known_folder) for known_folder in _other_folders(home) if known_folder != folder]
    if is_there and folder != APPS.expanduser():
        folders.append(os.fspath(folder))
    try:
        if folders:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_privately(home / APPS_FILE, msgspec.json.encode(folders))
        elif (home / APPS_FILE).exists():
            (home / APPS_FILE).unlink()
            with contextlib.suppress(OSError):  # not empty
                home.rmdir()
    except OSError as error:
        raise CommandError(f"{home} cannot be written: {error.strerror or error}") from None


def _other_folders(home: Path) -> tuple[Path, ...]:
    return tuple(map(Path, read_json_as(home / APPS_FILE, list[str], bundle.MAX_RECORD_BYTES) or ()))


def _downloads(folder: Path) -> Iterator[Path]:
    """Yield the models that Paceline downloaded into the folder, and partial downloads, but no other models."""
    yield from (marker.parent for marker in own_files(folder, r"[^.].*", ANY, re.escape(MARKER)))
    yield from own_folders(folder, re.escape(PARTIAL), PARTIAL_NAME)
    yield from own_files(folder, re.escape(PARTIAL), PARTIAL_LOCK)


def _matching(home: Path, patterns: Sequence[Sequence[str]]) -> Iterator[Path]:
    return (path for names in patterns for path in own_files(home, *names))


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    below = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_size for file in below)


def chosen_parts(parts: Sequence[Part], names: Collection[str]) -> tuple[Part, ...]:
    """Return the parts with these names. Raises `CommandError` for an unknown name."""
    unknown = sorted(set(names) - set(TITLES))
    if unknown:
        raise CommandError(f"there is no part called {unknown[0]}: name some of {', '.join(TITLES)}, or give --all")
    return tuple(part for part in parts if part.name in names)


def remove(settings: Settings, parts: Sequence[Part], show_progress: ShowProgress) -> list[str]:
    """Stop the server, unless only the app goes; remove these parts and return a report. Raises `CommandError`."""
    stopped = stop(settings, show_progress) if any(part.name != "app" for part in parts) else None
    report = ["The server is stopped."] if stopped is not None else []
    report += [_remove(settings, part) for part in parts]
    if any(part.name == "state" for part in parts) and autostart.installed_agent(settings) is not None:
        report.append("A new Paceline still starts at login: `paceline service uninstall` ends that")
    remaining = sorted(settings.home.iterdir()) if settings.home.is_dir() else []
    if not remaining and settings.home.is_dir() and not settings.home.is_symlink():  # a link belongs to the user
        settings.home.rmdir()
    elif remaining and any(part.name == "state" for part in parts):
        report.append(f"This stays in {settings.home}: {', '.join(path.name for path in remaining)}")
    return report


def _remove(settings: Settings, part: Part) -> str:
    if part.name == "service":
        autostart.uninstall(settings)
    elif part.name == "app":
        return "\n".join(bundle.uninstall(path.parent) for path in part.paths)
    else:
        roots = settings.model_folders if part.name == "downloads" else (settings.home,)
        for path in part.paths:
            _delete(path)
        folders = {parent for path in part.paths for parent in path.parents if any(map(parent.is_relative_to, roots))}
        for folder in sorted(folders - {settings.home, *settings.model_dirs}, reverse=True):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
    return f"Removed: {part.text}"


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{path} cannot be removed: {error.strerror or error}") from None


def untouched_items(settings: Settings) -> list[str]:
    """Return lines about what `uninstall` leaves alone, and how to remove the program."""
    folders = [str(folder) for folder in settings.model_folders if not folder.is_relative_to(settings.home)]
    models = [f"Models in your own folders stay: {', '.join(folders)}"] if folders else []
    return [*models, f"The program itself: {this_installation().remove}"]


def as_json(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the existing parts as JSON, for `uninstall --json`."""
    return {
        "parts": [
            {"name": part.name, "size_bytes": part.size_bytes, "paths": [str(path) for path in part.paths]}
            for part in parts
        ],
        "program": this_installation().remove,
    }
