"""`paceline uninstall` removes the chosen parts of what Paceline wrote, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import application
from app.desktop import bundle, removal
from app.i18n.catalogs import read_words
from app.settings import Settings, read_settings

OWN = {
    "caches": (
        "logs/paceline.log",
        "logs/paceline.log.4",
        "logs/start.log",
        f"costs/{'a' * 32}.json",
        f"prefixes/a-1/rows-{'2' * 64}.safetensors",
        f"prefixes/a-1/state-{'2' * 64}.123.part",
        "tokenizers.json",
        "window.json",
        "window/Cache/x",
    ),
    "state": (
        "paceline.sqlite3.before-0003",
        "paceline.sqlite3.damaged-20261126-120000-2-wal",
        "paceline.sqlite3.reserve",
        "hub_token",
        "languages/fr.json",
    ),
    "downloads": (
        "models/organisation/model/model.safetensors",
        "models/organisation/model/.paceline.json",
        f"models/.partial/organisation--other@{'1' * 40}/x",
        "models/.partial/organisation--other.lock",
    ),
}
STRANGERS = ("thesis.txt", "models.txt", "other/logs/paceline.log", "models/organisation/mine/model.safetensors")
STRANGERS_AMONG_OURS = (
    "logs/notes.txt",
    "logs/paceline.log.bak",
    "costs/2026.json",
    "prefixes/mine/model.safetensors",
    "prefixes/a-1/rows-2.safetensors",
    "paceline.sqlite3.mine",
    "paceline.sqlite3-copy",
    "open-door.html",
    "server.json.bak",
    "languages/words.txt",
    "models/.partial/organisation--other@mine/x",
    "models/.partial/notes.txt",
)
"""Files in our folders whose names we never write."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    home = tmp_path / "home"
    for name in (*(own for names in OWN.values() for own in names), *STRANGERS):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"12345678")
    return home


def run(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(application, ["uninstall", *words], input=typed)


def settings() -> Settings:
    return read_settings()


def there(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() or path.is_symlink()}


def test_it_lists_what_is_there_with_sizes_and_changes_nothing(home: Path) -> None:
    before = there(home)
    report = json.loads(run("--json").stdout)
    assert {part["name"]: part["size_bytes"] for part in report["parts"]} == {
        name: 8 * len(own) for name, own in OWN.items()
    }
    listed = run("--all", "--dry-run")
    assert listed.exit_code == 0
    for name in OWN:
        assert f"{name}: " in listed.stdout
    assert "program itself: " in listed.stdout
    assert there(home) == before


@pytest.mark.parametrize("name", OWN)
def test_a_part_that_is_named_goes_and_all_else_stays(home: Path, name: str) -> None:
    before = there(home)
    assert run(name, typed="n\n").exit_code == 1
    assert there(home) == before
    assert run(name, typed="y\n").exit_code == 0
    assert there(home) == before - set(OWN[name])


def test_everything_goes_but_what_is_not_ours_and_that_is_named(home: Path) -> None:
    for name in STRANGERS_AMONG_OURS:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"12345678")
    (home / "prefixes/linked-1").symlink_to(home / "prefixes/mine", target_is_directory=True)
    (home / "costs-elsewhere").mkdir()
    (home / "languages/link.json").symlink_to(home / "thesis.txt")
    result = run("--all", "--yes")
    assert result.exit_code == 0, result.output
    assert there(home) == {*STRANGERS, *STRANGERS_AMONG_OURS, "prefixes/linked-1", "languages/link.json"}
    assert "This stays in" in result.stdout
    assert "thesis.txt" in result.stdout


def test_an_empty_state_folder_goes_too(home: Path) -> None:
    for name in STRANGERS:
        (home / name).unlink()
    shutil.rmtree(home / "models/organisation/mine")
    (home / "other/logs").rmdir()
    (home / "other").rmdir()
    assert run("--all", "--yes").exit_code == 0
    assert not home.exists()
    assert "Nothing of Paceline's is here." in run().stdout


def test_models_on_another_disk_are_removed_where_paceline_downloaded_them_and_no_link_is_followed(
    home: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    (home / "models").rename(disk)
    (home / "models").symlink_to(disk)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".paceline.json").touch()
    (disk / "organisation/linked").symlink_to(elsewhere)
    assert run("downloads", "--yes").exit_code == 0
    assert there(disk) == {"organisation/mine/model.safetensors", "organisation/linked"}
    assert (elsewhere / ".paceline.json").exists()


@pytest.mark.parametrize("name", ["logs", "prefixes", "costs", "window", "languages"])
def test_a_folder_of_ours_that_is_a_link_stays_with_what_it_leads_to(home: Path, tmp_path: Path, name: str) -> None:
    (home / name).rename(tmp_path / "elsewhere")
    (home / name).symlink_to(tmp_path / "elsewhere")
    before = there(tmp_path / "elsewhere")
    result = run("--all", "--yes")
    assert result.exit_code == 0, result.output
    assert there(tmp_path / "elsewhere") == before
    assert name in result.stdout.rpartition("This stays in")[2]


def test_the_app_goes_as_its_own_command_takes_it_away(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Applications"
    bundle.install(folder, bundle.launcher_info(settings(), read_words()), ("en",))
    assert "app" in {part.name for part in removal.installed_parts(settings())}
    assert run("app", "--yes").exit_code == 0
    assert not (folder / bundle.NAME).exists()


def test_an_app_in_another_folder_is_known(home: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "My applications", tmp_path / "Applications"]
    for folder in folders:
        for _ in range(2):
            done = CliRunner().invoke(application, ["app", "install", "--folder", str(folder)])
            assert done.exit_code == 0, done.output
    (part,) = (part for part in removal.installed_parts(settings()) if part.name == "app")
    assert set(part.paths) == {folder / bundle.NAME for folder in folders}
    assert run("--all", "--yes").exit_code == 0
    assert not any(folder.exists() for folder in folders)
    assert there(home) == set(STRANGERS)


def test_an_app_of_somebody_else_is_not_listed_and_keeps_nothing_from_going(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "Applications" / bundle.NAME
    other.mkdir(parents=True)
    assert "app" not in {part.name for part in removal.installed_parts(settings())}
    result = run("--all", "--yes")
    assert result.exit_code == 0, result.output
    assert there(home) == set(STRANGERS)
    assert other.is_dir()


def test_a_state_folder_that_is_a_link_is_emptied_and_stays(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(home, target_is_directory=True)
    monkeypatch.setenv("PACELINE_HOME", str(link))
    for name in STRANGERS:
        (home / name).unlink()
    shutil.rmtree(home / "other")
    shutil.rmtree(home / "models/organisation/mine")
    result = run("--all", "--yes")
    assert result.exit_code == 0, result.output
    assert link.is_symlink()
    assert list(home.iterdir()) == []


def test_a_part_that_is_no_part_is_one_line(home: Path) -> None:
    result = run("everything")
    assert result.exit_code == 1
    assert "name some of service, app, downloads, caches, state" in result.stderr
