"""Detection of how this copy was installed, and of the version that an update would bring."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.machine.installation import Installation, editable_source, installation_of, newer_version, newest_in


@pytest.mark.parametrize(
    ("marker", "installer", "kind", "update", "desktop"),
    [
        (
            "uv-receipt.toml",
            "uv",
            "uv tool",
            "uv tool upgrade paceline",
            "uv tool install --force 'paceline[desktop]'",
        ),
        ("pipx_metadata.json", "pip", "pipx", "pipx upgrade paceline", "pipx install --force 'paceline[desktop]'"),
        (
            "",
            "uv",
            "uv",
            "uv pip install --python '/my env/python' --upgrade paceline",
            "uv pip install --python '/my env/python' --upgrade 'paceline[desktop]'",
        ),
        (
            "",
            "pip",
            "pip",
            "'/my env/python' -m pip install --upgrade paceline",
            "'/my env/python' -m pip install --upgrade 'paceline[desktop]'",
        ),
    ],
)
def test_every_way_to_install_has_its_own_way_to_update(
    tmp_path: Path, marker: str, installer: str, kind: str, update: str, desktop: str
) -> None:
    if marker:
        (tmp_path / marker).touch()
    installation = installation_of(tmp_path, Path("/my env/python"), installer, None)
    assert (installation.kind, installation.update, installation.desktop) == (kind, update, desktop)
    assert "uninstall" in installation.remove


@pytest.mark.parametrize(
    ("installer", "remove"),
    [
        ("uv", "uv pip uninstall --python /installs/python paceline"),
        ("pip", "/installs/python -m pip uninstall paceline"),
    ],
)
def test_a_folder_called_like_a_word_of_the_command_keeps_its_name(tmp_path: Path, installer: str, remove: str) -> None:
    assert installation_of(tmp_path, Path("/installs/python"), installer, None).remove == remove


def test_a_checkout_is_pulled_and_homebrew_upgrades_its_own(tmp_path: Path) -> None:
    origin = json.dumps({"url": f"file://{tmp_path}/my%20code", "dir_info": {"editable": True}})
    installation = installation_of(tmp_path, Path("python"), "pip", editable_source(origin))
    assert (installation.kind, installation.path) == ("checkout", tmp_path / "my code")
    assert installation.update.startswith(f"git -C '{tmp_path}/my code' pull")
    assert installation.desktop == f"make -C '{tmp_path}/my code' desktop"
    for other in ('{"url": "file:///x", "dir_info": {}}', '{"url": "x", "archive_info": {}}', "", "[]"):
        assert editable_source(other) is None
    cellar = tmp_path / "Cellar/paceline/1.0/libexec"
    assert installation_of(cellar, Path("python"), "pip", None).update == "brew upgrade paceline"
    assert installation_of(cellar, Path("python"), "pip", None).desktop == "brew reinstall paceline"


LISTING = "WARNING: no cache\npaceline (0.10.0)\nAvailable versions: 0.10.0, 0.9.0\n  INSTALLED: 0.9.0\n"
PIP_PLAN = "Looking up paceline\nCollecting paceline\nWould install paceline-0.10.0\n"
PLAN = "Resolved 1 package in 5ms\nWould install 1 package\n - paceline==0.9.0\n + paceline==0.10.0\n"
OUTDATED = '{"formulae":[{"name":"paceline","installed_versions":["0.9.0"],"current_version":"0.10.0_1"}],"casks":[]}'
TAGS = "1\trefs/tags/v0.10.0\n2\trefs/tags/v0.9.0\n3\trefs/tags/v0.11.0rc1\n4\trefs/tags/nightly\n"


@pytest.mark.parametrize(
    ("prefix", "marker", "installer", "source", "said"),
    [
        ("env", "", "pip", None, LISTING),
        ("env", "pipx_metadata.json", "pip", None, PIP_PLAN),
        ("env", "pipx_metadata.json", "uv", None, PLAN),
        ("env", "", "uv", None, PLAN),
        ("env", "uv-receipt.toml", "uv", None, PLAN),
        ("Cellar/paceline/0.9.0/libexec", "", "pip", None, OUTDATED),
        ("env", "", "", Path("/code"), TAGS),
    ],
    ids=["pip", "pipx", "pipx by uv", "uv", "uv tool", "Homebrew", "checkout"],
)
def test_each_installer_names_the_newest_version_in_its_own_way(
    tmp_path: Path, prefix: str, marker: str, installer: str, source: Path | None, said: str
) -> None:
    place = tmp_path / prefix
    place.mkdir(parents=True)
    if marker:
        (place / marker).touch()
    installation = installation_of(place, Path("/env/python"), installer, source)
    assert newest_in(said, installation.version_pattern, "0.9.0") == "0.10.0"
    assert newest_in(said, installation.version_pattern, "0.10.0") == ""
    assert newest_in(said, installation.version_pattern, "0.10.0rc1") == "0.10.0"
    assert newest_in("", installation.version_pattern, "0.9.0") == ""


def asked(*words: str) -> str:
    installation = Installation("pip", Path(), "", "", words, r"^paceline \((\S+)\)")
    return asyncio.run(newer_version(installation, "1.0"))


def test_an_answer_counts_whatever_the_exit_code() -> None:
    assert asked(sys.executable, "-c", "print('paceline (2.0)'); exit(1)") == "2.0"


def test_who_cannot_tell_raises_with_what_was_said() -> None:
    with pytest.raises(OSError, match="no network"):
        asked(sys.executable, "-c", "exit('no network')")
    with pytest.raises(OSError, match="no-such-installer"):
        asked("no-such-installer")


def test_a_checkout_learns_of_the_tags_of_its_origin_and_fetches_nothing(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
        return subprocess.run(["git", *named, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q", "origin")
    git("-C", "origin", "commit", "-q", "--allow-empty", "-m", "Begin")
    git("clone", "-q", "origin", "mine")
    git("-C", "origin", "tag", "v2.0")
    installation = installation_of(tmp_path, Path(sys.executable), "", tmp_path / "mine")
    assert asyncio.run(newer_version(installation, "1.0")) == "2.0"
    assert asyncio.run(newer_version(installation, "2.0")) == ""
    assert git("-C", "mine", "tag") == ""
