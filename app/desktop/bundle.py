"""`Paceline.app`: a bundle for the Finder that runs this installation; installed, checked and removed here.

It contains no copy of Paceline: its launcher is a `/bin/sh` script that runs the Python of this installation. A record
in the bundle lists the written files with hashes, so that uninstalling removes exactly these.
"""

import contextlib
import hashlib
import os
import plistlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from app import __version__
from app.command.autostart import APP_IDENTIFIER, environment_of, stable_python
from app.core.errors import CommandError, ModelUnavailable
from app.i18n.catalogs import Words
from app.machine.installation import version_order
from app.machine.own_files import read_json_as, write_privately
from app.models.safe_files import read_file
from app.settings import Settings

NAME = "Paceline.app"
ICONS = Path(__file__).parent / "icons"
INFO_PLIST, LAUNCHER = "Contents/Info.plist", "Contents/MacOS/paceline"
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
    """The record in a bundle: the version and Python that wrote the bundle, and each file with its SHA-256."""

    version: str
    python: str
    files: dict[str, str]
    folders_made: int = 0
    """Number of parent folders that were created for the bundle; they are removed with it if empty."""


@dataclass(frozen=True, slots=True)
class LauncherInfo:
    """Installation that the launcher runs."""

    version: str
    python: Path
    moved_message: str
    """Message for the user if that installation no longer exists."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the terminal has and the Finder lacks."""

    @property
    def python_text(self) -> str:
        """Path of the Python, as text for the record."""
        return os.fsencode(self.python).decode(errors="replace")


def launcher_info(settings: Settings, words: Words) -> LauncherInfo:
    """Return the launcher information for the installation that runs this command. Raises `CommandError`."""
    python, environment = stable_python(Path(sys.executable)), environment_of(settings)
    return LauncherInfo(__version__, python, words("desktop.moved"), environment)


