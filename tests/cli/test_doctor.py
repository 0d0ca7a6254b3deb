"""What `doctor` notices, and that each finding says what to do."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import application
from app.command import doctor
from app.core.server_file import RunningServer, held_home
from app.settings import Settings, read_settings
from tests.cli.fake_server import FakeServer


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return read_settings(home=tmp_path / "home", port=8710)


def test_a_healthy_computer(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/health/ready"] = (200, {"status": "ready"})
    result = CliRunner().invoke(application, ["doctor", "--json"], env=dict(environment))
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["ok"]
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    assert levels["server"] == levels["models"] == levels["package"] == levels["mlx"] == "ok"


def test_a_held_port_fails_and_names_the_holder(environment: Mapping[str, str], fake: FakeServer) -> None:
    fake.answers["/health/ready"] = (418, {})
    result = CliRunner().invoke(application, ["doctor"], env=dict(environment))
    assert result.exit_code == 1
    assert f"port {fake.port} is used by" in result.stdout
    assert "→" in result.stdout


def test_a_port_that_is_held_by_a_silent_program() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        (finding,) = doctor.check_port(read_settings(port=port), answer_seconds=0.1)
        assert finding.level == "fail"
        assert "process" in doctor.holder_of(port)


def test_a_free_port(settings: Settings) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    (finding,) = doctor.check_port(read_settings(port=port))
    assert finding.level == "ok"
    assert "paceline serve" in finding.action


def test_the_server_of_this_home_is_found_wherever_it_listens(settings: Settings, fake: FakeServer) -> None:
    fake.answers["/health/ready"] = (200, {"status": "ready"})
    with held_home(settings.home) as write:
        write(RunningServer("127.0.0.1", fake.port, "key"))
        (finding,) = doctor.check_port(settings)
    assert finding.message == f"ready at http://127.0.0.1:{fake.port}"


def test_a_worker_that_starts_is_a_warning(fake: FakeServer) -> None:
    fake.answers["/health/ready"] = (503, {})
    (finding,) = doctor.check_port(read_settings(port=fake.port))
    assert finding.level == "warn"


def test_another_owner_of_the_package_fails(settings: Settings) -> None:
    (finding,) = doctor.check_package_owner(settings, {"app": ["paceline", "some-template"]})
    assert finding.level == "fail"
    assert "some-template" in finding.message
    assert finding.action


def test_a_missing_folder_is_a_warning(tmp_path: Path) -> None:
    findings = list(doctor.check_folders(read_settings(model_dirs=(tmp_path, tmp_path / "gone"))))
    assert [finding.level for finding in findings] == ["ok", "warn"]


def test_a_broken_model_is_named_and_harms_no_other(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{", encoding="utf-8")
    findings = list(doctor.check_models(read_settings(model_dirs=(tmp_path,))))
    assert findings[0].level == "ok"
    assert any("broken" in finding.message and finding.level == "warn" for finding in findings)


def test_a_ceiling_above_the_memory_is_a_warning() -> None:
    (finding,) = doctor.check_memory(read_settings(memory_limit=1 << 60))
    assert finding.level == "warn"


def test_every_finding_that_is_not_ok_says_what_to_do(settings: Settings) -> None:
    findings = doctor.examine(settings)
    assert [finding for finding in findings if finding.level != "ok" and not finding.action] == []


def test_a_home_that_others_may_write_into_is_a_warning_with_the_command_to_run(settings: Settings) -> None:
    settings.home.mkdir()
    settings.home.chmod(0o777)
    (_, finding) = doctor.check_store(settings)
    assert finding.level == "warn"
    assert f"chmod 700 {settings.home}" in finding.action


def test_a_home_that_is_not_ours_alone_fails(settings: Settings) -> None:
    settings.home.mkdir()
    settings.home.chmod(0o1777)
    (finding,) = doctor.check_store(settings)
    assert finding.level == "fail"
    assert "set PACELINE_HOME" in finding.action
