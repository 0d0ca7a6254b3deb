"""`Paceline.app`: a bundle for the Finder that runs this installation; installed, checked and removed here.

It contains no copy of Paceline: its launcher is a `/bin/sh` script that runs the Python of this installation. The
written files are recorded in it with hashes, so that uninstalling removes exactly those.
"""

import contextlib
import hashlib
import os
import plistlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from app import __version__
from app.command.autostart import steady_python, usual_home
from app.core.errors import CommandError, ModelUnavailable
from app.i18n import Words
from app.machine.installation import version_order
from app.machine.own_files import read_kept
from app.models.safe_files import read_file, write_privately
from app.settings import Settings

NAME = "Paceline.app"
IDENTIFIER = "app.paceline.Paceline"
ICONS = Path(__file__).parent / "icons"
INFORMATION, LAUNCHER = "Contents/Info.plist", "Contents/MacOS/paceline"
ICON, RECORD = "Contents/Resources/paceline.icns", "Contents/Resources/written.json"
FOLDERS = ("Contents/MacOS", "Contents/Resources", "Contents", "")
"""Folders of the bundle, inner ones first."""
EXECUTABLE = frozenset({LAUNCHER})
FIRST_MACOS = "14.0"
"""First macOS version that mlx runs on."""
MAX_RECORD_BYTES = 1 << 20
MAX_FILE_BYTES = 16 << 20

DIALOG = (
    "on run argv",
    'display dialog (item 1 of argv) with title "Paceline" buttons {"OK"} default button 1 with icon caution',
    "end run",
)
"""Program for osascript. The text to show is passed as an argument, never as part of the program."""

SCRIPT = """#!/bin/sh
# Written by `paceline app install` of Paceline {version}; `paceline app uninstall` removes it.
python={python}
{environment}if [ -x "$python" ] && "$python" -P -c 'import sys, importlib.util as found
sys.exit(found.find_spec("app.desktop.bundle") is None)' 2>/dev/null; then
  exec "$python" -P -m app.cli app open
fi
message={moved}
echo "$message" >&2
if command -v osascript >/dev/null; then
  osascript{dialog} "$message" >/dev/null
fi
exit 1
"""


class BundleRecord(msgspec.Struct, frozen=True):
    """The record in a bundle: the version and Python that wrote it, and each file with its SHA-256."""

    version: str
    python: str
    files: dict[str, str]
    folders_made: int = 0
    """Number of parent folders that were created for the bundle; they are removed with it if empty."""


@dataclass(frozen=True, slots=True)
class Launching:
    """Facts in the launcher about the installation that wrote it."""

    version: str
    python: Path
    moved: str
    """Message for the user if that installation no longer exists."""
    home: str = ""
    """State folder, if it is not the default."""

    @property
    def place(self) -> str:
        """Path of its Python as text for the record."""
        return os.fsencode(self.python).decode(errors="replace")


def this_installation(settings: Settings, words: Words) -> Launching:
    """Return the installation that runs this command."""
    home = "" if usual_home(settings) else str(settings.home)
    return Launching(__version__, steady_python(Path(sys.executable)), words("desktop.moved"), home)


def information(version: str, languages: tuple[str, ...]) -> dict[str, Any]:
    """Return the contents of Info.plist. Versions in it have at most three numbers."""
    numbers = re.match(r"\d+(?:\.\d+){0,2}", version)
    return {
        "CFBundleDevelopmentRegion": "en",
        "CFBundleDisplayName": "Paceline",
        "CFBundleExecutable": Path(LAUNCHER).name,
        "CFBundleIconFile": Path(ICON).name,
        "CFBundleIdentifier": IDENTIFIER,
        "CFBundleInfoDictionaryVersion": "6.0",
        "CFBundleLocalizations": list(languages),
        "CFBundleName": "Paceline",
        "CFBundlePackageType": "APPL",
        "CFBundleShortVersionString": numbers[0] if numbers else "0",
        "CFBundleVersion": numbers[0] if numbers else "0",
        "LSApplicationCategoryType": "public.app-category.developer-tools",
        "LSArchitecturePriority": ["arm64"],  # else macOS takes a script for Intel code and asks for Rosetta
        "LSMinimumSystemVersion": FIRST_MACOS,
        "LSUIElement": True,
        "NSHighResolutionCapable": True,
    }


def launcher(launching: Launching) -> str:
    """Return the script that a double click runs; every inserted text is quoted."""
    home = f"export PACELINE_HOME={shlex.quote(launching.home)}\n" if launching.home else ""
    return SCRIPT.format(
        version=launching.version,
        python=shlex.quote(str(launching.python)),
        environment=home,
        moved=shlex.quote(launching.moved),
        dialog="".join(f" -e {shlex.quote(line)}" for line in DIALOG),
    )


