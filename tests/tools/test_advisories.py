"""The advisory scan of the gate: it names vulnerable packages, and never fails the gate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tools.advisories import findings, scan

RECORDED = {
    "dependencies": [
        {"name": "alembic", "version": "1.20.1", "vulns": []},
        {
            "name": "jinja2",
            "version": "3.1.6",
            "vulns": [
                {
                    "id": "CVE-2025-27516",
                    "fix_versions": ["9.1.6"],
                    "aliases": ["GHSA-cpwx-vrp4-4pq7"],
                    "description": "Jinja2 vulnerable to sandbox breakout\nthrough attr filter",
                }
            ],
        },
    ],
    "fixes": [],
}
"""Output of pip-audit 2.10.1 for our lock files, from a service that knows one vulnerability."""
WARNING = (
    "WARNING: jinja2 3.1.6 has a known vulnerability, CVE-2025-27516 (repaired in 9.1.6; `make lock` takes it): "
    "Jinja2 vulnerable to sandbox breakout through attr filter"
)


def test_a_vulnerable_package_is_named_with_what_repairs_it() -> None:
    assert findings(RECORDED) == [WARNING]


def test_without_a_finding_it_says_how_many_were_compared_and_which_were_not() -> None:
    sound = {"dependencies": RECORDED["dependencies"][:1], "fixes": []}
    assert findings(sound) == ["1 locked packages, no known vulnerability."]
    sound["dependencies"] = [*sound["dependencies"], {"name": "ours", "skip_reason": "not on the index"}]
    assert findings(sound) == ["WARNING: not compared with known vulnerabilities: ours."]


def test_a_finding_ends_the_tool_with_1_and_the_scan_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "audit.py").write_text(f"import sys; print({json.dumps(RECORDED)!r}); sys.exit(1)")
    assert scan([], [sys.executable, str(tmp_path / "audit.py")]) == [WARNING]


@pytest.mark.parametrize("said", ["", "no JSON", "[]", '{"dependencies": null}', '{"dependencies": [{"vulns": [{}]}]}'])
def test_a_service_that_cannot_be_asked_or_read_is_a_warning(said: str, tmp_path: Path) -> None:
    (tmp_path / "audit.py").write_text(f"import sys; print({said!r}); sys.exit(1)")
    for command in ([sys.executable, str(tmp_path / "audit.py")], [str(tmp_path / "missing")]):
        (line,) = scan(["requirements.lock"], command)
        assert line.startswith("WARNING: the locked packages were not compared with known vulnerabilities: ")


def test_the_command_ends_well_whatever_it_found(tmp_path: Path) -> None:
    script = str(ROOT / "tools" / "advisories.py")
    ran = subprocess.run(
        [sys.executable, script, str(tmp_path / "no.lock")], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("WARNING: ")
