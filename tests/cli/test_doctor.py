"""Findings of `doctor`: each names a problem and says what to do."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import application
from app.command import doctor
from app.command.listing import ModelRow
from app.core.messages import Pressure
from app.machine.host import chip_name
from app.machine.server_file import RunningServer, lock_home
from app.serving.live_settings import LiveSettings
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
        assert f"(process {os.getpid()})" in finding.message


def test_a_free_port(settings: Settings) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    (finding,) = doctor.check_port(read_settings(port=port))
    assert finding.level == "ok"
    assert "paceline serve" in finding.action


def test_the_server_of_this_home_is_found_wherever_it_listens(settings: Settings, fake: FakeServer) -> None:
    fake.answers["/health/ready"] = (200, {"status": "ready"})
    with lock_home(settings.home) as write:
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


def test_a_folder_that_macos_forbids_to_the_server_is_named_with_the_place_of_the_switch(
    settings: Settings, fake: FakeServer, tmp_path: Path
) -> None:
    denied = {"folder": str(tmp_path), "problem": "forbidden"}
    fake.answers["/admin/api/models"] = (200, {"folders": ["a name, as older servers say", denied]})
    settings = settings.model_copy(update={"model_dirs": (tmp_path,)})
    with lock_home(settings.home) as write:
        write(RunningServer("127.0.0.1", fake.port, "key"))
        (finding,) = doctor.check_folders(settings)
    assert (finding.level, finding.message) == ("warn", f"{tmp_path} may not be read")
    assert "Privacy & Security" in finding.action


@pytest.mark.parametrize(
    ("chip", "macos", "wheel", "level"),
    [
        ("Apple M4 Max", "15.5", "macosx_15_0_arm64", ""),
        ("Apple M5", "26.2", "macosx_26_0_arm64", "ok"),
        ("Apple M5 Pro", "26.3.1", "macosx_15_0_arm64", "warn"),  # its Python takes macOS 26 for 16
        ("Apple M5", "26.1", "macosx_26_0_arm64", "warn"),
        ("Apple M6", "27.0", "macosx_26_0_arm64", "ok"),
        ("AMD EPYC", "", "", ""),
    ],
)
def test_a_chip_with_neural_accelerators_is_told_where_mlx_cannot_use_them(
    chip: str, macos: str, wheel: str, level: str
) -> None:
    finding = doctor.accelerator_finding(chip, macos, f"Tag: py3-none-{wheel}\n")
    assert (finding.level if finding else "") == level


def test_a_variable_without_effect_is_named_with_the_one_that_was_meant(settings: Settings) -> None:
    environment = {"PACELINE_REQUIRE_KEYS": "1", "PACELINE_OPENBLAS": "0", "PACELINE_PORT": "1", "PACELINER": "2"}
    (finding,) = doctor.check_variables(settings, environment)
    assert (finding.level, finding.message) == ("warn", "PACELINE_REQUIRE_KEYS is not a setting and has no effect")
    assert "PACELINE_REQUIRE_KEY " in finding.action
    (other,) = doctor.check_variables(settings, {"PACELINE_XYZZY": ""})
    assert other.action.startswith("docs/settings.md")


def test_a_python_for_intel_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "sysctl_number", lambda _name: 1)
    (finding,) = doctor.check_platform(settings)
    assert (finding.level, "Rosetta" in finding.message) == ("fail", True)


def test_a_broken_model_is_named_and_harms_no_other(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{", encoding="utf-8")
    findings = list(doctor.check_models(read_settings(model_dirs=(tmp_path,))))
    assert findings[0].level == "ok"
    assert any("broken" in finding.message and finding.level == "warn" for finding in findings)


def test_drafters_alone_are_no_usable_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ModelRow("drafter", "eagle3", "local", 1_000, 0, draft="", problem="", path="drafter")
    monkeypatch.setattr(doctor, "models_on_disk", lambda _live: [row])
    (finding,) = doctor.check_models(read_settings(model_dirs=(tmp_path,)))
    assert (finding.level, finding.message) == ("fail", "no usable model")


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


def test_the_platform_is_named_with_its_chip(settings: Settings) -> None:
    (finding,) = doctor.check_platform(settings)
    assert chip_name() in finding.message


@pytest.mark.parametrize(("pressure", "level"), [("normal", "ok"), ("warning", "warn"), ("critical", "warn")])
def test_a_lack_of_memory_is_a_warning(settings: Settings, pressure: Pressure, level: str) -> None:
    (finding,) = doctor.check_memory_pressure(settings, lambda: pressure)
    assert (finding.level, bool(finding.action)) == (level, level == "warn")


def test_a_mac_whose_gpu_may_hold_too_little_gets_the_line_that_raises_it() -> None:
    finding = doctor.gpu_memory_finding(64 << 30, 48 << 30, {"small": 10**9, "large": 50 * 10**9, "huge": 10**12})
    assert finding.level == "warn"
    assert "sudo sysctl iogpu.wired_limit_mb=57906" in finding.action
    assert "large (50.0 GB)" in finding.message
    assert "small" not in finding.message
    assert "huge" not in finding.message, "no setting makes room for it"
    assert doctor.gpu_memory_finding(64 << 30, 48 << 30, {"small": 10**9}).level == "ok"


def test_what_metal_says_is_asked_of_another_process() -> None:
    assert (doctor.metal_bytes() > 0) == (sys.platform == "darwin")


def test_models_on_disk_need_their_weights_and_more(tmp_path: Path) -> None:
    needs = doctor.needed_by_models(LiveSettings(read_settings(home=tmp_path)))
    assert needs["demo-assistant"] > 10**6


def test_too_few_open_files_are_a_warning_with_the_command_to_run(settings: Settings) -> None:
    asked = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 600));"
        "from app.command import doctor; from app.settings import read_settings;"
        "(finding,) = doctor.check_open_files(read_settings()); print(finding.level, finding.message, finding.action)"
    )
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert said.startswith("warn a server may open 600 (this shell: 256)")
    assert "ulimit -Hn 8192" in said
    (finding,) = doctor.check_open_files(settings, 8192)
    assert finding.level == "ok"


def test_a_mac_says_whether_it_stays_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = doctor.check_sleep(read_settings(), is_mac=True)
    assert (missing.level, bool(missing.action)) == ("warn", True)
    (tmp_path / "caffeinate").write_text("")
    (tmp_path / "caffeinate").chmod(0o755)
    (finding,) = doctor.check_sleep(read_settings(), is_mac=True)
    assert finding.level == "ok"
    (off,) = doctor.check_sleep(read_settings(prevent_sleep=False), is_mac=True)
    assert "PACELINE_PREVENT_SLEEP is off" in off.message
    assert list(doctor.check_sleep(read_settings(), is_mac=False)) == []
