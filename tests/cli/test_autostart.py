"""Start at login: the files for launchd and systemd, the calls of their tools, and that undoing it leaves nothing."""

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.command import autostart, service
from app.command.autostart import Agent, agent_of, environment_of, launch_agent, stable_python, systemd_unit
from app.core.errors import CommandError
from app.machine.server_file import RunningServer, is_served
from app.settings import Settings, read_settings

DOCUMENTED = {
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "LimitLoadToSessionType": list,
    "AssociatedBundleIdentifiers": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
"""Keys of launchd.plist(5) with their types."""
HOSTILE = 'ho me/a "b" 100% $HOME \\ c'


@pytest.fixture(autouse=True)
def nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [*os.environ]:
        if name.startswith(("PACELINE_", "HF_", "XDG_CONFIG")) or name in autostart.FORWARDED_VARIABLES:
            monkeypatch.delenv(name)


def settings_of(home: Path) -> Settings:
    return read_settings(home=home)


def test_launchd_reads_every_key_as_it_is_documented(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / HOSTILE)
    agent = agent_of(settings, is_mac=True)
    written = plistlib.loads(plistlib.dumps(launch_agent(agent, settings, ("--port=9000", f"--model-dir={HOSTILE}"))))
    assert {name: type(value) for name, value in written.items()} == DOCUMENTED
    assert written["Label"] == agent.label == agent.path.stem
    assert agent.path.parent == tmp_path / "Library/LaunchAgents"
    assert written["ProgramArguments"][-3:] == ["serve", "--port=9000", f"--model-dir={HOSTILE}"]
    assert Path(written["ProgramArguments"][0]).is_absolute()
    assert written["KeepAlive"] == {"SuccessfulExit": False}, "again after a crash, not after a stop"
    assert written["EnvironmentVariables"] == {"PACELINE_HOME": str(tmp_path / HOSTILE)}
    assert written["ExitTimeOut"] > settings.drain_seconds


def test_every_home_has_an_agent_of_its_own_and_the_usual_one_the_plain_name(tmp_path: Path) -> None:
    usual = settings_of(Settings.model_fields["home"].default.expanduser())
    assert (agent_of(usual, is_mac=True).label, agent_of(usual, is_mac=False).label) == (
        autostart.SERVICE_LABEL,
        "paceline.service",
    )
    assert "PACELINE_HOME" not in environment_of(usual, {})
    labels = {agent_of(settings_of(tmp_path / name), is_mac=mac).label for name in "ab" for mac in (True, False)}
    assert len(labels) == 4


def test_settings_of_the_terminal_go_along_but_never_a_key(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    wanted = {"PACELINE_MODEL_DIRS": "/models", "HF_HOME": "/hub", "https_proxy": "http://a", "NO_PROXY": "localhost"}
    known = {**wanted, "HF_TOKEN": "hf_secret", "EDITOR": "vi"}
    assert environment_of(settings, known) == {**wanted, "PACELINE_HOME": str(tmp_path)}
    with pytest.raises(CommandError, match="keys create"):
        environment_of(settings, {"PACELINE_API_KEY": "pl-secret"})


def test_the_unit_says_what_systemd_understands(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / HOSTILE)
    agent = agent_of(settings, is_mac=False)
    unit = systemd_unit(agent, settings, (f"--model-dir={HOSTILE}",))
    escaped = HOSTILE.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    assert f'"--model-dir={escaped.replace("$", "$$")}"' in unit
    assert f'Environment="PACELINE_HOME={tmp_path}/{escaped}"' in unit
    for line in ("Restart=on-failure", "WantedBy=default.target", "KillMode=mixed"):
        assert line in unit.splitlines()
    agent.path.parent.mkdir(parents=True)
    agent.path.write_text(unit, encoding="utf-8")
    verified = checked("systemd-analyze", "--user", "verify", str(agent.path))
    assert verified in {"", None}, verified


def checked(*words: str) -> str | None:
    """Run a tool of the system; return its complaints from stderr, or None where there is no such tool."""
    if shutil.which(words[0]) is None:
        return None
    environment = {**os.environ, "XDG_RUNTIME_DIR": os.environ["HOME"]}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stderr.strip()


Told = list[list[str]]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Told]:
    """Fakes of `launchctl` and `systemctl` that log their arguments; they fail if the file `fails` lists the first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("launchctl", "systemctl"):
        script = f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/told"\n'
        script += f'if grep -qsx -- "$1" "{tmp_path}/fails"; then echo "no such domain" >&2; exit 5; fi\n'
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def calls() -> Told:
        file = tmp_path / "told"
        return [line.split() for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []

    return calls


def as_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Callable[..., Agent] = agent_of
    monkeypatch.setattr(autostart, "agent_of", lambda settings: plain(settings, is_mac=True))


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


@pytest.mark.parametrize("is_mac", [True, False], ids=["launchd", "systemd"])
def test_it_is_installed_as_often_as_one_likes_and_undone_completely(
    tmp_path: Path, system: Callable[[], Told], monkeypatch: pytest.MonkeyPatch, *, is_mac: bool
) -> None:
    if is_mac:
        as_mac(monkeypatch)
    settings = settings_of(tmp_path / "home")
    before = files_below(tmp_path)
    assert not autostart.uninstall(settings)
    for _ in range(2):
        agent = autostart.install(settings, autostart.agent_file_content(settings, ()))
        assert agent.path.is_file()
        assert autostart.installed_agent(settings) == agent
        assert agent.path.stat().st_mode & 0o777 == 0o600
    agent.start()
    assert autostart.uninstall(settings)
    assert files_below(tmp_path) - {"told"} == before
    calls = [call for call in system() if call[1] != "print"]
    words = [call[1] if is_mac else call[2] for call in calls]
    once = ["bootout", "enable", "bootstrap"] if is_mac else ["daemon-reload", "enable", "restart"]
    ending = (
        ["bootstrap", "kickstart", "bootout"]
        if is_mac
        else ["reset-failed", "start", "disable", "daemon-reload", "reset-failed"]
    )
    assert words == [*once, *once, *ending]
    if is_mac:
        assert calls[2] == ["launchctl", "bootstrap", f"gui/{os.getuid()}", str(agent.path)]


def test_a_server_of_the_systems_gets_its_options_by_the_command_that_made_it_so(
    tmp_path: Path, system: Callable[[], Told]
) -> None:
    settings = settings_of(tmp_path / "home")
    autostart.install(settings, autostart.agent_file_content(settings, ()))
    calls = system()
    for begin in (service.start, service.restart):
        with pytest.raises(CommandError, match="give options to `paceline service install`"):
            begin(settings, ("--port=9",), lambda _text: None)
    assert system() == calls


def test_where_nobody_has_logged_in_at_a_screen_the_agent_lives_in_the_background(
    tmp_path: Path, system: Callable[[], Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_mac(monkeypatch)
    (tmp_path / "fails").write_text("print\n", encoding="utf-8")
    settings = settings_of(tmp_path / "home")
    agent = autostart.install(settings, autostart.agent_file_content(settings, ()))
    assert ["launchctl", "bootstrap", f"user/{os.getuid()}", str(agent.path)] in system()
    assert "Background" in plistlib.loads(agent.path.read_bytes())["LimitLoadToSessionType"]


def test_a_launchd_that_still_ends_an_earlier_agent_is_asked_again(
    tmp_path: Path, system: Callable[[], Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_mac(monkeypatch)
    (tmp_path / "fails").write_text("bootstrap\n", encoding="utf-8")
    monkeypatch.setattr(autostart, "BOOTSTRAP_SECONDS", 0.0)
    monkeypatch.setattr("time.sleep", lambda _seconds: (tmp_path / "fails").unlink(missing_ok=True))
    settings = settings_of(tmp_path / "home")
    assert autostart.install(settings, autostart.agent_file_content(settings, ())).path.is_file()
    assert [call[1] for call in system()].count("bootstrap") == 2


def test_a_server_that_ran_runs_again_where_the_system_refuses_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path / "home")
    began: list[tuple[str, ...]] = []

    def refuse(_settings: Settings, _content: bytes) -> Agent:
        raise CommandError("no such domain")

    ran = RunningServer("127.0.0.1", 1, "", words=("--port=0",))
    monkeypatch.setattr(service, "stop", lambda _settings, _show: ran)
    monkeypatch.setattr(service, "start", lambda _settings, words, _show: began.append(words))
    monkeypatch.setattr(autostart, "install", refuse)
    with pytest.raises(CommandError, match="no such domain"):
        service.install(settings, (), lambda _text: None)
    assert began == [("--port=0",)]


def test_what_the_system_refuses_is_told_and_leaves_nothing(
    tmp_path: Path, system: Callable[[], Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_mac(monkeypatch)
    monkeypatch.setattr(autostart, "BOOTSTRAP_SECONDS", 0.0)
    (tmp_path / "fails").write_text("bootstrap\n", encoding="utf-8")
    settings = settings_of(tmp_path / "home")
    with pytest.raises(CommandError, match="no such domain"):
        autostart.install(settings, autostart.agent_file_content(settings, ()))
    assert autostart.installed_agent(settings) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(CommandError, match="no launchctl: start it with `paceline start`"):
        autostart.install(settings, autostart.agent_file_content(settings, ()))


def test_a_python_of_homebrew_is_named_by_the_path_that_outlives_an_update(tmp_path: Path) -> None:
    python = tmp_path / "Cellar/paceline/0.1.0/libexec/bin/python"
    linked = tmp_path / "opt/paceline/libexec/bin/python"
    for path in (python, linked):
        path.parent.mkdir(parents=True)
        path.touch()
    assert stable_python(python) == linked
    assert stable_python(Path("/usr/bin/python3")) == Path("/usr/bin/python3")


def test_the_system_starts_it_keeps_it_alive_and_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the user's systemd where it runs; elsewhere only the command of the unit is run, with `--help`."""
    settings = settings_of(tmp_path / "home")
    monkeypatch.setenv("PACELINE_PORT", "0")
    answers = subprocess.run(["systemctl", "--user", "is-system-running"], capture_output=True, text=True, check=False)
    if "running" not in answers.stdout and "degraded" not in answers.stdout:
        agent = agent_of(settings, is_mac=False)
        unit = systemd_unit(agent, settings, ())
        words = next(line for line in unit.splitlines() if line.startswith("ExecStart=")).partition("=")[2]
        command = [word.strip('"') for word in words.split()]
        assert command[:3] == [sys.executable, "-P", "-m"]
        environment: dict[str, Any] = {**os.environ, "PACELINE_HOME": str(settings.home)}
        with subprocess.Popen([*command, "--help"], env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert "OpenAI endpoint" in process.communicate(timeout=60)[0]
        return
    try:
        server, _ = service.install(settings, (), lambda _text: None)
        os.kill(server.pid, 9)
        while (
            not is_served(settings.home)
            or (process_id := autostart_server(settings)) is None
            or process_id == server.pid
        ):
            pass
        service.stop(settings, lambda _text: None)
        assert not is_served(settings.home), "a stop is no crash"
    finally:
        autostart.uninstall(settings)


def autostart_server(settings: Settings) -> int | None:
    from app.machine.server_file import read_server

    server = read_server(settings.home)
    return None if server is None else server.pid
