"""A released wheel, installed by each installer on a computer that has no checkout."""

import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from app import __version__
from tests.architecture.source import ROOT, tracked_files
from tests.packaging.environments import (
    Distributions,
    Installed,
    run,
    with_pip,
    with_pipx,
    with_uv,
    write_hollow_wheel,
)

MAX_WHEEL_BYTES = 40_000_000
INSTALLERS: dict[str, Callable[[Path, Path, Path], Installed]] = {"uv tool": with_uv, "pipx": with_pipx}


def test_the_wheel_carries_every_file_of_the_app_and_no_other(built: Distributions) -> None:
    tracked = {path.relative_to(ROOT).as_posix() for path in tracked_files() if path.is_relative_to(ROOT / "app")}
    with zipfile.ZipFile(built.wheel) as wheel:
        record = f"paceline-{__version__}.dist-info/"
        assert {name for name in wheel.namelist() if not name.startswith(record)} == tracked
        assert f"Version: {__version__}\n" in wheel.read(f"{record}METADATA").decode()
    assert built.wheel.stat().st_size <= MAX_WHEEL_BYTES


def test_the_sdist_carries_what_the_wheel_is_built_from_and_the_locked_versions(built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        below = {name.split("/")[1] for name in archive.getnames()}
    assert below == {
        "app", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "requirements.lock", "PKG-INFO", ".gitignore"
    }  # fmt: skip


@pytest.mark.soak
@pytest.mark.landing
@pytest.mark.parametrize("kind", INSTALLERS)
def test_an_installed_tool_knows_how_it_is_updated(
    kind: str, built: Distributions, dependencies: Path, tmp_path: Path
) -> None:
    installed = INSTALLERS[kind](tmp_path, built.wheel, dependencies)
    assert installed.run("--version").strip() == f"paceline {__version__}"
    assert found_installation(installed) == (kind, "", f"update: {kind} upgrade paceline")
    assert found_installation(installed, **with_release(tmp_path, "999.0"))[1] == "999.0 is available"


@pytest.mark.soak
@pytest.mark.landing
def test_a_person_installs_starts_chats_and_uninstalls_and_nothing_is_left(
    built: Distributions, dependencies: Path, tmp_path: Path
) -> None:
    installed = with_pip(tmp_path, built.wheel, dependencies)
    update = f"update: {installed.python} -m pip install --upgrade paceline"
    assert found_installation(installed, **with_release(tmp_path, "999.0")) == ("pip", "999.0 is available", update)
    try:
        assert "Paceline is running at" in installed.run("start", "--port", "0", "--no-open")
        assert "8, 9, 10" in installed.run("chat", "demo-assistant", "--once", "Count from 1 to 10.")
    finally:
        installed.run("stop")
    installed.run("app", "install", "--folder", str(tmp_path / "My applications"))
    removed = installed.run("uninstall", "--all", "--yes")
    program = removed.splitlines()[-1].removeprefix("The program itself: ")
    run(tmp_path, *program.split(), "--yes")
    assert not installed.program.exists()
    shutil.rmtree(tmp_path / "environment")
    shutil.rmtree(tmp_path / "releases")
    shutil.rmtree(tmp_path / ".config")
    assert sorted(tmp_path.rglob("*")) == []


def with_release(home: Path, version: str) -> dict[str, str]:
    """Return the environment of a user whose installers find this release, and who has update checks on."""
    folder = home / "releases"
    folder.mkdir()
    write_hollow_wheel(folder, "paceline", version)
    settings = home / ".config" / "uv" / "uv.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"no-index = true\nfind-links = [{json.dumps(str(folder))}]\n", encoding="utf-8")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PACELINE_CHECK_UPDATES": "true"}


def found_installation(installed: Installed, **environment: str) -> tuple[str, str, str]:
    """Return what `paceline doctor` reports: the installer, the newer version, and the command to update."""
    findings = json.loads(installed.run("doctor", "--json", **environment))["findings"]
    entry = next(finding for finding in findings if finding["check"] == "paceline")
    how, _, newer = entry["message"].removeprefix(f"{__version__}, ").partition("; ")
    return how.partition(":")[0], newer, entry["action"]
