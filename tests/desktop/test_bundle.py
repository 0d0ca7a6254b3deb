"""`Paceline.app`: its Info.plist, its launcher, and that uninstalling it removes nothing else."""

import hashlib
import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from app import __version__
from app.command.autostart import stable_python
from app.core.errors import CommandError
from app.desktop.bundle import (
    ICON,
    INFO_PLIST,
    LAUNCHER,
    NAME,
    RECORD,
    BundleRecord,
    LauncherInfo,
    info_plist,
    install,
    launcher_script,
    status,
    uninstall,
)
from app.i18n.catalogs import languages

DOCUMENTED = {
    "CFBundleDevelopmentRegion": str,
    "CFBundleDisplayName": str,
    "CFBundleExecutable": str,
    "CFBundleIconFile": str,
    "CFBundleIdentifier": str,
    "CFBundleInfoDictionaryVersion": str,
    "CFBundleLocalizations": list,
    "CFBundleName": str,
    "CFBundlePackageType": str,
    "CFBundleShortVersionString": str,
    "CFBundleVersion": str,
    "LSApplicationCategoryType": str,
    "LSArchitecturePriority": list,
    "LSMinimumSystemVersion": str,
    "LSUIElement": bool,
    "NSHighResolutionCapable": bool,
}
"""Types that Apple documents for the keys of an Info.plist (Bundle Resources); its arrays here contain strings."""
LAUNCHING = LauncherInfo("1.2.0", Path("/opt/paceline/bin/python"), "It has moved.")


def written(folder: Path, launching: LauncherInfo = LAUNCHING) -> str:
    return install(folder, launching, languages())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_information_has_the_types_that_apple_documents(tmp_path: Path) -> None:
    written(tmp_path)
    read = plistlib.loads((tmp_path / NAME / INFO_PLIST).read_bytes())
    assert {key: type(value) for key, value in read.items()} == DOCUMENTED
    assert all(isinstance(item, str) for value in read.values() if isinstance(value, list) for item in value)


def test_the_information_names_what_is_in_the_bundle(tmp_path: Path) -> None:
    written(tmp_path)
    bundle = tmp_path / NAME
    read = plistlib.loads((bundle / INFO_PLIST).read_bytes())
    assert os.access(bundle / "Contents" / "MacOS" / read["CFBundleExecutable"], os.X_OK)
    assert (bundle / "Contents" / "Resources" / read["CFBundleIconFile"]).read_bytes().startswith(b"icns")
    assert (read["CFBundlePackageType"], read["LSUIElement"]) == ("APPL", True)
    assert set(read["CFBundleLocalizations"]) == {"en", "ja", "ko", "zh-Hans"}
    assert set(read["CFBundleIdentifier"]) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-.")


@pytest.mark.parametrize(("version", "number"), [("1.2.0", "1.2.0"), ("1.3.0rc1", "1.3.0"), ("2.0.0.dev3", "2.0.0")])
def test_a_version_is_told_as_three_numbers(version: str, number: str) -> None:
    read = info_plist(version, ("en",))
    assert (read["CFBundleShortVersionString"], read["CFBundleVersion"]) == (number, number)


def program(path: Path, *lines: str) -> Path:
    """Write a program that runs `lines`, then prints its arguments, each in brackets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, 'for word; do printf "[%s]" "$word"; done', "echo"]))
    path.chmod(0o755)
    return path


def double_click(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher as the Finder does: with almost no environment, from the root folder."""
    own = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run([script], cwd="/", env=own, capture_output=True, text=True, check=False)


def test_a_double_click_runs_the_python_of_this_installation_wherever_it_lies(tmp_path: Path) -> None:
    python = program(tmp_path / 'Ann\'s "tools" $HOME `x` \\ 도구' / "python", 'echo "$PACELINE_HOME"')
    script = tmp_path / "paceline"
    launching = LauncherInfo("1.2.0", python, "It has moved.", {"PACELINE_HOME": "/her 'state'"})
    script.write_bytes(os.fsencode(launcher_script(launching)))
    script.chmod(0o755)
    ran = double_click(script)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("/her 'state'\n[-P][-m][app.cli][app][open]\n")


