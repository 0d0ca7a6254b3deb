"""Finds documents that lag behind the code."""

import re
from typing import Any

import pytest
import typer

from app import __version__
from app.cli import application
from app.core import errors
from tests.architecture.endpoints_table import endpoints_tables
from tests.architecture.settings_table import VARIABLES, settings_table
from tests.architecture.source import PACKAGE, ROOT

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(application)
    return dict(group.commands)


def test_every_command_and_option_is_documented() -> None:
    page = read("docs/commands.md")
    missing = [f"paceline {name}" for name in commands() if f"paceline {name}" not in page]
    for command in commands().values():
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        missing += [f"{command.name} {option}" for option in sorted(options - {"--help"}) if option not in page]
    assert missing == []


def test_every_endpoint_is_documented() -> None:
    assert endpoints_tables() in read("docs/api.md"), "run python -m tests.architecture.endpoints_table"


def test_every_setting_is_documented() -> None:
    page = read("docs/settings.md")
    assert [name for name in (*VARIABLES, "PACELINE_OPENBLAS") if f"`{name}`" not in page] == []


def test_of_each_setting_the_documents_tell_what_the_schema_says() -> None:
    assert settings_table() in read("docs/settings.md"), "run python -m tests.architecture.settings_table"


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES])
def test_no_document_names_a_setting_that_is_gone(document: str) -> None:
    named = set(re.findall(r"PACELINE_[A-Z_]+", read(document)))
    assert named - set(VARIABLES) - {"PACELINE_OPENBLAS"} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_make_targets_that_documents_name_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`|    )make ([a-z-]+)", read(document), re.MULTILINE))
    assert named - targets == set()


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES, "CHANGELOG.md"])
def test_the_files_that_documents_name_exist(document: str) -> None:
    text = read(document)
    folder = (ROOT / document).parent
    named = set(re.findall(r"`((?:app|tests|bench|tools|docs)/[\w./-]+)`", text))
    linked = {target for target in re.findall(r"\]\(([\w./-]+)\)", text) if "://" not in target}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert [name for name in sorted(linked) if not (folder / name).exists()] == []


def test_the_architecture_names_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"app/{name}/" not in read("ARCHITECTURE.md")] == []


def test_the_changelog_has_this_version() -> None:
    assert re.search(
        rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d{{2}}-\d{{2}}$", read("CHANGELOG.md"), re.MULTILINE
    )


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    drawn = set(re.findall(r"[├└│─ ]*\b([A-Z]\w+)", (errors.__doc__ or "").partition("\n\n")[2], re.MULTILINE))
    real = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert real <= drawn