def info_plist(version: str, languages: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of Info.plist, where versions may have at most three numbers."""
    numbers = re.match(r"\d+(?:\.\d+){0,2}", version)
    return {
        "CFBundleDevelopmentRegion": "en",
        "CFBundleDisplayName": "Paceline",
        "CFBundleExecutable": Path(LAUNCHER).name,
        "CFBundleIconFile": Path(ICON).name,
        "CFBundleIdentifier": APP_IDENTIFIER,
        "CFBundleInfoDictionaryVersion": "6.0",
        "CFBundleLocalizations": list(languages),
        "CFBundleName": "Paceline",
        "CFBundlePackageType": "APPL",
        "CFBundleShortVersionString": numbers[0] if numbers else "0",
        "CFBundleVersion": numbers[0] if numbers else "0",
        "LSApplicationCategoryType": "public.app-category.developer-tools",
        "LSArchitecturePriority": ["arm64"],  # else macOS takes the script for Intel code and asks for Rosetta
        "LSMinimumSystemVersion": FIRST_MACOS,
        "LSUIElement": True,
        "NSHighResolutionCapable": True,
    }


def launcher_script(info: LauncherInfo) -> str:
    """Return the script that a double click runs; every inserted text is quoted."""
    variables = ((name, value) for name, value in sorted(info.environment.items()) if name.isidentifier())
    return SCRIPT.format(
        version=info.version,
        python=shlex.quote(str(info.python)),
        environment="".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables),
        moved=shlex.quote(info.moved_message),
        dialog="".join(f" -e {shlex.quote(line)}" for line in DIALOG),
    )


def bundle_files(info: LauncherInfo, languages: tuple[str, ...]) -> dict[str, bytes]:
    """Return every file of the bundle except its record."""
    return {
        INFO_PLIST: plistlib.dumps(info_plist(info.version, languages)),
        LAUNCHER: os.fsencode(launcher_script(info)),
        ICON: (ICONS / "paceline.icns").read_bytes(),
    }


def read_record(bundle: Path) -> BundleRecord | None:
    """Return the record of a bundle; None if there is no bundle. Raises `CommandError` for anything not ours."""
    if bundle.is_symlink() or (bundle.exists() and not bundle.is_dir()):
        raise CommandError(f"{bundle} is not a Paceline app: move it away, or choose another folder with --folder")
    if not bundle.exists():
        return None
    record = read_json_as(_path_inside(bundle, RECORD), BundleRecord, MAX_RECORD_BYTES)
    if record is None:
        raise CommandError(
            f"{bundle} was not written by `paceline app install`: move it away, or choose another folder with --folder"
        )
    return record


def install(folder: Path, info: LauncherInfo, languages: tuple[str, ...]) -> str:
    """Write the bundle into `folder`, over an earlier one of ours; return a report. Raises `CommandError`."""
    bundle = folder / NAME
    previous = read_record(bundle)
    files = bundle_files(info, languages)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    folders_made = (
        previous.folders_made if previous else sum(not ancestor.exists() for ancestor in (folder, *folder.parents))
    )
    record = BundleRecord(info.version, info.python_text, hashes, folders_made)
    if previous == record and not _changed_files(bundle, record):
        return f"{bundle} is installed already, for Paceline {info.version}."
    with _translated_errors(folder):
        # The record is written first, so that an interrupted install is still recognised as ours.
        for name, content in {RECORD: msgspec.json.encode(record), **files}.items():
            path = _path_inside(bundle, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_privately(path, content)
            path.chmod(0o700 if name in EXECUTABLE else 0o644)  # a proxy's address may contain a password
        written = previous.files if previous else {}
        _remove(bundle, {name: written[name] for name in written.keys() - files.keys()})
    if previous is None:
        return f"{bundle} is installed, for Paceline {info.version}."
    return f"{bundle} was {_difference_text(previous, info)} and is now for Paceline {info.version}."


def uninstall(folder: Path) -> str:
    """Remove exactly the files that were written; return a report that names any other files. Raises `CommandError`."""
    bundle = folder / NAME
    record = read_record(bundle)
    if record is None:
        return f"There is no {NAME} in {folder}."
    with _translated_errors(folder):
        _remove(bundle, record.files)
        _path_inside(bundle, RECORD).unlink(missing_ok=True)
        for directory in (*(bundle / name for name in FOLDERS), *bundle.parents[: record.folders_made]):
            with contextlib.suppress(OSError):  # not empty
                directory.rmdir()
    if not bundle.exists():
        return f"{bundle} is removed."
    remaining = sorted(str(path.relative_to(bundle)) for path in bundle.rglob("*") if not path.is_dir())
    return f"What Paceline wrote is removed from {bundle}; this is not Paceline's and stays: {', '.join(remaining)}"


def status(folder: Path, info: LauncherInfo) -> str:
    """Return a report: whether the bundle exists, is intact, and runs this installation. Raises `CommandError`."""
    bundle = folder / NAME
    record = read_record(bundle)
    if record is None:
        return f"{NAME} is not installed in {folder}: `paceline app install` does it."
    if broken := _changed_files(bundle, record):
        return f"{bundle} is damaged ({', '.join(broken)}): `paceline app install` repairs it."
    if (record.version, record.python) != (info.version, info.python_text):
        return f"{bundle} is {_difference_text(record, info)}: `paceline app install` makes it run {info.version}."
    return f"{bundle} is installed, for Paceline {record.version}."


def _difference_text(record: BundleRecord, info: LauncherInfo) -> str:
    """Return how the existing bundle differs from this installation."""
    if record.version != info.version:
        age = "newer" if version_order(record.version) > version_order(info.version) else "older"
        return f"of Paceline {record.version} ({age} than this one)"
    if record.python != info.python_text:
        return f"of another installation ({record.python})"
    return "of an earlier install"


def _changed_files(bundle: Path, record: BundleRecord) -> list[str]:
    """Return the files that are missing or changed."""
    return [name for name, expected_hash in record.files.items() if _hash(_path_inside(bundle, name)) != expected_hash]


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(read_file(path, MAX_FILE_BYTES)).hexdigest()
    except ModelUnavailable:
        return ""


def _remove(bundle: Path, files: Mapping[str, str]) -> None:
    """Remove the files that are unchanged since they were written."""
    for name, expected_hash in files.items():
        path = _path_inside(bundle, name)
        if not path.is_symlink() and _hash(path) == expected_hash:
            path.unlink()


def _path_inside(bundle: Path, name: str) -> Path:
    """Return the path of a file in the bundle. Raises `CommandError` if a record's name leads out of it."""
    path = bundle / name
    if not path.parent.resolve().is_relative_to(bundle.resolve()):
        raise CommandError(f"{path} leads out of {bundle}: remove the app by hand")
    return path


@contextlib.contextmanager
def _translated_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandError(f"{folder} cannot be written ({reason}): choose another folder with --folder") from None