def test_a_double_click_after_the_installation_moved_says_so_in_a_dialog(tmp_path: Path) -> None:
    moved = 'It\'s "gone" $HOME `id`.'
    script = tmp_path / "paceline"
    script.write_bytes(os.fsencode(launcher_script(LauncherInfo("1.2.0", tmp_path / "gone", moved))))
    script.chmod(0o755)
    shown = tmp_path / "shown"
    program(tmp_path / "bin" / "osascript", f"exec >{shown}")
    ran = double_click(script, PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert (ran.returncode, ran.stderr) == (1, moved + "\n")
    assert shown.read_text().endswith(f"[-e][end run][{moved}]\n")


def test_a_python_without_paceline_is_told_in_the_same_way(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
    script = tmp_path / "paceline"
    script.write_bytes(os.fsencode(launcher_script(LauncherInfo("1.2.0", empty / "bin" / "python", "It has moved."))))
    script.chmod(0o755)
    ran = double_click(script)
    assert (ran.returncode, ran.stderr) == (1, "It has moved.\n")


def test_an_app_that_is_uninstalled_leaves_its_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "Other.app").mkdir()
    before = sorted(tmp_path.rglob("*"))
    folder = tmp_path / "deep" / "Applications"
    assert written(folder) == f"{folder / NAME} is installed, for Paceline 1.2.0."
    assert status(folder, LAUNCHING) == f"{folder / NAME} is installed, for Paceline 1.2.0."
    assert uninstall(folder) == f"{folder / NAME} is removed."
    assert sorted(tmp_path.rglob("*")) == before
    assert uninstall(folder) == f"There is no {NAME} in {folder}."


def test_a_file_that_somebody_else_put_there_stays_and_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    own = tmp_path / NAME / "Contents" / "Resources" / "notes.txt"
    own.write_text("mine")
    (tmp_path / NAME / ICON).write_bytes(b"my own icon")
    said = uninstall(tmp_path)
    assert said.endswith("stays: Contents/Resources/notes.txt, Contents/Resources/paceline.icns")
    assert tree(tmp_path) == {f"{NAME}/Contents/Resources/notes.txt": b"mine", f"{NAME}/{ICON}": b"my own icon"}


def test_installing_again_changes_nothing_and_says_so(tmp_path: Path) -> None:
    written(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert written(tmp_path).endswith("is installed already, for Paceline 1.2.0.")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("other", "age"), [("1.10.0", "newer"), ("1.2.0rc1", "older"), ("0.9.0", "older")])
def test_the_app_of_another_version_is_told_and_replaced(tmp_path: Path, other: str, age: str) -> None:
    written(tmp_path, LauncherInfo(other, LAUNCHING.python, LAUNCHING.moved_message))
    assert f"is of Paceline {other} ({age} than this one): `paceline app install`" in status(tmp_path, LAUNCHING)
    assert f"was of Paceline {other} ({age} than this one) and is now for Paceline 1.2.0" in written(tmp_path)
    assert status(tmp_path, LAUNCHING).endswith("is installed, for Paceline 1.2.0.")


def test_what_an_earlier_version_wrote_and_this_one_does_not_goes_unless_it_was_changed(tmp_path: Path) -> None:
    written(tmp_path)
    contents, record = tmp_path / NAME / "Contents", tmp_path / NAME / RECORD
    for name in ("PkgInfo", "changed"):
        (contents / name).write_text("APPL????")
    known = msgspec.json.decode(record.read_bytes(), type=BundleRecord)
    hashes = known.files | {
        f"Contents/{name}": hashlib.sha256(b"APPL????").hexdigest() for name in ("PkgInfo", "changed")
    }
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, version="1.1.0", files=hashes)))
    (contents / "changed").write_text("mine")
    written(tmp_path)
    assert not (contents / "PkgInfo").exists()
    assert (contents / "changed").read_text() == "mine"


def test_a_damaged_app_is_told_and_repaired(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / NAME / LAUNCHER).unlink()
    assert f"is damaged ({LAUNCHER})" in status(tmp_path, LAUNCHING)
    written(tmp_path)
    assert status(tmp_path, LAUNCHING).endswith("is installed, for Paceline 1.2.0.")


def test_the_app_of_another_installation_is_told(tmp_path: Path) -> None:
    written(tmp_path, LauncherInfo("1.2.0", Path("/elsewhere/python"), "It has moved."))
    assert "is of another installation (/elsewhere/python)" in status(tmp_path, LAUNCHING)


def test_an_app_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "folder" / NAME / "Contents"
    foreign.mkdir(parents=True)
    (foreign / "Info.plist").write_text("theirs")
    (tmp_path / "linked").mkdir()
    written(tmp_path / "elsewhere")
    (tmp_path / "linked" / NAME).symlink_to(tmp_path / "elsewhere" / NAME)
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / NAME).write_text("theirs")
    before = tree(tmp_path)
    for name in ("folder", "linked", "file"):
        for deed in (written, uninstall):
            with pytest.raises(CommandError, match="move it away"):
                deed(tmp_path / name)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["../../mine.txt", "Contents/link/mine.txt"])
def test_a_record_that_names_files_elsewhere_removes_none(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "Applications"
    written(folder)
    (tmp_path / "mine.txt").write_text("mine")
    (folder / NAME / "Contents" / "link").symlink_to(tmp_path)
    hashes = {name: "3a1d7a1a6d1a9a8d9a3f6f2c7a3b5c1d"}
    (folder / NAME / RECORD).write_bytes(msgspec.json.encode(BundleRecord("1.0.0", "python", hashes, 1 << 60)))
    with pytest.raises(CommandError, match="leads out of"):
        uninstall(folder)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "Applications").write_text("a file")
    with pytest.raises(CommandError, match="choose another folder with --folder"):
        written(tmp_path / "Applications")


def test_homebrew_python_is_known_by_the_path_that_updates_keep(tmp_path: Path) -> None:
    cellar = tmp_path / "Cellar" / "paceline" / "1.2.0" / "libexec" / "bin" / "python"
    kept = tmp_path / "opt" / "paceline" / "libexec" / "bin" / "python"
    assert stable_python(cellar) == cellar
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert stable_python(cellar) == kept


def test_the_command_installs_tells_and_uninstalls(tmp_path: Path) -> None:
    own: Mapping[str, str] = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "LANG": "ko_KR.UTF-8"}

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "app.cli", "app", *words, "--folder", "Programs"]
        return subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=True).stdout

    bundle = tmp_path / "Programs" / NAME
    assert said("install") == f"{bundle} is installed, for Paceline {__version__}.\n"
    script = (bundle / LAUNCHER).read_text(encoding="utf-8")
    assert sys.executable in script
    assert "다시 설치" in script
    assert "PACELINE_HOME" not in script
    assert said("status") == f"{bundle} is installed, for Paceline {__version__}.\n"
    assert said("uninstall") == f"{bundle} is removed.\n"
    assert list(tmp_path.iterdir()) == []