def contents(launching: Launching, languages: tuple[str, ...]) -> dict[str, bytes]:
    """Return every file of the bundle except its record."""
    return {
        INFORMATION: plistlib.dumps(information(launching.version, languages)),
        LAUNCHER: os.fsencode(launcher(launching)),
        ICON: (ICONS / "paceline.icns").read_bytes(),
    }


def read_record(bundle: Path) -> BundleRecord | None:
    """Return the record of a bundle; None if there is no bundle. Raises `CommandError` for anything not ours."""
    if bundle.is_symlink() or (bundle.exists() and not bundle.is_dir()):
        raise CommandError(f"{bundle} is no app of Paceline's: move it away, or choose another folder with --folder")
    if not bundle.exists():
        return None
    record = read_kept(_inside(bundle, RECORD), BundleRecord, MAX_RECORD_BYTES)
    if record is None:
        raise CommandError(
            f"{bundle} was not written by `paceline app install`: move it away, or choose another folder with --folder"
        )
    return record


def install(folder: Path, launching: Launching, languages: tuple[str, ...]) -> str:
    """Write the bundle into `folder`, over an earlier one of ours; return what was done. Raises `CommandError`."""
    bundle = folder / NAME
    before = read_record(bundle)
    files = contents(launching, languages)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    made = before.folders_made if before else sum(not ancestor.exists() for ancestor in (folder, *folder.parents))
    record = BundleRecord(launching.version, launching.place, hashes, made)
    is_whole = before == record and not _differing(bundle, record)
    if is_whole:
        return f"{bundle} is installed already, for Paceline {launching.version}."
    with _explained(folder):
        # The record first, so that an interrupted install is still known to be ours.
        for name, content in {RECORD: msgspec.json.encode(record), **files}.items():
            path = _inside(bundle, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_privately(path, content)
            path.chmod(0o755 if name in EXECUTABLE else 0o644)
        _remove(bundle, {name: known for name, known in (before.files if before else {}).items() if name not in files})
    if before is None:
        return f"{bundle} is installed, for Paceline {launching.version}."
    return f"{bundle} was {_apart(before, launching)} and is now for Paceline {launching.version}."


def uninstall(folder: Path) -> str:
    """Remove exactly what was written; the returned report names other files there. Raises `CommandError`."""
    bundle = folder / NAME
    record = read_record(bundle)
    if record is None:
        return f"There is no {NAME} in {folder}."
    with _explained(folder):
        _remove(bundle, record.files)
        _inside(bundle, RECORD).unlink(missing_ok=True)
        for directory in (*(bundle / name for name in FOLDERS), *bundle.parents[: record.folders_made]):
            with contextlib.suppress(OSError):  # not empty
                directory.rmdir()
    if not bundle.exists():
        return f"{bundle} is removed."
    left = sorted(str(path.relative_to(bundle)) for path in bundle.rglob("*") if not path.is_dir())
    return f"What Paceline wrote is removed from {bundle}; this is not Paceline's and stays: {', '.join(left)}"


def status(folder: Path, launching: Launching) -> str:
    """Return a report: whether the bundle exists, is intact, and runs this installation. Raises `CommandError`."""
    bundle = folder / NAME
    record = read_record(bundle)
    if record is None:
        return f"{NAME} is not installed in {folder}: `paceline app install` does it."
    if broken := _differing(bundle, record):
        return f"{bundle} is damaged ({', '.join(broken)}): `paceline app install` repairs it."
    if (record.version, record.python) != (launching.version, launching.place):
        return f"{bundle} is {_apart(record, launching)}: `paceline app install` makes it run {launching.version}."
    return f"{bundle} is installed, for Paceline {record.version}."


def _apart(record: BundleRecord, launching: Launching) -> str:
    """Return how the existing bundle differs from this installation."""
    if record.version != launching.version:
        age = "newer" if version_order(record.version) > version_order(launching.version) else "older"
        return f"of Paceline {record.version} ({age} than this one)"
    if record.python != launching.place:
        return f"of another installation ({record.python})"
    return "of an earlier install"


def _differing(bundle: Path, record: BundleRecord) -> list[str]:
    """Return the files that are missing or changed."""
    return [name for name, known in record.files.items() if _hash(_inside(bundle, name)) != known]


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(read_file(path, MAX_FILE_BYTES)).hexdigest()
    except ModelUnavailable:
        return ""


def _remove(bundle: Path, files: Mapping[str, str]) -> None:
    """Remove the files that are unchanged since they were written."""
    for name, known in files.items():
        path = _inside(bundle, name)
        if not path.is_symlink() and _hash(path) == known:
            path.unlink()


def _inside(bundle: Path, name: str) -> Path:
    """Return the path of a file in the bundle. Raises `CommandError` if a record's name leads out of it."""
    path = bundle / name
    if not path.parent.resolve().is_relative_to(bundle.resolve()):
        raise CommandError(f"{path} leads out of {bundle}: remove the app by hand")
    return path


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise CommandError(f"{folder} cannot be written ({why}): choose another folder with --folder") from None
