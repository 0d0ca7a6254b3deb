"""`bench/mac_check.py` runs to its end on any computer, and says why a step cannot run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import mac_check
from tests.shares import LANDING


def ran(tmp_path: Path, *steps: str) -> dict[str, str]:
    file = tmp_path / "check.json"
    app = mac_check.typer.Typer()
    app.command()(mac_check.main)
    words = [word for step in steps for word in ("--step", step)]
    result = CliRunner().invoke(app, ["--json", str(file), *words])
    assert result.exit_code == 0, result.output
    facts = json.loads(file.read_text(encoding="utf-8"))
    assert all(fact["value"] in result.output.replace("\n", " ") or len(fact["value"]) > 40 for fact in facts)
    return {fact["what"]: fact["value"] for fact in facts}


def test_the_machine_and_its_operations_are_measured(tmp_path: Path) -> None:
    facts = ran(tmp_path, "machine", "operations", "attention")
    assert facts["chip"]
    assert facts["dependent operation"].endswith("µs")
    assert {name: value for name, value in facts.items() if name.startswith("heads of")} == {
        f"heads of {size}": "stores scores" for size in (64, 80, 96, 128, 192, 256, 512)
    }, "as a CPU does"


def test_a_step_that_cannot_run_says_why_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac_check, "paceline", lambda _context, *words: mac_check.output("no-such-program", *words))
    facts = ran(tmp_path, "service", "operations")
    assert facts["skipped"] == "there is no no-such-program here"
    assert "dependent operation" in facts


@pytest.mark.parametrize("step", [pytest.param("life", marks=LANDING)])
def test_a_server_lives_through_the_check(tmp_path: Path, step: str) -> None:
    assert {"start", "load of demo-assistant", "first answer", "second answer"} <= ran(tmp_path, step).keys()
