"""A release: its notes from the changelog, its Homebrew formula from the lock, and the workflow that publishes it; and
the workflow that tests and measures on a Mac."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from app import __version__
from tests.architecture.source import ROOT
from tools.release import NotReady, formula, locked_for_macos, main, notes, wheels_of

CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-11-30

### Added

- A menu bar.

## [0.1.0] - 2026-11-01

- The first.
"""
LOCK = """\
mlx==0.32.4 ; platform_machine == 'arm64' and sys_platform == 'darwin' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
mlx-cpu==0.32.4 ; sys_platform == 'linux' \\
    --hash=sha256:cc
rich==15.0.0 \\
    --hash=sha256:dd
tomli==2.0 ; python_full_version < '3.11' \\
    --hash=sha256:ee
"""
RICH = ("rich", "https://index.example/rich-15.0.0-py3-none-any.whl", "dd")


def report(*packages: tuple[str, str, str]) -> dict[str, object]:
    """Return the parts of pip's `--report` that a formula needs."""
    return {
        "version": "1",
        "install": [
            {
                "metadata": {"name": name, "version": "1"},
                "download_info": {"url": url, "archive_info": {"hashes": {"sha256": sha256}}},
            }
            for name, url, sha256 in packages
        ],
    }


def test_the_notes_are_the_changelogs_section_of_the_tag() -> None:
    assert notes(CHANGELOG, "v0.2.0", "0.2.0") == "### Added\n\n- A menu bar.\n"


@pytest.mark.parametrize(
    ("tag", "version", "why"),
    [
        ("v0.3.0", "0.2.0", "app/__init__.py says 0.2.0"),
        ("0.2.0", "0.2.0", "tag v0.2.0"),
        ("v0.3.0", "0.3.0", "rename `[Unreleased]`"),
        ("v0.2", "0.2", "rename `[Unreleased]`"),
    ],
)
def test_what_does_not_agree_is_not_released(tag: str, version: str, why: str) -> None:
    with pytest.raises(NotReady, match=re.escape(why)):
        notes(CHANGELOG, tag, version)


def test_a_tag_that_the_project_does_not_have_ends_the_command_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["notes", "v999.0"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_mac_gets_its_own_locked_packages_with_all_their_hashes() -> None:
    assert [line.split() for line in locked_for_macos(LOCK)] == [
        ["mlx==0.32.4", "--hash=sha256:aa", "--hash=sha256:bb"],
        ["rich==15.0.0", "--hash=sha256:dd"],
    ]


def test_the_locks_give_a_mac_the_menu_bar_and_metal_and_nothing_of_linux() -> None:
    names = {line.partition("==")[0] for line in locked_for_macos((ROOT / "requirements-desktop.lock").read_text())}
    assert {"mlx", "mlx-metal", "mlx-lm", "pyobjc-framework-cocoa", "fastapi"} <= names
    assert not names & {"mlx-cpu", "mlx-cuda", "pyside6-essentials"}


def test_the_desktop_lock_pins_what_the_plain_one_does() -> None:
    plain, desktop = (
        dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))
        for name in ("requirements.lock", "requirements-desktop.lock")
    )
    assert desktop.items() >= plain.items()


def test_a_formula_holds_each_wheel_once_and_those_of_one_system_in_its_block() -> None:
    own = "https://index.example/mlx-{}.whl"
    text = formula(
        "https://releases.example/paceline-1-py3-none-any.whl",
        "ff",
        "https://home.example",
        {
            "macosx_14_0_arm64": wheels_of(report(RICH, ("mlx", own.format(14), "14"))),
            "macosx_26_0_arm64": wheels_of(report(RICH, ("mlx", own.format(26), "26"))),
        },
    )
    assert text.count('resource "rich"') == 1
    assert text.index('resource "rich"') < text.index("on_sonoma do") < text.index(own.format(14))
    assert text.index(own.format(14)) < text.index("on_tahoe :or_newer do") < text.index(own.format(26))
    assert "depends_on macos: :sonoma" in text
    assert f'version "{__version__}"' in text


def test_nothing_is_published_that_was_not_checked_built_and_tried() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert [jobs[name].get("needs") for name in ("check", "build", "try", "publish")] == [
        None, ["check", "soak"], "build", "try"
    ]  # fmt: skip
    lines = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert ".ci/run" in lines
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {name for line in lines for name in re.findall(r"\bmake ([a-z-]+)", line)} <= targets
    for path in re.findall(r"\b(?:tools|\.ci)/[\w./]+", " ".join(lines)):
        assert Path(ROOT, path).is_file()


def test_a_mac_is_checked_tested_and_measured_and_the_figures_bear_its_chip(tmp_path: Path) -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "mac.yml").read_text())["jobs"].values()
    assert job["runs-on"] == "macos-15", "the label's runners are Apple silicon"
    steps = job["steps"]
    lines = " && ".join(step.get("run", "") for step in steps)
    called = [name for words in re.findall(r"\bmake ([a-z -]+)", lines) for name in words.split()]
    assert called == ["install", "check", "test-all", "bench", "mac-check"]
    (kept,) = (step["with"] for step in steps if step.get("uses", "").startswith("actions/upload-artifact@"))
    assert f"--json {kept['path']}/" in lines
    assert kept["name"] == "bench-${{ steps.chip.outputs.name }}"
    (chip,) = (step["run"] for step in steps if step.get("id") == "chip")
    stand_in = tmp_path / "sysctl"
    stand_in.write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M1 (Virtual)"\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_OUTPUT": str(tmp_path / "output")}
    subprocess.run(["bash", "-ec", chip], env=environment, check=True)
    assert (tmp_path / "output").read_text() == "name=Apple-M1-Virtual\n"
